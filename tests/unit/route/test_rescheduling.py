"""H30: who moves where, in whole numbers."""

from __future__ import annotations

from penstock.route.rescheduling import EngineMove, Movable, Rescheduler
from penstock.route.router import EngineLoad


def loads(*blocks: int) -> list[EngineLoad]:
    return [EngineLoad(number, kv_blocks=num, block_size=10) for number, num in enumerate(blocks)]


def moves(held: list[list[Movable]], *blocks: int) -> list[EngineMove]:
    return Rescheduler().moves(loads(*blocks), dict(enumerate(held)))


def test_H30_nobody_moves_while_there_is_room() -> None:
    assert moves([[Movable("a", 900)], []], 100, 100) == []


def test_H30_who_waits_goes_to_where_there_is_room_and_runs_at_once() -> None:
    held = [[Movable("runs", 900), Movable("waits", 200, waits=True), Movable("later", 150, waits=True)], []]
    assert moves(held, 100, 100) == [EngineMove("waits", 0, 1)]


def test_H30_memory_in_pieces_is_joined_by_moving_who_runs() -> None:
    """500 tokens wait; 400 are free here and 400 there: nowhere is there room until a small one has moved."""
    held = [
        [Movable("large", 400), Movable("small", 200), Movable("waits", 500, waits=True)],
        [Movable("other", 600)],
    ]
    assert moves(held, 100, 100) == [EngineMove("small", 0, 1)]


def test_H30_low_priority_goes_first_and_a_headroom_is_kept_beside_high() -> None:
    held = [[Movable("low", 300, priority=5), Movable("mid", 200), Movable("waits", 950, waits=True)], []]
    assert moves(held, 100, 100) == [EngineMove("low", 0, 1)]
    full = [Movable("urgent", 400, priority=-1), Movable("plain", 400)]
    assert moves([full, []], 100, 100) == [EngineMove("plain", 0, 1)]
    assert moves([full[1:] * 2, []], 100, 100) == [], "as many tokens, and nobody urgent among them"
    held = [[Movable("plain", 500), Movable("waits", 600, waits=True)], [Movable("urgent", 150, priority=-1)]]
    assert moves(held, 100, 100) == [EngineMove("plain", 0, 1)], "600 would not leave the urgent one its headroom"


def test_H30_who_takes_in_has_some_left_and_who_stays_stays() -> None:
    held = [[Movable("a", 600), Movable("b", 500)], [Movable("c", 420)]]
    assert moves(held, 100, 100) == [], "500 and 420 leave less than a tenth"
    held[0][1] = Movable("b", 450)
    assert moves(held, 100, 100) == [EngineMove("b", 0, 1)]
    held[0][1] = Movable("b", 450, stays=True)
    assert moves(held, 100, 100) == []


def test_H30_least_and_most_free_are_paired() -> None:
    held = [[Movable("a", 600), Movable("b", 500)], [], [Movable("c", 700), Movable("d", 600)], [Movable("e", 100)]]
    assert moves(held, 100, 100, 100, 100) == [EngineMove("d", 2, 1), EngineMove("b", 0, 3)]
