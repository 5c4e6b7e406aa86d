"""L11: ways to get a step from the engine to the ranks and its result back."""

from __future__ import annotations

from penstock.base.registry import Registry

EXECUTORS = Registry("executor")
EXECUTORS.add("inproc", "penstock.executor.inproc:InprocExecutor")
