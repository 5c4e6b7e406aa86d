"""What every token costs in Python calls: nothing but the one that was made, whatever a manager could do besides."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from penstock.core.sequence import Sequence
from penstock.kv.manager import KVManager
from tests.unit.kv.test_kv_model import make_groups, started

MANAGERS: dict[str, dict[str, Any]] = {
    "plain": {}, "swapping": {"host_slabs": [32]}, "offloading": {"host_slabs": [32], "offload": True}
}  # fmt: skip


def calls(function: Callable[[], object]) -> int:
    """Python functions that run while `function` does, itself not counted."""
    num = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal num
        num += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return num - 1


def decoding(kv: KVManager) -> Sequence:
    """A sequence that has computed nine tokens of blocks of eight, and knows one more."""
    seq = started(kv, 0, [1] * 9)
    seq.num_computed = 9
    kv.commit(seq)
    seq.token_ids.append(1)
    return seq


@pytest.mark.parametrize("name", MANAGERS)
def test_a_token_more_in_a_block_of_ones_own_is_one_call(name: str) -> None:
    kv = KVManager(make_groups(2), [64], 8, **MANAGERS[name])
    seq = decoding(kv)
    assert calls(lambda: kv.grow(seq, 10)) == 1
    seq.num_computed = 10
    assert calls(lambda: kv.commit(seq)) == 1
    assert calls(lambda: kv.selections.coming([seq] * 50)) == 1, "not one per sequence"
