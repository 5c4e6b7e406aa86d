"""tools/train: what is measured about a model is measured right, and so is what it is compared with."""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from penstock import LLM
from penstock.core.model_spec import weight_shapes
from tests.oracle import NaiveModel

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import widen
from train import acceptance, evaluate, kneser_ney, report, skills
from train.recipes import RECIPES
from train.tokenizer import save_tokenizer, train_tokenizer

PROSE = " ".join(
    f"The {a} {b} went to the {c}. It was {d} there."
    for a in ("red", "old", "small") for b in ("dog", "man", "cat") for c in ("hill", "sea") for d in ("cold", "warm")
)  # fmt: skip


# -- n-gram baseline -------------------------------------------------------------------------------------------------


class SlowKneserNey:
    """The same by dictionaries, from the text of the paper: equations 22 to 26, every order by recursion."""

    def __init__(self, tokens: list[int], vocab_size: int, order: int) -> None:
        self.vocab_size, self.order = vocab_size, order
        grams = [tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1)]
        self.counts: dict[int, Counter[tuple[int, ...]]] = {order: Counter(grams)}
        for n in range(order - 1, 0, -1):
            self.counts[n] = Counter(gram[1:] for gram in self.counts[n + 1])

    def discount(self, n: int, count: int) -> float:
        of = Counter(self.counts[n].values())
        half = (0.0, 0.5, 1.0, 1.5)
        if not all(of[i] for i in (1, 2, 3, 4)):
            return half[min(count, 3)]
        y = of[1] / (of[1] + 2 * of[2])
        found = [0.0] + [i - (i + 1) * y * of[i + 1] / of[i] for i in (1, 2, 3)]
        good = all(0 < found[i] <= i for i in (1, 2, 3))
        return (found if good else half)[min(count, 3)]

    def p(self, token: int, context: tuple[int, ...]) -> float:
        n = len(context) + 1
        lower = 1 / self.vocab_size if n == 1 else self.p(token, context[1:])
        following = {gram[-1]: c for gram, c in self.counts[n].items() if gram[:-1] == context}
        if not following:
            return lower
        total = sum(following.values())
        left = sum(self.discount(n, c) for c in following.values()) / total
        count = following.get(token, 0)
        return max(count - self.discount(n, count), 0) / total * (count > 0) + left * lower


