"""A front end over a real engine process, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec

import uvloop

from penstock.base.clock import MonotonicClock
from penstock.config import EngineConfig, from_kwargs
from penstock.core.output import RequestOutput
from penstock.core.sampling import SamplingParams
from penstock.engine.frontend import EngineClient
from penstock.engine.placement import EnginePlacement
from penstock.engine.process_link import ProcessLink
from penstock.engine.stream import Stream
from penstock.launch.bundled import bundled_model
from penstock.launch.front import Front, limits_from, open_front
from penstock.route import ROUTERS
from penstock.text.validate import build_request


def nano(**settings: Any) -> EngineConfig:
    """The bundled model, with operations whose results do not depend on the batch."""
    path = bundled_model("nano")
    assert path is not None
    usual = {"model": str(path), "ops": "ref", "max_model_len": 256, "num_gpu_blocks_override": 256}
    return from_kwargs(**(usual | settings))


class Running:
    """`client` over `link`; `submit` takes text."""

    def __init__(self, client: EngineClient, link: ProcessLink, front: Front) -> None:
        self.client = client
        self.link = link
        self.front = front

    def submit(self, name: str, text: str | list[int], params: SamplingParams) -> Stream:
        assert self.client.info is not None
        assert self.front.tokenizer is not None
        ids = self.front.tokenizer.encode(text) if isinstance(text, str) else text
        limits = limits_from(self.client.info)
        request = build_request(name, ids, params, limits=limits, tokenizer=self.front.tokenizer, seed=len(ids))
        return self.client.submit(request, params, None)

    async def complete(self, name: str, text: str | list[int], params: SamplingParams) -> RequestOutput:
        return await self.submit(name, text, params).result()

    def signal(self, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.link.pid
        assert pid is not None
        os.kill(pid, number)
        return pid

    async def until(self, condition: Callable[[], bool], limit_s: float = 90.0) -> None:
        """Polls: for states that have no event of their own."""
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(0.005)


P = ParamSpec("P")


def within(seconds: float) -> Callable[[Callable[P, Coroutine[Any, Any, None]]], Callable[P, None]]:
    """Runs a test on an event loop of its own (the server's kind), with a limit: three times as much on a machine that
    has other work, since only what hangs should meet it."""

    def wrap(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(asyncio.wait_for(test(*args, **kwargs), 3 * seconds))

        return run

    return wrap


@asynccontextmanager
async def replicated(
    size: int, policy: str = "prefix", max_restarts_per_minute: int = 10_000, **settings: Any
) -> AsyncIterator[Running]:
    """Several engines of one model behind one client."""
    config = nano(data_parallel_size=size, **settings)
    placing = EnginePlacement(ROUTERS.get(policy)())
    links = [
        ProcessLink(
            config.as_kwargs(), max_restarts_per_minute=max_restarts_per_minute, block_secret=placing.block_secret
        )
        for _ in range(size)
    ]
    front = open_front(config)
    client = EngineClient(
        links[0], front.tokenizer, MonotonicClock(), further=links[1:], placing=placing,
        has_store=config.cache.kv_offload != "none",
    )  # fmt: skip
    await client.start()
    try:
        yield Running(client, links[0], front)
    finally:
        await client.stop()


@asynccontextmanager
async def running(config: EngineConfig | None = None, **link_settings: Any) -> AsyncIterator[Running]:
    config = config or nano()
    link = ProcessLink(config.as_kwargs(), **link_settings)
    front = open_front(config)
    client = EngineClient(link, front.tokenizer, MonotonicClock())
    await client.start()
    try:
        yield Running(client, link, front)
    finally:
        await client.stop()


def is_gone(pid: int) -> bool:
    """No such process, not even as a zombie."""
    return not Path(f"/proc/{pid}").exists()


def num_fds() -> int:
    """Open descriptors, without the spare one on /dev/null that the event loop opens once."""
    num = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            num += os.readlink(f"/proc/self/fd/{name}") != "/dev/null"
    return num


async def assert_num_fds(expected: int) -> None:
    """The event loop may close descriptors one round later."""
    for _ in range(100):
        if num_fds() == expected:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"{num_fds()} descriptors in place of {expected}")
