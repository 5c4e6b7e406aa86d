"""Experts placed so that tokens stay where they are from layer to layer (catalogue row C77).

    PYTHONPATH=. python benchmarks/studies/expert_affinity.py [--trace FILE.npz] [--devices 2 4 8] [--out FILE.json]

A token is where its first choice of a layer is. A hop is a device that it must be sent to for the next layer: one that
holds a choice of it, and is another. All devices hold equally many experts of every layer. Places come from one half of
a recorded trace, hops are counted on the other. `random`: the mean of ten draws. `contiguous`: experts by their ids.
`affinity`: layer after layer, the pairs of expert and device with most common tokens first; then exchanges of two
experts of a layer as long as one saves hops, with both neighbours as they are (`Placement.exchange`). `exact`: the
integer program of the paper, by scipy's solver if there is one, for cuts that it can solve (`--exact`).

Source: Yao et al., ExFlow, arXiv 2401.08383, section 4 (inter-layer affinity, integer program). The sends that gather
what several devices gave for one token are left out: with one choice there are none.

Shape letters: T tokens, L layers, K choices, X experts, D devices.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.common import about, save
from benchmarks.studies.expert_balance import contiguous, imbalance, step_loads
from benchmarks.studies.routing import I64, TRACE, RoutingTrace, read


def affinities(choices: npt.NDArray[np.uint8], num_experts: int) -> I64:
    """choices [T, L, K] -> [L - 1, X, X]: tokens whose first choice of a layer is one, and that choose the other in the
    next."""
    _, num_layers, top_k = choices.shape
    out = np.zeros((num_layers - 1, num_experts, num_experts), np.int64)
    for i in range(num_layers - 1):
        for k in range(top_k):
            np.add.at(out[i], (choices[:, i, 0], choices[:, i + 1, k]), 1)
    return out


def hops(choices: npt.NDArray[np.uint8], placed: I64, num_devices: int) -> float:
    """choices [T, L, K], placed [L, X] -> sends to another device, of a token through all layers, on average."""
    total = 0
    for i in range(choices.shape[1] - 1):
        at = placed[i][choices[:, i, 0]]
        wanted = np.zeros((len(choices), num_devices), bool)
        np.put_along_axis(wanted, placed[i + 1][choices[:, i + 1]], True, axis=1)
        wanted[np.arange(len(at)), at] = False
        total += int(wanted.sum())
    return total / len(choices)


def drawn(num_layers: int, num_experts: int, num_devices: int, seed: int) -> I64:
    rng = np.random.default_rng(seed)
    plain = contiguous(num_experts, num_devices)
    return np.stack([rng.permutation(plain) for _ in range(num_layers)])


class Placement:
    """The devices [L, X] of experts, made from affinities [L - 1, X, X]."""

    def __init__(self, affinity: I64, num_devices: int, first: I64 | None = None) -> None:
        """`first` [X]: the devices of the first layer's experts; by their ids if there is none."""
        self.affinity, self.num_devices = affinity, num_devices
        num_experts = affinity.shape[1]
        self.placed = np.zeros((len(affinity) + 1, num_experts), np.int64)
        self.placed[0] = contiguous(num_experts, num_devices) if first is None else first
        for layer in range(1, len(self.placed)):
            self.placed[layer] = self._greedy(self._worth(layer, after=False))

    def stays(self) -> int:
        """Choices that are on the device where their token is: what is made large."""
        return int(sum(
            (a * (self.placed[i][:, None] == self.placed[i + 1][None])).sum() for i, a in enumerate(self.affinity)
        ))  # fmt: skip

    def exchange(self) -> None:
        """Exchanges pairs within layers until none saves anything: the best one of a layer first, forth and back."""
        layers = [*range(len(self.placed)), *range(len(self.placed) - 2, -1, -1)]
        before = -1
        while before < (before := self.stays()):
            for layer in layers:
                while self._exchange_one(layer):
                    pass

    def _exchange_one(self, layer: int) -> bool:
        worth, at = self._worth(layer), self.placed[layer]
        own = worth[np.arange(len(at)), at]
        there = worth[:, at]  # [X, X]: of expert i on the device of expert j
        gain = there + there.T - own[:, None] - own[None]
        i, j = divmod(int(np.argmax(gain)), len(at))
        if gain[i, j] <= 0:
            return False
        at[i], at[j] = at[j], at[i]
        return True

    def _worth(self, layer: int, after: bool = True) -> I64:
        """[X, D]: tokens that stay if an expert of the layer is on a device, the layers beside it as they are."""
        out = np.zeros((self.affinity.shape[1], self.num_devices), np.int64)
        one = np.eye(self.num_devices, dtype=np.int64)
        if layer:
            out += self.affinity[layer - 1].T @ one[self.placed[layer - 1]]
        if after and layer + 1 < len(self.placed):
            out += self.affinity[layer] @ one[self.placed[layer + 1]]
        return out

    def _greedy(self, worth: I64) -> I64:
        num_experts, num_devices = worth.shape
        room = np.bincount(contiguous(num_experts, num_devices), minlength=num_devices)
        placed = np.full(num_experts, -1, np.int64)
        for pair in np.argsort(-worth, axis=None, kind="stable"):
            expert, device = divmod(int(pair), num_devices)
            if placed[expert] < 0 and room[device]:
                placed[expert], room[device] = device, room[device] - 1
        return placed


def by_affinity(affinity: I64, num_devices: int) -> I64:
    """[L - 1, X, X] -> [L, X]."""
    made = Placement(affinity, num_devices)
    made.exchange()
    return made.placed


