"""Standing questions of serving, each answered by simulations on one page (`penstock study NAME`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.base.registry import Registry

STUDIES: Registry[Callable[..., Any], None] = Registry("study")
STUDIES.add("batching", "penstock.sim.studies.batching:run")
STUDIES.add("buckets", "penstock.sim.studies.buckets:run")
STUDIES.add("chunks", "penstock.sim.studies.chunks:run")
STUDIES.add("memory", "penstock.sim.studies.memory:run")
STUDIES.add("swap", "penstock.sim.studies.swap:run")
