"""What formats of weights are worth: speed of decoding and of reading a prompt, bytes, and perplexity beside them.

    python -m benchmarks.micro.weight_formats --threads 2 --out benchmarks/results/weight_formats.json
    python -m benchmarks.micro.weight_formats --shape qwen2.5-0.5b --layers 2 --vocab 8192 --prompt 128     (a try-out)

Rows C89 and E01 of the catalogue. A model in the shape of a real one with random weights runs as a native program in
every format; all are in memory, and in each round every one decodes some tokens (batch 1, greedy, after a prompt) and
reads a prompt, in turns, with the read probe of `penstock bench roofline` between them. Bytes per token: those of the
packed matrices and of the cached keys and values that a token sees; GB/s is their rate in the fastest round, `of read`
its share of the fastest probe. Logits and greedy choice are the program's own: no engine, no sampler.

Checked in the same run, for every format: the same prompt in pieces gives the same bits, decoding repeats its tokens
bit by bit in every round, and logits are as near to float32's as the format allows. Perplexity is of the bundled model
nano on the text of `penstock quantize`, with native kernels. A weight-only format that decodes slower than float32 gets
a line with what it reads and what its arithmetic takes.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from benchmarks.common import Clock, about, clock_of, figures, read_rate, save, show
from benchmarks.models import Model, spec_of, weights_of
from benchmarks.peers.make_models import SHAPES
from rich.console import Console
from rich.progress import track

from penstock.base.bf16 import F32
from penstock.bench.bandwidth import ReadProbe
from penstock.config import from_kwargs
from penstock.core.matrix_format import parse_scheme
from penstock.eval.perplexity import passage, score
from penstock.eval.sample import SAMPLE
from penstock.eval.scorer import load, make_scorer
from penstock.launch.bundled import bundled_model
from penstock.ops.native.library import best_library
from penstock.ops.native.program import Pool

FORMATS = {
    "float32": ("float32", "none"), "bfloat16": ("bfloat16", "none"), "int8-wo": ("bfloat16", "int8-wo"),
    "int4-wo": ("bfloat16", "int4-wo"), "int8-w8a8": ("bfloat16", "int8-w8a8"),
    "int4-w4a8:128": ("bfloat16", "int4-w4a8:128"),
}  # fmt: skip
"""Name -> type of the weights before packing, scheme."""
LIMITS = {"float32": 0.0, "bfloat16": 0.03, "int8-wo": 0.08, "int8-w8a8": 0.08, "int4-wo": 0.8, "int4-w4a8:128": 0.8}
"""Root mean square of the logits' differences from float32's, over the logits' deviation."""
STEP_TOKENS = 512


@dataclass
class Format:
    """One model and its samples in seconds: `decode` per token, `prefill` of the prompt."""

    name: str
    model: Model
    error: float = 0.0
    perplexity: float | None = None
    tokens: list[int] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)


def decoded(f: Format, start: int, first: int, count: int, clock: Clock) -> tuple[list[int], float]:
    """Greedy tokens behind `start` cached ones, and seconds per token."""
    tokens, began = [first], clock()
    for i in range(count):
        tokens.append(int(f.model.step([tokens[-1:]], [start + i])[0].argmax()))
    return tokens, (clock() - began) / count


