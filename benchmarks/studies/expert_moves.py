"""An expert that a device does not hold: move its weights there, or compute it where they are? (catalogue row C75)

    PYTHONPATH=. python benchmarks/studies/expert_moves.py [--shapes NAME ...] [--trace FILE.npz] [--out FILE.json]

The *near* device has a model's other layers and its popular experts; the *far* one, this machine's processor, has all
experts. Per expert and number of its tokens the rule takes the cheaper: to move it, which takes as long for one token
as for many, or to compute it far, which takes longer with every token. Measured here, in turns: a far expert's time by
tokens, on the native kernels with one thread, four bits a weight; the rates at which memory is copied and a file is
read past the page cache. Of the near device, a data sheet (`plan.devices`): link and roofline. Which experts tokens
choose is a recorded trace of another model (`benchmarks.studies.routing`), whose every second text says who is popular.

A step of a layer, simulated: the near device computes what it holds while its link brings what is moved, one expert
after the other; each is computed once it is there; the far device works at the same time; the layer ends with the later
of the two. Rows of tokens that cross the link are counted with far experts.

Source: Kamahori et al., Fiddler, arXiv 2402.07033, section 3 (algorithm 1).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import about, figures, save, take_turns
from benchmarks.studies.expert_balance import step_loads
from benchmarks.studies.routing import I64, TRACE, RoutingTrace, read

SHAPES = {"mixtral-8x7b": (4096, 14336), "gpt-oss-20b": (2880, 2880), "qwen3-30b-a3b": (2048, 768)}
"""[E, F] of an expert."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COSTS = TRACE.with_name("expert-moves.json")
MEBI = 1 << 20


@dataclass(frozen=True)
class Costs:
    """Seconds. `far_s`: tokens -> of an expert of so many, where its weights are. `near_s`: the same, where they are
    moved to. `move_s`: to move one expert; `row_s`: to move a token's row there and back."""

    far_s: Mapping[int, float]
    near_s: Mapping[int, float]
    move_s: float
    row_s: float

    def far(self, tokens: int) -> float:
        return between(self.far_s, tokens) + tokens * self.row_s

    def near(self, tokens: int) -> float:
        return between(self.near_s, tokens)


Rule = Callable[[Costs, int], bool]
"""Whether an expert with so many tokens is moved."""


def cheaper(costs: Costs, tokens: int) -> bool:
    return costs.move_s + costs.near(tokens) < costs.far(tokens)


RULES: dict[str, Rule] = {"move": lambda *_: True, "compute": lambda *_: False, "cheaper": cheaper}


def between(known: Mapping[int, float], tokens: int) -> float:
    """On the line between the neighbours; beyond the last, in proportion to it."""
    points = sorted(known.items())
    if tokens <= points[0][0]:
        return points[0][1]
    for (a, low), (b, high) in pairwise(points):
        if tokens <= b:
            return low + (high - low) * (tokens - a) / (b - a)
    return points[-1][1] * tokens / points[-1][0]


def layer_seconds(costs: Costs, tokens: Sequence[int], held: Sequence[bool], rule: Rule) -> float:
    """Tokens of every expert, and whether the near device has it -> seconds of the layer's experts."""
    near = sum(costs.near(n) for n, has in zip(tokens, held, strict=True) if has and n)
    far = arrived = 0.0
    for n, has in zip(tokens, held, strict=True):
        if has or not n:
            continue
        if rule(costs, n):
            arrived += costs.move_s
            near = max(near, arrived) + costs.near(n)
        else:
            far += costs.far(n)
    return max(near, far)


def popular(loads: I64, share: float) -> list[list[bool]]:
    """loads [L, X] -> per layer, whether an expert is among the `share` with the largest ones."""
    most = round(share * loads.shape[1])
    return [[bool(b) for b in np.argsort(np.argsort(-of_layer, kind="stable")) < most] for of_layer in loads]


