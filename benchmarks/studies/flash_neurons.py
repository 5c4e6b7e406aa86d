"""Feed-forwards that stay in a file: only neurons that a token activates are read, and kept for a while (row B21).

    PYTHONPATH=. python benchmarks/studies/flash_neurons.py MODEL [--tokens 256] [--windows 0 1 5 20] [--ranks 16 48]
        [--text FILE] [--out FILE.json]
    PYTHONPATH=.:tools python benchmarks/studies/flash_neurons.py nano --train DATA --corpus CORPUS --out FOLDER

MODEL: a folder of a model with gated ReLU feed-forwards. The second command makes one: nano with ReLU in place of SiLU,
trained on for some steps (`DATA` as in benchmarks/quality/gqa.py). Where ReLU gives 0, neither the row of `up` nor
the column of `down` counts, so they need not be read. Both lie side by side in a file (a *bundle*), in bfloat16.

Who says what is active: `exact`, the gates themselves, whose matrix stays in memory; or `rank R`, a product of two thin
matrices that stands for it (least squares on another text), with a threshold that finds nearly all: then gates are
in the bundles, too, and what it overlooks is lost. Window k: neurons that were active in the last k tokens stay in
memory; 0: everything is read anew for every token.

Bytes and calls of `pread` are counted, and blocks of 4,096 bytes that a drive would have to read for them; nothing
is timed. A layer's sums run over neurons in the order of their ids, so leaving zeros out changes no bit.

Source: Alizadeh et al., LLM in a flash, arXiv 2312.11514, sections 3.1 (predictor, window) and 3.2 (bundles).

Shape letters: T tokens, E hidden, F neurons of a layer, n of them, R rank, P parts of a bundle.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.common import about, save

from penstock.backends.reference import ReferenceBackend
from penstock.base.bf16 import F32, narrow, widen
from penstock.config import from_kwargs
from penstock.core.model_spec import FeedForward
from penstock.eval.perplexity import log_probs
from penstock.eval.sample import SAMPLE
from penstock.eval.scorer import LoadedModel, ProgramScorer, load
from penstock.ops.ref import REF
from penstock.ops.ref.product import rows_as_float32

BLOCK = 4096
Ids = npt.NDArray[np.int64]
Predictor = Callable[[int, F32], F32]
"""Layer and x [E] -> a number for every neuron [F], above 0 if it is to be read."""


@dataclass
class Counts:
    """What was read: `reads` of runs of neighbours, `blocks` of the drive that these touch; `held`: bytes in memory
    after each token, added up."""

    tokens: int = 0
    num_bytes: int = 0
    reads: int = 0
    blocks: int = 0
    neurons: int = 0
    held: int = 0


class NeuronFile:
    """The bundles of a model's neurons: `parts` of gate, up and down, layer after layer."""

    def __init__(self, model: LoadedModel, path: Path, parts: Sequence[str]) -> None:
        """Raises ValueError for a model without gated ReLU feed-forwards of one width."""
        widths = {layer.ffn.width for layer in model.spec.layers if _is_relu(layer.ffn)}  # type: ignore[union-attr]
        if len(widths) != 1 or not all(_is_relu(layer.ffn) for layer in model.spec.layers):
            raise ValueError("neurons are left out where ReLU gives 0: name a model whose layers all have it, gated")
        (self.width,) = widths
        self.parts, self.hidden = tuple(parts), model.spec.hidden_size
        self.bundle_bytes = 2 * len(parts) * self.hidden
        with path.open("wb") as out:
            for i in range(len(model.spec.layers)):
                found = {
                    n: rows_as_float32(w, 0, w.shape[0]) for n in parts for w in [model.weights[f"layers.{i}.{n}"]]
                }
                rows = [found[n].T if n == "down" else found[n] for n in parts]
                out.write(narrow(np.ascontiguousarray(np.stack(rows, axis=1))).tobytes())
        self._fd = os.open(path, os.O_RDONLY)

    def read(self, layer: int, ids: Ids, counts: Counts) -> F32:
        """Bundles [n, P, E] of neurons in ascending order; a run of neighbours is one read."""
        pieces = []
        for run in np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1) if len(ids) else ():
            at, size = (layer * self.width + int(run[0])) * self.bundle_bytes, len(run) * self.bundle_bytes
            data = os.pread(self._fd, size, at)
            assert len(data) == size, "the file has all neurons"
            pieces.append(np.frombuffer(data, np.uint16))
            counts.reads += 1
            counts.num_bytes += size
            counts.blocks += (at + size - 1) // BLOCK - at // BLOCK + 1
        counts.neurons += len(ids)
        flat = np.concatenate(pieces) if pieces else np.zeros(0, np.uint16)
        return widen(flat.reshape(len(ids), len(self.parts), self.hidden))

    def close(self) -> None:
        os.close(self._fd)


