"""Adaptive mode put together: which knobs may move, and for what promises (docs/guides/adaptive.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.base.errors import ConfigError, InputError
from penstock.base.latency import latency_limits
from penstock.sched.controller import REST_S, Controller, Promise

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.engine.core import EngineCore

DEFAULTS = {"scheduling_policy": "fcfs", "long_prefill_token_threshold": 0, "schedule_conservativeness": 1.0}
"""A knob that was given another value stays there; of the others a given value is the most that they may be."""


def promise_of(text: str) -> Promise:
    """Raises ConfigError."""
    try:
        limits = latency_limits(text, "adaptive_slo")
    except InputError as error:
        raise ConfigError(str(error), field="adaptive_slo") from None
    return Promise(limits.get("ttft_s", 1.0), limits.get("tpot_s", 0.1))


def movable_of(config: EngineConfig) -> tuple[str, ...]:
    """Raises ConfigError for a knob that is none."""
    text = config.scheduler.adaptive_knobs
    if text != "all":
        names = tuple(name.strip() for name in text.split(","))
        if unknown := [name for name in names if name not in REST_S]:
            raise ConfigError(
                f"adaptive_knobs: there is no {unknown[0]!r}; known: {', '.join(REST_S)}, or all",
                field="adaptive_knobs",
            )
        return names
    return tuple(n for n in REST_S if n not in DEFAULTS or getattr(config.scheduler, n) == DEFAULTS[n])


def check_adaptive(config: EngineConfig) -> None:
    """Raises ConfigError."""
    promise_of(config.scheduler.adaptive_slo)
    movable_of(config)


def adapt(config: EngineConfig, core: EngineCore) -> None:
    """Give the engine a controller, if it is to have one. A replay's engine gets none: its log has the moves."""
    if config.scheduler.adaptive:
        promise = promise_of(config.scheduler.adaptive_slo)
        core.controller = Controller(core.scheduler, core.knobs, promise, movable_of(config))
