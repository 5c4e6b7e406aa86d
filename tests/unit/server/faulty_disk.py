"""A disk that says no: the n-th change of what lies under a folder fails, and some after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHANGES = ("open", "write", "fsync", "replace", "ftruncate")


@contextmanager
def failing(
    folder: Path, code: int, nth: int, *, times: float = 1, kinds: tuple[str, ...] = CHANGES
) -> Iterator[list[str]]:
    """The changes that were tried, in order; `times` of them from the `nth` (from 0) raise OSError with `code`. A write
    that fails has written a part of its data before, as a disk that fills up does."""
    tried: list[str] = []

    def wrap(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *more: Any, **named: Any) -> Any:
            if kind not in kinds or not _is_under(folder, first) or (kind == "open" and not more[0] & os.O_CREAT):
                return real(first, *more, **named)
            tried.append(kind)
            now = len(tried) - 1
            if nth <= now < nth + times:
                if kind == "write":
                    real(first, bytes(more[0])[: len(more[0]) // 2])
                raise OSError(code, os.strerror(code))
            return real(first, *more, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind in CHANGES:
            patch.setattr(os, kind, wrap(kind, getattr(os, kind)))
        yield tried


def _is_under(folder: Path, what: Any) -> bool:
    try:
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what)
    except (OSError, TypeError):
        return False
    return str(path).startswith(str(folder))