@pytest.mark.parametrize(("vocab", "order", "length"), [(7, 3, 500), (5, 5, 300), (4096, 5, 200), (1, 2, 40)])
def test_kneser_ney_equals_the_paper(vocab: int, order: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(order)
    # Tokens that depend on the one before, so that contexts repeat and counts of 1 to 4 exist.
    tokens = [0]
    for _ in range(length):
        tokens.append(int((tokens[-1] * 3 + rng.integers(0, 3) ** 2) % vocab))
    text = rng.integers(0, vocab, 40).tolist() + tokens[:20]
    monkeypatch.setattr(kneser_ney, "_CHUNK", 37)
    model = kneser_ney.KneserNey(np.array(tokens, np.uint16), vocab, order)
    slow = SlowKneserNey(tokens, vocab, order)
    want = [slow.p(text[i], tuple(text[max(0, i - order + 1) : i])) for i in range(len(text))]
    ids = np.array(text, np.uint16)
    np.testing.assert_allclose(model.probabilities(ids), want, rtol=1e-12)
    np.testing.assert_allclose(model.probabilities(ids, 3), want[3:], rtol=1e-12)
    bits = -sum(math.log2(p) for p in want[1:]) / 100
    assert model.bits_per_byte(ids, 100) == pytest.approx(bits)
    assert model.num_grams == sum(map(len, slow.counts.values()))


def test_kneser_ney_sums_to_one() -> None:
    rng = np.random.default_rng(0)
    tokens = (rng.integers(0, 4, 3000) * rng.integers(0, 5, 3000)).astype(np.uint16)
    model = kneser_ney.KneserNey(tokens, 16, 5)
    for n in range(6):
        for start in range(20):
            p = model.next_token(tokens[start : start + n] if start % 2 else rng.integers(0, 16, n).astype(np.uint16))
            assert p.min() > 0
            assert p.sum() == pytest.approx(1, abs=1e-12)
    context = tokens[100:104]
    one = [model.probabilities(np.append(context, np.uint16(t)), 4)[0] for t in range(16)]
    np.testing.assert_allclose(model.next_token(context), one, rtol=1e-12)
    with pytest.raises(ValueError, match="64 bits"):
        kneser_ney.KneserNey(tokens, 2**14, 5)
    with pytest.raises(ValueError, match="no 5-gram"):
        kneser_ney.KneserNey(tokens[:4], 16, 5)


# -- acceptance ------------------------------------------------------------------------------------------------------


def test_accepted_runs_are_those_of_real_speculation() -> None:
    """Against the loop itself: draft K tokens behind what is accepted, compare, take the target's own token."""

    def target(prefix: tuple[int, ...]) -> int:
        return random.Random(f"t{prefix[-6:]}").randrange(3)

    def drafter(prefix: tuple[int, ...]) -> int:
        rng = random.Random(f"d{prefix[-6:]}")
        return target(prefix) if rng.random() < 0.7 else rng.randrange(3)

    for seed in range(20):
        text: tuple[int, ...] = (seed,)
        hits = []
        for _ in range(60):
            hits.append(drafter(text) == target(text))
            text = (*text, target(text))
        for length in acceptance.LENGTHS:
            prefix: tuple[int, ...] = (seed,)
            want = []
            while len(prefix) - 1 + length <= 60:
                draft = prefix
                for _ in range(length):
                    draft = (*draft, drafter(draft))
                accepted = 0
                while accepted < length and draft[len(prefix)] == target(prefix):
                    prefix = (*prefix, target(prefix))
                    accepted += 1
                prefix = (*prefix, target(prefix))
                want.append(accepted)
            assert acceptance.accepted_runs(hits, length) == want
    assert acceptance.accepted_runs([True, False, True, True, True], 2) == [1, 2]
    found = acceptance.acceptance([[True] * 8, [False] * 4])
    assert found.share == pytest.approx(8 / 12)
    assert found.runs[8] == 8
    assert found.runs[1] == pytest.approx(4 / 8)
    assert "66.7%" in acceptance.markdown({"prose": found})


# -- scores ----------------------------------------------------------------------------------------------------------


def save(out: Path, tokenizer: Path, seed: int, context: int = 256) -> Path:
    """A model of the tiny recipe with random weights, as a folder."""
    from msgspec.structs import replace

    spec = replace(RECIPES["tiny"], max_position=context)
    rng = np.random.default_rng(seed)
    weights = {
        name: rng.standard_normal(shape, np.float32) * (0.5 if len(shape) == 2 else 0.1) + (len(shape) == 1)
        for name, shape in weight_shapes(spec).items()
    }
    same = widen.Shape(32, 2, 2, 1, 16, 64)
    widen.write(widen.Widening(spec, same), weights, out, "float32")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_text((tokenizer / name).read_text("utf-8"), "utf-8")
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer([PROSE * 5, "What is the pass key? 0123456789."]), out)
    return out


