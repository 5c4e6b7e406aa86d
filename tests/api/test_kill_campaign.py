"""A slice of `tools/kill_soak.py`: streams go on while engines are killed, poisoned and hung."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from kill_soak import campaign, parse

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are killed by signals")


def test_a_kill_and_a_hang_change_no_stream() -> None:
    kinds = "kill,poison-hang"
    args = parse(
        ["--kills", "2", "--apart", "0.7", "--streams", "4", "--ops", "native", "--kinds", kinds, "--seed", "2"]
    )
    tally = campaign(args, Console(quiet=True))
    assert set(tally.kinds) == set(kinds.split(",")), "another seed"
    assert (tally.changed, tally.failed, tally.poisons_wrong) == (0, 0, [])
    assert tally.finished > 4
    assert (tally.convicted, tally.refused) == (1, 1)
