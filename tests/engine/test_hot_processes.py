"""Weights swapped from files: by `LLM`, in a rank's own process, and under an engine that is killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.base.errors import CapacityError, InputError, ModelError, UnsupportedError
from penstock.core.weight_swap import WeightsOrder
from penstock.launch import reload
from penstock.plan.probe import Free
from tests.adapting import nano as nano_path
from tests.engine.processes import nano, running, within
from tests.native.running import ISAS
from tests.weights import other_nano

PROMPTS = ["Once upon a time there was", "The big dog"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_nano(tmp_path_factory.mktemp("weights") / "other", 1)


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY)]


WAYS: dict[str, dict[str, Any]] = {"ref": {"ops": "ref"}, "apart": {"ops": "ref", "executor": "multiproc"}}
if ISAS:
    WAYS["native"] = {"ops": "native"}


@pytest.mark.parametrize("way", WAYS)
def test_I15_an_engine_is_afterwards_as_one_that_was_started_so(other: Path, way: str) -> None:
    settings = {"max_model_len": 128, "num_gpu_blocks_override": 64} | WAYS[way]
    llm = LLM(str(nano_path()), **settings)
    before, expected = tokens(llm), tokens(LLM(str(other), **settings | {"executor": "inproc"}))
    stream = llm.stream(PROMPTS[0], GREEDY)
    for _ in range(4):
        first = next(stream)
    assert first.weight_version == "default"
    version = llm.update_weights(other, mode="recompute")
    *_, last = stream
    assert last.outputs[0].weight_versions == [(0, 4, "default"), (4, 12, version)]
    assert tokens(llm) == expected != before
    assert llm.generate(PROMPTS[0], GREEDY)[0].weight_version == version == llm.weight_version
    with pytest.raises(ModelError, match="nothing"):
        llm.update_weights(other / "nothing")
    assert tokens(llm) == expected
    assert llm.update_weights(nano_path(), version="back") == "back"
    assert tokens(llm) == before


def test_what_cannot_be_swapped_says_why(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(nano_path()), ops="ref", max_model_len=64)
    with pytest.raises(InputError, match="mode: 'now' is none of wait, abort, recompute, keep"):
        llm.update_weights(other, mode="now")
    monkeypatch.setattr(reload, "free_memory", lambda: Free(1 << 30, 1000))
    with pytest.raises(CapacityError, match="weights are swapped while the old ones serve"):
        llm.update_weights(other)
    monkeypatch.setattr(reload, "why_not", lambda _: "these")
    with pytest.raises(UnsupportedError, match="these cannot be swapped in a running engine"):
        llm.update_weights(other)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_engine_comes_back_with_the_weights_in_force(other: Path) -> None:
    """Killed while a swap waits: the old ones. Killed afterwards: the new ones, under the same stream."""

    @within(120)
    async def run() -> None:
        greedy = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        async with running(nano(), max_restarts_per_minute=50) as engine:
            client = engine.client
            stream = engine.submit("waits", PROMPTS[0], greedy)
            await engine.until(lambda: bool(stream.output.outputs[0].token_ids))
            swap = asyncio.create_task(client.swap_weights(WeightsOrder(str(other), "new")))
            await asyncio.sleep(0.01)
            engine.signal()
            with pytest.raises(ModelError, match="the old weights serve on"):
                await swap
            old = await stream.result()
            assert old.error is None
            assert client.weight_version == "default"
            done = await client.swap_weights(WeightsOrder(str(other), "new"))
            assert done.facts is not None
            calm = await engine.complete("new", PROMPTS[0], greedy)
            assert calm.outputs[0].token_ids != old.outputs[0].token_ids
            stream = engine.submit("killed", PROMPTS[0], greedy)
            await engine.until(lambda: len(stream.output.outputs[0].token_ids) > 3)
            engine.signal()
            again = await stream.result()
            assert again.outputs == calm.outputs
            assert again.weight_version == "new"
            assert client.num_restarts == 2

    run()
