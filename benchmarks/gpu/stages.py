"""The stages in their order: what answers most comes first. Each has a budget in seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from benchmarks.gpu.bench import Bench


class Stage(NamedTuple):
    """`room`: module of this folder; `make`: gives what runs, out of that module."""

    name: str
    budget_s: float
    room: str
    make: Callable[[object], Callable[[Bench], None]]


def _run(room: object) -> Callable[[Bench], None]:
    found: Callable[[Bench], None] = room.run  # type: ignore[attr-defined]
    return found


STAGES = (
    Stage("correctness", 75, "correctness", _run),
    Stage("kernel-checks", 60, "kernel_checks", _run),
    Stage("ceilings", 20, "ceilings", _run),
    Stage("llama-3.1-8b", 100, "engine", lambda room: room.stage("llama-3.1-8b")),  # type: ignore[attr-defined]
    Stage("kernels", 60, "kernels", _run),
    Stage("int4", 50, "engine", lambda room: room.int4("llama-3.1-8b")),  # type: ignore[attr-defined]
    Stage("adapters", 30, "adapters", _run),
    Stage("serving", 75, "serving", lambda room: room.stage("llama-3.2-1b", (1, 16))),  # type: ignore[attr-defined]
    Stage("ready", 90, "serving", lambda room: room.stage("llama-3.1-8b", ())),  # type: ignore[attr-defined]
    Stage("qwen3-30b-a3b", 75, "engine", lambda room: room.stage("qwen3-30b-a3b")),  # type: ignore[attr-defined]
    Stage("llama-3.2-1b", 50, "engine", lambda room: room.stage("llama-3.2-1b")),  # type: ignore[attr-defined]
)
NAMES = tuple(stage.name for stage in STAGES)
