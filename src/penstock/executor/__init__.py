"""L11: builds ranks from a RankSpec, and gets a step from the engine to them and its result back."""

from __future__ import annotations

from penstock.base.registry import Registry

EXECUTORS = Registry("executor")
"""Each is made with (spec, build, *, depth, loading, box): see `rank.RankFactory`; `loading` hears of bytes of weights
(done, in all), `box` is where a rank counts its operations."""
EXECUTORS.add("inproc", "penstock.executor.inproc:InprocExecutor")
EXECUTORS.add("multiproc", "penstock.executor.multiproc:MultiprocExecutor")
