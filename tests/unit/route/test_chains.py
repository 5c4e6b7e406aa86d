"""H23: chains of servers of layers, held against all there are."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from penstock.route.chains import Hop, Span, least_chain, missing_layers


def cost(spans: dict[str, Span], chain: list[Hop]) -> float:
    return sum(spans[h.server].way_s + (h.last - h.first) * spans[h.server].layer_s for h in chain)


def all_chains(spans: list[Span], first: int, last: int) -> list[list[Hop]]:
    """By hand: every layer's server, neighbours of one server joined."""
    found = []
    for servers in product(*[[s.server for s in spans if s.first <= n < s.last] for n in range(first, last)]):
        chain: list[Hop] = []
        for n, server in enumerate(servers, first):
            if chain and chain[-1].server == server:
                chain[-1] = Hop(server, chain[-1].first, n + 1)
            else:
                chain.append(Hop(server, n, n + 1))
        found.append(chain)
    return found


def test_H23_the_chain_is_the_one_with_the_least_measured_time() -> None:
    rng = Random(1)
    found = 0
    for _ in range(300):
        layers = rng.randint(1, 5)
        spans = []
        for n in range(rng.randint(1, 5)):
            first = rng.randrange(layers)
            spans.append(
                Span(f"s{n}", first, rng.randint(first + 1, layers), rng.choice([0.001, 0.02, 0.3]), rng.random() / 50)
            )
        first = rng.randrange(layers)
        want = all_chains(spans, first, layers)
        got = least_chain(spans, first, layers)
        assert (got is None) == (not want) == bool(missing_layers(spans, first, layers))
        if got is None:
            continue
        found += 1
        named = {span.server: span for span in spans}
        assert [h.first for h in got] == [first, *(h.last for h in got[:-1])]
        assert got[-1].last == layers
        assert all(named[h.server].first <= h.first < h.last <= named[h.server].last for h in got)
        assert cost(named, got) == pytest.approx(min(cost(named, chain) for chain in want))
    assert found > 150


def test_H23_a_near_server_is_taken_and_a_far_one_only_for_what_nobody_else_has() -> None:
    near, far = Span("near", 0, 4, 0.001, 0.001), Span("far", 2, 6, 0.2, 0.002)
    assert least_chain([near, far], 0, 6) == [Hop("near", 0, 4), Hop("far", 4, 6)]
    other = Span("other", 3, 6, 0.01, 0.0015)
    assert least_chain([near, far, other], 0, 6) == [Hop("near", 0, 4), Hop("other", 4, 6)]
    assert least_chain([near, far, other], 3, 6) == [Hop("other", 3, 6)], "a way less"
    slow = Span("slow", 0, 6, 0.002, 0.0011)
    assert least_chain([near, other, slow], 0, 6) == [Hop("slow", 0, 6)], "one way less pays for slower layers"
    assert least_chain([near], 0, 6) is None
    assert missing_layers([near], 0, 6) == [4, 5]
    assert least_chain([], 0, 1) is None
