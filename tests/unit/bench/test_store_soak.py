"""A little of the campaign that kills engines over one folder of blocks, on a disk that fails."""

from __future__ import annotations

from pathlib import Path

from benchmarks.serving import remote_soak
from benchmarks.serving.store_soak import soak


def test_killed_engines_leave_nothing_wrong(tmp_path: Path) -> None:
    told = soak(kills=2, faults=1, seed=3, folder=tmp_path / "kv")
    assert told["kills"] >= 2
    assert told["answers"] > 0
    assert told["blocks"] > 0
    assert (told["wrong"], told["stuck"], told["left_half_written"]) == (0, 0, 0)


def test_servers_that_are_killed_and_lie_change_no_answer(tmp_path: Path) -> None:
    told = remote_soak.soak(kills=2, seed=3, place=tmp_path)
    assert (told["kills"], told["engines"]) == (2, 1)
    assert told["answers"] > 0
    assert told["blocks"] > 0
    assert (told["wrong"], told["stuck"], told["left_half_written"]) == (0, 0, 0)
