"""Dropping whole units until exactly so many tokens are left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.core.compression import Span


def keep_units(
    units: Sequence[Span], worth: Sequence[float], token_worth: Mapping[int, float], target: int
) -> list[int]:
    """Places of the `target` tokens that stay when the units worth least are dropped, the earlier of two equals first.

    The last unit would often go too far: of it, the tokens worth least are dropped, one by one. `worth`: per unit;
    `token_worth`: by place.
    """
    excess = sum(end - start for start, end in units) - target
    dropped: set[int] = set()
    for n in sorted(range(len(units)), key=lambda n: (worth[n], n)):
        if not excess:
            break
        places = range(*units[n])
        if len(places) > excess:
            places_by_worth = sorted(places, key=lambda i: (token_worth[i], i))
            dropped.update(places_by_worth[:excess])
            break
        dropped.update(places)
        excess -= len(places)
    return [i for unit in units for i in range(*unit) if i not in dropped]
