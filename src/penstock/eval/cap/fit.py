"""What each configuration could hold, by the engine's own plan: all are checked before the first one is started."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from penstock.base.errors import CapacityError, ConfigError, PenstockError
from penstock.config import EngineConfig, from_kwargs
from penstock.eval.cap.board import Configuration
from penstock.eval.cap.conditions import Conditions
from penstock.launch.build import plan_of
from penstock.plan.resolve import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class Seat:
    """A configuration that can be started. `fits`: tokens of the longest sequence within `kv_memory`, by the plan."""

    configuration: Configuration
    config: EngineConfig
    max_model_len: int
    fits: int
    kv_memory: int

    def limited(self) -> EngineConfig:
        """The same, in that memory."""
        memory = {"kv_cache_memory_bytes": self.kv_memory, "num_gpu_blocks_override": None, "max_model_len": self.fits}
        return from_kwargs(**(self.config.as_kwargs() | memory))


def seats(board: Sequence[tuple[Configuration, EngineConfig]], conditions: Conditions) -> list[Seat]:
    """Plans every configuration. Raises ConfigError or another PenstockError, naming it; nothing has run by then."""
    plans = [_named(one, partial(plan_of, config)) for one, config in board]
    need = conditions.input_len + conditions.output_len
    memory = conditions.kv_memory or _four(plans[0], need)
    made = []
    for (one, config), plan in zip(board, plans, strict=True):
        fits = _named(one, partial(_fits, config, plan.max_model_len, memory))
        if fits < need:
            limit = "its context" if fits == plan.max_model_len else f"{memory} bytes of KV memory"
            raise ConfigError(
                f"{one.name!r}: {limit} holds {fits} tokens, fewer than the {conditions.input_len} of --input-len and "
                f"{conditions.output_len} of --output-len; lower them, or raise --kv-memory",
                field="kv_memory",
            )
        made.append(Seat(one, config, plan.max_model_len, fits, memory))
    return made


def _four(plan: Plan, num_tokens: int) -> int:
    """Bytes for four requests of the plain configuration, in whole blocks."""
    blocks = 4 * -(-num_tokens // plan.block_size)
    return math.ceil(plan.kv_bytes / plan.kv_capacity_tokens * blocks * plan.block_size)


def _fits(config: EngineConfig, max_model_len: int, memory: int) -> int:
    """The longest sequence that the planner accepts, in tokens; 0: none."""

    def plans(n: int) -> bool:
        changed = {"kv_cache_memory_bytes": memory, "num_gpu_blocks_override": None, "max_model_len": n}
        try:
            plan_of(from_kwargs(**(config.as_kwargs() | changed)))
        except CapacityError:
            return False
        return True

    if plans(max_model_len):
        return max_model_len
    low, high = 0, max_model_len
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if plans(middle) else (low, middle)
    return low


def _named(one: Configuration, do: Callable[[], T]) -> T:
    try:
        return do()
    except ConfigError as error:
        raise type(error)(f"{one.name!r}: {error}", field=error.field) from None
    except PenstockError as error:
        raise type(error)(f"{one.name!r}: {error}") from None
