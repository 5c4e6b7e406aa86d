"""Experts larger than the memory given to them (C71, C73, C74): tokens/s, hits and stalls against the size of the
cache.

    python -m benchmarks.engine.expert_memory --out benchmarks/results/expert-memory.json
    python -m benchmarks.engine.expert_memory --tokens 64 --warm 64 --shares 0.333 --rounds 1            (a try-out)

The model is Qwen2.5-Coder-0.5B (`tools/models.py`) whose feed-forwards are split into experts: neurons whose rows of
the gate are alike (k-means, equally many each) become an expert, and the router's row is the mean of theirs, so that
experts whose gates open are chosen; each expert's logits are brought to mean 0 and deviation 1 over a text, so that
all are chosen about equally often, as training with a balancing loss makes it (`--unbalanced`: not; few are then
chosen nearly always). Nobody trained it: it writes no sensible text, but its routing follows what real text does to a
real model's neurons. Text is read a token at a step, as if it were decoded. Every miss is a read from the drive
(O_DIRECT).

Sides run in turns, on engines that share one file of packed experts; all must have the same last logits' token. `on
demand` is a cache that holds one layer: what a token needs is read for it, and nothing is left when the next one comes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from benchmarks.common import about, save
from benchmarks.engines import HUGE, Run, request
from rich.console import Console

from penstock.backends.native.backend import NativeBackend
from penstock.backends.native.experts.left import LeftExperts
from penstock.backends.native.experts.recorder import RoutingRecorder
from penstock.backends.native.experts.routers import LayerRouter
from penstock.backends.native.experts.trained import fit
from penstock.base.bf16 import F32, narrow
from penstock.config import from_kwargs
from penstock.core.events import EXPERT_COUNTS
from penstock.core.model_spec import Experts, FeedForward, ModelSpec
from penstock.core.router import Router
from penstock.families.registry import open_model
from penstock.launch.assemble import connect
from penstock.launch.backend import traits_of
from penstock.launch.tokenizer import load_tokenizer
from penstock.ops.native.library import best_library
from penstock.ops.native.program import Pool
from penstock.plan.resolve import resolve
from penstock.runner.assemble import DecoderModel
from penstock.weights.load import load_weights

MODEL = Path.home() / ".cache" / "penstock" / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
CORPUS = Path(__file__).resolve().parents[3] / "shared" / "data" / "corpus"
NOVELS = ("children/carroll_alices_adventures_in_wonderland.txt", "children/grahame_the_wind_in_the_willows.txt")


def split(spec: ModelSpec, weights: dict[str, Any], num: int, top_k: int) -> tuple[ModelSpec, dict[str, Any]]:
    """The model with experts in place of its feed-forwards. Mutates: weights (of those it takes them out)."""
    layers = []
    for n, layer in enumerate(spec.layers):
        dense = layer.ffn
        assert isinstance(dense, FeedForward), "dense"
        width = dense.width // num
        experts = Experts(
            num_experts=num, top_k=top_k, expert=msgspec.structs.replace(dense, width=width),
            router=Router(chosen_only=True, scale=float(top_k), bias=True),
        )  # fmt: skip
        layers.append(msgspec.structs.replace(layer, ffn=experts))
        gate, up, down = (weights.pop(f"layers.{n}.{name}") for name in ("gate", "up", "down"))
        groups = alike(gate, num)
        weights[f"layers.{n}.router"] = np.stack([gate[group].mean(axis=0) for group in groups]).astype(np.float32)
        weights[f"layers.{n}.router.bias"] = np.zeros(num, np.float32)
        for e, group in enumerate(groups):
            name = f"layers.{n}.experts.{e}."
            weights[name + "gate"], weights[name + "up"] = narrow(gate[group]), narrow(up[group])
            weights[name + "down"] = narrow(np.ascontiguousarray(down[:, group]))
    return msgspec.structs.replace(spec, layers=tuple(layers)), weights


def alike(rows: F32, num: int, rounds: int = 4) -> list[Any]:
    """The rows of a matrix in `num` equal groups by k-means of their directions."""
    rng = np.random.default_rng(0)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    centres = unit[rng.choice(len(unit), num, replace=False)]
    each = len(rows) // num
    for _ in range(rounds):
        near = unit @ centres.T
        left = np.full(num, each)
        group = np.full(len(rows), -1)
        for i in np.argsort(-near.max(axis=1)):
            group[i] = next(e for e in np.argsort(-near[i]) if left[e])
            left[group[i]] -= 1
        centres = np.stack([unit[group == e].mean(axis=0) for e in range(num)])
    return [np.flatnonzero(group == e) for e in range(num)]


class Side(NamedTuple):
    """`share`: of all experts in memory; 0: one layer's worth."""

    eviction: str
    prediction: str
    share: float

    @property
    def name(self) -> str:
        return f"{self.eviction}/{self.prediction}@{self.share:.3f}"


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        checkpoint = open_model(MODEL)
        spec = checkpoint.spec
        tokenizer = load_tokenizer(checkpoint.tokenizer, spec)
        assert tokenizer is not None
        self.tokenizer = tokenizer
        self.texts = [
            tokenizer.encode_inner((CORPUS / name).read_text()[8000:24000]) for name in (NOVELS[0], args.text)
        ]
        weights = dict(load_weights(checkpoint.weights, spec, "float32"))
        self.spec, self.weights = split(spec, weights, args.experts, args.top_k)
        library = best_library()
        self.pool = Pool(library, args.threads)
        self.args = args
        self.base: Any = self._packed()
        self._calibrate()
        self.base = self._packed()
        self._train()
        cache = self.base.stops.cache
        self.slot_bytes, self.num_experts = cache.slot_bytes, cache.bounds[-1]

    @property
    def routers(self) -> list[LayerRouter | None]:
        found: list[LayerRouter | None] = []
        for n in range(len(self.spec.layers)):
            names = (f"layers.{n}.router", f"layers.{n}.router.bias", f"layers.{n}.ffn_norm")
            weight, bias, norm = (np.asarray(self.weights[name], np.float32) for name in names)
            ffn = self.spec.layers[n].ffn
            assert isinstance(ffn, Experts)
            found.append(LayerRouter(names[0], len(weight), ffn.top_k, ffn.router, None, norm, True, bias, weight))
        return found

    def _packed(self) -> Any:
        self.model = self._model()
        backend = NativeBackend(self.pool, leave=LeftExperts(1 << 40, "lru", "none"))
        return self.model.on(backend, max_tokens=1, quantization=self.args.scheme)

    def record(self, text: list[int], step: int = 1) -> RoutingRecorder:
        recorder = RoutingRecorder([self.args.experts] * len(self.spec.layers))
        self.base.stops.predictor = recorder
        config, plan = self._config(step), self._plan(step)
        core = connect(config, plan, self.base, self.spec.vocab_size, backend=NativeBackend(self.pool))
        Run(core).serve([request("recorded", text, 1)])
        return recorder

    def _train(self) -> None:
        """The map of `trained`, from the text that caches are warmed with."""
        recorder = self.record(self.texts[0][512 : 512 + self.args.train])
        found, mean = fit(np.concatenate(recorder.rows[0]), recorder.used())
        self.map = Path(tempfile.mkdtemp()) / "map.npz"
        np.savez(self.map, map=found, mean=mean)

    def _calibrate(self) -> None:
        """Logits to deviation 0.1, so that weights of the chosen are near 1; and to mean 0, unless `--unbalanced`."""
        for n, seen in enumerate(self.record(self.texts[0][-256:]).rows):
            weight = self.weights[f"layers.{n}.router"]
            if len(seen) < 9:  # the last layer runs only where logits are wanted
                continue
            logits = np.concatenate(seen) @ weight.T
            by = (0.1 / logits.std(axis=0)) if not self.args.unbalanced else np.full(len(weight), 0.1 / logits.std())
            self.weights[f"layers.{n}.router"] = (weight * by[:, None]).astype(np.float32)
            if not self.args.unbalanced:
                self.weights[f"layers.{n}.router.bias"] = (-logits.mean(axis=0) * by).astype(np.float32)

    def _plan(self, step: int = 1) -> Any:
        config = self._config(step)
        return resolve(config, self.spec, HUGE, traits=traits_of(config))

    def _config(self, step: int = 1) -> Any:
        return from_kwargs(
            model="(benchmark)", dtype="bfloat16", ops="native", quantization=self.args.scheme,
            threads=self.args.threads, max_model_len=2048, max_num_batched_tokens=step, max_num_seqs=1,
            num_gpu_blocks_override=128, enable_prefix_caching=False,
        )  # fmt: skip

    def _model(self) -> DecoderModel:
        return DecoderModel(spec=self.spec, weights=self.weights, groups=self._plan().own_groups, max_model_len=2048)

    def engine(self, side: Side) -> Any:
        slots = max(self.args.experts, round(side.share * self.num_experts))
        prediction = f"trained:{self.map}" if side.prediction == "trained" else side.prediction
        leave = LeftExperts(slots * self.slot_bytes, side.eviction, prediction)
        backend = NativeBackend(self.pool, leave=leave)
        forward = self.model.on(backend, max_tokens=1, quantization=self.args.scheme, matrices=self.base.matrices)
        return connect(self._config(), self._plan(), forward, self.spec.vocab_size, backend=backend)

    def run(self, side: Side) -> dict[str, float]:
        core, a = self.engine(side), self.args
        Run(core).serve([request("warm", self.texts[0][: a.warm], 1)])
        before = {name: getattr(core.stats, name) for name in EXPERT_COUNTS}
        run = Run(core).serve([request("text", self.texts[1][: a.tokens], 1)])
        counts = {name: getattr(core.stats, name) - before[name] for name in EXPERT_COUNTS}
        asked = counts["num_expert_hits"] + counts["num_expert_late"] + counts["num_expert_misses"]
        return {
            "tokens_per_s": a.tokens / run.wall_s, "hits": counts["num_expert_hits"] / asked,
            "late": counts["num_expert_late"] / asked, "misses": counts["num_expert_misses"] / asked,
            "foreseen": counts["num_experts_foreseen"] / max(1, counts["num_experts_ahead"]),
            "stall_share": counts["expert_stall_s"] / run.wall_s,
            "mb_per_token": counts["expert_read_bytes"] / a.tokens / 1e6, "last": run.tokens["text"][0],
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--scheme", default="int4-wo:32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warm", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shares", default="0.125,0.25,0.3334,0.5,0.75,1")
    parser.add_argument("--sides", default="lru/none,lru/router,lfu/none,lifo/none,activation/activations,lru/trained")
    parser.add_argument("--train", type=int, default=1024)
    parser.add_argument("--text", default=NOVELS[1], help="what is read, below the corpus")
    parser.add_argument("--unbalanced", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bench, console = Bench(args), Console()
    sides = [Side("lru", "none", 0.0)]
    sides += [Side(*s.split("/"), float(share)) for share in args.shares.split(",") for s in args.sides.split(",")]
    found: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    for _ in range(args.rounds):
        for side in sides:
            found[side.name].append(bench.run(side))
    last = {run["last"] for runs in found.values() for run in runs}
    assert len(last) == 1, f"sides wrote different tokens: {last}"
    table = {n: {k: statistics.median(run[k] for run in runs) for k in runs[0]} for n, runs in found.items()}
    base = table[sides[0].name]["tokens_per_s"]
    for name, row in table.items():
        row["over_on_demand"] = row["tokens_per_s"] / base
        console.print(name, " ".join(f"{k} {v:.3f}" for k, v in row.items() if k != "last"), soft_wrap=True)
    if args.out:
        save(args.out, about(**{name: str(value) for name, value in vars(args).items() if name != "out"}) | {
            "slot_bytes": bench.slot_bytes, "experts": bench.num_experts, "sides": table, "runs": found,
        })  # fmt: skip


if __name__ == "__main__":
    main()
