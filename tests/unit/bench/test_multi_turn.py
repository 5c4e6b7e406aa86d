"""Conversations that come back: all engines say the same, and the tiers had what came back."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.serving import multi_turn


@pytest.mark.parametrize("swap_space", [0.0, 0.007])
def test_conversations_come_back_from_the_tiers_and_say_the_same(swap_space: float, tmp_path: Path) -> None:
    given = ["nano", "--num-gpu-blocks", "24", "--document", "96", "--reply", "8", "--turns", "2", "--clients", "2"]
    args = multi_turn.parser().parse_args([*given, "--swap-space", str(swap_space), "--policy", "wait"])
    whole, count = multi_turn.sizes(args)
    assert count * -(-whole // multi_turn.BLOCK) >= 8 * 24
    found = multi_turn.measure(args, str(tmp_path / "kv"))
    assert found["alike"]
    hits = found["engines"]["tiers"]["hits"]
    assert hits["disk"] > 0
    assert (hits["host"] > 0) == (swap_space > 0)
    assert hits["device"] + hits["host"] + hits["disk"] >= 0.8 * count * 128, "4 blocks of each were there"
    lost = found["engines"]["recompute"]["hits"]
    assert lost["host"] == lost["disk"] == 0
    assert lost["device"] < 0.2 * count * 128
    assert not any(num for where, num in found["engines"]["stateless"]["hits"].items() if where != "queried")
