"""A model that loads while it computes, each shard with as many bits as a deadline allows (catalogue row B22).

    PYTHONPATH=. python benchmarks/studies/elastic_shards.py MODEL [--rate 2e6] [--tokens 512] [--memory BYTES]
        [--points 8] [--text FILE] [--real] [--out FILE.json]

A *shard* is half a layer: its attention's matrices, or its feed-forward's. Each lies on disk in several *versions*, the
formats that weights have here: four bits with a scale per 128 or per 32 inputs, eight, and sixteen. The model reads one
prompt, from nothing in memory: shards load one after the other, and each computes once it is there and those before it
are done. `plan` begins with the fewest bits everywhere and gives more, shard by shard, where most is won per byte, as
long as the pipeline's end stays within the deadline (and what waits to be computed within a memory). What is won is
profiled: `profile` reads a text with one shard in sixteen bits and all others in the fewest. A version between wins in
proportion to the rounding error that it takes away.

`Replay` carries a plan out on the files themselves, on a clock that bytes and measured seconds move: it counts what it
reads, not what the plan says. `--real` does it once more by the clock on the wall, with a thread that reads at the
given rate. Beside the plan are the best single version that meets the deadline (`uniform`), and a plan without a
profile, by rounding errors alone (`blind`).

Source: Guo et al., STI, arXiv 2207.05022, sections 4 and 5. The paper also leaves out layers and slices of layers; here
all compute.

Shape letters: N shards, V versions.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.common import about, save

from penstock.backends.reference import BlasBackend
from penstock.base.bf16 import F32, narrow, widen
from penstock.config import from_kwargs
from penstock.core.matrix_format import parse_scheme
from penstock.core.model_spec import weight_shapes
from penstock.eval.perplexity import log_probs
from penstock.eval.sample import SAMPLE
from penstock.eval.scorer import LoadedModel, ProgramScorer, load
from penstock.ops.blas import BLAS
from penstock.ops.ref.product import rows_as_float32
from penstock.quant.reference import RoundedMatrix, quantised

VERSIONS = ("int4-wo:128", "int4-wo:32", "int8-wo", "none")
"""From the fewest bits to the most; `none` is bfloat16."""
Plan = list[int]
"""The version of every shard."""
Sizes = Sequence[Sequence[float]]
"""[N][V]."""


class Store:
    """The shards of a model in all versions, a file each, in a folder.

    Attributes:
        shards: names of every shard's matrices, in the order in which a model computes.
        num_bytes, errors: [N][V] of files, and summed squares of what rounding changes.
    """

    def __init__(self, model: LoadedModel, folder: Path) -> None:
        shapes = {n: s for n, s in weight_shapes(model.spec).items() if n.startswith("layers.") and len(s) == 2}
        self.shards: list[tuple[str, ...]] = []
        for i in range(len(model.spec.layers)):
            own = [n for n in shapes if n.startswith(f"layers.{i}.")]
            attention = tuple(n for n in own if n.rsplit(".", 1)[-1] in "qkvo")
            self.shards += [attention, tuple(n for n in own if n not in attention)]
        self._shapes, self._folder = {n: (s[0], s[1]) for n, s in shapes.items()}, folder
        self.num_bytes: list[list[int]] = []
        self.errors: list[list[float]] = []
        for number, names in enumerate(self.shards):
            whole = {n: rows_as_float32(model.weights[n], 0, shapes[n][0]) for n in names}
            for version in range(len(VERSIONS)):
                self._path(number, version).write_bytes(b"".join(_encoded(whole[n], VERSIONS[version]) for n in names))
            found = [self.read(number, version) for version in range(len(VERSIONS))]
            self.num_bytes.append([size for _, size in found])
            self.errors.append([sum(float(((v[n] - whole[n]) ** 2).sum()) for n in names) for v, _ in found])

    def read(self, shard: int, version: int) -> tuple[dict[str, F32], int]:
        """What a version's codes stand for, by name, and the bytes that were read."""
        data = self._path(shard, version).read_bytes()
        out, at = {}, 0
        for name in self.shards[shard]:
            out[name], at = _decoded(data, at, self._shapes[name], VERSIONS[version])
        return out, len(data)

    def _path(self, shard: int, version: int) -> Path:
        return self._folder / f"{shard}.{version}"