def check(f: Format, ids: list[int], exact: F32 | None) -> F32:
    """Logits of the prompt, whole and in pieces, and how far they are from `exact`. Mutates: `f.error`."""
    whole = f.model.prefill(ids).copy()
    cut = max(1, len(ids) // 3)
    f.model.step([ids[:cut]], [0])
    f.model.step([ids[cut:-1]], [cut])
    pieces = f.model.step([ids[-1:]], [len(ids) - 1])[0]
    assert np.array_equal(pieces, whole), f"{f.name}: other bits in pieces"
    if exact is not None:
        f.error = float(np.sqrt(np.mean((whole - exact) ** 2)) / np.std(exact))
        assert f.error <= LIMITS[f.name], f"{f.name}: logits are {f.error:.3f} of their deviation away"
    return whole


def perplexities(names: list[str], max_tokens: int, threads: int) -> dict[str, float]:
    """Of the bundled nano on the built-in text, its types and schemes by `names`."""
    path, out, read = bundled_model("nano"), {}, None
    if path is None:
        return {}
    for name in names:
        dtype, scheme = FORMATS[name]
        model = load(from_kwargs(model=str(path), dtype=dtype, ops="native", threads=threads))
        scorer = make_scorer(model, parse_scheme(scheme))
        if read is None:
            assert model.tokenizer is not None
            read = passage(SAMPLE, model.tokenizer, scorer, max_tokens=max_tokens)
        out[name] = score(scorer, read).perplexity
    return out


def measure(formats: list[Format], ids: list[int], args: argparse.Namespace, probe: ReadProbe) -> list[float]:
    """Rounds of all formats, beginning with another one each time. Returns the read probes in bytes per second."""
    clock, reads, context = clock_of(args.threads), [read_rate(probe, clock_of(args.threads))], args.context
    firsts = {}
    for f in formats:
        firsts[f.name] = int(f.model.prefill(ids[:context]).argmax())
    for turn in track(range(args.repeats), description="rounds"):
        at = turn % len(formats)
        for f in formats[at:] + formats[:at]:
            f.model.prefill(ids[:context])
            tokens, per_token = decoded(f, context, firsts[f.name], args.tokens, clock)
            assert not f.tokens or tokens == f.tokens, f"{f.name}: other tokens in round {turn}"
            f.tokens = tokens
            f.decode.append(per_token)
            began = clock()
            f.model.prefill(ids)
            f.prefill.append(clock() - began)
            reads.append(read_rate(probe, clock))
    return reads


def row(f: Format, args: argparse.Namespace, read: float, base: Format) -> dict[str, Any]:
    num_bytes = f.model.weight_bytes + f.model.kv_bytes(args.context + args.tokens // 2)
    low = min(f.decode)
    return {
        "format": f.name, "weight_bytes": f.model.weight_bytes, "bytes_per_token": num_bytes,
        "decode_s": figures(f.decode), "decode_tokens_per_s": 1 / low, "gb_per_s": num_bytes / low / 1e9,
        "of_read": num_bytes / low / read, "decode_speed_up": min(base.decode) / low,
        "prefill_s": figures(f.prefill), "prefill_tokens_per_s": args.prompt / min(f.prefill),
        "prefill_speed_up": min(base.prefill) / min(f.prefill), "logit_error": f.error, "perplexity": f.perplexity,
    }  # fmt: skip


def reasons(rows: list[dict[str, Any]]) -> list[str]:
    """C89's condition: weight-only formats decode at least as fast as float32, or it is said why they do not."""
    out = []
    for r in rows:
        if not r["format"].endswith("-wo"):
            continue
        if r["decode_speed_up"] >= 1:
            out.append(f"{r['format']}: {r['decode_speed_up']:.2f}x as fast as float32 at batch 1")
            continue
        out.append(
            f"{r['format']}: SLOWER than float32 at batch 1 ({r['decode_speed_up']:.2f}x). It reads "
            f"{rows[0]['bytes_per_token'] / r['bytes_per_token']:.1f}x fewer bytes, at {r['of_read']:.0%} of the read "
            f"rate (float32: {rows[0]['of_read']:.0%}): turning codes into floats takes the time, not memory"
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--vocab", type=int, help="a smaller vocabulary")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="float32 is always there")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--context", type=int, default=128, help="tokens before those that are decoded")
    parser.add_argument("--tokens", type=int, default=16, help="decoded in a round")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--probe-mib", type=int, default=256)
    parser.add_argument("--text-tokens", type=int, default=4096, help="of the text for perplexity; 0: none")
    parser.add_argument("--out", help="write the figures as JSON")
    args = parser.parse_args()
    if (library := best_library()) is None:
        raise SystemExit("no native library was built")
    if not 0 < args.context <= args.prompt:
        parser.error("--context: at most the prompt")
    names = ["float32", *(name for name in args.formats if name != "float32")]
    console, pool = Console(), Pool(library, args.threads)
    quality = perplexities(names, args.text_tokens, args.threads) if args.text_tokens else {}
    spec = spec_of(args.shape, layers=args.layers, vocab=args.vocab)
    ids = np.random.default_rng(1).integers(2, spec.vocab_size, args.prompt).tolist()
    formats: list[Format] = []
    exact: F32 | None = None
    for dtype in ("float32", "bfloat16"):
        weights = weights_of(spec, dtype)
        for name in (n for n in names if FORMATS[n][0] == dtype):
            model = Model(
                spec, weights, pool, scheme=FORMATS[name][1], max_tokens=STEP_TOKENS, kv_dtype="bfloat16",
                max_len=args.prompt + args.tokens,
            )  # fmt: skip
            f = Format(name, model, perplexity=quality.get(name))
            formats.append(f)
            logits = check(f, ids[: min(args.prompt, 96)], exact)
            exact = logits if exact is None else exact
    with ReadProbe(args.probe_mib << 20, args.threads) as probe:
        reads = measure(formats, ids, args, probe)
    read = max(reads)
    rows = [row(f, args, read, formats[0]) for f in formats]
    isa = library.pst_isa_name().decode()
    shown = [
        [r["format"], f"{r['bytes_per_token'] / 1e6:,.0f}", f"{r['decode_tokens_per_s']:.1f}", f"{r['gb_per_s']:.1f}",
         f"{r['of_read']:.0%}", f"{r['decode_speed_up']:.2f}", f"{r['prefill_tokens_per_s']:,.0f}",
         f"{r['prefill_speed_up']:.2f}", "" if r["perplexity"] is None else f"{r['perplexity']:.3f}"]
        for r in rows
    ]  # fmt: skip
    title = f"{args.shape}, {len(spec.layers)} layers, {isa}, {args.threads} threads; reading {read / 1e9:.1f} GB/s"
    columns = ("format", "MB/token", "tok/s", "GB/s", "of read", "x f32", "prefill tok/s", "x f32", "ppl of nano")
    show(console, title, columns, shown)
    told = reasons(rows)
    for line in told:
        console.print(f"- {line}")
    save(
        args.out,
        {"about": about(isa=isa, threads=args.threads, settings=vars(args)), "read_bytes_per_s": figures(reads),
         "rows": rows, "weight_only": told},
    )  # fmt: skip


if __name__ == "__main__":
    main()
