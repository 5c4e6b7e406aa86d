"""Codecs of keys and values (catalogue rows F36, F37, F39, F41): perplexity and divergence beside bytes.

    PYTHONPATH=. python benchmarks/quality/codecs.py MODEL --text FILE [--calibration FILE] [--out FILE.json]
        [--parts codecs mixed rotation] [--label NAME] [--window 1024] [--max-tokens 6144]

codecs: every codec against float32 keys and values: the same windows, differences with paired intervals (95 %,
bootstrap over windows). Bytes are those of one sequence of `--context` tokens: slabs that the allocator counts as used,
times the bytes of a slab in storage. mixed: a format of the bytes of a uniform one, found on the calibration text: what
each layer's (with --heads each head's) keys and values cost alone, in divergence, at each codec, added up and
minimised exactly; it is measured on the other text. rotation: error of keys, as the model has them on the text, with
and without. No time is measured: these are the reference operations.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import about
from rich.console import Console
from rich.table import Table

from penstock.config import from_kwargs
from penstock.core.cache_spec import CACHE_DTYPE_BYTES
from penstock.core.kv_codec import KV_CODECS, group_size
from penstock.core.model_spec import Attention, cache_groups
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.core.sequence import Sequence as Seq
from penstock.eval.compare import Comparison, Remembered, compare
from penstock.eval.perplexity import Passage, passage
from penstock.eval.sample import SAMPLE
from penstock.eval.scorer import LoadedModel, ProgramScorer, load
from penstock.kv.manager import KVManager
from penstock.ops.blas import BLAS
from penstock.ops.ref.codecs.packed import decode_tokens, encode_tokens
from penstock.ops.ref.rotation import hadamard
from penstock.ops.ref.storage import write_kv
from penstock.runner.storage import Storage

BLOCK, STEP = 32, 512
RECENT = 64
Format = str | dict[str, Any]
Unit = tuple[int, str, int | None]
"""Layer, k or v, and the head (None: all of them)."""
FORMATS: dict[str, Format] = {
    "float16": "float16", "int8": "int8", "int4": "int4", "int2": "int2",
    "int4, recent 64": {"dtype": "int4", "recent": RECENT}, "int2, recent 64": {"dtype": "int2", "recent": RECENT},
    "kivi4": "kivi4", "kivi2": "kivi2", "kivi2, recent 32": {"dtype": "kivi2", "recent": 32},
    "kivi2, recent 128": {"dtype": "kivi2", "recent": 128},
    "int2, recent 64, sinks 32": {"dtype": "int2", "recent": RECENT, "sinks": 32},
    "int2, recent 96": {"dtype": "int2", "recent": RECENT + 32},
    "kivi2, sinks 32": {"dtype": "kivi2", "sinks": 32}, "kivi2, recent 96": {"dtype": "kivi2", "recent": RECENT + 32},
}  # fmt: skip
"""The last two pairs spend the same on the first tokens and on more of the newest."""
ROTATED = ("int8", "int4", "int2", "kivi4", "kivi2")
CHOICES = ("int8", "int4", "int2")
CHANNEL_CHOICES = ("channel4", "channel2")
"""For keys, where newest tokens are kept whole."""
console = Console(stderr=True)


class Bench:
    """One model, its text, and what float32 keys and values expect of it."""

    def __init__(self, model: str, text: str, window: int, max_tokens: int) -> None:
        self.name = model
        self.model = load(from_kwargs(model=model, ops="ref", kv_cache_dtype="float32"))
        assert self.model.tokenizer is not None
        self.reference = Remembered(ProgramScorer(self.model, BLAS))
        size = min(window, self.model.max_len)
        self.passage = self.windows(text, size, max_tokens)

    def windows(self, text: str, window: int, max_tokens: int) -> Passage:
        assert self.model.tokenizer is not None
        return passage(text, self.model.tokenizer, self.reference, window=window, max_tokens=max_tokens)

    def variant(self, how: Format, rotation: str = "none") -> LoadedModel:
        """The same weights with other keys and values, checked as the engine would."""
        given = from_kwargs(model=self.name, ops="ref", kv_cache_dtype=how, kv_rotation=rotation)
        return replace(self.model, kv_dtype=given.cache.kv_cache_dtype, rotation=rotation)

    def compare(self, how: Format, rotation: str = "none", read: Passage | None = None) -> Comparison:
        return compare(self.reference, ProgramScorer(self.variant(how, rotation), BLAS), read or self.passage)

    def bytes_of(self, how: Format, context: int) -> int:
        """Held by one sequence of so many tokens, by the allocator's count."""
        groups = cache_groups(self.model.spec, self.variant(how).kv_dtype)
        slabs = [4 if g.spec.kind == "slot" else -(-context // BLOCK) + 1 for g in groups]
        kv = KVManager(groups, slabs, BLOCK, step_tokens=STEP)
        seq = Seq(0, Request(request_id="one", prompt_token_ids=[3] * context, rules=TokenRules()), arrival=0)
        kv.admit(seq, kv.match(seq))
        while seq.lag:
            until = min(context, seq.num_computed + STEP)
            assert kv.grow(seq, until), "the pools are made for it"
            while seq.num_computed < until:
                seq.num_computed += kv.cut(seq, seq.num_computed, until - seq.num_computed)
                kv.commit(seq)
            kv.drain()
        storage = Storage(groups, slabs, BLOCK)
        each = [sum(a.nbytes for a in planes.values()) // n for planes, n in zip(storage.planes, slabs, strict=True)]
        return sum(own.used * size for own, size in zip(kv.stats().groups, each, strict=True))


def row(name: str, found: Comparison, **more: Any) -> dict[str, Any]:
    return {
        "format": name, "perplexity": found.score.perplexity,
        "minus_float32": found.score.perplexity - found.reference.perplexity,
        "interval": found.score.difference(found.reference), "kl": found.mean_kl, "kl_interval": found.kl_interval(),
        "kl_p99": found.p99_kl, "same_top": found.agreement, **more,
    }  # fmt: skip


def codecs(bench: Bench, contexts: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    half = {n: bench.bytes_of("float16", n) for n in contexts}
    for rotation, names in (("none", FORMATS), ("hadamard", ROTATED)):
        for name in names:
            held = {n: bench.bytes_of(FORMATS[name], n) for n in contexts}
            shares = {str(n): held[n] / half[n] for n in contexts}
            found = bench.compare(FORMATS[name], rotation)
            rows.append(row(name, found, rotation=rotation, bytes={str(n): held[n] for n in contexts}, shares=shares))
            show(rows[-1])
    return rows


# -- mixed -----------------------------------------------------------------------------------------------------------


def units_of(bench: Bench, heads: bool) -> list[Unit]:
    out: list[Unit] = []
    for n, layer in enumerate(bench.model.spec.layers):
        if isinstance(layer.mixer, Attention):
            each = range(layer.mixer.num_kv_heads) if heads else (None,)
            out += [(n, which, head) for which in "kv" for head in each]
    return out


def format_of(bench: Bench, chosen: Mapping[Unit, str], recent: int, others: str = "float16") -> dict[str, Any]:
    """A format with these codecs, and `others` wherever nothing is chosen."""
    layers: dict[str, Any] = {}
    for n, layer in enumerate(bench.model.spec.layers):
        if not isinstance(layer.mixer, Attention):
            continue
        layers[str(n)] = {
            which: [chosen.get((n, which, head), chosen.get((n, which, None), others))
                    for head in range(layer.mixer.num_kv_heads)]
            for which in "kv"
        }  # fmt: skip
    return {"dtype": others, "layers": layers} | ({"recent": recent} if recent else {})


def head_bytes(codec: str, dim: int) -> int:
    """Of one head of one token."""
    traits = KV_CODECS.traits(codec)
    scales = traits.width(dim) * CACHE_DTYPE_BYTES[traits.scale_dtype]
    return dim * traits.bits // 8 + scales // (BLOCK if traits.scales == "block" else 1)


def cheapest(costs: Mapping[Unit, Mapping[str, float]], sizes: Mapping[str, int], budget: int) -> dict[Unit, str]:
    """The choice of least total cost whose sizes add up to at most `budget`: exact, by dynamic programming."""
    best: dict[int, tuple[float, dict[Unit, str]]] = {0: (0.0, {})}
    for unit, by_codec in costs.items():
        after: dict[int, tuple[float, dict[Unit, str]]] = {}
        for spent, (cost, chosen) in best.items():
            for codec, more in by_codec.items():
                total = spent + sizes[codec]
                if total <= budget and (total not in after or cost + more < after[total][0]):
                    after[total] = (cost + more, {**chosen, unit: codec})
        best = after
    return min(best.values(), key=lambda found: found[0])[1]


UNIFORM: dict[int, dict[str, Any]] = {
    4: {"int4": "int4", "kivi4": "kivi4"},
    3: {"keys 4, values 2": {"k": "int4", "v": "int2"}, "keys 2, values 4": {"k": "int2", "v": "int4"}},
}
"""Mean bits -> the same everywhere."""


def mixed(bench: Bench, calibration: Passage, heads: bool, recent: int, bits: int) -> list[dict[str, Any]]:
    """The formats of equal bytes: uniform ones, and the one that was searched for."""
    units = units_of(bench, heads)
    dims = {layer.mixer.head_dim for layer in bench.model.spec.layers if isinstance(layer.mixer, Attention)}
    assert len(dims) == 1, "all heads are of one size"
    sizes = {codec: head_bytes(codec, min(dims)) for codec in (*CHOICES, *CHANNEL_CHOICES)}
    costs: dict[Unit, dict[str, float]] = {}
    for unit in units:
        costs[unit] = {
            codec: bench.compare(format_of(bench, {unit: codec}, recent), read=calibration).mean_kl
            for codec in (*CHOICES, *(CHANNEL_CHOICES if recent and unit[1] == "k" else ()))
        }
        console.print(unit, {codec: round(kl, 6) for codec, kl in costs[unit].items()})
    budget = len(units) * (sizes["int4"] if bits == 4 else (sizes["int4"] + sizes["int2"]) // 2)
    chosen = cheapest(costs, sizes, budget)
    spent = sum(sizes[codec] for codec in chosen.values())
    found = bench.compare(format_of(bench, chosen, recent))
    by = "head" if heads else "layer"
    rows, against = [], {}
    for name, how in UNIFORM[bits].items():
        if how == "kivi4" and not recent:
            continue
        uniform = bench.compare({"dtype": how} | ({"recent": recent} if recent else {}))
        rows.append(row(f"uniform {name}, recent {recent}", uniform, by=by, bytes_per_unit=budget / len(units)))
        against[name] = {
            "minus": found.score.perplexity - uniform.score.perplexity,
            "interval": found.score.difference(uniform.score), "kl_ratio": found.mean_kl / uniform.mean_kl,
        }  # fmt: skip
    rows.append(
        row(f"mixed by {by}, {bits} bits, recent {recent}", found, by=by, bytes_per_unit=spent / len(units),
            against=against, counts={codec: sum(c == codec for c in chosen.values()) for codec in sizes},
            setting=format_of(bench, chosen, recent))
    )  # fmt: skip
    for each in rows:
        show(each)
    console.print(against)
    return rows


# -- rotation --------------------------------------------------------------------------------------------------------


def rotation(bench: Bench) -> list[dict[str, Any]]:
    """Error of every layer's keys at 4 and 2 bits: sum of squares over that of the keys, and how far they stand out."""
    keys: dict[tuple[int, int], list[np.ndarray]] = {}

    def listening(step: Any, a: Any, b: Any, group: int, layer: int, names: tuple[str, str]) -> None:
        keys.setdefault((group, layer), []).append(a)
        write_kv(step, a, b, group, layer, names)

    ops = BLAS.replaced("listening", {"write_kv": listening}, batch_invariant=False)
    scorer = ProgramScorer(bench.model, ops)
    for window in bench.passage.windows[::2]:
        scorer.logits(window.token_ids)
    rows = []
    for (_, layer), parts in keys.items():
        k = np.concatenate(parts)
        each: dict[str, Any] = {"layer": layer, "largest_over_rms": _outlier(k), "turned": _outlier(hadamard(k))}
        for bits in (4, 2):
            for name, x in (("none", k), ("hadamard", hadamard(k))):
                packed, bounds = encode_tokens(x, bits, group_size(x.shape[-1]))
                back = decode_tokens(packed, bounds.astype(np.float32), bits)
                each[f"int{bits} {name}"] = float(np.square(back - x).sum() / np.square(x).sum())
        rows.append(each)
        console.print({name: round(value, 5) for name, value in each.items()})
    return rows


def _outlier(x: np.ndarray) -> float:
    """Mean over tokens and heads of the largest component over the root mean square."""
    return float((np.abs(x).max(axis=-1) / np.sqrt(np.square(x).mean(axis=-1))).mean())


def show(r: Mapping[str, Any]) -> None:
    low, high = r["interval"] or (float("nan"),) * 2
    console.print(
        f"{r['format']:<28} {r.get('rotation', ''):<9} perplexity {r['perplexity']:.3f}, "
        f"{r['minus_float32']:+.3f} ({low:+.3f} to {high:+.3f}), KL {r['kl']:.5f}, {r['same_top']:.1%}, "
        f"{r.get('shares', r.get('counts', ''))}"
    )


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    out = Table("format", "rotation", "perplexity", "minus float32's", "KL", "same top token", "of float16's bytes")
    for r in rows:
        low, high = r["interval"] or (float("nan"),) * 2
        out.add_row(
            str(r["format"]), str(r.get("rotation", "none")), f"{r['perplexity']:.3f}",
            f"{r['minus_float32']:+.3f} ({low:+.3f} to {high:+.3f})", f"{r['kl']:.5f}", f"{r['same_top']:.1%}",
            ", ".join(f"{n}: {share:.3f}" for n, share in r.get("shares", {}).items()),
        )  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, help="by default the built-in sample")
    parser.add_argument("--calibration-tokens", type=int, default=2048)
    parser.add_argument("--parts", nargs="+", default=["codecs", "mixed", "rotation"])
    parser.add_argument("--label")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=6144)
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--heads", action="store_true", help="mixed: by kv head instead of by layer")
    parser.add_argument("--bits", type=int, choices=tuple(UNIFORM), default=4, help="mixed: mean bits of a number")
    parser.add_argument("--recent", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    bench = Bench(options.model, text, options.window, options.max_tokens)
    label = options.label or options.model
    console.print(f"{label}: {bench.passage.num_tokens} tokens in {len(bench.passage.windows)} windows")
    results: dict[str, Any] = {"tokens": bench.passage.num_tokens, "windows": len(bench.passage.windows),
                               "window": bench.passage.window, "stride": bench.passage.stride}  # fmt: skip
    if "codecs" in options.parts:
        results["codecs"] = codecs(bench, options.context)
    if "mixed" in options.parts:
        other = SAMPLE if options.calibration is None else options.calibration.read_text(encoding="utf-8")
        read = bench.windows(other, min(512, bench.model.max_len), options.calibration_tokens)
        for recent in options.recent:
            name = f"mixed by {'head' if options.heads else 'layer'}, {options.bits} bits, recent {recent}"
            results[name] = mixed(bench, read, options.heads, recent, options.bits)
    if "rotation" in options.parts:
        results["rotation"] = rotation(bench)
    Console().print(table([r for name in results if name.startswith(("codecs", "mixed")) for r in results[name]]))
    if options.out:
        found = json.loads(options.out.read_text()) if options.out.exists() else {}
        found["about"] = about(block_size=BLOCK, dtype=bench.model.dtype)
        found[label] = found.get(label, {}) | json.loads(json.dumps(results), parse_float=lambda x: round(float(x), 6))
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