class Window:
    """The bundles of a layer that are in memory: of neurons that were active in the last `length` tokens."""

    def __init__(self, length: int) -> None:
        self._recent: deque[frozenset[int]] = deque(maxlen=length)
        self._held: dict[int, F32] = {}

    def take(self, file: NeuronFile, layer: int, ids: Ids, counts: Counts) -> F32:
        """Bundles [n, P, E]; those that are not held are read."""
        missing = np.array([i for i in ids.tolist() if i not in self._held], np.int64)
        self._held.update(zip(missing.tolist(), file.read(layer, missing, counts), strict=True))
        rows = (
            np.stack([self._held[i] for i in ids.tolist()]) if len(ids) else np.zeros((0, len(file.parts), file.hidden))
        )
        self._recent.append(frozenset(ids.tolist()))
        stay = frozenset().union(*self._recent)
        self._held = {i: row for i, row in self._held.items() if i in stay}
        counts.held += len(self._held) * file.bundle_bytes
        return rows.astype(np.float32, copy=False)


class FlashFeedForward:
    """Entries of an op table, under which a model's feed-forwards are read from a file, a token after the other.

    Attributes:
        counts: what was read.
        found, overlooked: active neurons that were read, and that were not (`audit`: all gates are computed for it).
    """

    def __init__(
        self, model: LoadedModel, file: NeuronFile, *, window: int = 0, predict: Predictor | None = None,
        everything: bool = False, audit: bool = False,
    ) -> None:  # fmt: skip
        """`predict`: if not the gates themselves, which must be in the file then. `everything`: all neurons are read,
        whether active or not: the reference."""
        assert (predict is None) == ("gate" not in file.parts), "who computes no gates beforehand reads them"
        self._roles = {
            id(model.weights[f"layers.{i}.{name}"]): (i, name)
            for i in range(len(model.spec.layers)) for name in ("gate", "up", "down")
        }  # fmt: skip
        self._windows = [Window(window) for _ in model.spec.layers]
        self._file, self._predict, self._everything, self._audit = file, predict, everything, audit
        self._gates = [model.weights[f"layers.{i}.gate"] for i in range(len(model.spec.layers))]
        self.counts = Counts()
        self.found = self.overlooked = 0

    def scorer(self, model: LoadedModel) -> ProgramScorer:
        table = REF.replaced("flash", {"linear": self._linear, "activate_gated": self._pair})
        return ProgramScorer(model, ReferenceBackend(table=table))

    def _linear(self, x: Any, weight: Any, bias: F32 | None = None) -> Any:
        layer, name = self._roles.get(id(weight), (0, ""))
        if name == "gate" and self._predict is not None:
            return np.stack([self._predict(layer, row) for row in x])
        if name == "up":
            return x
        return self._layer(layer, x) if name == "down" else REF["linear"](x, weight, bias)

    @staticmethod
    def _pair(scores: F32, x: F32, *bound: Any) -> list[tuple[F32, F32]]:
        """What `down` is given instead of activations: scores [F] and x [E] of each token."""
        return list(zip(scores, x, strict=True))

    def _layer(self, layer: int, tokens: Sequence[tuple[F32, F32]]) -> F32:
        return np.stack([self._token(layer, scores, x) for scores, x in tokens])

    def _token(self, layer: int, scores: F32, x: F32) -> F32:
        self.counts.tokens += layer == 0
        ids: Ids = np.arange(len(scores)) if self._everything else np.flatnonzero(scores > 0)
        rows = self._windows[layer].take(self._file, layer, ids, self.counts)
        # A sum of a row at a time: a product's sums would depend on how many rows there are.
        gates = scores[ids] if self._predict is None else np.add.reduce(rows[:, 0] * x, axis=1)
        if self._audit:
            active = REF["linear"](x[None], self._gates[layer])[0] > 0
            self.found += int(active[ids].sum())
            self.overlooked += int(active.sum() - active[ids].sum())
        inner = np.maximum(gates, np.float32(0)) * np.add.reduce(rows[:, -2] * x, axis=1)
        out: F32 = np.add.reduce(inner[:, None] * rows[:, -1], axis=0, initial=np.float32(0))
        return out


