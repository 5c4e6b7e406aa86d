"""A little of the campaign that kills engines over one folder of blocks, on a disk that fails."""

from __future__ import annotations

from pathlib import Path

from benchmarks.serving.store_soak import soak


def test_killed_engines_leave_nothing_wrong(tmp_path: Path) -> None:
    told = soak(kills=2, faults=1, seed=3, folder=tmp_path / "kv")
    assert told["kills"] >= 2
    assert told["answers"] > 0
    assert told["blocks"] > 0
    assert (told["wrong"], told["stuck"], told["left_half_written"]) == (0, 0, 0)
