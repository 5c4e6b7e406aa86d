"""The grammar processor of a rank: rollback and forks, the thread, the end, dead ends, the compile cache."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.batch import AddedRow, Appended, SchedulerOutput
from penstock.core.sampling import StructuredOutputs, TokenRules
from penstock.runner.input_batch import Pick
from penstock.runner.logits.grammar import Grammar
from penstock.runner.logits.grammar_cache import GrammarCache
from penstock.runner.sampler import Sampler
from penstock.text.grammar.compile import Compiler, Vocabulary, compiled_bytes
from penstock.text.grammar.source import grammar_of
from tests.unit.text.grammar_walk import END, TOKENS, VOCABULARY, fresh_cache, walk

V = len(TOKENS)
CACHE = fresh_cache()
SCHEMA = {
    "type": "object",
    "properties": {"ab": {"type": "integer"}, "n": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["ab", "n"],
    "additionalProperties": False,
}
GRAMMARS = [
    grammar_of(asked)
    for asked in (
        StructuredOutputs(json=SCHEMA),
        StructuredOutputs(json_object=True),
        StructuredOutputs(regex=r"(ab)*c?\d{0,4}"),
        StructuredOutputs(choice=["ab", "abab", "xyz"]),
        StructuredOutputs(grammar='root ::= "(" root ")" | "ab" | root "12"'),
    )
]


def rules(grammar: str, **more: object) -> TokenRules:
    return TokenRules(grammar=grammar, stop_ids=[END], **more)  # type: ignore[arg-type]


def mask(processor: Grammar, seq_id: int) -> bytes:
    logits = np.zeros((1, V), np.float32)
    processor.apply(logits, [seq_id])
    return np.isfinite(logits[0]).tobytes()


@pytest.mark.parametrize("threaded", [False, True])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), grammar=st.sampled_from(GRAMMARS))
def test_rollback_and_fork_equal_a_fresh_replay(threaded: bool, data: st.DataObject, grammar: str) -> None:
    """Along outputs of the grammar itself: random tokens would leave it at once."""
    processor = Grammar(V, CACHE, threaded=threaded)
    assert processor.add(0, rules(grammar), [1], [])
    rows: dict[int, list[int]] = {0: []}
    for step in range(data.draw(st.integers(1, 25))):
        seq_id = data.draw(st.sampled_from(sorted(rows)))
        history = rows[seq_id]
        match data.draw(st.sampled_from(["advance", "advance", "advance", "two", "rollback", "fork", "any"])):
            case "rollback":
                n = data.draw(st.integers(0, len(history)))
                processor.rollback(seq_id, n)
                del history[len(history) - n :]
            case "fork":
                processor.fork(seq_id, step + 1)
                rows[step + 1] = list(history)
            case "any":
                token = data.draw(st.integers(0, V - 1))
                processor.advance(seq_id, [token])
                history.append(token)
            case kind:
                for _ in range(2 if kind == "two" else 1):
                    allowed = np.flatnonzero(np.frombuffer(mask(processor, seq_id), np.bool_)).tolist()
                    if allowed:
                        token = data.draw(st.sampled_from(allowed))
                        processor.advance(seq_id, [token])
                        history.append(token)
    for seq_id, history in rows.items():
        fresh = Grammar(V, CACHE, threaded=False)
        fresh.add(9, rules(grammar), [1], history)
        assert mask(processor, seq_id) == mask(fresh, 9), history
        assert processor.exhausted(seq_id) == fresh.exhausted(9)


def test_the_thread_changes_no_output() -> None:
    for seed in range(20):
        grammar = GRAMMARS[seed % len(GRAMMARS)]
        assert walk(grammar, seed, CACHE, threaded=True) == walk(grammar, seed, CACHE, threaded=False)


def test_masks_are_ready_before_they_are_asked_for() -> None:
    """The work starts when the row changes; the thread ends with its processor."""
    processor = Grammar(V, CACHE, threaded=True)
    processor.add(1, rules(GRAMMARS[0]), [1], [])
    state = processor._states[1]
    for _ in range(10_000):
        with state.lock:
            if not state.stale:
                break
        threading.Event().wait(0.001)
    assert not state.stale
    thread = next(t for t in threading.enumerate() if t.name == "penstock-grammar")
    count = sum(t.name == "penstock-grammar" for t in threading.enumerate())
    del processor, state
    for _ in range(10_000):
        if sum(t.name == "penstock-grammar" for t in threading.enumerate()) < count:
            break
        threading.Event().wait(0.001)
    assert thread is not None
    assert sum(t.name == "penstock-grammar" for t in threading.enumerate()) < count


# -- with the sampler: ends and dead ends --------------------------------------------------------------------------


def sample(row_rules: TokenRules, output: list[int], cache: object = CACHE) -> tuple[list[int], list[str], list[int]]:
    """(tokens, errors, rows that ended) of one step of one row."""
    sampler = Sampler(V, cache)  # type: ignore[arg-type]
    sampler.chain.track(SchedulerOutput(0, added=[AddedRow(7, 0, [1, *output], 1, row_rules)]))
    pick = Pick(
        seq_id=7, rules=row_rules, row=0, position=1 + len(output), sample_index=0, num_samples=1, num_candidates=0,
        prompt_row=0, prompt_start=0, prompt_ids=np.zeros(0, np.int32),
    )  # fmt: skip
    out = sampler.sample(np.zeros((1, V), np.float32), [pick])
    return [t for s in out.sampled for t in s.token_ids], [e.message for e in out.errors], out.ended


def ids(text: str) -> list[int]:
    return [TOKENS.index(bytes([b])) for b in text.encode()]


def test_the_end() -> None:
    whole = grammar_of(StructuredOutputs(choice=["yes", "no"]))
    assert sample(rules(whole), ids("yes")) == ([END], [], [])
    assert sample(rules(whole), ids("ye"))[0] == ids("s")
    # No id to end with: ignored by the client, or forbidden by another rule.
    assert sample(TokenRules(grammar=whole), ids("yes")) == ([], [], [7])
    assert sample(rules(whole, min_tokens=50), ids("yes")) == ([], [], [7])
    assert sample(rules(whole, allowed_ids=ids("yesno")), ids("yes")) == ([], [], [7])
    assert sample(rules(whole, bad_sequences=[[END]]), ids("no")) == ([], [], [7])
    # It may end, but need not: min_tokens holds.
    longer = grammar_of(StructuredOutputs(regex="a+"))
    assert sample(rules(longer, min_tokens=9), ids("a")) == (ids("a"), [], [])


def test_dead_ends_end_the_request_with_a_reason() -> None:
    whole = grammar_of(StructuredOutputs(choice=["yes", "no"]))
    tokens, errors, ended = sample(rules(whole, allowed_ids=ids("abc")), ids("y"))
    assert (tokens, ended) == ([], [])
    assert "excluded" in errors[0]
    tokens, errors, ended = sample(rules(whole), ids("x"))
    assert (tokens, ended) == ([], [])
    assert "no token of the vocabulary" in errors[0]
    # A vocabulary that cannot write what the grammar asks for after "a".
    small = Vocabulary([b"", b"a", b"b"], [0], [0])
    cache = fresh_cache()
    cache._compiler = Compiler(small)
    sampler = Sampler(3, cache)
    row_rules = TokenRules(grammar=grammar_of(StructuredOutputs(regex="a(x|y)|b")), stop_ids=[0])
    sampler.chain.track(SchedulerOutput(0, added=[AddedRow(7, 0, [1], 1, row_rules)]))
    sampler.chain.track(SchedulerOutput(1, appended=[Appended(7, [1])]))
    logits = np.zeros((1, 3), np.float32)
    sampler.chain.apply(logits, [7])
    assert np.isneginf(logits).all()
    assert sampler.chain.exhausted(7)


def test_a_grammar_that_does_not_compile_fails_its_row_alone() -> None:
    tokens, errors, ended = sample(rules('{"grammars": [{"lark_grammar": "start: nothing"}]}'), [])
    assert (tokens, ended) == ([], [])
    assert "cannot be compiled" in errors[0]


# -- the compile cache --------------------------------------------------------------------------------------------


def test_the_cache_is_bounded_in_bytes_and_counts() -> None:
    """A stream of distinct schemas, with one that comes again and again."""
    schemas = [{"type": "object", "properties": {f"p{n}": {"type": "integer"}}} for n in range(300)]
    grammars = [grammar_of(StructuredOutputs(json=schema)) for schema in schemas]
    bound = 5 * compiled_bytes(grammars[-1])
    cache = fresh_cache(bound)
    for grammar in grammars:
        assert not cache.matcher(grammar).is_error()
        assert not cache.matcher(grammars[0]).is_error()
        assert cache.num_bytes <= bound
        assert cache.num_bytes == sum(map(compiled_bytes, cache._held))
    assert 2 <= len(cache) <= 5
    assert cache.counts() == (300, 300, cache.num_bytes)  # grammars[0] is never given up
    none = fresh_cache(0)
    assert not none.matcher(grammars[0]).is_error()
    assert len(none) == none.num_bytes == 0


def test_a_matcher_is_its_rows_own() -> None:
    cache = fresh_cache()
    grammar = grammar_of(StructuredOutputs(choice=["ab", "12"]))
    first, second = cache.matcher(grammar), cache.matcher(grammar)
    assert first.consume_tokens(ids("ab"))
    assert second.consume_tokens(ids("12"))
    assert cache.matcher(grammar).consume_tokens(ids("ab"))
    assert VOCABULARY.end_id == V


def test_asking_what_is_held_does_not_wait_for_the_table_of_the_vocabulary() -> None:
    """The engine's loop asks between steps, while a thread makes the table for the first grammar of all."""
    begun, may_end = threading.Event(), threading.Event()

    def make() -> Compiler:
        begun.set()
        assert may_end.wait(10)
        return Compiler(VOCABULARY)

    cache = GrammarCache(make)
    maker = threading.Thread(target=cache.check, args=(GRAMMARS[0],))
    maker.start()
    answers: list[bool] = []
    asker = threading.Thread(target=lambda: answers.append(cache.holds(GRAMMARS[0])))
    try:
        assert begun.wait(10)
        asker.start()
        asker.join(5)
        assert answers == [False]
    finally:
        may_end.set()
        maker.join()
    assert cache.holds(GRAMMARS[0])
