"""Row D03: hypotheses of different lengths compete by the documented score, and the data can tell it from others."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from penstock.engine.beam import final_score
from tests.engine.fake_model import VOCAB
from tests.engine.harness import Knobs, fake_engine, request, run
from tests.engine.naive import beam_search, fake_logits

Score = Callable[[float, int, bool], float]
"""(cumulative logprob, prompt and generated tokens, ends with the end token) -> what hypotheses are sorted by."""

PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.5)
OTHERS: dict[str, Callable[[float, int], Score]] = {
    "plain sum": lambda p, prompt: lambda s, n, ends: s,
    "mean": lambda p, prompt: lambda s, n, ends: s / (n - ends),
    "the end token counts": lambda p, prompt: lambda s, n, ends: s / n**p,
    "one token less": lambda p, prompt: lambda s, n, ends: s / (n - 1) ** p,
    "generated tokens only": lambda p, prompt: lambda s, n, ends: s / max(1, n - ends - prompt) ** p,
    "inverse": lambda p, prompt: lambda s, n, ends: s * (n - ends) ** p,
}


def test_D03_the_order_of_hypotheses_depends_on_their_length() -> None:
    """Against a search over lists, for prompts so short that the length decides; wrong scores give other answers."""
    rng = random.Random(3)
    told_apart = dict.fromkeys(OTHERS, 0)
    num_lengths = 0
    for penalty in PENALTIES:
        core, _ = fake_engine(Knobs(block_size=4, num_blocks=128, budget=64, max_num_seqs=8))
        prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 4))] for _ in range(12)]
        load = [request(p, beam_width=4, max_tokens=10, eos=[2, 9, 17], length_penalty=penalty) for p in prompts]
        got = run(core, load)
        for r in load:
            want = beam_search(fake_logits, r)
            beams = got[r.request_id].beams
            assert [(tokens, why) for tokens, _, why in beams] == [(tokens, why) for tokens, _, why in want], penalty
            assert [score for _, score, _ in beams] == pytest.approx([score for _, score, _ in want], abs=1e-4)
            num_lengths += len({len(tokens) for tokens, _, _ in beams}) > 1
            prompt = len(r.prompt_token_ids)
            for name, make in OTHERS.items():
                score = make(penalty, prompt)
                other = sorted(beams, key=lambda b, s=score: -s(b[1], prompt + len(b[0]), b[2] == "stop"))  # type: ignore[misc]
                told_apart[name] += other != beams
    assert num_lengths > 30, "hypotheses are all of one length"
    assert all(told_apart.values()), told_apart


def test_D03_the_score_is_the_documented_formula() -> None:
    assert final_score(-6.0, 9, True, 2.0) == pytest.approx(-6.0 / 64)
    assert final_score(-6.0, 9, False, 2.0) == pytest.approx(-6.0 / 81)
    assert final_score(-6.0, 9, True, 0.0) == -6.0
    assert final_score(-6.0, 1, True, 2.0) == -6.0, "an end token alone has length 1"


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("eos", [True, False])
def test_D03_beam_search_equals_the_reference_with_fewer_copies(width: int, eos: bool) -> None:
    core, _ = fake_engine(Knobs(block_size=4, num_blocks=128, budget=64, prefix_cache="none"))
    prompt = [3 + i % 20 for i in range(30)]
    load = [
        request(prompt, beam_width=width, max_tokens=16, eos=[2, 9] if eos else [], length_penalty=p)
        for p in (0.5, 2.0)
    ]
    got = run(core, load)
    for r in load:
        want = beam_search(fake_logits, r)
        beams = got[r.request_id].beams
        assert [(b[0], b[2]) for b in beams] == [(w[0], w[2]) for w in want]
        for b, w in zip(beams, want, strict=True):
            assert b[1] == pytest.approx(w[1], abs=1e-4)
    # A naive engine copies a whole hypothesis whenever a beam is taken over by another one.
    naive = core.stats.num_forks * -(-len(prompt) // 4)
    copies = core.kv.stats().num_cow_copies
    assert copies <= core.stats.num_forks
    assert copies < naive or core.stats.num_forks == 0
