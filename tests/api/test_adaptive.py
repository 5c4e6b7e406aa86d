"""Adaptive mode in a server: moves are told of, and the admin may freeze them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from penstock.core.events import Move
from penstock.sched.controller import Controller
from penstock.server.live import LiveServer
from tests.api.watch import COMPLETIONS, scrape, small

USER, ADMIN = {"authorization": "Bearer user"}, {"authorization": "Bearer admin"}


def restless_look(self: Controller, now_s: float) -> list[Move]:
    """Instead of rules, whose moves depend on the machine: a move every fifth of a second."""
    if self._knobs.frozen or now_s < self._next_s:
        return []
    self._next_s = now_s + 0.2
    was = self._knobs.values()["max_num_seqs"]
    return [Move(name="max_num_seqs", value=8 if was != 8 else 16, was=was, why="it was time")]


@pytest.fixture(scope="module")
def restless() -> Iterator[LiveServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Controller, "look", restless_look)
        with small(api_key="user", admin_api_key="admin", adaptive=True) as server:
            yield server


def state(server: LiveServer) -> dict[str, Any]:
    """Empty until the engine has said something of itself."""
    found = httpx.get(server.url + "/internal/state", headers=USER).json()["adaptive"]
    return found or {"knobs": {}, "moves": [], "frozen": False}


def ask(server: LiveServer, until: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Four clients ask without a pause until something is so; whether it came to be."""
    stop = threading.Event()

    def client(number: int) -> None:
        body = {"prompt": f"{number} " * 60, "max_tokens": 60, "ignore_eos": True}
        while not stop.is_set():
            assert httpx.post(server.url + COMPLETIONS, headers=USER, json=body, timeout=60).status_code == 200

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    while not (found := until()) and time.monotonic() < end:
        time.sleep(0.1)
    stop.set()
    for thread in threads:
        thread.join()
    return found


def test_moves_show_in_state_and_metrics_and_can_be_frozen(restless: LiveServer) -> None:
    assert ask(restless, lambda: len(state(restless)["moves"]) >= 2)
    told = state(restless)
    assert not told["frozen"]
    for move in told["moves"]:
        assert move["why"]
        assert move["value"] != move["was"]
        assert move["knob"] in told["knobs"]
    shown = scrape(restless.url, **USER)
    assert shown["penstock:adaptive_moves_total"] >= 2
    assert shown["penstock:adaptive_frozen"] == 0
    assert shown["penstock:adaptive_knob{knob=max_num_seqs,value=}"] in (8, 16)
    assert shown[f"penstock:adaptive_knob{{knob=scheduling_policy,value={told['knobs']['scheduling_policy']}}}"] == 1

    assert httpx.post(restless.url + "/admin/adaptive/freeze", headers=USER).status_code == 403
    answer = httpx.post(restless.url + "/admin/adaptive/freeze", headers=ADMIN)
    assert answer.json() == {"object": "adaptive", "frozen": True}
    assert ask(restless, lambda: state(restless)["frozen"])
    moves = state(restless)["moves"]
    assert not ask(restless, lambda: state(restless)["moves"] != moves, 3.0), "frozen"
    assert httpx.post(restless.url + "/admin/adaptive/thaw", headers=ADMIN).status_code == 200
    assert ask(restless, lambda: state(restless)["moves"] != moves), "thawed"


def test_a_server_that_is_not_in_adaptive_mode_says_so() -> None:
    with small(admin_api_key="admin") as server:
        assert httpx.get(server.url + "/internal/state", headers=ADMIN).json()["adaptive"] is None
        answer = httpx.post(server.url + "/admin/adaptive/freeze", headers=ADMIN)
        assert answer.status_code == 404
        assert "--adaptive" in answer.json()["error"]["message"]
