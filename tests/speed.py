"""How fast this machine is just now, for bounds on time: on a slower one they are as many times longer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_COUNT_S, _BUILD_S = 0.02, 0.015
"""What the two loops below take where the bounds of tests were set."""


def slowness() -> float:
    """Of this thread now, at least 1: a busy sibling core or a small cache may double what a second is worth."""
    counted, built = [], []
    for _ in range(3):
        started = time.thread_time()
        for i in range(1_000_000):
            i & 3
        counted.append(time.thread_time() - started)
        started = time.thread_time()
        rows = [{"type": "text", "at": f"a[{i}]"} for i in range(40_000)]
        sum(len(row["at"]) for row in rows)
        built.append(time.thread_time() - started)
    return max(1.0, sorted(counted)[1] / _COUNT_S, sorted(built)[1] / _BUILD_S)


@contextmanager
def cpu_within(seconds: float) -> Iterator[None]:
    """Fails if what is inside takes this thread more than `seconds` of a machine that is as fast as usual."""
    started = time.thread_time()
    yield
    taken = time.thread_time() - started
    if taken >= seconds:
        most = seconds * slowness()
        assert taken < most, f"{taken:.2f} s of CPU time, at most {most:.2f} here"
