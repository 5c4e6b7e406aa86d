"""H26, H30: engines that hand requests to each other are killed at any step; nothing is lost, and no token changes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from penstock.base.errors import EngineGoneError, InputError
from penstock.core.request import Control
from tests.engine.processes import replicated, within
from tests.engine.test_handover import PROMPTS, num_tokens, store
from tests.engine.test_process_link import params

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are killed by signals")
KILLS = int(os.environ.get("PENSTOCK_HANDOVER_KILLS", "3"))
SEED = int(os.environ.get("PENSTOCK_HANDOVER_SEED", "1"))
ASKED = (0, 1, 3)


@within(60 + 10 * KILLS)
async def test_H26_H30_engines_are_killed_at_any_step_of_a_hand_over(tmp_path: Path) -> None:
    """Seeded: who dies, and when: while prompts are computed, written, read, handed over, or tokens made."""
    rng = random.Random(SEED)
    async with replicated(2, "round-robin", kv_offload=store(tmp_path), block_size=16) as engine:
        client = engine.client
        want = [(await engine.complete(f"calm{i}", PROMPTS[i], params(i))).outputs for i in ASKED]
        for done in range(KILLS):
            await engine.until(lambda: all(replica.state == "ready" for replica in client.replicas))
            client.control(Control(kind="reset_prefix_cache"))
            moved = done % 3 == 0  # else the engine for prompts dies, and then the one for tokens
            client.handover.set_roles({0: "mixed", 1: "mixed"} if moved else {0: "prefill", 1: "decode"})
            streams = [engine.submit(f"{done}-{i}", PROMPTS[i], params(i)) for i in ASKED]
            results = [asyncio.create_task(stream.result()) for stream in streams]
            if moved:
                await engine.until(lambda streams=streams: num_tokens(streams[0]) >= rng.randrange(1, 12))
                moves = [client.handover.migrate(s.request_id, 1 - s.replica.number) for s in streams]
                moving = [asyncio.create_task(move) for move in moves]
            await asyncio.sleep(rng.random() * 0.06)
            victim = client.replicas[rng.randrange(2) if moved else done % 3 - 1]
            os.kill(victim.link.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            outputs = await asyncio.gather(*results)
            assert [output.error for output in outputs] == [None] * len(ASKED)
            assert [output.outputs for output in outputs] == want
            if moved:
                for task in moving:
                    with contextlib.suppress(EngineGoneError, InputError):
                        await task
        assert client.num_restarts + sum(r.state == "restarting" for r in client.replicas) == KILLS
        assert not client.handover._answers
