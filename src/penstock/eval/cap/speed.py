"""P: how fast and how cheap a configuration is in a fixed KV memory. Prompts are the same for all.

One request alone: time to its first token, time per token after it, and the KV memory it holds, read from the
allocator. A batch: tokens per second, and how many sequences ran at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.base.errors import EngineError
from penstock.core.sampling import SamplingParams
from penstock.eval.cap.conditions import Conditions
from penstock.eval.tasks.base import Reader
from penstock.eval.tasks.prose import noise_of, prose
from penstock.kv.block_pool import BlockPool
from penstock.kv.manager import KVManager
from penstock.launch.llm import LLM


@dataclass
class Speed:
    """Of one configuration, over all rounds. Units: seconds, bytes, tokens per second (prompts and outputs).

    `prefill_bytes`, `end_bytes`: KV memory that one request holds once its first token is there, and with its last.
    `peak_running`: most sequences at once in a batch. `preempted`: preemptions in all batches.
    """

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    batch_s: list[float] = field(default_factory=list)
    batch_tokens: int = 0
    prefill_bytes: int = 0
    end_bytes: int = 0
    peak_running: int = 0
    preempted: int = 0

    @property
    def throughput(self) -> float:
        return self.batch_tokens * len(self.batch_s) / sum(self.batch_s)


def by_round(times: Sequence[float], repeats: int) -> list[float]:
    """Geometric mean of each round of so many: what is timed within one shares the machine's mood, and counts once."""
    return [float(x) for x in np.exp(np.log(np.reshape(times, (-1, repeats))).mean(axis=1))]


@dataclass(frozen=True)
class Prompts:
    """Ids: one to warm up, `single` and `batches` to time, all of `input_len` tokens and all different."""

    warm: list[int]
    single: list[list[int]]
    batches: list[list[list[int]]]


def draw(reader: Reader, conditions: Conditions, round_: int) -> Prompts:
    """Stretches of prose; those of every round are others."""
    rng, noise = random.Random(f"speed {conditions.seed} {round_}"), noise_of(prose(None))

    def one() -> list[int]:
        ids: list[int] = []
        while len(ids) < conditions.input_len:
            ids += reader.ids(noise(rng, 4 * conditions.input_len + 64))
        return ids[: conditions.input_len]

    return Prompts(
        one(), [one() for _ in range(conditions.repeats)],
        [[one() for _ in range(conditions.requests)] for _ in range(conditions.repeats)],
    )  # fmt: skip


def time_round(llm: LLM, prompts: Prompts, conditions: Conditions, speed: Speed) -> None:
    """One round of everything. Mutates: `speed`. Raises EngineError."""
    params = SamplingParams(temperature=0.0, max_tokens=conditions.output_len, ignore_eos=True, detokenize=False)
    speed.prefill_bytes, speed.end_bytes = _held(llm, prompts.warm, params)
    for ids in prompts.single:
        (output,) = llm.generate([{"prompt_token_ids": ids}], params)
        ttft, tpot = output.metrics.ttft_s, output.metrics.tpot_s(len(output.outputs[0].token_ids))
        if output.error is not None or ttft is None or tpot is None:
            raise EngineError(f"a request of the speed run failed: {output.error}")
        speed.ttft_s.append(ttft)
        speed.tpot_s.append(tpot)
    stats = llm.engine.core.stats
    before = stats.num_preemptions
    for batch in prompts.batches:
        began = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params)
        speed.batch_s.append(time.perf_counter() - began)
        failed = next((o.error for o in outputs if o.error is not None), None)
        if failed is not None:
            raise EngineError(f"a batch of the speed run failed: {failed}")
        speed.batch_tokens = sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs)
    speed.peak_running = max(speed.peak_running, stats.peak_running)
    speed.preempted += stats.num_preemptions - before


def _held(llm: LLM, ids: list[int], params: SamplingParams) -> tuple[int, int]:
    """Bytes with the first token, and with the last one before memory is given back."""
    engine = llm.engine
    held = [held_bytes(engine.core.kv, engine.plan.block_size) for _ in llm.stream({"prompt_token_ids": ids}, params)]
    seen = [n for n in held if n]
    return (seen[0], seen[-1]) if seen else (0, 0)


def held_bytes(kv: KVManager, block_size: int) -> int:
    """What running sequences hold: slabs in use, less the pages of broken ones that are free again."""
    total = 0
    for group, pool, stats in zip(kv.groups, kv.pools, kv.stats().groups, strict=True):
        slab = group.slab_bytes(block_size)
        total += stats.used * slab
        if isinstance(pool, BlockPool):  # windows have no single pages
            loose = pool.num_free_pages - pool.num_free * pool.pages_per_slab
            total -= loose * slab // pool.pages_per_slab
    return total
