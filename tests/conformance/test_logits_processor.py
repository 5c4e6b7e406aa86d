"""What every LogitsProcessor promises. Registering one enrols it; it then needs rules and a plain definition here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.batch import AddedRow, Appended, Fork, SchedulerOutput
from penstock.core.protocols import LogitsProcessor
from penstock.core.sampling import StructuredOutputs, TokenRules
from penstock.runner.logits import LOGITS_PROCESSORS, ORDER
from penstock.runner.logits.chain import LogitsChain
from penstock.runner.logits.grammar_cache import GrammarCache
from penstock.text.grammar.compile import Compiler, Vocabulary
from penstock.text.grammar.source import grammar_of

V = 12
IDS = st.integers(0, V - 1)
ALSO_OUTSIDE = st.integers(-2, V + 2)
GRAMMARS = GrammarCache(
    lambda: Compiler(
        Vocabulary([b"a", b"b", b"c", b"d", b"ab", b"e", b"f", b"", b"cd", b"bc", b"<x>", b"<end>"], [10, 11])
    ),
    end_ids=lambda: frozenset({10, 11}),
)

RULES: dict[str, st.SearchStrategy[TokenRules]] = {
    "allowed_ids": st.builds(TokenRules, allowed_ids=st.lists(ALSO_OUTSIDE, max_size=6)),
    "bad_words": st.builds(
        TokenRules,
        bad_sequences=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=4),
    ),
    "grammar": st.builds(
        TokenRules,
        grammar=st.sampled_from(["(ab|c)*d", "a+", "b{2,3}c?", "(a|b)(c|d)*", "[a-f]{4}", "(a|b)[x-z]|cd"]).map(
            lambda regex: grammar_of(StructuredOutputs(regex=regex))
        ),
        stop_ids=st.sampled_from([[], [11], [10, 11], [0, 11]]),
    ),
    "min_tokens": st.builds(TokenRules, min_tokens=st.integers(1, 6), stop_ids=st.lists(IDS, min_size=1, max_size=3)),
    "logit_bias": st.builds(
        TokenRules,
        logit_bias=st.dictionaries(ALSO_OUTSIDE, st.floats(-100, 100, width=32), max_size=4).map(
            lambda d: {**d, 0: 1.5}
        ),
    ),
    "repetition_penalty": st.builds(TokenRules, repetition_penalty=st.sampled_from([0.5, 1.2, 3.0])),
    "count_penalties": st.builds(
        TokenRules,
        frequency_penalty=st.sampled_from([-1.0, 0.3, 2.0]),
        presence_penalty=st.sampled_from([-0.5, 0.0, 1.7]),
    ),
}


def allowed_ids(row: list[float], rules: TokenRules, prompt: list[int], output: list[int]) -> list[float]:
    assert rules.allowed_ids is not None
    return [x if i in rules.allowed_ids else -np.inf for i, x in enumerate(row)]


def bad_words(row: list[float], rules: TokenRules, prompt: list[int], output: list[int]) -> list[float]:
    row = list(row)
    for token in range(V):
        after = [*output, token]
        if any(after[-len(bad) :] == bad for bad in rules.bad_sequences):
            row[token] = -np.inf
    return row


def min_tokens(row: list[float], rules: TokenRules, prompt: list[int], output: list[int]) -> list[float]:
    return [-np.inf if i in rules.stop_ids and len(output) < rules.min_tokens else x for i, x in enumerate(row)]


def logit_bias(row: list[float], rules: TokenRules, prompt: list[int], output: list[int]) -> list[float]:
    return [x + rules.logit_bias.get(i, 0.0) for i, x in enumerate(row)]


def grammar(row: list[float], rules: TokenRules, prompt: list[int], output: list[int]) -> list[float]:
    """By trying every token on a matcher that has just been made. Token 7 is no text; 10 and 11 are special."""
    assert rules.grammar is not None
    matcher = GRAMMARS.compiler().compile(rules.grammar)
    lost = not matcher.consume_tokens(output)
    out = []
    for token, x in enumerate(row):
        if token in (10, 11):
            allowed = not lost and token in rules.stop_ids and matcher.is_accepting()
        else:
            allowed = not lost and matcher.validate_tokens([token]) == 1
        out.append(x if allowed else -np.inf)
    return out


def repetition_penalty(row: list[float], rules: TokenRules, prompt: list[int], output: list[int]) -> list[float]:
    p, seen = rules.repetition_penalty, {*prompt, *output}
    return [(x / p if x > 0 else x * p) if i in seen else x for i, x in enumerate(row)]


def count_penalties(row: list[float], rules: TokenRules, prompt: list[int], output: list[int]) -> list[float]:
    n = Counter(output)
    return [x - rules.frequency_penalty * n[i] - rules.presence_penalty * (n[i] > 0) for i, x in enumerate(row)]


PLAIN: dict[str, Callable[..., list[float]]] = {
    f.__name__: f
    for f in (allowed_ids, bad_words, grammar, min_tokens, logit_bias, repetition_penalty, count_penalties)
}

every = pytest.mark.parametrize("name", LOGITS_PROCESSORS.names())
suite = settings(max_examples=60, deadline=None, derandomize=True)
TOKENS = st.lists(st.integers(0, 5), max_size=4)


def make(name: str) -> LogitsProcessor:
    more = (GRAMMARS,) if name == "grammar" else ()
    processor: LogitsProcessor = LOGITS_PROCESSORS.get(name)(V, *more)
    return processor


def random_logits(num_rows: int, seed: int = 0) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, 3, (num_rows, V)).astype(np.float32)
    logits[:, 5] = 0.0
    logits[:, 7] = -np.inf
    return logits


def applied(processor: LogitsProcessor, logits: np.ndarray, seq_ids: list[int]) -> np.ndarray:
    out = logits.copy()
    processor.apply(out, seq_ids)
    return out


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


def test_registry_order_and_suite_agree() -> None:
    assert sorted(ORDER) == LOGITS_PROCESSORS.names() == sorted(RULES) == sorted(PLAIN)
    assert ORDER == (
        "allowed_ids", "bad_words", "grammar", "min_tokens", "logit_bias", "repetition_penalty", "count_penalties",
    )  # fmt: skip
    for name in ORDER:
        assert make(name).name == name


@every
def test_nothing_to_do_is_not_followed(name: str) -> None:
    processor, logits = make(name), random_logits(2)
    assert processor.add(1, TokenRules(), [1, 2], [3]) is False
    processor.advance(1, [1])
    processor.rollback(1, 2)
    processor.fork(1, 2)
    processor.remove(1)
    processor.remove(2)
    assert same(applied(processor, logits, [1, 2]), logits)


@every
@suite
@given(data=st.data(), prompt=TOKENS.filter(bool), output=st.lists(st.integers(0, 5), max_size=8))
def test_it_means_what_its_definition_says(name: str, data: Any, prompt: list[int], output: list[int]) -> None:
    rules = data.draw(RULES[name])
    processor = make(name)
    logits = random_logits(1, seed=len(output))
    if not processor.add(1, rules, prompt, output):
        assert PLAIN[name](logits[0].tolist(), rules, prompt, output) == logits[0].tolist()
        return
    got = applied(processor, logits, [1])[0]
    want = np.array(PLAIN[name](logits[0].tolist(), rules, prompt, output))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert not np.isnan(got).any()
    assert np.isneginf(got[7]), "a masked token came back"


@every
@suite
@given(data=st.data())
def test_state_is_a_function_of_the_history(name: str, data: Any) -> None:
    """After any interleaving of advance, rollback, fork and remove, each row is as if it had been added just now."""
    processor = make(name)
    rows: dict[int, tuple[TokenRules, list[int], list[int]]] = {}
    rules, prompt, output = data.draw(RULES[name]), data.draw(TOKENS.filter(bool)), data.draw(TOKENS)
    if not processor.add(0, rules, prompt, output):
        return
    rows[0] = (rules, prompt, list(output))
    next_id = 1
    for _ in range(data.draw(st.integers(0, 12))):
        if not rows:
            break
        seq_id = data.draw(st.sampled_from(sorted(rows)))
        rules, prompt, output = rows[seq_id]
        match data.draw(st.sampled_from(["advance", "advance", "rollback", "fork", "remove"])):
            case "advance":
                new = data.draw(TOKENS)
                processor.advance(seq_id, new)
                output += new
            case "rollback":
                n = data.draw(st.integers(0, len(output)))
                processor.rollback(seq_id, n)
                del output[len(output) - n :]
            case "fork":
                processor.fork(seq_id, next_id)
                rows[next_id] = (rules, prompt, list(output))
                next_id += 1
            case "remove":
                processor.remove(seq_id)
                del rows[seq_id]
    ids = list(range(next_id + 1))
    logits = random_logits(len(ids), seed=next_id)
    got = applied(processor, logits, ids)
    for r, seq_id in enumerate(ids):
        fresh = make(name)
        if seq_id in rows:
            assert fresh.add(seq_id, *rows[seq_id])
        assert same(got[r : r + 1], applied(fresh, logits[r : r + 1], [seq_id])), f"sequence {seq_id}"


@every
@suite
@given(data=st.data())
def test_rows_are_independent(name: str, data: Any) -> None:
    """A batch equals its rows one by one, in any order, and rows that are not followed keep every bit."""
    processor = make(name)
    followed = set()
    for seq_id in range(6):
        if seq_id % 3 and processor.add(seq_id, data.draw(RULES[name]), data.draw(TOKENS), data.draw(TOKENS)):
            followed.add(seq_id)
    order = data.draw(st.permutations(range(6)))
    logits = random_logits(6)
    together = applied(processor, logits, order)
    for r, seq_id in enumerate(order):
        assert same(together[r : r + 1], applied(processor, logits[r : r + 1], [seq_id]))
        if seq_id not in followed:
            assert same(together[r], logits[r])


@every
@suite
@given(data=st.data())
def test_applying_does_not_change_the_state(name: str, data: Any) -> None:
    processor = make(name)
    processor.add(1, data.draw(RULES[name]), [1, 2], data.draw(TOKENS))
    logits = random_logits(1)
    assert same(applied(processor, logits, [1]), applied(processor, logits, [1]))


@every
def test_a_rollback_into_the_prompt_is_our_bug(name: str) -> None:
    if name in ("allowed_ids", "logit_bias"):
        return  # these look at no token
    processor = make(name)
    rules = TokenRules(
        bad_sequences=[[1]],
        grammar=grammar_of(StructuredOutputs(regex=".*")),
        min_tokens=5,
        stop_ids=[1],
        repetition_penalty=2.0,
        presence_penalty=1.0,
    )
    assert processor.add(1, rules, [1, 2, 3], [4])
    with pytest.raises(AssertionError):
        processor.rollback(1, 2)


def hf(name: str, *args: Any, history: list[int], logits: np.ndarray) -> np.ndarray:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers, name)(*args)
    out = processor(torch.tensor([history], dtype=torch.long), torch.from_numpy(logits.copy()))
    return np.asarray(out.numpy())


def test_repetition_penalty_equals_transformers() -> None:
    prompt, output = [1, 5, 5, 9], [3, 1]
    processor, logits = make("repetition_penalty"), random_logits(1)
    processor.add(1, TokenRules(repetition_penalty=1.7), prompt, output)
    want = hf("RepetitionPenaltyLogitsProcessor", 1.7, history=prompt + output, logits=logits)
    np.testing.assert_array_equal(applied(processor, logits, [1]), want)


def test_bad_words_equal_transformers_on_generated_text() -> None:
    """transformers looks at the prompt too; on a history that is all generated, both mean the same."""
    bad = [[2], [3, 4], [1, 3, 4], [4, 3, 6], [3, 3, 3, 3, 3, 3]]
    for output in ([1, 3], [4, 3], [0, 1, 3], [3], [0]):
        processor, logits = make("bad_words"), random_logits(1)
        processor.add(1, TokenRules(bad_sequences=bad), [7], output)
        want = hf("NoBadWordsLogitsProcessor", bad, history=output, logits=logits)
        np.testing.assert_array_equal(applied(processor, logits, [1]), want)
    processor = make("bad_words")
    processor.add(1, TokenRules(bad_sequences=[[3, 4]]), [3], [])
    assert same(applied(processor, random_logits(1), [1]), random_logits(1)), "the prompt is not generated text"


def test_chain_applies_in_the_documented_order() -> None:
    """Bias before penalties (a doubled bias would show otherwise), masks win over everything, forks keep state."""
    rules = TokenRules(
        logit_bias={0: 4.0, 1: 100.0, 2: 100.0, 3: 100.0},
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        bad_sequences=[[0, 2]],
        min_tokens=2,
        stop_ids=[3],
        allowed_ids=[0, 2, 3, 4],
    )
    chain = LogitsChain(V)
    chain.track(SchedulerOutput(0, added=[AddedRow(1, 0, [4, 0], 1, rules), AddedRow(2, 0, [4, 0], 1, TokenRules())]))
    assert (chain.follows(1), chain.follows(2)) == (True, False)
    logits = np.ones((3, V), np.float32)
    chain.apply(logits, [1, 2, 3])
    want = np.full(V, -np.inf)
    want[0] = (1 + 4) / 2 - 0.5 - 0.25
    want[4] = 0.5
    np.testing.assert_allclose(logits[0], want)
    assert (logits[1:] == 1).all()
    # The fork sees the parent's tokens; the parent goes; the child's second token ends min_tokens and the bad word.
    chain.track(SchedulerOutput(1, forked=[Fork(1, 5, 1)], removed=[1], appended=[Appended(5, [4])]))
    logits = np.ones((2, V), np.float32)
    chain.apply(logits, [1, 5])
    assert not chain.follows(1)
    assert (logits[0] == 1).all()
    want[2], want[3], want[4] = 101, 101, 0.5 - 0.75
    np.testing.assert_allclose(logits[1], want)
    # Rollback comes before the new tokens of the same entry.
    chain.track(SchedulerOutput(2, appended=[Appended(5, [0], rollback=1)]))
    logits = np.ones((1, V), np.float32)
    chain.apply(logits, [5])
    want[0], want[2], want[3], want[4] = 2.5 - 2 * 0.5 - 0.25, -np.inf, 101, 0.5
    np.testing.assert_allclose(logits[0], want)
