"""The poison rule by itself; with engines that die: `tests/engine/test_suspicion.py`."""

from __future__ import annotations

from penstock.engine.suspects import CLEAR_AFTER, Suspects


def tried(suspects: Suspects, *live: str) -> list[str]:
    """Who runs alone in a new engine, if all of them pass."""
    suspects.begin(live)
    found = []
    while (request_id := suspects.next()) is not None:
        found.append(request_id)
    return found


def test_who_has_passed_is_tried_again_after_another_death_in_its_step() -> None:
    suspects = Suspects()
    suspects.crashed(["a", "b"])
    assert tried(suspects, "a", "b", "c") == ["a", "b"]
    assert tried(suspects, "a", "b", "c") == [], "nobody died"
    suspects.crashed(["b", "c"])
    assert tried(suspects, "a", "b", "c") == ["b", "c"]


def test_two_kills_from_outside_with_a_passed_trial_between_them_convict_nobody() -> None:
    suspects = Suspects()
    for engine in (1, 3, 5):
        suspects.crashed(["a", "b"], engine)
        suspects.begin(["a"])
        assert suspects.next() == "a"
        assert suspects.crashed(["a"], engine + 1, from_outside=True).guilty is None
        assert tried(suspects, "a") == ["a"]
    suspects.crashed(["a", "b"], 7)
    for engine, guilty in ((8, None), (9, "a")):
        suspects.begin(["a"])
        assert suspects.next() == "a"
        assert suspects.crashed(["a"], engine, from_outside=True).guilty == guilty, "twice in a row"


def test_suspicion_ends_after_some_tokens_and_not_before() -> None:
    suspects = Suspects()
    suspects.crashed(["a"])
    suspects.committed("a", CLEAR_AFTER - 1)
    assert suspects.has_strike("a")
    suspects.crashed(["a"])
    suspects.committed("a", CLEAR_AFTER - 1)
    assert suspects.has_strike("a"), "another death counts from the beginning"
    suspects.committed("a", 1)
    assert not suspects.has_strike("a")
