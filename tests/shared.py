"""Data and models that lie in the folder `shared` beside the repository; tests that need one are skipped without it."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared(*parts: str) -> Path:
    """The path of something below `shared`. Skips the calling test, saying what is missing, if it is not there."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path
