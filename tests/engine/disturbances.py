"""Engines behind one client, disturbed at random: killed, drained, added, removed, restarted, while streams run."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.base.errors import EngineError, RefusedError
from penstock.engine.membership import Membership
from penstock.engine.process_link import ProcessLink
from tests.engine.hosts import EngineHost, beside, free_port
from tests.engine.processes import Running, is_gone, nano, replicated, running
from tests.engine.test_engine_hosts import spread, spread_config
from tests.engine.test_process_link import params
from tests.engine.test_replicas import PROMPTS

QUICK: dict[str, Any] = {"ops": "auto", "num_gpu_blocks_override": 64}
ACTIONS = ("kill", "drain", "resume", "add", "remove", "restart", "restart all", "nothing")
ELSEWHERE = ("kill", "drain", "resume", "restart", "restart all", "nothing", "kill host", "stop host")
"""With engines on other hosts: who is removed there may not come again. Hosts are killed and begun again, or stopped
until they are out of reach."""
SILENT_S = 1.5


class Disturbed:
    """Keeps six streams running and compares each with what an undisturbed engine said, while `rng` draws what is done
    to the engines. Counts what was done; what was refused counts as that."""

    def __init__(
        self, engine: Running, group: Membership, want: list[object], rng: random.Random,
        hosts: Sequence[EngineHost] = (),
    ) -> None:  # fmt: skip
        self.engine, self.group, self.want, self.rng, self.hosts = engine, group, want, rng, hosts
        self._busy: set[EngineHost] = set()
        self.done: Counter[str] = Counter()
        self.streams = 0
        self._ends = False
        self._actions: set[asyncio.Task[None]] = set()

    async def run(self, actions: int, pause_s: float) -> None:
        """Raises AssertionError with the first stream that differs."""
        readers = [asyncio.create_task(self._read(n)) for n in range(len(PROMPTS))]
        for _ in range(actions):
            task = asyncio.create_task(self._act(self.rng.choice(ELSEWHERE if self.hosts else ACTIONS)))
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
                case "kill host" | "stop host":
                    await self._disturb_host(self.rng.choice(self.hosts), action)
        except (RefusedError, EngineError) as error:  # the second: a host that went while its engine was restarted
            if isinstance(error, EngineError) and not self.hosts:
                raise
            action = "refused"
        self.done[action] += 1

    async def _disturb_host(self, host: EngineHost, action: str) -> None:
        if host in self._busy:
            raise RefusedError("it is being disturbed", status=409, code="replica_busy")
        self._busy.add(host)
        try:
            if action == "kill host":
                host.kill()
                await asyncio.sleep(self.rng.random())
                host.start()
            else:
                pids = [host.pid, *host.ranks]
                for number in (signal.SIGSTOP, signal.SIGCONT):
                    for pid in pids:
                        if not is_gone(pid):
                            os.kill(pid, number)
                    await asyncio.sleep(2 * SILENT_S * self.rng.random())
        finally:
            self._busy.discard(host)

    def _kill(self, number: int) -> None:
        replica = next(replica for replica in self.engine.client.replicas if replica.number == number)
        pid = getattr(replica.link, "pid", None)
        if replica.late is not None and replica.state == "ready" and replica.info is not None:
            pid = replica.info.pid
        if pid is not None and not is_gone(pid):
            os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def elsewhere(router: str, num: int, seed: int) -> AsyncIterator[tuple[Running, list[EngineHost]]]:
    """One engine here and `num` on as many other hosts."""
    port, config = free_port(), nano().model.model
    with tempfile.TemporaryDirectory(prefix="penstock-hosts-") as folder:
        logs = [Path(folder) / f"{seed}-{n}" for n in range(num)]
        hosts = [EngineHost(config, port, log, size=num + 1, first=n).start() for n, log in enumerate(logs, 1)]
        with beside(*hosts):
            async with spread(spread_config(port, num + 1, **QUICK), router, silent_s=SILENT_S) as engine:
                await engine.until_state(*["ready"] * (num + 1))
                yield engine, hosts


@asynccontextmanager
async def together(router: str, most: int) -> AsyncIterator[tuple[Running, list[EngineHost]]]:
    async with replicated(2, router, max_replicas=most, **QUICK) as engine:
        yield engine, []


async def campaign(
    seed: int, actions: int, most: int = 3, pause_s: float = 0.15, num_hosts: int = 0
) -> dict[str, Any]:  # fmt: skip
    """`actions` drawn by `seed` on two engines at first, three at most; up to `pause_s` seconds between two.
    `num_hosts`: instead, one engine here and one on each of so many other hosts."""
    rng, began = random.Random(seed), time.monotonic()
    async with running(nano(**QUICK)) as calm:
        outputs = await asyncio.gather(*(calm.complete(f"c{i}", p, params(i)) for i, p in enumerate(PROMPTS)))
    want: list[object] = [output.outputs for output in outputs]
    router = rng.choice(["prefix", "least-requests", "least-tokens", "power-of-two", "virtual-usage"])
    spreads = elsewhere(router, num_hosts, seed) if num_hosts else together(router, most)
    async with spreads as (engine, hosts):
        placing = engine.client.placing
        assert placing is not None
        config = nano(data_parallel_size=2, max_replicas=most, **QUICK).as_kwargs()

        def make() -> ProcessLink:
            return ProcessLink(config, max_restarts_per_minute=10_000, block_secret=placing.block_secret)

        group = Membership(engine.client, make, most, start_tries=10_000)
        disturbed = Disturbed(engine, group, want, rng, hosts)
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
