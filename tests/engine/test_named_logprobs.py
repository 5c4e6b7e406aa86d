"""Log-probabilities of named tokens under the engine's laws: those of the naive model, and the same bits whatever the
company, the steps, the pages and the caches."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.core.batch import TokenLogprobs
from tests.engine.harness import Collector, disturbed, real_engine, request, tiny
from tests.engine.test_laws_models import CONTROLS, draw_knobs, oracle

NAMED = [9, 3, 17]


@pytest.mark.parametrize("name", ["llama_gqa", "slots"])
def test_named_logprobs_do_not_depend_on_anything_but_the_request(name: str) -> None:
    spec, weights = tiny(name)
    rng = random.Random(f"named-{name}")
    text = [rng.randrange(3, spec.vocab_size) for _ in range(21)]
    tails = [[rng.randrange(3, spec.vocab_size) for _ in range(1 + i)] for i in range(6)]

    def asked() -> list[object]:
        return [
            request([*text, *tail], request_id=str(i), max_tokens=1, num_logprobs=0, logprob_ids=NAMED)
            for i, tail in enumerate(tails)
        ]  # fmt: skip

    seen: list[dict[str, TokenLogprobs]] = []
    for _ in range(5):
        knobs = draw_knobs(rng)
        knobs.window_blocks = 0
        collector: Collector = disturbed(real_engine(spec, weights, knobs), asked(), rng, CONTROLS, note=knobs)  # type: ignore[arg-type]
        seen.append({i: found.logprobs[0][0] for i, found in collector.requests.items()})
    assert all(found == seen[0] for found in seen)
    for i, tail in enumerate(tails):
        row = oracle(name)((*text, *tail)).astype(np.float64)
        want = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        entry = seen[0][str(i)]
        assert entry.top_ids == NAMED
        assert entry.top_logprobs == pytest.approx(want[NAMED].tolist(), abs=1e-9)
        assert (entry.token_id, entry.rank) == (int(want.argmax()), 1)