def simulate(trace: RoutingTrace, costs: Costs, step_tokens: int, share: float) -> dict[str, float]:
    """Rule -> milliseconds of a step's experts, all layers, on average over texts that did not say who is popular."""
    history, held_out = trace.halves()
    held = popular(history.loads(), share)
    steps = step_loads(held_out, step_tokens)[: 512 // step_tokens + 1]

    def of(rule: Rule) -> float:
        each = [
            layer_seconds(costs, [int(n) for n in layer], held[i], rule) for s in steps for i, layer in enumerate(s)
        ]
        return 1e3 * sum(each) / len(steps)

    return {name: of(rule) for name, rule in RULES.items()}


def near_costs(shape: tuple[int, int], num_bytes: int, far_s: Mapping[int, float], link: float, device: str) -> Costs:
    """`link`: bytes per second; the near device's times by roofline, its weights as far ones."""
    from penstock.plan.devices import device_preset

    e, f = shape
    sheet = device_preset(device)
    least = num_bytes / sheet.read_bytes_per_s
    near_s = {n: max(least, 6 * e * f * n / sheet.flops("bfloat16")) for n in far_s}
    return Costs(far_s, near_s, num_bytes / link, 2 * 2 * e / link)


def measure(shape: tuple[int, int], repeats: int) -> dict[str, Any]:
    """A far expert's bytes, and its seconds by tokens: the fastest of `repeats`."""
    from benchmarks.micro.kernels.products import Product, matrix, packed

    from penstock.ops.native.library import best_library
    from penstock.ops.native.program import Pool

    library = best_library()
    assert library is not None, "build the native kernels first: python setup.py build_ext --inplace"
    e, f = shape
    pool = Pool(library, 1)
    # Several, so that a call finds its weights in memory, as a step does, and not in a cache.
    copies = max(1, round(256 * MEBI / (1.5 * e * f)))
    pairs = [(packed(pool, "i4", matrix(e, 2 * f)), packed(pool, "i4", matrix(f, e))) for _ in range(copies)]
    rng = np.random.default_rng(0)

    def work(n: int) -> Callable[[], None]:
        x, inner = (rng.standard_normal((n, width), np.float32) for width in shape)
        made = [(Product(pool, first, x), Product(pool, second, inner)) for first, second in pairs]

        def run() -> None:
            for first, second in made:
                first()
                second()

        return run

    found = take_turns({str(n): work(n) for n in TOKENS}, repeats, time.thread_time)
    num_bytes = sum(m.num_bytes for m in pairs[0])
    return {"bytes": num_bytes, "seconds": {n: figures([s / copies for s in each]) for n, each in found.items()}}


def rates(num_bytes: int = 256 * MEBI, repeats: int = 5) -> dict[str, dict[str, float]]:
    """Bytes per second of one thread: memory that is copied, and a file read past the page cache."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    copied, loaded = [], []
    with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
        source.tofile(file.name)
        os.fsync(file.fileno())
        for _ in range(repeats):
            began = time.perf_counter()
            np.copyto(target, source)
            copied.append(num_bytes / (time.perf_counter() - began))
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            for at in range(0, num_bytes, 4 * MEBI):
                os.preadv(file.fileno(), [memoryview(target)[at : at + 4 * MEBI]], at)
            loaded.append(num_bytes / (time.perf_counter() - began))
    return {"memcpy": figures(copied), "pread": figures(loaded)}


def known(path: Path = COSTS, device: str = "l4") -> dict[str, Costs]:
    """Shape and link -> costs, as they were stored."""
    from penstock.plan.devices import device_preset

    stored = json.loads(path.read_text("utf-8"))
    links = {name: figure["median"] for name, figure in stored["rates"].items()}
    links[f"link of {device}"] = device_preset(device).host_copy_bytes_per_s
    out = {}
    for name, found in stored["experts"].items():
        far_s = {int(n): s["median"] for n, s in found["seconds"].items()}
        for link, rate in links.items():
            out[f"{name}, {link}"] = near_costs(SHAPES[name], found["bytes"], far_s, rate, device)
    return out


def study(trace: RoutingTrace, costs: Mapping[str, Costs], share: float = 0.25) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, own in costs.items():
        moves = [n for n in range(1, 4097) if cheaper(own, n)]
        steps = {str(n): simulate(trace, own, n, share) for n in (1, 4, 16, 64, 256, 1024)}
        out[name] = {"moved from tokens": moves[0] if moves else None, "ms by step's tokens": steps}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--held", type=float, default=0.25, help="share of experts that the near device has")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="l4")
    parser.add_argument("--out", default=str(COSTS))
    args = parser.parse_args()
    measured = {"rates": rates(), "experts": {name: measure(SHAPES[name], args.repeats) for name in args.shapes}}
    save(args.out, about(**measured))
    found = study(read(args.trace), known(Path(args.out), args.device), args.held)
    print(json.dumps(found, indent=1))
    save(args.out, about(**measured, device=args.device, held=args.held, found=found))


if __name__ == "__main__":
    main()
