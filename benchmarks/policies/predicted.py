"""Loads whose requests say how long they are expected to be: exactly, or off by a factor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.policies.case import Load

from penstock.lengths.oracle import noisy
from penstock.sim.workload import TimedRequest, Workload


def predicted(load: Load, noise: float = 0.0) -> Load:
    """`load` with predictions; `noise`: sigma of the logarithm of the factor by which they are wrong."""

    def told(rate: float, seed: int, n: int) -> Workload:
        plain = load(rate, seed, n)

        def source() -> Iterator[TimedRequest]:
            for number, r in enumerate(plain.source()):
                yield replace(r, expected=noisy(r.num_output, noise, seed, str(number)))

        return replace(plain, source=source)

    return told
