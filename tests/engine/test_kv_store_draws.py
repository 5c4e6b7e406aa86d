"""A store of blocks changes no token, whatever its disk does and when: drawn, without threads (`store_draws`)."""

from __future__ import annotations

import logging

import pytest

from tests.engine.store_draws import DRAFTED, SPECS, run_seed
from tests.sampled import draws

SEEDS = {"llama_gqa": 40, "windowed": draws(16, 40)}
"""Of the two that are quick; 3 of others. The planted errors that are rarest show within these."""

DRAFTED_SEEDS = {"llama_gqa": 4, "llama_mha": 4}


@pytest.mark.parametrize("name", SPECS)
def test_a_drawn_disk_changes_no_token_and_no_name_has_two_contents(name: str) -> None:
    logging.disable(logging.WARNING)  # every fault is a line
    try:
        truth: dict[str, bytes] = {}
        assert sum(run_seed(name, seed, truth) for seed in range(SEEDS.get(name, 3))) > 10, "hardly anything was read"
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", DRAFTED)
def test_drafts_beside_a_drawn_disk_change_no_token_and_are_never_taken_on_trust(name: str) -> None:
    logging.disable(logging.WARNING)
    try:
        truth: dict[str, bytes] = {}
        assert sum(run_seed(name, seed, truth, drafted=True) for seed in range(DRAFTED_SEEDS.get(name, 2))) > 5
    finally:
        logging.disable(logging.NOTSET)


def test_a_seed_is_drawn_the_same_again() -> None:
    truths: list[dict[str, bytes]] = [{}, {}]
    counts = [run_seed("llama_gqa", 3, truth) for truth in truths]
    assert counts[0] == counts[1] > 0
    assert list(truths[0].items()) == list(truths[1].items()), "something else than the seed decides"
