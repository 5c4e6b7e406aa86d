"""Requests that have ended leave nothing, also in an engine that is never idle: live objects by type, not memory."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from itertools import pairwise

import httpx

from penstock.base.clock import MonotonicClock
from penstock.config import serve_from_kwargs
from penstock.core.messages import EngineInfo
from penstock.core.sampling import SamplingParams
from penstock.engine.blackbox import BlackBox
from penstock.engine.core import EngineCore
from penstock.engine.frontend import EngineClient
from penstock.engine.thread_link import ThreadLink
from penstock.server.live import LiveServer
from penstock.text.validate import build_request
from tests.api.conftest import bundled
from tests.engine.crashing import LIMITS, TOKENIZER
from tests.engine.fake_model import VOCAB
from tests.engine.harness import Knobs, fake_engine
from tests.engine.processes import within

ROUND = 400
LONG = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)


def census() -> tuple[Counter[str], int]:
    """Live objects by type, and blocks of Python's own memory: strings and numbers are in no list of objects."""
    gc.collect()
    return Counter(type(o).__name__ for o in gc.get_objects()), sys.getallocatedblocks()


def grown(before: tuple[Counter[str], int], after: tuple[Counter[str], int]) -> tuple[dict[str, int], int]:
    """Types with more live objects than before, and how many blocks more."""
    more = {name: number - before[0][name] for name, number in after[0].items() if number > before[0][name]}
    return more, after[1] - before[1]


def kept(rounds: list[tuple[Counter[str], int]]) -> tuple[dict[str, int], int]:
    """What grew from each round to the next: a connection that closes late is there once, a leak every time."""
    steps = [grown(before, after) for before, after in pairwise(rounds)]
    types = set.intersection(*(set(more) for more, _ in steps))
    return {name: min(more[name] for more, _ in steps) for name in types}, min(blocks for _, blocks in steps)


@within(120)
async def test_an_engine_under_constant_load_keeps_nothing() -> None:
    """It is never without a request, so nothing may wait for that moment to be dropped."""

    def make() -> tuple[EngineCore, EngineInfo]:
        return fake_engine(Knobs(num_blocks=200, budget=64, max_num_seqs=16))[0], EngineInfo(
            vocab_size=VOCAB, max_model_len=256
        )

    client = EngineClient(ThreadLink(make), TOKENIZER, MonotonicClock())
    await client.start()
    number = 0

    async def one(params: SamplingParams, *, leaves: bool = False) -> None:
        nonlocal number
        number += 1
        prompt = [5 + number % 7, 6, 7, 9 + number % 11]
        request = build_request(f"request-{number}", prompt, params, limits=LIMITS, tokenizer=TOKENIZER, seed=number)
        stream = client.submit(request, params)
        timer = asyncio.get_running_loop().call_later(600, stream.abort, "timeout")
        stream.on_end(timer.cancel)
        async for _ in stream.deltas():
            if leaves:
                break

    async def load(ended: asyncio.Event) -> None:
        while not ended.is_set():
            await one(LONG)

    ended = asyncio.Event()
    busy = [asyncio.create_task(load(ended)) for _ in range(2)]
    kinds = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=2, n=2), SamplingParams(max_tokens=4, stop=["a"])]

    async def round_of(num: int) -> tuple[Counter[str], int]:
        numbers = iter(range(num))

        async def some() -> None:
            for i in numbers:
                await one(kinds[i % 3] if i % 5 else LONG, leaves=not i % 5)

        await asyncio.gather(*(some() for _ in range(6)))
        return census()

    await round_of(ROUND)
    rounds = [await round_of(ROUND) for _ in range(3)]
    # A leak is there every time; those that were under way, not.
    more, blocks = kept(rounds)
    while len(rounds) < 10 and (blocks >= ROUND // 2 or any(number >= ROUND // 20 for number in more.values())):
        rounds.append(await round_of(ROUND))
        more, blocks = kept(rounds)
    ended.set()
    await asyncio.gather(*busy)
    await client.stop()
    assert all(number < ROUND // 20 for number in more.values()), more
    assert blocks < ROUND // 2, f"{blocks} blocks more after {ROUND} requests: {more}"


def test_a_server_under_constant_load_keeps_nothing() -> None:
    """All the way from the socket; a point of the history a second is all that comes to stay."""
    config = serve_from_kwargs(
        model=bundled(), port=0, max_model_len=256, num_gpu_blocks_override=64, threads=1, request_log=False,
        engine_in_process=True, request_timeout=600.0,
    )  # fmt: skip
    num = 100

    async def load(url: str) -> tuple[Counter[str], int]:
        numbers, ended = iter(range(num)), asyncio.Event()
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:

            async def stream(body: dict[str, object], *, leaves: bool = False) -> None:
                async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                    async for _ in answer.aiter_bytes():
                        if leaves:
                            break

            async def busy() -> None:
                while not ended.is_set():
                    await stream({"prompt": "a", "max_tokens": 200, "ignore_eos": True})

            async def some() -> None:
                for i in numbers:
                    body: dict[str, object] = {"prompt": f"x {i % 20}", "max_tokens": 3, "seed": i}
                    if i % 3 == 0:
                        await stream(body)
                    elif i % 3 == 1:
                        await stream(body | {"max_tokens": 100, "ignore_eos": True}, leaves=True)
                    else:
                        await client.post("/v1/completions", json=body)

            keeping = asyncio.create_task(busy())
            await asyncio.gather(*(some() for _ in range(6)))
            found = census()
            ended.set()
            await keeping
        return found

    with LiveServer(config) as live:
        for _ in range(2):  # connections, caches and the prefix tree fill
            asyncio.run(load(live.url))
        more, _ = kept([asyncio.run(load(live.url)) for _ in range(3)])
    assert all(number < num // 3 for number in more.values()), more


def test_the_loop_forgets_the_names_of_those_that_have_ended() -> None:
    """Those that live keep theirs: a crash must find them."""
    from penstock.engine.loop import EngineLoop
    from tests.engine.harness import request

    core = fake_engine(Knobs(num_blocks=300, budget=64, max_num_seqs=16))[0]
    box = BlackBox()
    loop = EngineLoop(core, lambda message: None, box)
    loop.send([request([5, 6, 7], request_id="stays", max_tokens=500)])
    todo = iter(range(400))
    step = core.step

    def stepping() -> list[object]:
        out = step()
        number = next(todo, None)
        if number is None:
            loop.stop()
        elif len(core.groups) < 4:
            loop.send([request([5, 8, number % 20 + 3], request_id=f"r{number}", max_tokens=2)])
        assert len(loop._handles) <= 3 * 64
        assert "stays" in loop._handles
        return out  # type: ignore[return-value]

    core.step = stepping  # type: ignore[method-assign, assignment]
    loop.run()
    assert next(todo, None) is None
