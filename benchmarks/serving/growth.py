"""How time grows with context, with sequences and with the prompt, beside what the machine needs at least.

    python -m benchmarks.serving.growth --threads 2 --out benchmarks/results/growth.json --html growth.html
    python -m benchmarks.serving.growth --layers 2 --vocab 8192 --contexts 256 1024 --sequences 1 4 --prompts 128 256

Engines (scheduler, cache, sampler) on native programs of random weights in Qwen2.5-0.5B's shape, a format each:

- context: time per output token of one sequence behind 1,024 to 32,768 tokens; the prefix cache brings its prompt back;
- sequences: tokens per second of 1 to 64 sequences behind 64 tokens each;
- prompt: time to the first token of 128 to 4,096 tokens that no cache knows.

At every point all formats take turns, in rounds, between probes of the memory. The roofline is that of `penstock bench
roofline` (layers, head, attention, each the longer of computing and reading), with the bytes of the packed weights and
two rates measured here: the read probe around the point, and the fastest product of this format's kernels in a cache.
It is a lower bound; the gap is what the median step takes above it, `gap of low` the same of the fastest. Checked in
the same run: a format writes equal tokens in every round, and a sequence in a batch writes what it writes alone.
Weights that fit into the caches can be faster than a roofline of memory. With one thread, times are this thread's own.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import about, clock_of, ms, read_rate, save, seconds, show
from benchmarks.engines import Maker, Run, request
from benchmarks.micro.kernels.products import Product, matrix, packed, rows_of
from benchmarks.models import spec_of, weights_of
from benchmarks.peers.make_models import SHAPES
from rich.console import Console
from rich.progress import track

from penstock.bench.bandwidth import ReadProbe
from penstock.core.step_shape import EMPTY, StepShape
from penstock.engine.core import EngineCore
from penstock.ops.native.library import best_library
from penstock.ops.native.program import Pool
from penstock.plan.flops import model_work
from penstock.report.chart import Chart, Line
from penstock.report.files import save_text
from penstock.report.numbers import number
from penstock.report.numbers import seconds as duration
from penstock.report.page import render

FORMATS = {
    "f32": ("float32", "none", "f32"), "bf16": ("bfloat16", "none", "bf16"),
    "int8-w8a8": ("bfloat16", "int8-w8a8", "i8"), "int4-w4a8:128": ("bfloat16", "int4-w4a8:128", "i4"),
}  # fmt: skip
"""Name -> type of weights and cache, scheme, the products' format."""
KINDS = {
    "context": "Time per output token against context", "sequences": "Tokens per second against sequences at once",
    "prompt": "Time to the first token against prompt",
}  # fmt: skip
SHORT = 64
"""Tokens before the sequences whose throughput is measured."""
STEP_TOKENS = 512
BLOCK = 32


@dataclass
class Point:
    """`samples`: seconds of a step (context, sequences) or of a prompt. `model_s`: the least by the roofline."""

    format: str
    kind: str
    x: int
    samples: list[float] = field(default_factory=list)
    model_s: float = 0.0
    read_bytes_per_s: float = 0.0

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples)

    def as_json(self) -> dict[str, Any]:
        low = min(self.samples)
        made = self.x if self.kind != "context" else 1
        return {
            "format": self.format, "kind": self.kind, "x": self.x, "low_s": low, "median_s": self.median_s,
            "high_s": max(self.samples), "num_samples": len(self.samples), "model_s": self.model_s,
            "gap": self.median_s / self.model_s - 1, "gap_of_low": low / self.model_s - 1,
            "tokens_per_s": made / self.median_s, "read_bytes_per_s": self.read_bytes_per_s,
        }  # fmt: skip


