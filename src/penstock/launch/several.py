"""Several models on one machine: what each will take, known before any of them is loaded."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import msgspec

from penstock.base.errors import CapacityError, PenstockError
from penstock.config import EngineConfig
from penstock.core.machine import Machine
from penstock.core.messages import EngineInfo
from penstock.launch.build import foreseen
from penstock.plan.memory import MIN_RESERVE_BYTES, RESERVE_PERCENT, gib


@dataclass(frozen=True)
class Foreseen:
    """A model that is not loaded yet. `config`: with what was decided, so that an engine that starts while others run
    decides the same. `place`: whose memory it takes, "" for the machine's. Units: bytes."""

    config: EngineConfig
    info: EngineInfo
    weight_bytes: int
    kv_bytes: int
    place: str
    limit_bytes: int
    """What all models there may take."""
    grows: bool
    """KV takes memory as it is used, and can give it back."""

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


def foresee(name: str, config: EngineConfig, machine: Machine, limit_bytes: int | None) -> Foreseen:
    """Reads headers only. `limit_bytes`: all that models may take. Raises CapacityError, ModelError, ..., with the
    model's name before their sentence.

    Whoever asks a GPU for its memory takes some of it, and gigabytes of libraries: that is done in a process that ends.
    """
    if config.execution.device in ("auto", "cpu"):
        return _foresee(name, config, machine, limit_bytes)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_foresee, name, config, machine, limit_bytes).result()


def _foresee(name: str, config: EngineConfig, machine: Machine, limit_bytes: int | None) -> Foreseen:
    device = config.execution.device
    place = device if device.startswith("cuda") else ""
    if limit_bytes is not None:
        # Whoever says what models may take has thought of what is left to others.
        spared = limit_bytes + max(MIN_RESERVE_BYTES, machine.available_bytes * RESERVE_PERCENT // 100)
        machine = msgspec.structs.replace(machine, available_bytes=min(machine.available_bytes, spared))
    try:
        plan, info, free_bytes = foreseen(config, machine)
        weights = plan.weight_bytes + sum(draft.weight_bytes for draft in plan.drafts)
        most = limit_bytes if limit_bytes is not None else usable(free_bytes)
        if weights + plan.kv_bytes > most:
            raise CapacityError(
                f"its weights take {gib(weights)} and its KV {gib(plan.kv_bytes)}, and all models together may take "
                f"{gib(most)}; raise models_memory, or lower its kv_cache_memory_bytes",
                field="models_memory",
            )
    except PenstockError as error:
        raise type(error)(f"the model {name}: {error}") from None
    decided = config
    if config.model.dtype == "auto":
        decided = replace(decided, model=replace(decided.model, dtype=plan.dtype))
    cache = config.cache
    if plan.kv_bytes and cache.kv_cache_memory_bytes is None and cache.num_gpu_blocks_override is None:
        decided = replace(decided, cache=replace(cache, kv_cache_memory_bytes=plan.kv_bytes))
    grows = not place and cache.kv_allocator in ("paged", "modules")
    return Foreseen(decided, info, weights, plan.kv_bytes, place, most, grows)


def usable(free_bytes: int) -> int:
    """Of what is free now, less the reserve that one model alone would leave."""
    return free_bytes - max(MIN_RESERVE_BYTES, free_bytes * RESERVE_PERCENT // 100)
