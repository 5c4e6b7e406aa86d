"""L11: ways to get a step from the engine to the ranks and its result back."""

from __future__ import annotations

from collections.abc import Callable

from penstock.base.registry import Registry
from penstock.core.protocols import Executor

EXECUTORS: Registry[Callable[..., Executor], None] = Registry("executor")
EXECUTORS.add("inproc", "penstock.executor.inproc:InprocExecutor")
