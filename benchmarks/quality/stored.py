"""What coded blocks of a store (catalogue row F42) cost behind them: perplexity, divergence, bytes.

    PYTHONPATH=. python benchmarks/quality/stored.py MODEL --text FILE [--windows 8] [--prefix 1024] [--tokens 256]
        [--bins 1,0.75,0.75 ...] [--out FILE.json]

Of each window the first tokens are read, their keys and values rounded as the codec rounds them (encoded and decoded
with its own code), and the next ones are read behind that: everything else is the engine's own. `int8` rounds by the
8-bit codec of memory instead. Perplexity is of the tokens behind; differences from `plain` are taken window by window
(95 %, bootstrap), KL(plain || coded) in nats per token, `same`: the share of tokens behind which both expect the same
first. `bits`: of a number in the files, all included. `--bins` compares other bins than the codec's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import about, save
from benchmarks.quality.selector_pairs import difference
from rich.console import Console
from rich.progress import track

from penstock.base.bf16 import narrow, widen
from penstock.config import from_kwargs
from penstock.core.kv_codec import KV_CODECS
from penstock.core.matrix_format import parse_scheme
from penstock.core.model_spec import cache_groups
from penstock.eval.perplexity import log_probs
from penstock.eval.scorer import ProgramScorer, load, make_scorer
from penstock.launch.kv_store import make_block_codec
from penstock.runner import cachegen

BLOCK = 32


class Rounding:
    """Rounds the blocks of a scorer's cache in place. `num_bytes`, `numbers` so far."""

    def __init__(self, groups: Any, name: str, bins: tuple[float, ...] | None) -> None:
        if bins is not None:
            cachegen.CacheGen.bins = bins
        self.codec = make_block_codec("cachegen", groups, BLOCK) if name != "int8" else None
        self.num_bytes = self.numbers = 0

    def __call__(self, planes: dict[str, Any], width: int, num_blocks: int) -> None:
        for at in range(0, num_blocks * width, width):
            views = [array[at : at + width] for array in planes.values()]
            self.numbers += sum(view.size for view in views)
            if self.codec is None:
                codec = KV_CODECS.get("int8")
                for view in views:
                    elements, scales = codec.encode(widen(view))
                    self.num_bytes += elements.nbytes + (0 if scales is None else scales.nbytes)
                    view[:] = narrow(codec.decode(elements, scales))
                continue
            block = bytearray(b"".join(view.tobytes() for view in views))
            data = self.codec.encode(memoryview(block))
            assert data is not None
            assert self.codec.decode(memoryview(data), memoryview(block))
            self.num_bytes += len(data)
            start = 0
            for view in views:
                view[:] = np.frombuffer(block, view.dtype, view.size, start).reshape(view.shape)
                start += view.nbytes


def behind(scorer: ProgramScorer, ids: np.ndarray, prefix: int) -> np.ndarray:
    """Log probabilities behind tokens `prefix` to the last but one: [T, V]."""
    found: np.ndarray = log_probs(scorer._step(ids[prefix:-1], prefix))
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    length = args.prefix + args.tokens + 1
    config = from_kwargs(model=args.model, max_model_len=length, kv_cache_dtype="bfloat16", threads=args.threads)
    model = load(config)
    scorer = make_scorer(model, parse_scheme("none"))
    assert model.tokenizer is not None
    ids = np.array(model.tokenizer.encode(Path(args.text).read_text()), np.int32)
    groups = cache_groups(model.spec, model.kv_dtype)
    planes, width = scorer._storage.planes[0], scorer._storage.pages_per_slab[0]
    own = cachegen.BINS
    roundings = {"int8": Rounding(groups, "int8", None), "cachegen": Rounding(groups, "cachegen", own)}
    for bins in args.bins:
        roundings[bins] = Rounding(groups, "cachegen", tuple(float(part) for part in bins.split(",")))
    blocks = args.prefix // BLOCK
    found: dict[str, dict[str, list[float]]] = {}
    starts = np.linspace(0, len(ids) - length, args.windows).astype(int)
    for start in track(starts, console=Console(stderr=True)):
        window = ids[start : start + length]
        scorer.logits(window[: args.prefix].tolist())
        kept = {name: array[: blocks * width].copy() for name, array in planes.items()}
        plain, rows, next_ids = behind(scorer, window, args.prefix), np.arange(args.tokens), window[args.prefix + 1 :]
        for name, rounding in {"plain": None, **roundings}.items():
            if rounding is not None:
                rounding(planes, width, blocks)
            p = plain if rounding is None else behind(scorer, window, args.prefix)
            figures = found.setdefault(name, {"nats": [], "kl": [], "same": []})
            figures["nats"].append(float(-p[rows, next_ids].mean()))
            figures["kl"].append(float((np.exp(plain) * (plain - p)).sum(1).mean()))
            figures["same"].append(float((plain.argmax(1) == p.argmax(1)).mean()))
            for plane, array in kept.items():
                planes[plane][: blocks * width] = array
    out: dict[str, Any] = {}
    for name, figures in found.items():
        out[name] = {
            "perplexity": float(np.exp(np.mean(figures["nats"]))), "kl": float(np.mean(figures["kl"])),
            "same": float(np.mean(figures["same"])), "nats": figures["nats"],
        }  # fmt: skip
        if name != "plain":
            less = difference(figures["nats"], found["plain"]["nats"])
            out[name] |= {"nats_minus_plain": less, "bits": 8 * roundings[name].num_bytes / roundings[name].numbers}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=1024, help="tokens that are rounded")
    parser.add_argument("--tokens", type=int, default=256, help="that are read behind them")
    parser.add_argument("--bins", nargs="*", default=[], help="of the first, middle and last third: 1,0.75,0.75")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out")
    args = parser.parse_args()
    found = measure(args)
    asked = {"model": Path(args.model).name, "text": Path(args.text).name, "prefix": args.prefix, "tokens": args.tokens}
    Console().print_json(json.dumps({name: {k: v for k, v in f.items() if k != "nats"} for name, f in found.items()}))
    save(args.out, about(asked=asked, found=found))


if __name__ == "__main__":
    main()
