"""H26, H30, B16: requests go from engine to engine of one server, with their keys and values."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.base.errors import InputError
from penstock.core.sampling import SamplingParams
from penstock.engine.stream import Stream
from tests.engine.beside import Beside, beside
from tests.engine.processes import nano, running, within
from tests.engine.test_process_link import params

STORY = "Once upon a time there was a small dog who lived in a large house with a red door and a blue roof. " * 2
PROMPTS = [f"{number}. {STORY}" for number in range(6)]


def store(folder: Path) -> str:
    return f"disk:{folder / 'blocks'},200MiB"


def num_tokens(stream: Stream) -> int:
    return len(stream.output.outputs[0].token_ids) if not stream.ended else 1 << 20


async def calm(engine: Beside) -> list[object]:
    """What each would be, were it alone with one engine."""
    streams = [engine.submit(f"calm{i}", PROMPTS[i], params(i)) for i in range(6)]
    return [(await stream.result()).outputs for stream in streams]


@within(60)
async def test_B16_a_prefix_of_one_engine_is_read_by_the_other(tmp_path: Path) -> None:
    async with beside(2, kv_offload=store(tmp_path), kv_load_policy="wait", block_size=16) as engine:
        first = await engine.complete("a", STORY + "One", params(0))
        await engine.client.handover.flush(engine.client.replicas[0])
        second = engine.submit("b", STORY + "One", params(0))
        assert second.replica.number == 1
        output = await second.result()
        assert output.num_cached_tokens == 16 * ((len(first.prompt_token_ids or []) - 1) // 16) > 0
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in first.outputs]


@pytest.mark.parametrize("length", [50, 500, 1900])
def test_H30_downtime_is_a_step_whatever_the_length(length: int, tmp_path: Path) -> None:
    @within(60)
    async def run() -> None:
        wide = {"max_model_len": 2048, "num_gpu_blocks_override": 160, "ops": "auto", "block_size": 16}
        prompt = [3 + (7 * i) % 4000 for i in range(length)]
        greedy = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
        async with beside(2, kv_offload=store(tmp_path), **wide) as engine:
            want = (await engine.complete("calm", prompt, greedy)).outputs
            stream = engine.submit("r", prompt, greedy)
            source = stream.replica.number
            task = asyncio.create_task(stream.result())
            await engine.until(lambda: num_tokens(stream) >= 20)
            moved = await engine.client.handover.migrate("r", 1 - source)
            at = len(engine.steps)
            assert stream.replica.number == 1 - source
            assert (await task).outputs == want
            later = [told for told in engine.steps[at:] if told.number != source and told.num_tokens]
            first = next(n for n, told in enumerate(later) if any(out.token_ids for out in told.outputs))
            assert first == 0, "the first step of the other engine makes a token"
            assert later[0].num_tokens <= 2 * 16, "it computes what fills no block, however long the text is"
            assert moved.num_copied >= length // 16 * 16

    run()