def _encoded(w: F32, version: str) -> bytes:
    scheme = parse_scheme(version)
    if not scheme.weight_bits:
        return narrow(w).tobytes()
    made = quantised(w, scheme)
    codes = made.codes.ravel()
    if scheme.weight_bits == 4:
        pairs = (codes.view(np.uint8) & 15).reshape(-1, 2)
        return (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8).tobytes() + made.scales.tobytes()
    return codes.tobytes() + made.scales.tobytes()


def _decoded(data: bytes, at: int, shape: tuple[int, int], version: str) -> tuple[F32, int]:
    """The matrix that begins at a place, and the place behind it."""
    scheme, (n, k) = parse_scheme(version), shape
    if not scheme.weight_bits:
        return widen(np.frombuffer(data, np.uint16, n * k, at).reshape(shape)), at + 2 * n * k
    if scheme.weight_bits == 4:
        pairs = np.frombuffer(data, np.uint8, n * k // 2, at)
        codes = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(shape).astype(np.int8)
        codes = np.where(codes > 7, codes - 16, codes).astype(np.int8)
    else:
        codes = np.frombuffer(data, np.int8, n * k, at).reshape(shape)
    at += n * k * scheme.weight_bits // 8
    columns = -(-k // scheme.group) if scheme.group else 1
    kind: type[Any] = np.float16 if scheme.group else np.float32
    scales = np.frombuffer(data, kind, n * columns, at)
    made = RoundedMatrix(codes, scales.reshape(n, columns) if scheme.group else scales, scheme.group)
    return made.values(), at + scales.nbytes


# -- planning ----------------------------------------------------------------------------------------------------------


@dataclass
class Pipeline:
    """When shards are there and computed. `rate`: bytes per second; `memory`: bytes that may be there, not computed."""

    rate: float
    memory: float = float("inf")

    def __post_init__(self) -> None:
        self.loaded_s = self.computed_s = 0.0
        self._waiting: list[tuple[float, float]] = []

    def add(self, num_bytes: float, compute_s: float) -> None:
        """One more shard. Raises ValueError if it alone does not fit into the memory."""
        if num_bytes > self.memory:
            raise ValueError(
                f"a shard of {num_bytes:,.0f} bytes does not fit into a memory of {self.memory:,.0f}: raise it, or cut "
                "the model into smaller shards"
            )
        while self._waiting and sum(size for size, _ in self._waiting) + num_bytes > self.memory:
            self.loaded_s = max(self.loaded_s, self._waiting.pop(0)[1])
        self.loaded_s += num_bytes / self.rate
        self.computed_s = max(self.computed_s, self.loaded_s) + compute_s
        self._waiting.append((num_bytes, self.computed_s))


def end_s(num_bytes: Sequence[float], compute_s: Sequence[float], rate: float, memory: float = float("inf")) -> float:
    made = Pipeline(rate, memory)
    for size, seconds in zip(num_bytes, compute_s, strict=True):
        made.add(size, seconds)
    return made.computed_s


def plan(
    sizes: Sizes, gains: Sizes, compute_s: Sequence[float], rate: float, deadline_s: float,
    memory: float = float("inf"),
) -> Plan:  # fmt: skip
    """Bytes and gains [N][V] (of a version over the first), seconds [N] -> the version of every shard.

    Raises: ValueError if even the fewest bits come too late.
    """
    made: Plan = [0] * len(sizes)

    def end(versions: Plan) -> float:
        return end_s([own[v] for own, v in zip(sizes, versions, strict=True)], compute_s, rate, memory)

    if end(made) > deadline_s:
        raise ValueError(
            f"{deadline_s:.3g} s are too short: with the fewest bits everywhere the end is at {end(made):.3g} s; ask "
            f"for that, or for a faster link than {rate:,.0f} bytes/s"
        )
    open_ = {(i, v) for i, own in enumerate(sizes) for v in range(1, len(own))}

    # Any step up, not only to the next version: one that wins nothing may stand before one that does.
    def worth(step: tuple[int, int]) -> tuple[float, int, int]:
        i, v = step
        gain = gains[i][v] - gains[i][made[i]]
        return gain / max(1e-9, sizes[i][v] - sizes[i][made[i]]), -i, -v

    while open_:
        best = max(open_, key=worth)
        open_.remove(best)
        i, v = best
        tried = [*made[:i], v, *made[i + 1 :]]
        if v > made[i] and gains[i][v] > gains[i][made[i]] and end(tried) <= deadline_s:
            made[i] = v
    return made


def gains_of(importance: Sequence[float], errors: Sizes) -> list[list[float]]:
    """Importance of shards [N] and rounding errors [N][V] -> [N][V]."""
    return [[w * (1 - e / own[0]) for e in own] for w, own in zip(importance, errors, strict=True)]


# -- carrying it out ---------------------------------------------------------------------------------------------------


class Replay:
    """An entry for `linear` of an op table: matrices are those that a plan has read, when their shard's turn comes.

    Attributes:
        pipeline: moved by what was read and by the seconds that shards compute.
        num_bytes: read so far.
    """

    def __init__(
        self, model: LoadedModel, store: Store, made: Plan, compute_s: Sequence[float], pipeline: Pipeline,
    ) -> None:  # fmt: skip
        self._store, self._plan, self._compute_s, self.pipeline = store, made, compute_s, pipeline
        self._names = {id(model.weights[n]): (i, n) for i, names in enumerate(store.shards) for n in names}
        self._kept = model.weights
        self._there: list[Mapping[str, F32]] = []
        self.num_bytes = 0

    def __call__(self, x: F32, weight: Any, bias: F32 | None = None) -> F32:
        if (found := self._names.get(id(weight))) is None:
            return BLAS["linear"](x, weight, bias)  # type: ignore[no-any-return]
        shard, name = found
        while len(self._there) <= shard:
            self.load()
        out: F32 = x @ self._there[shard][name].T
        return out if bias is None else out + bias

    def load(self) -> None:
        shard = len(self._there)
        matrices, size = self._store.read(shard, self._plan[shard])
        self.pipeline.add(size, self._compute_s[shard])
        self.num_bytes += size
        self._there.append(matrices)


class Timed(Replay):
    """By the clock on the wall: a thread reads, and no faster than the rate; products wait for their shard.

    Attributes:
        began: when the first product of each shard began, by the clock of `start`.
    """

    def start(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._ready = [threading.Event() for _ in self._plan]
        self.began: dict[int, float] = {}
        self._start = time.perf_counter()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for ready in self._ready:
            self.load()
            time.sleep(max(0.0, self._start + self.num_bytes / self.pipeline.rate - time.perf_counter()))
            ready.set()

    def __call__(self, x: F32, weight: Any, bias: F32 | None = None) -> F32:
        if (found := self._names.get(id(weight))) is not None:
            self._ready[found[0]].wait()
            self.began.setdefault(found[0], self._clock())
        return super().__call__(x, weight, bias)


def scorer_of(model: LoadedModel, linear: Callable[..., F32]) -> ProgramScorer:
    return ProgramScorer(model, BlasBackend(table=BLAS.replaced("shards", {"linear": linear}, batch_invariant=False)))


def nats(scorer: ProgramScorer, ids: Sequence[int]) -> float:
    p = log_probs(scorer.logits(ids[:-1]))
    return float(-p[np.arange(len(ids) - 1), ids[1:]].mean())


def profile(model: LoadedModel, store: Store, ids: Sequence[int]) -> list[float]:
    """[N]: nats that sixteen bits win where all others have the fewest, but at least a thousandth of the most, so that
    what is left of a deadline goes to the others. Source: STI, section 5.2."""
    num = len(store.shards)

    def of(raised: int) -> float:
        made = [len(VERSIONS) - 1 if i == raised else 0 for i in range(num)]
        return nats(scorer_of(model, Replay(model, store, made, [0.0] * num, Pipeline(1.0))), ids)

    low = of(-1)
    won = [low - of(i) for i in range(num)]
    return [max(w, 1e-3 * max(won)) for w in won]


def seconds_of_shards(model: LoadedModel, store: Store, ids: Sequence[int]) -> list[float]:
    """[N]: from the first product of a shard to that of the next, where all are there: the fastest of three runs, in
    the thread's own time. The last one's goes to the end, so the head is in it; what comes before the first one is in
    that one's."""
    runs = []
    for _ in range(3):
        timed = Timed(model, store, [len(VERSIONS) - 1] * len(store.shards), [0.0] * len(store.shards), Pipeline(1e15))
        scorer = scorer_of(model, timed)
        timed.start(time.thread_time)
        timed._ready[-1].wait()
        begun = time.thread_time()
        scorer.logits(ids)
        ends = [*(timed.began[i] for i in range(1, len(store.shards))), time.thread_time()]
        starts: npt.NDArray[np.float64] = np.array([begun, *ends[:-1]])
        runs.append(np.array(ends) - starts)
    return [float(s) for s in np.min(runs, axis=0)]


def study(model: LoadedModel, store: Store, ids: Sequence[int], other: Sequence[int], args: argparse.Namespace) -> Any:
    """Profiled on `other`, and measured on `ids`."""
    compute_s = seconds_of_shards(model, store, ids[:-1])
    importance = profile(model, store, other)
    num = len(store.shards)
    rounding = [own[0] for own in store.errors]
    ways = {"profiled": gains_of(importance, store.errors), "blind": gains_of(rounding, store.errors)}
    ends = [end_s([own[v] for own in store.num_bytes], compute_s, args.rate, args.memory) for v in range(len(VERSIONS))]
    rows = []
    for deadline in np.linspace(1.001 * ends[0], 1.001 * ends[-1], args.points):
        made = {n: plan(store.num_bytes, g, compute_s, args.rate, deadline, args.memory) for n, g in ways.items()}
        made["uniform"] = [max(v for v in range(len(VERSIONS)) if ends[v] <= deadline)] * num
        row: dict[str, Any] = {"deadline_s": float(deadline)}
        for name, versions in made.items():
            replay = Replay(model, store, versions, compute_s, Pipeline(args.rate, args.memory))
            row[name] = {
                "nats": nats(scorer_of(model, replay), ids), "end_s": replay.pipeline.computed_s,
                "bytes": replay.num_bytes, "versions": "".join(map(str, versions)),
            }  # fmt: skip
            if args.real and name == "profiled":
                timed = Timed(model, store, versions, [0.0] * num, Pipeline(args.rate))
                scorer, began = scorer_of(model, timed), time.perf_counter()
                timed.start()
                scorer.logits(ids[:-1])
                row["wall_s"] = time.perf_counter() - began
        print(json.dumps(row), flush=True)
        rows.append(row)
    return {"compute_s": sum(compute_s), "importance": importance, "uniform_end_s": ends, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rate", type=float, default=2e6, help="bytes per second")
    parser.add_argument("--memory", type=float, default=float("inf"), help="bytes that wait to be computed")
    parser.add_argument("--tokens", type=int, default=512, help="of the text that is measured, 512 at most")
    parser.add_argument("--points", type=int, default=8, help="deadlines")
    parser.add_argument("--text", type=Path, help="another text than the bundled one")
    parser.add_argument("--real", action="store_true", help="by the clock on the wall, too")
    parser.add_argument("--out")
    args = parser.parse_args()
    model = load(from_kwargs(model=args.model, ops="blas", dtype="float32", max_model_len=513, threads=1))
    assert model.tokenizer is not None
    text = args.text.read_text("utf-8")[:20_000] if args.text else SAMPLE
    ids = model.tokenizer.encode(text)[: 2 * args.tokens]
    half = len(ids) // 2
    with TemporaryDirectory() as folder:
        store = Store(model, Path(folder))
        found = study(model, store, ids[:half], ids[half:], args)
    asked = {k: v for k, v in vars(args).items() if k not in ("out", "model", "text")}
    asked["memory"] = None if args.memory == float("inf") else args.memory
    save(args.out, about(model=Path(args.model).name, asked=asked, tokens=half, versions=VERSIONS, found=found))


if __name__ == "__main__":
    main()