@pytest.fixture(scope="module")
def models(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [save(tmp_path_factory.mktemp(f"m{seed}"), folder, seed) for seed in (1, 2)]


def naive(llm: LLM) -> NaiveModel:
    from penstock.families.registry import open_model
    from penstock.weights.load import load_weights

    checkpoint = open_model(Path(llm.config.model.model))
    return NaiveModel(checkpoint.spec, load_weights(checkpoint, checkpoint.spec, "float32"))


def test_hits_are_where_greedy_choices_agree(models: list[Path]) -> None:
    target, drafter = (LLM(path) for path in models)
    prompts = [[0, 5, 300, 17], [0, 9, 9]]
    for other, share in ((target, 1.0), (drafter, None)):
        hits = acceptance.hits_of(target, other, prompts, 20)
        for prompt, text in zip(prompts, hits, strict=True):
            written = naive(target).greedy(prompt, 20)
            ends = [i for i, token in enumerate(written) if token in (0, 2)]
            written = written[: ends[0] + 1] if ends else written
            choices = naive(other).logits([*prompt, *written])[len(prompt) - 1 : -1].argmax(axis=1)
            assert text == (choices == written).tolist()
        assert share is None or acceptance.acceptance(hits).share == share


def test_intervals_are_wilsons() -> None:
    from scipy.stats import binomtest

    for right, n in ((0, 10), (10, 10), (9, 10), (57, 100), (1, 3)):
        want = binomtest(right, n).proportion_ci(method="wilson")
        assert evaluate.wilson(right, n) == pytest.approx((want.low, want.high), abs=1e-6)
    assert evaluate.wilson(0, 0) == (0.0, 1.0)


def test_answers_are_compared_up_to_their_end() -> None:
    assert evaluate.said(" 12345. And so on") == evaluate.said("12345.") == "12345"
    assert evaluate.said("Tom in the barn\nWho") == "Tom in the barn"
    assert evaluate.said('{"age": 3}') == '{"age": 3}'
    assert evaluate.said("123456.") != evaluate.said("12345.")


def test_bits_per_byte_are_those_of_the_definition(models: list[Path], folder: Path, tmp_path: Path) -> None:
    short = save(tmp_path, folder, 1, context=64)
    for path, prose in ((models[0], PROSE[:300]), (short, PROSE[:1500] + " ünï")):
        llm = LLM(path)
        reader = evaluate.Reader(llm)
        found = evaluate.bits_per_byte(reader, prose)
        ids = reader.ids(prose)
        assert ids[0] == 0
        window = min(1024, reader.max_len - 1)
        model, bits, at = naive(llm), 0.0, 1
        for start in range(0, len(ids), window // 2):
            part = ids[start : start + window]
            logits = model.logits(part).astype(np.float64)
            logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            while at < start + len(part):
                assert start == 0 or at - start >= window // 2
                bits -= logp[at - start - 1, ids[at]] / math.log(2)
                at += 1
        assert found["bits_per_byte"] == pytest.approx(bits / len(prose.encode()), rel=1e-5)
        assert (found["bytes"], found["tokens"]) == (len(prose.encode()), len(ids) - 1)


def test_whole_evaluation(models: list[Path]) -> None:
    """Whatever a model says, there is a card."""
    found = json.loads(json.dumps(evaluate.evaluate(LLM(models[0], ops="blas"), PROSE * 3, 1, prose_chars=400)))
    assert set(found["skills"]) == set(skills.SKILLS)
    assert found["skills"]["copy"]["chat"]["n"] == 1
    assert found["needle"]["lengths"] == [256], "no prompt is longer than the context"
    assert 180 < found["needle"]["mean_tokens"][0] <= 256
    assert len(found["samples"]) == 20
    assert len({s["text"] for s in found["samples"]}) > 10
    bits = found["prose"]["bits_per_byte"]
    found["prose"]["kneser_ney"] = {"tales": 2 * bits, "more": bits / 2}
    card = report.markdown(found)
    assert f"5-gram of tales needs {2 * bits:.3f}: 50.0% fewer" in card
    assert f"5-gram of more needs {bits / 2:.3f}: 100.0% more" in card
    for title in ("Skills", "Needle".lower(), "lookup", "Prose", "Samples", "Chat"):
        assert title in card
    assert f"| {'needle'} | 0% (0% to 79%) | 0% (0% to 79%) |" in card


def test_scores_stand_where_they_belong(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that finds only what stands in the first half of a prompt, and is right about nothing else."""
    reader = evaluate.Reader(LLM(models[0]))

    def answers(exercises: list[skills.Exercise], *, chat: bool = False) -> list[str]:
        return [e.answer + " More" if e.depth is not None and e.depth < 0.4 else "12." for e in exercises]

    monkeypatch.setattr(reader, "answers", answers)
    needle = evaluate.needle_grid(reader, PROSE * 20, 3, lengths=(200, 256))
    assert needle["lengths"] == [200, 256]
    rates = [[s["rate"] for s in row] for row in needle["scores"]]
    assert rates == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    lookup = evaluate.lookup_grid(reader, 2, pairs=(10, 1000))
    assert lookup["pairs"] == [10], "what does not fit is left out"
    assert [s["rate"] for s in lookup["scores"][0]] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert evaluate.skill_scores(reader, PROSE, 3)["copy"]["plain"] == evaluate.score([False] * 3)

    texts: list[str] = []

    class Page(HTMLParser):
        def handle_data(self, data: str) -> None:
            texts.append(data)

    page = report.heat_map(needle)
    Page().feed(page)
    assert texts.count("100%") == 5, "four cells, one depth"
    assert texts.count("3 of 3; 100% (44% to 100%)") == 4
    assert "http" not in page
