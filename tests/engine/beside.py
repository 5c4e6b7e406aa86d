"""Several engines of one model in threads of this process, behind one client: quick to start, and open to a look."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from penstock.base.clock import MonotonicClock
from penstock.core.output import EngineOutput
from penstock.engine.core import EngineCore
from penstock.engine.frontend import EngineClient
from penstock.engine.placement import EnginePlacement
from penstock.engine.thread_link import ThreadLink
from penstock.launch.build import local_engine
from penstock.launch.front import open_front
from penstock.route import ROUTERS
from tests.engine.processes import Running, nano


@dataclass
class Told:
    """What one step of an engine did: tokens that ran, and its news."""

    number: int
    num_tokens: int
    outputs: list[EngineOutput]


class Beside(Running):
    """`steps`: of all engines, in the order in which they ended."""

    cores: dict[int, EngineCore]
    steps: list[Told]


@asynccontextmanager
async def beside(size: int, policy: str = "round-robin", **settings: Any) -> AsyncIterator[Beside]:
    config = nano(data_parallel_size=size, **({"ops": "auto"} | settings))
    cores: dict[int, EngineCore] = {}
    steps: list[Told] = []

    def link(number: int) -> ThreadLink:
        make = local_engine(config)

        def made() -> Any:
            cores[number], info = make()
            step = cores[number].step

            def told() -> list[EngineOutput]:
                before = cores[number].stats.num_scheduled_tokens
                outputs = step()
                steps.append(Told(number, cores[number].stats.num_scheduled_tokens - before, outputs))
                return outputs

            cores[number].step = told  # type: ignore[method-assign]
            return cores[number], info

        return ThreadLink(made)

    links = [link(number) for number in range(size)]
    front = open_front(config)
    placing = EnginePlacement(ROUTERS.get(policy)())
    has_store = config.cache.kv_offload != "none"
    client = EngineClient(
        links[0], front.tokenizer, MonotonicClock(), further=links[1:], placing=placing, has_store=has_store
    )
    await client.start()
    engine = Beside(client, links[0], front)  # type: ignore[arg-type]
    engine.cores, engine.steps = cores, steps
    try:
        yield engine
    finally:
        await client.stop()
