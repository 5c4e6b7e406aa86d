"""L11: builds ranks from a RankSpec, and gets a step from the engine to them and its result back."""

from __future__ import annotations

from collections.abc import Callable

from penstock.base.registry import Registry
from penstock.core.protocols import Executor

EXECUTORS: Registry[Callable[..., Executor], None] = Registry("executor")
"""Each is made with (spec, build, *, depth, loading, box): see `rank.RankFactory`; `loading` hears of bytes of weights
(done, in all), `box` is where a rank counts its operations."""
EXECUTORS.add("inproc", "penstock.executor.inproc:InprocExecutor")
EXECUTORS.add("multiproc", "penstock.executor.multiproc:MultiprocExecutor")
