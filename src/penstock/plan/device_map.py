"""Which device takes which place when a model is laid out anew, so that the fewest bytes move.

When machines leave or come, the degrees of parallelism change, and with them what each place needs: weights of some
layers, a share of each, and the keys and values of some requests. A device that has a part of that already need not
fetch it. What is reused is largest under a maximum-weight matching of devices and places.

Source: SpotServe, Miao et al., ASPLOS 2024, section 3.3 (the device mapper), with the algorithm of Kuhn (1955) and
Munkres (1957) in the form with potentials, O(places^2 x devices).

Whole numbers alone: bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class ModelLayout:
    """So many copies of the model, each of `stages` with `shards` devices; `layers` are shared out evenly."""

    copies: int
    stages: int
    shards: int
    layers: int

    @property
    def num_places(self) -> int:
        return self.copies * self.stages * self.shards

    @property
    def places(self) -> list[ModelPlace]:
        """Copy by copy, stage by stage."""
        each = product(range(self.copies), range(self.stages), range(self.shards))
        return [ModelPlace(self, *place) for place in each]


@dataclass(frozen=True)
class ModelPlace:
    """One device's part of a layout: shard `shard` of every layer of a stage, for the requests of one copy."""

    layout: ModelLayout
    copy: int
    stage: int
    shard: int

    @property
    def layers(self) -> range:
        of = self.layout
        return range(self.stage * of.layers // of.stages, (self.stage + 1) * of.layers // of.stages)

    def layer_bytes(self, num_bytes: int, other: ModelPlace | None = None) -> int:
        """Of a layer of `num_bytes`, what is this place's; of that, what the other has as well, rounded down."""
        if other is None:
            return num_bytes // self.layout.shards
        mine, its = self.layout.shards, other.layout.shards
        shared = min((self.shard + 1) * its, (other.shard + 1) * mine) - max(self.shard * its, other.shard * mine)
        return num_bytes * max(0, shared) // (mine * its)


@dataclass(frozen=True)
class ModelContext:
    """What places need, in bytes: `weight_bytes` of a layer, and `kv_bytes[c]` of a layer for the requests of the old
    copy c. They go on in the new copy `c % copies`."""

    weight_bytes: int
    kv_bytes: Sequence[int] = ()

    def needed(self, place: ModelPlace) -> int:
        """Bytes that lie at a place of the new layout."""
        return len(place.layers) * place.layer_bytes(self.weight_bytes + sum(self._moved(place)))

    def reused(self, old: ModelPlace, place: ModelPlace) -> int:
        """Of them, those that a device at the old place has."""
        layers = set(old.layers) & set(place.layers)
        own = self.kv_bytes[old.copy] if old.copy < len(self.kv_bytes) and self._goes(old.copy, place) else 0
        return len(layers) * place.layer_bytes(self.weight_bytes + own, old)

    def _moved(self, place: ModelPlace) -> list[int]:
        return [num for copy, num in enumerate(self.kv_bytes) if self._goes(copy, place)]

    @staticmethod
    def _goes(copy: int, place: ModelPlace) -> bool:
        return copy % place.layout.copies == place.copy


def assignment(weights: Sequence[Sequence[int]]) -> list[int]:
    """Of each row the column, no column twice, with the largest sum of weights. At least as many columns as rows."""
    rows, columns = len(weights), len(weights[0]) if weights else 0
    assert columns >= rows, "a row without a column"
    of_row, of_column = [0] * (rows + 1), [0] * (columns + 1)  # potentials
    taken, way = [0] * (columns + 1), [0] * (columns + 1)  # of each column its row (from 1), 0: none
    for row in range(1, rows + 1):
        taken[0], at = row, 0
        least: list[int | None] = [None] * (columns + 1)
        seen = [False] * (columns + 1)
        while True:
            seen[at] = True
            mine, step, nearest = taken[at], None, 0
            for column in range(1, columns + 1):
                if seen[column]:
                    continue
                slack = -weights[mine - 1][column - 1] - of_row[mine] - of_column[column]
                known = least[column]
                if known is None or slack < known:
                    least[column], way[column] = known, at = slack, at
                if step is None or known < step:
                    step, nearest = known, column
            assert step is not None, "there is a free column"
            for column in range(columns + 1):
                if seen[column]:
                    of_row[taken[column]] += step
                    of_column[column] -= step
                elif (slack_left := least[column]) is not None:
                    least[column] = slack_left - step
            at = nearest
            if not taken[at]:
                break
        while at:
            taken[at] = taken[way[at]]
            at = way[at]
    found = [0] * rows
    for column in range(1, columns + 1):
        if taken[column]:
            found[taken[column] - 1] = column - 1
    return found


def device_map(held: Sequence[ModelPlace | None], layout: ModelLayout, context: ModelContext) -> list[int]:
    """Of each place of `layout` the device. `held[d]`: what device d had; None: it is new, and has nothing."""
    places = layout.places
    weights = [[0 if old is None else context.reused(old, place) for old in held] for place in places]
    return assignment(weights)


def moved_bytes(
    chosen: Sequence[int], held: Sequence[ModelPlace | None], layout: ModelLayout, context: ModelContext
) -> int:  # fmt: skip
    """That have to be fetched where device `chosen[k]` takes the k-th place."""
    total = 0
    for device, place in zip(chosen, layout.places, strict=True):
        old = held[device]
        total += context.needed(place) - (0 if old is None else context.reused(old, place))
    return total


def layouts(num_devices: int, layers: int, heads: int, least_parts: int) -> list[ModelLayout]:
    """All that fit: copies of `least_parts` devices or more (less has no room for the model), shards that divide the
    heads."""
    found = []
    for shards in (n for n in range(1, heads + 1) if heads % n == 0):
        for stages in range(1, layers + 1):
            parts = stages * shards
            if least_parts <= parts <= num_devices:
                found.append(ModelLayout(num_devices // parts, stages, shards, layers))
    return found
