"""Bytes that move when machines are taken away and come: matched by what they hold, against in order (row I01).

    python -m benchmarks.studies.spot [--seeds 200] [--out FILE.json]

A model of 32 layers and 8 heads of keys and values needs three devices at least. On a seeded course of pre-emptions
and arrivals of up to 12 spot machines it is laid out anew at each event: of the layouts that fit, the one with the most
copies, then the fewest stages. Keys and values of running requests move with the weights. Devices take the places of
the new layout by `plan.device_map`, or in the order in which they are there (*naive*).
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from benchmarks.common import save, show
from rich.console import Console

from penstock.plan.device_map import ModelContext, ModelLayout, ModelPlace, device_map, layouts, moved_bytes

LAYERS, HEADS, LEAST, MOST = 32, 8, 3, 12
LAYER_BYTES = 440_000_000
KV_BYTES = 60_000_000
"""Of a layer, at most, for the requests of one copy."""
EVENTS = 40


def best(num_devices: int) -> ModelLayout:
    return max(layouts(num_devices, LAYERS, HEADS, LEAST), key=lambda one: (one.copies, -one.stages))


def placed(chosen: list[int], count: int, layout: ModelLayout) -> list[ModelPlace | None]:
    held: list[ModelPlace | None] = [None] * count
    for device, place in zip(chosen, layout.places, strict=True):
        held[device] = place
    return held


def course(seed: int) -> tuple[int, int]:
    """Bytes moved: matched, and in order. Both see the same machines go and come."""
    rng = random.Random(seed)
    num = rng.randrange(6, MOST + 1)
    layout = best(num)
    matched = placed(list(range(layout.num_places)), num, layout)
    naive, total = list(matched), [0, 0]
    for _ in range(EVENTS):
        if len(matched) > LEAST and (rng.random() < 0.5 or len(matched) == MOST):
            gone = rng.randrange(len(matched))
            matched.pop(gone)
            naive.pop(gone)
        else:
            matched.append(None)
            naive.append(None)
        context = ModelContext(LAYER_BYTES, [rng.randrange(KV_BYTES) for _ in range(layout.copies)])
        layout = best(len(matched))
        for k, held in enumerate((matched, naive)):
            chosen = device_map(held, layout, context) if k == 0 else list(range(layout.num_places))
            total[k] += moved_bytes(chosen, held, layout, context)
            held[:] = placed(chosen, len(held), layout)
    return total[0], total[1]


def measure(seeds: int) -> dict[str, Any]:
    found = [course(seed) for seed in range(seeds)]
    matched, naive = (sum(column) for column in zip(*found, strict=True))
    shares = sorted(a / b for a, b in found)
    return {
        "courses": seeds, "events": EVENTS * seeds, "matched_bytes": matched, "naive_bytes": naive,
        "matched_of_naive": matched / naive, "least": shares[0], "most": shares[-1],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--out")
    args = parser.parse_args()
    found = measure(args.seeds)
    rows = [[name, f"{value:,}" if isinstance(value, int) else f"{value:.3f}"] for name, value in found.items()]
    show(Console(), "bytes moved when spot machines come and go", ("", "value"), rows)
    save(args.out, found)


if __name__ == "__main__":
    main()