@dataclass
class LowRank:
    """Gates [F, E] of every layer as products of [F, R] and [R, E], and a threshold for each layer."""

    factors: list[tuple[F32, F32]]
    thresholds: list[float]

    def __call__(self, layer: int, x: F32) -> F32:
        left, right = self.factors[layer]
        found: F32 = left @ (right @ x) - np.float32(self.thresholds[layer])
        return found

    @property
    def num_bytes(self) -> int:
        """In bfloat16."""
        return sum(2 * (left.size + right.size) for left, right in self.factors)


def low_rank(model: LoadedModel, inputs: Sequence[F32], rank: int, recall: float = 0.97) -> LowRank:
    """`inputs` [T, E] of every layer's gates: the product that is nearest on them, and the threshold above which
    lies such a share of what is active on them."""
    factors, thresholds = [], []
    for i, x in enumerate(inputs):
        w = model.weights[f"layers.{i}.gate"]
        gate = rows_as_float32(w, 0, w.shape[0]).astype(np.float64)
        # The best product for these inputs: the leading directions of what the gates give on them.
        _, _, turned = np.linalg.svd(x @ gate.T, full_matrices=False)
        basis = turned[:rank].T
        left, right = basis.astype(np.float32), (basis.T @ gate).astype(np.float32)
        factors.append((left, right))
        guessed, active = (x @ right.T) @ left.T, x @ gate.T > 0
        thresholds.append(float(np.quantile(guessed[active], 1 - recall)))
    return LowRank(factors, thresholds)


@dataclass
class _Watch:
    """Keeps what gates are given, by layer."""

    roles: dict[int, int]
    inputs: dict[int, list[F32]] = field(default_factory=dict)

    def __call__(self, x: F32, weight: Any, bias: F32 | None = None) -> F32:
        if (layer := self.roles.get(id(weight))) is not None:
            self.inputs.setdefault(layer, []).append(x)
        found: F32 = REF["linear"](x, weight, bias)
        return found


def gate_inputs(model: LoadedModel, ids: Sequence[int]) -> list[F32]:
    """[T, E] of every layer, on a text."""
    layers = range(len(model.spec.layers))
    watch = _Watch({id(model.weights[f"layers.{i}.gate"]): i for i in layers})
    ProgramScorer(model, ReferenceBackend(table=REF.replaced("watch", {"linear": watch}))).logits(ids)
    return [np.concatenate(watch.inputs[i]) for i in layers]


def _is_relu(f: Any) -> bool:
    return isinstance(f, FeedForward) and f.gated and f.activation == "relu"


def nats(logits: F32, ids: Sequence[int]) -> float:
    return float(-log_probs(logits)[np.arange(len(ids) - 1), ids[1:]].mean())


