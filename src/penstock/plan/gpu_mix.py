"""The cheapest mix of machines for requests of several sizes, each kind of which some machines serve more cheaply.

Requests are put into buckets by their size; a bucket's rate is cut into equal slices, each of which goes to one type of
machine. What a machine is busy with a slice is the slice's rate over the rate that it could serve of that bucket within
the service level. A type needs as many machines as its slices keep busy, rounded up.

Source: Melange, Griggs et al., arXiv 2404.14527, section 5: the same integer program, solved here by branch and bound.

Whole numbers alone: loads in millionths of a machine, prices in any unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.base.errors import CapacityError

MILLION = 1_000_000


@dataclass(frozen=True)
class MixBucket:
    """`load[type]`: millionths of a machine of that type that one slice keeps busy; a type that is not named cannot
    serve it in time. `slices`: how many there are."""

    load: Mapping[str, int]
    slices: int = 1


@dataclass(frozen=True)
class MachineMix:
    """Machines by type, what they cost, and of each bucket the slices by type."""

    machines: dict[str, int]
    cost: int
    given: tuple[dict[str, int], ...]


def sliced(rate: int, most: Mapping[str, int], slices: int) -> MixBucket:
    """A bucket of `rate` requests per hour, of which a machine of a type serves at most `most[type]` per hour."""
    return MixBucket({name: -(-rate * MILLION // (slices * top)) for name, top in most.items() if top > 0}, slices)


def cheapest_mix(buckets: Sequence[MixBucket], prices: Mapping[str, int]) -> MachineMix:
    """Raises CapacityError for a bucket that no type of machine serves in time."""
    names = sorted(prices)
    for number, bucket in enumerate(buckets):
        if not any(name in bucket.load for name in names):
            raise CapacityError(f"no type of machine serves bucket {number} within the limits; add one, or relax them")
    order = sorted(range(len(buckets)), key=lambda b: -_floor(buckets[b], prices))
    floors = [0] * (len(order) + 1)
    """Of the buckets from here on: the least that they can cost, if machines could be bought in parts."""
    for k in range(len(order) - 1, -1, -1):
        floors[k] = floors[k + 1] + _floor(buckets[order[k]], prices)
    best = min((_alone(buckets, prices, name) for name in names), key=lambda found: found[0])
    search = _Search(buckets, prices, names, order, floors, *best)
    search.go(0, dict.fromkeys(names, 0), [])
    return search.found()


def _floor(bucket: MixBucket, prices: Mapping[str, int]) -> int:
    """In millionths of a price."""
    return bucket.slices * min(prices[name] * load for name, load in bucket.load.items() if name in prices)


def _alone(
    buckets: Sequence[MixBucket], prices: Mapping[str, int], name: str
) -> tuple[int, list[dict[str, int]] | None]:
    """The cost of one type for everything, which is where the search begins; more than anything if it cannot."""
    if any(name not in bucket.load for bucket in buckets):
        return 1 << 200, None
    total = sum(bucket.load[name] * bucket.slices for bucket in buckets)
    return prices[name] * -(-total // MILLION), [{name: bucket.slices} for bucket in buckets]


@dataclass
class _Search:
    """Depth first over the buckets, the dearest first; a branch that cannot be cheaper is left."""

    buckets: Sequence[MixBucket]
    prices: Mapping[str, int]
    names: Sequence[str]
    order: Sequence[int]
    floors: Sequence[int]
    cost: int
    given: list[dict[str, int]] | None

    def go(self, depth: int, loads: dict[str, int], chosen: list[dict[str, int]]) -> None:
        in_parts = sum(self.prices[name] * load for name, load in loads.items()) + self.floors[depth]
        bought = sum(self.prices[name] * -(-load // MILLION) for name, load in loads.items())
        if max(-(-in_parts // MILLION), bought) >= self.cost:
            return
        if depth == len(self.order):
            self.cost, self.given = bought, [dict(self._of(chosen, k)) for k in range(len(self.buckets))]
            return
        bucket = self.buckets[self.order[depth]]
        usable = sorted((n for n in self.names if n in bucket.load), key=lambda n: self.prices[n] * bucket.load[n])
        for split in _splits(bucket.slices, usable):
            more = {name: loads[name] + split.get(name, 0) * bucket.load.get(name, 0) for name in self.names}
            self.go(depth + 1, more, [*chosen, split])

    def _of(self, chosen: list[dict[str, int]], bucket: int) -> dict[str, int]:
        return {name: num for name, num in chosen[list(self.order).index(bucket)].items() if num}

    def found(self) -> MachineMix:
        assert self.given is not None, "every bucket has a type"
        loads = dict.fromkeys(self.names, 0)
        for bucket, split in zip(self.buckets, self.given, strict=True):
            for name, num in split.items():
                loads[name] += num * bucket.load[name]
        machines = {name: -(-load // MILLION) for name, load in loads.items() if load}
        return MachineMix(machines, self.cost, tuple(self.given))


def _splits(slices: int, names: Sequence[str]) -> Iterator[dict[str, int]]:
    """All ways to give slices to types, the first type's most first."""
    if len(names) == 1:
        yield {names[0]: slices}
        return
    for num in range(slices, -1, -1):
        for rest in _splits(slices - num, names[1:]):
            yield {names[0]: num, **rest}