class Format:
    """An engine and its roofline."""

    def __init__(self, name: str, maker: Maker, pool: Pool, most: int, blocks: int, decoded: int) -> None:
        self.name, self._decoded, self._clock = name, decoded, clock_of(pool.num_threads)
        dtype, _, product = FORMATS[name]
        self._work = model_work(maker.spec, dtype, dtype)
        sizes = {key: m.num_bytes for key, m in maker.forward.matrices.items()}
        self._head_bytes = sum(size for key, size in sizes.items() if not key.startswith("layers."))
        self._layer_bytes = sum(sizes.values()) - self._head_bytes
        assert self._head_bytes, "the head is a matrix beside the layers"
        self.peak = peak(pool, product)
        # Attention multiplies in the cache's type.
        self.attention_peak = peak(pool, "f32" if dtype == "float32" else "bf16")
        self.core: EngineCore = maker.engine(max_num_seqs=most, num_gpu_blocks_override=blocks, block_size=BLOCK)
        self._asked = 0
        self._alone: dict[int, list[int]] = {}
        self._known: dict[tuple[str, int], dict[str, list[int]]] = {}

    def roofline(self, shapes: Iterable[StepShape], read: float) -> float:
        """Seconds at least, each phase the longer of its computing and its reading."""
        total = 0.0
        for shape in shapes:
            work = self._work.step(shape)
            total += max(work.linear_flops / self.peak, self._layer_bytes / read)
            total += max(work.head_flops / self.peak, self._head_bytes * bool(shape.num_logits) / read)
            total += max(work.mixer_flops / self.attention_peak, work.mixer_bytes / read)
        return total

    def run(self, kind: str, x: int, ids: list[int]) -> list[float]:
        """Samples of one round. Its tokens must be those of the rounds before."""
        self._asked += 1
        run = Run(self.core, self._clock)
        if kind == "prompt":
            # A namespace of its own: nothing is found in the cache.
            fresh = request("prompt", ids[:x], 1, namespace=str(self._asked).encode())
            run.serve([fresh])
            samples = [run.wall_s]
        elif kind == "context":
            run.serve([request("one", ids[:x], self._decoded + 1)])
            samples = [s for s, made in run.steps if made == 1][1:]
        else:
            texts = [ids[b * SHORT : (b + 1) * SHORT] for b in range(x)]
            # Whoever enters first goes on while the others' prompts are read.
            late = -(-x * SHORT // STEP_TOKENS)
            run.serve([request(str(b), text, self._decoded + late) for b, text in enumerate(texts)])
            samples = [s for s, made in run.steps if made == x][1:]
            self._check_alone(run)
        known = self._known.setdefault((kind, x), run.tokens)
        assert run.tokens == known, f"{self.name}: other tokens in another round of {kind} {x}"
        return samples

    def _check_alone(self, run: Run) -> None:
        """A sequence writes the same tokens in any company; the first and the last of the batch are looked at."""
        for name in {"0", str(len(run.tokens) - 1)}:
            seen = self._alone.setdefault(int(name), run.tokens[name])
            n = min(len(seen), len(run.tokens[name]))
            assert seen[:n] == run.tokens[name][:n], f"{self.name}: sequence {name} depends on its company"

    def shapes(self, kind: str, x: int) -> list[StepShape]:
        if kind == "context":
            return [EMPTY.plus(x + self._decoded // 2, 1, 1)]
        if kind == "sequences":
            shape = EMPTY
            for _ in range(x):
                shape = shape.plus(SHORT + self._decoded // 2, 1, 1)
            return [shape]
        starts = range(0, x, STEP_TOKENS)
        return [EMPTY.plus(s, min(STEP_TOKENS, x - s), int(s + STEP_TOKENS >= x)) for s in starts]


def peak(pool: Pool, product: str) -> float:
    """FLOP/s of the kernels on data of their own cache: the fastest of some products [192, 512] x [512, 512]."""
    run = Product(pool, packed(pool, product, matrix(512, 512)), rows_of(192, 512))
    run()
    fastest = min(seconds(run, clock_of(pool.num_threads), 2e-3) for _ in range(20))
    return 2 * 192 * 512 * 512 / fastest


def measure(formats: list[Format], args: argparse.Namespace, ids: list[int], probe: ReadProbe) -> list[Point]:
    clock = clock_of(args.threads)
    todo = [("sequences", x) for x in args.sequences] + [("prompt", x) for x in args.prompts]
    todo += [("context", x) for x in sorted(args.contexts)]
    points = []
    for kind, x in track(todo, description="points"):
        here = {f.name: Point(f.name, kind, x) for f in formats}
        reads = [read_rate(probe, clock)]
        for f in formats:
            f.run(kind, x, ids)  # the cache learns the prompt
        for turn in range(args.repeats):
            at = turn % len(formats)
            for f in formats[at:] + formats[:at]:
                here[f.name].samples += f.run(kind, x, ids)
                reads.append(read_rate(probe, clock))
        for f in formats:
            point = here[f.name]
            # The fastest probe: another one was slowed down by something else.
            point.read_bytes_per_s = max(reads)
            point.model_s = f.roofline(f.shapes(kind, x), max(reads))
            points.append(point)
    return points


def page(points: list[Point], formats: list[str], sentence: str) -> str:
    """One file, no scripts, nothing loaded."""
    charts, tables = [], []
    for kind, title in KINDS.items():
        mine = [p for p in points if p.kind == kind]
        if not mine:
            continue
        rate = kind == "sequences"
        lines = []
        for i, name in enumerate(formats):
            of = [p for p in mine if p.format == name]
            xs = [float(p.x) for p in of]
            ys = [p.x / p.median_s if rate else p.median_s for p in of]
            least = [p.x / p.model_s if rate else p.model_s for p in of]
            lines.append(Line("rooflines", xs, least, 7))
            lines.append(Line(name, xs, ys, i, [(x, y, "") for x, y in zip(xs, ys, strict=True)]))
        charts.append(Chart(title, y_format=number if rate else duration, lines=lines, note=kind))
        tables.append((title, COLUMNS, [cells(p) for p in mine]))
    return render(
        "sheet.html", title="How time grows", intro=[sentence], findings=(), charts=charts, tables=tables, left_out=(),
        setup=(), foot="Grey: the roofline, a lower bound. Gap: how much longer the median (the fastest) step takes.",
    )  # fmt: skip


COLUMNS = ("", "format", "ms", "fastest", "roofline", "gap", "gap of low", "tokens/s", "GB/s")


def cells(p: Point) -> list[str]:
    j = p.as_json()
    return [
        f"{p.x:,}", p.format, ms(j["median_s"]), ms(j["low_s"]), ms(p.model_s), f"{j['gap']:+.0%}",
        f"{j['gap_of_low']:+.0%}", number(j["tokens_per_s"]), f"{p.read_bytes_per_s / 1e9:.1f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--vocab", type=int, help="a smaller vocabulary")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bf16", "int8-w8a8", "int4-w4a8:128"])
    parser.add_argument("--contexts", nargs="*", type=int, default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--sequences", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--prompts", nargs="*", type=int, default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--tokens", type=int, default=16, help="decoded per round")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--probe-mib", type=int, default=512)
    parser.add_argument("--out", help="write all points as JSON")
    parser.add_argument("--html", help="write a page with charts")
    args = parser.parse_args()
    if (library := best_library()) is None:
        raise SystemExit("no native library was built")
    console, pool = Console(), Pool(library, args.threads)
    longest = max([*args.contexts, *args.prompts, SHORT], default=SHORT) + 2 * args.tokens + 16
    spec = spec_of(args.shape, layers=args.layers, vocab=args.vocab, length=longest)
    most = max([1, *args.sequences])
    blocks = 2 * (longest + most * (SHORT + args.tokens + 16 + BLOCK)) // BLOCK
    formats = []
    for dtype in ("float32", "bfloat16"):
        mine = [name for name in args.formats if FORMATS[name][0] == dtype]
        weights = weights_of(spec, dtype) if mine else {}
        for name in mine:
            maker = Maker(
                spec, weights, pool, dtype=dtype, scheme=FORMATS[name][1], max_tokens=STEP_TOKENS, max_len=longest
            )
            formats.append(Format(name, maker, pool, most, blocks, args.tokens))
    ids = np.random.default_rng(1).integers(2, spec.vocab_size, max(longest, most * SHORT)).tolist()
    with ReadProbe(args.probe_mib << 20, args.threads) as probe:
        points = measure(formats, args, ids, probe)
    isa = library.pst_isa_name().decode()
    peaks = ", ".join(f"{f.name} {f.peak / 1e9:,.0f} GFLOP/s" for f in formats)
    sentence = (
        f"{args.shape}, {len(spec.layers)} layers, vocabulary {spec.vocab_size:,}, {isa}, {args.threads} threads; "
        f"fastest products: {peaks}"
    )
    console.print(sentence)
    for kind, title in KINDS.items():
        table = [cells(p) for p in points if p.kind == kind]
        if table:
            show(console, title, COLUMNS, table, 2)
    names = [f.name for f in formats]
    result = {
        "about": about(isa=isa, settings=vars(args), parameters=spec.num_params),
        "peaks": {f.name: {"products": f.peak, "attention": f.attention_peak} for f in formats},
        "points": [p.as_json() for p in points],
    }
    save(args.out, result)
    if args.html:
        save_text(Path(args.html), page(points, names, sentence))


if __name__ == "__main__":
    main()