def study(
    model: LoadedModel, ids: Sequence[int], other: Sequence[int], folder: Path, windows: Sequence[int],
    ranks: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    """Ways of reading -> per token: bytes, reads, blocks; nats on `ids`. Predictors are made on `other`."""
    rows: dict[str, Any] = {}

    def run(name: str, file: NeuronFile, more: int, **how: Any) -> F32:
        flash = FlashFeedForward(model, file, audit="predict" in how, **how)
        logits = flash.scorer(model).logits(ids[:-1])
        c = flash.counts
        dense = len(model.spec.layers) * file.width * file.bundle_bytes
        rows[name] = {
            "bytes": c.num_bytes / c.tokens, "of_dense": c.num_bytes / c.tokens / dense, "reads": c.reads / c.tokens,
            "blocks": c.blocks / c.tokens, "held_bytes": c.held / c.tokens, "resident_bytes": more,
            "nats": nats(logits, ids),
        }  # fmt: skip
        if "predict" in how:
            rows[name]["recall"] = flash.found / (flash.found + flash.overlooked)
        print(name, json.dumps(rows[name]), flush=True)
        return logits

    pairs = NeuronFile(model, folder / "pairs", ("up", "down"))
    gates = len(model.spec.layers) * pairs.width * 2 * pairs.hidden
    whole = run("dense", pairs, gates, everything=True)
    for k in windows:
        logits = run(f"exact, window {k}", pairs, gates, window=k)
        rows[f"exact, window {k}"]["equal_bits"] = logits.tobytes() == whole.tobytes()
    triples, inputs = NeuronFile(model, folder / "triples", ("gate", "up", "down")), gate_inputs(model, other)
    for rank in ranks:
        guess = low_rank(model, inputs, rank)
        for k in (windows[0], windows[-1]):
            run(f"rank {rank}, window {k}", triples, guess.num_bytes, window=k, predict=guess)
    pairs.close()
    triples.close()
    return rows


def train(args: argparse.Namespace) -> None:
    import msgspec
    import torch
    from benchmarks.quality.gqa import LENGTH, perplexity, trained

    from train.export import export
    from train.text import held_out_prose

    torch.set_num_threads(1)
    model = load(from_kwargs(model=args.model, ops="blas", dtype="float32"))
    assert model.tokenizer is not None
    change = msgspec.structs.replace
    layers = [change(layer, ffn=change(layer.ffn, activation="relu")) for layer in model.spec.layers]
    relu = change(model.spec, layers=tuple(layers))
    weights: Any = {n: rows_as_float32(w, 0, w.shape[0]) for n, w in model.weights.items()}
    ids = model.tokenizer.encode(held_out_prose(args.corpus)[:400_000])
    starts = np.linspace(0, len(ids) - LENGTH - 2, 32).astype(int)
    texts = torch.tensor([ids[s : s + LENGTH + 1] for s in starts])
    how = argparse.Namespace(data=args.train, lr=args.lr, rows=8)
    print("silu", perplexity(trained(model.spec, weights, 0, how, 7), texts))
    print("relu", perplexity(trained(relu, weights, 0, how, 7), texts), flush=True)
    made = trained(relu, weights, args.steps, how, 7)
    print(args.steps, "steps", perplexity(made, texts))
    export(made, args.train, Path(args.out))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--windows", type=int, nargs="+", default=[0, 1, 5, 20])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 48])
    parser.add_argument("--text", type=Path, help="another text than the bundled one")
    parser.add_argument("--train", type=Path, help="make MODEL a model with ReLU: prepared data")
    parser.add_argument("--corpus", type=Path, help="of which held-out prose is taken")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.train is not None:
        train(args)
        return
    model = load(from_kwargs(model=args.model, ops="ref", dtype="float32", max_model_len=512, threads=1))
    assert model.tokenizer is not None
    text = args.text.read_text("utf-8")[:20_000] if args.text else SAMPLE
    ids = model.tokenizer.encode(text)
    with TemporaryDirectory() as folder:
        other = ids[args.tokens :][:512]
        found = study(model, ids[: args.tokens], other, Path(folder), args.windows, args.ranks)
    save(args.out, about(model=Path(args.model).name, tokens=args.tokens, found=found))


if __name__ == "__main__":
    main()
