"""Experts placed on devices by the load they have had, so that no device waits for another (catalogue row C72).

    PYTHONPATH=. python benchmarks/studies/expert_balance.py [--trace FILE.npz] [--out FILE.json]

Places of experts come from one half of a recorded trace, and are tried on the other. `contiguous`: experts in the order
of their ids. `by load`: the heaviest first, each to the device with the least load that has room. `apart`: the same,
where what an expert has in common with those that a device has already (the covariance of their loads over steps)
counts as load. `hindsight`: by load, of the trace that is tried. All devices hold equally many experts of a layer.

Source: Huang et al., Towards MoE Deployment, arXiv 2303.06182 (load balancing: greedy and anti-correlation).

Shape letters: S steps, L layers, X experts, D devices.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.common import about, save
from benchmarks.studies.routing import I64, TRACE, RoutingTrace, read


def contiguous(num_experts: int, num_devices: int) -> I64:
    """[X]: the device of every expert."""
    return np.arange(num_experts) * num_devices // num_experts


def by_load(loads: npt.NDArray[Any], num_devices: int, shared: npt.NDArray[Any] | None = None) -> I64:
    """loads [X] -> the device of every expert [X]; ties go to the lower id. `shared` [X, X]: what two experts on one
    device count for besides."""
    num_experts = len(loads)
    room = np.bincount(contiguous(num_experts, num_devices), minlength=num_devices)
    placed: I64 = np.full(num_experts, -1, np.int64)
    held = np.zeros(num_devices)
    for expert in np.argsort(-loads, kind="stable"):
        cost = held.copy()
        if shared is not None:
            cost += [shared[expert, placed == device].sum() for device in range(num_devices)]
        device = int(np.argmin(np.where(room > 0, cost, np.inf)))
        placed[expert] = device
        room[device] -= 1
        held[device] += loads[expert]
    return placed


def apart(steps: npt.NDArray[Any], num_devices: int) -> I64:
    """steps [S, X]: loads of steps -> [X]. Experts that are busy together go to different devices."""
    common = np.cov(steps.T)
    # In units of load: how much more an expert has where another has its deviation more.
    deviation = np.sqrt(np.maximum(np.diag(common), 1e-12))
    return by_load(steps.mean(axis=0), num_devices, common / deviation[None, :])


def device_loads(placed: I64, loads: npt.NDArray[Any], num_devices: int) -> npt.NDArray[Any]:
    """placed [X], loads [..., X] -> [..., D]."""
    return loads @ np.eye(num_devices)[placed]


def step_loads(trace: RoutingTrace, step_tokens: int) -> I64:
    """[S, L, X]: tokens of every expert, where all texts are read at once, a token of each in turn."""
    place_in_text = np.concatenate([np.arange(n) for n in np.bincount(trace.texts) if n])
    order = np.argsort(place_in_text, kind="stable")
    steps = [order[i : i + step_tokens] for i in range(0, len(order) - step_tokens + 1, step_tokens)]
    one = np.eye(trace.num_experts, dtype=np.int64)
    return np.stack([one[trace.choices[step]].sum(axis=(0, 2)) for step in steps])


def imbalance(placed: I64, steps: npt.NDArray[Any], num_devices: int) -> float:
    """placed [L, X], steps [S, L, X] -> the largest load of a device over the mean one, on average over layers and
    steps: what a step takes over what it would if work were shared evenly."""
    each = np.stack(
        [device_loads(placed[i], steps[:, i], num_devices) for i in range(len(placed))], axis=1
    )  # [S, L, D]
    return float((each.max(axis=2) / each.mean(axis=2)).mean())


def placements(history: I64, held_out: I64, num_devices: int) -> dict[str, I64]:
    """Steps [S, L, X] of both halves -> ways of placing -> [L, X]."""
    layers = range(history.shape[1])
    totals, later = history.sum(axis=0), held_out.sum(axis=0)
    return {
        "contiguous": np.stack([contiguous(history.shape[2], num_devices) for _ in layers]),
        "by load": np.stack([by_load(totals[i], num_devices) for i in layers]),
        "apart": np.stack([apart(history[:, i], num_devices) for i in layers]),
        "hindsight": np.stack([by_load(later[i], num_devices) for i in layers]),
    }


def study(trace: RoutingTrace, devices: tuple[int, ...] = (2, 4, 8), steps: tuple[int, ...] = (16, 64, 256)) -> Any:
    """Devices and tokens of a step -> ways of placing -> imbalance on the texts that no plan has seen."""
    halves = trace.halves()
    found = {}
    for num in devices:
        for tokens in steps:
            history, held_out = (step_loads(half, tokens) for half in halves)
            ways = placements(history, held_out, num)
            found[f"{num} devices, {tokens} tokens"] = {n: imbalance(p, held_out, num) for n, p in ways.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--out")
    args = parser.parse_args()
    found = study(read(args.trace))
    print(json.dumps(found, indent=1))
    save(args.out, about(trace=args.trace.name, found=found))


if __name__ == "__main__":
    main()
