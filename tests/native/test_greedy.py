"""Greedy steps whose largest logits the program finds itself end as those whose logits the sampler looks through."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.core.request import Request
from penstock.runner.runner import Runner
from tests import specs
from tests.engine.harness import Collector, Knobs, assert_idle, real_engine, request
from tests.native.running import pytestmark_native

pytestmark = pytestmark_native
NAN_TOKEN = 7
"""A prompt with it has no finite logits."""
TIMES = 150
"""So often does every token of the small vocabulary stand in the large one: ties within pieces of it and across."""


def tied() -> tuple[Any, dict[str, Any]]:
    spec, weights = specs.make("llama_gqa")
    spec = msgspec.structs.replace(spec, vocab_size=spec.vocab_size * TIMES)
    repeated = {name: np.tile(weights[name], (TIMES, 1)) for name in ("embed", "lm_head")}
    repeated["embed"][NAN_TOKEN] = np.nan
    return spec, {**weights, **repeated}


def requests() -> list[Request]:
    return [
        request([3, 9, 12, 40], request_id="a", max_tokens=12),
        request([5, 6], request_id="b", max_tokens=9, eos=[4]),
        request([11, 30, 22], request_id="several", n=3, max_tokens=6),
        request([8, NAN_TOKEN, 20], request_id="sick", max_tokens=6),
    ]


def answers(spec: Any, weights: Any, listed: list[Request], *, by_program: bool) -> tuple[dict[str, Any], int]:
    """(what each request yields, steps whose logits nobody but the program saw)."""
    core = real_engine(spec, weights, Knobs(ops="native", num_blocks=64, max_num_seqs=8))
    runner = core.executor.runner  # type: ignore[attr-defined]
    assert isinstance(runner, Runner)
    greedy: Any = runner._greedy
    found = [0]
    run = greedy.run_greedy

    def counted(*args: Any) -> Any:
        out = run(*args)
        found[0] += isinstance(out, list)
        return out

    greedy.run_greedy = counted
    if not by_program:
        runner._greedy = None
    collector = Collector()
    for item in listed:
        core.add(item)
    while core.has_work:
        collector.take(core.step())
    assert_idle(core)
    got = {name: (c.tokens, c.reasons, c.error) for name, c in collector.requests.items()}
    return got, found[0]


def test_ties_and_sick_rows() -> None:
    spec, weights = tied()
    expected, none = answers(spec, weights, requests(), by_program=False)
    got, some = answers(spec, weights, requests(), by_program=True)
    assert got == expected
    assert (none, some > 5) == (0, True)
    assert "NaN" in got["sick"][2]
    tokens = [t for name in ("a", "b", "several") for sample in got[name][0].values() for t in sample]
    assert max(tokens) < spec.vocab_size // TIMES, "of equal ones the first"


def test_a_token_that_cannot_be() -> None:
    """A logit of minus infinity is no fault of a row: the sampler decides, on the same logits."""
    spec, weights = specs.make("llama_gqa")
    lm_head = weights["lm_head"].copy()
    lm_head[5] = 0
    lm_head[5, 0] = -np.inf
    listed = [request([i, 9], request_id=f"r{i}", max_tokens=1 + i % 3) for i in range(10, 30)]
    expected, _ = answers(spec, {**weights, "lm_head": lm_head}, listed, by_program=False)
    got, _ = answers(spec, {**weights, "lm_head": lm_head}, listed, by_program=True)
    assert got == expected
    errors = [error for _, _, error in got.values()]
    assert 0 < errors.count(None) < len(errors), "some rows are healthy, some are not"


@pytest.mark.parametrize("more", [{"temperature": 0.8, "seed": 2}, {"num_logprobs": 0}, {"repetition_penalty": 1.3}])
def test_company_that_needs_the_logits(more: dict[str, Any]) -> None:
    spec, weights = tied()
    listed = [*requests(), request([4, 10, 2], request_id="other", max_tokens=6, **more)]
    expected, _ = answers(spec, weights, listed, by_program=False)
    got, some = answers(spec, weights, listed, by_program=True)
    assert got == expected
    assert some, "once the other one has ended"
    alone, _ = answers(spec, weights, requests(), by_program=True)
    assert {name: got[name] for name in alone} == alone
