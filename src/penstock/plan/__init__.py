"""L4: what to build, decided before anything is built.

`probe` says what the machine has, `resolve` turns settings, a model's spec and a machine into a `Plan`: sizes in exact
integers, and a `Decision` with a reason for every value that nobody gave. What does not fit is refused here, before a
weight is read, with the smallest change that fits.
"""

from __future__ import annotations

from penstock.plan.probe import probe
from penstock.plan.resolve import Plan, resolve

__all__ = ["Plan", "probe", "resolve"]