def exact(affinity: I64, num_devices: int, seconds: float = 60.0) -> tuple[I64, bool]:
    """The placement with most stays, and whether that is proven: an integer program over x[l, e, d], and over
    y[l, d, e, f] <= x[l, e, d], x[l + 1, f, d] for pairs that tokens take. Raises ImportError without scipy, ValueError
    if nothing was found in time."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    between, num_experts, _ = affinity.shape
    size = (between + 1, num_experts, num_devices)
    x = np.arange(np.prod(size)).reshape(size)
    pairs = [(i, d, e, f) for i, e, f in np.argwhere(affinity) for d in range(num_devices)]
    worth = np.zeros(x.size + len(pairs))
    rows: list[tuple[list[tuple[int, float]], float, float]] = []
    for number, (i, d, e, f) in enumerate(pairs):
        y = x.size + number
        worth[y] = -affinity[i, e, f]
        rows += [([(y, 1), (int(x[i, e, d]), -1)], -np.inf, 0), ([(y, 1), (int(x[i + 1, f, d]), -1)], -np.inf, 0)]
    rows += [([(int(v), 1) for v in of_expert], 1, 1) for of_layer in x for of_expert in of_layer]
    room = np.bincount(contiguous(num_experts, num_devices), minlength=num_devices)
    rows += [([(int(v), 1) for v in x[i, :, d]], room[d], room[d]) for i in range(size[0]) for d in range(num_devices)]
    entries = [(r, column, value) for r, (terms, _, _) in enumerate(rows) for column, value in terms]
    r, c, v = zip(*entries, strict=True)
    matrix = coo_array((v, (r, c)), shape=(len(rows), len(worth))).tocsr()
    whole = np.zeros(len(worth))
    whole[: x.size] = 1
    lower = np.zeros(len(worth))
    lower[x[0, 0, 1:]] = 0
    upper = np.ones(len(worth))
    upper[x[0, 0, 1:]] = 0  # devices are alike: the first expert is on the first one
    found = milp(
        worth, integrality=whole, bounds=Bounds(lower, upper), options={"time_limit": seconds},
        constraints=LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows]),
    )  # fmt: skip
    if found.x is None:
        raise ValueError(f"no placement was found within {seconds:g} s: try fewer layers, experts or devices")
    return np.argmax(found.x[: x.size].reshape(size), axis=2), found.status == 0


def cut(trace: RoutingTrace, num_layers: int, num_experts: int) -> RoutingTrace:
    """First choices of the first layers, experts of neighbouring ids made one: small enough for an exact answer."""
    choices = trace.choices[:, :num_layers, :1] // (trace.num_experts // num_experts)
    return RoutingTrace(choices, trace.texts, num_experts)


def study(trace: RoutingTrace, devices: tuple[int, ...] = (2, 4, 8)) -> dict[str, Any]:
    """Choices and devices -> ways of placing -> hops of a token on texts that no plan has seen."""
    found: dict[str, Any] = {}
    for top_k in (1, trace.choices.shape[2]):
        narrow = RoutingTrace(trace.choices[:, :, :top_k], trace.texts, trace.num_experts)
        history, held_out = narrow.halves()
        for num in devices:
            layers, experts = trace.choices.shape[1], trace.num_experts
            affinity = affinities(history.choices, experts)
            draws = [hops(held_out.choices, drawn(layers, experts, num, seed), num) for seed in range(10)]
            placed = by_affinity(affinity, num)
            plain = np.tile(contiguous(experts, num), (layers, 1))
            steps = step_loads(held_out, 64)
            found[f"{top_k} of {experts} experts, {num} devices"] = {
                "random": float(np.mean(draws)), "contiguous": hops(held_out.choices, plain, num),
                "greedy": hops(held_out.choices, Placement(affinity, num).placed, num),
                "affinity": hops(held_out.choices, placed, num),
                "imbalance": {"contiguous": imbalance(plain, steps, num), "affinity": imbalance(placed, steps, num)},
            }  # fmt: skip
    return found


def compare_exact(trace: RoutingTrace, num_layers: int, num_experts: int, num_devices: int) -> dict[str, Any]:
    """Stays of greedy, of exchanges and of the best placement on a cut of the trace."""
    small = cut(trace, num_layers, num_experts)
    history, held_out = small.halves()
    affinity = affinities(history.choices, num_experts)
    best, proven = exact(affinity, num_devices)
    ways = {
        "greedy": Placement(affinity, num_devices), "affinity": Placement(affinity, num_devices),
        "exact": Placement(affinity, num_devices),
    }  # fmt: skip
    ways["affinity"].exchange()
    ways["exact"].placed = best
    told = {
        name: {"stays": way.stays(), "hops": hops(held_out.choices, way.placed, num_devices)}
        for name, way in ways.items()
    }
    return {"layers": num_layers, "experts": num_experts, "devices": num_devices, "proven": proven, **told}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--exact", action="store_true", help="compare with exact placements of small cuts")
    parser.add_argument("--out")
    args = parser.parse_args()
    trace = read(args.trace)
    found = study(trace, tuple(args.devices))
    if args.exact:
        found["exact"] = [compare_exact(trace, *size) for size in ((3, 8, 2), (4, 8, 2), (4, 8, 4), (6, 8, 2))]
    print(json.dumps(found, indent=1))
    save(args.out, about(trace=args.trace.name, found=found))


if __name__ == "__main__":
    main()
