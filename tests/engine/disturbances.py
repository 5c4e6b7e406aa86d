"""Engines behind one client, disturbed at random: killed, drained, added, removed, restarted, while streams run."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from typing import Any

from penstock.base.errors import RefusedError
from penstock.engine.membership import Membership
from penstock.engine.process_link import ProcessLink
from tests.engine.processes import Running, is_gone, nano, replicated, running
from tests.engine.test_process_link import params
from tests.engine.test_replicas import PROMPTS

QUICK: dict[str, Any] = {"ops": "auto", "num_gpu_blocks_override": 64}
ACTIONS = ("kill", "drain", "resume", "add", "remove", "restart", "restart all", "nothing")


class Disturbed:
    """Keeps six streams running and compares each with what an undisturbed engine said, while `rng` draws what is done
    to the engines. Counts what was done; what was refused counts as that."""

    def __init__(self, engine: Running, group: Membership, want: list[object], rng: random.Random) -> None:
        self.engine, self.group, self.want, self.rng = engine, group, want, rng
        self.done: Counter[str] = Counter()
        self.streams = 0
        self._ends = False
        self._actions: set[asyncio.Task[None]] = set()

    async def run(self, actions: int, pause_s: float) -> None:
        """Raises AssertionError with the first stream that differs."""
        readers = [asyncio.create_task(self._read(n)) for n in range(len(PROMPTS))]
        for _ in range(actions):
            task = asyncio.create_task(self._act(self.rng.choice(ACTIONS)))
            self._actions.add(task)
            await asyncio.sleep(pause_s * self.rng.random())
            if any(reader.done() for reader in readers):
                break
        await asyncio.gather(*self._actions)
        self._ends = True
        await asyncio.gather(*readers)

    async def _read(self, which: int) -> None:
        while not self._ends:
            name = f"d{which}-{self.streams}"
            self.streams += 1
            found = await self.engine.submit(name, PROMPTS[which], params(which)).result()
            assert found.error is None, (name, found.error)
            assert found.outputs == self.want[which], name

    async def _act(self, action: str) -> None:
        replicas = self.engine.client.replicas
        number, timeout = self.rng.choice(replicas).number, self.rng.choice([0.0, 0.0, 0.05, None])
        try:
            match action:
                case "kill":
                    self._kill(number)
                case "drain":
                    await self.group.drain(number, timeout)
                case "resume":
                    self.group.resume(number)
                case "add":
                    await self.group.add()
                case "remove":
                    await self.group.remove(number, timeout)
                case "restart":
                    await self.group.restart(number, timeout or 0.0)
                case "restart all":
                    await self.group.restart_all()
        except RefusedError:
            action = "refused"
        self.done[action] += 1

    def _kill(self, number: int) -> None:
        link = next(replica.link for replica in self.engine.client.replicas if replica.number == number)
        pid = getattr(link, "pid", None)
        if pid is not None and not is_gone(pid):
            os.kill(pid, signal.SIGKILL)


async def campaign(seed: int, actions: int, most: int = 3, pause_s: float = 0.15) -> dict[str, Any]:
    """`actions` drawn by `seed` on two engines at first, three at most; up to `pause_s` seconds between two."""
    rng, began = random.Random(seed), time.monotonic()
    async with running(nano(**QUICK)) as calm:
        outputs = await asyncio.gather(*(calm.complete(f"c{i}", p, params(i)) for i, p in enumerate(PROMPTS)))
    want: list[object] = [output.outputs for output in outputs]
    router = rng.choice(["prefix", "least-requests", "least-tokens", "power-of-two", "virtual-usage"])
    async with replicated(2, router, max_replicas=most, **QUICK) as engine:
        placing = engine.client.placing
        assert placing is not None
        config = nano(data_parallel_size=2, max_replicas=most, **QUICK).as_kwargs()

        def make() -> ProcessLink:
            return ProcessLink(config, max_restarts_per_minute=10_000, block_secret=placing.block_secret)

        group = Membership(engine.client, make, most, start_tries=10_000)
        disturbed = Disturbed(engine, group, want, rng)
        try:
            await disturbed.run(actions, pause_s)
        finally:
            await group.close()
        left = sum(load.requests for load in placing._loads.values())  # type: ignore[attr-defined]
        assert left == 0, "every request that ended is counted as ended"
    return {
        "seed": seed, "router": router, "streams": disturbed.streams, "done": dict(sorted(disturbed.done.items())),
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
