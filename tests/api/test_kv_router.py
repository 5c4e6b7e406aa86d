"""Routers of other projects understand our events: they find texts that were sent to a server behind their back.

Where they are not installed (`benchmarks/serving/kv_router.py` says how) there is nothing to try.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.conftest import bundled

pytest.importorskip("zmq")
from benchmarks.peers.engines import default_place
from benchmarks.serving.kv_router import ROUTERS, LossyLink, Replica, found, standing, text_of, version_in


@pytest.mark.parametrize("name", ROUTERS)
def test_texts_are_found_after_a_gap_and_after_an_eviction(name: str, tmp_path: Path) -> None:
    environment = default_place().folder / "venv" / "router"
    if version_in(environment, name) is None:
        pytest.skip(f"{name} is not installed in {environment}")
    pair = [Replica(bundled(), str(tmp_path), 48) for _ in range(2)]
    links = [LossyLink(one.events) for one in pair]
    router = ROUTERS[name](environment, str(tmp_path), pair, [link.address for link in links])
    with standing(*pair, *links, router):
        where = {text_of(n): n % 2 for n in range(4)}
        for n, (one, link) in enumerate(zip(pair, links, strict=True)):
            one.ask(text_of(10))
            link.loses = True
            for text, number in where.items():
                if number == n:
                    one.ask(text)
            link.loses = False
            one.ask(text_of(11))  # its number shows the gap
        assert found(router, where) == {"asked": 4, "found": 4}
        pair[0].fill(100, 10)
        for text in where:
            pair[1].ask(text)
        assert found(router, dict.fromkeys(where, 1)) == {"asked": 4, "found": 4}
