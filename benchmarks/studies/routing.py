"""Which experts real text chooses: a dense model's feed-forwards are split into experts, and their choices recorded.

    PYTHONPATH=. python benchmarks/studies/routing.py MODEL --texts FILE [FILE ...] [--experts 32] [--top-k 2]
        [--windows 8] [--tokens 256] [--out FILE.npz]

The quarter of a layer's neurons that gives most on average is a shared expert (CMoE, arXiv 2502.04416, section 4), for
else all tokens choose those who hold it. The others are sorted into equally many per expert by their gates' weights
(k-means; MoEfication, Zhang et al., arXiv 2110.01786, section 3.2), and a token's experts are those in which most of
its feed-forward's output arises (the same paper's ground truth: sums of |activation| times the length of the down
column). Hidden states are the dense model's. So the choices are those of a perfect router of a model that was never
trained to be routed: no training has evened the load.

Shape letters: T tokens, L layers, K choices, X experts, F neurons.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TRACE = Path(__file__).resolve().parents[1] / "results" / "expert-routes-qwen2.5-coder-0.5b.npz"
_CHARACTERS = 200_000
"""Of a text, from its beginning."""
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RoutingTrace:
    """`choices` [T, L, K], the best first; `texts` [T]: the number of the text that a token is of."""

    choices: npt.NDArray[np.uint8]
    texts: npt.NDArray[np.uint8]
    num_experts: int

    def halves(self) -> tuple[RoutingTrace, RoutingTrace]:
        """Texts of even numbers, which plans are made from, and the others, which they are tried on."""
        even = self.texts % 2 == 0
        return self._only(even), self._only(~even)

    def loads(self) -> I64:
        """Tokens of every layer's experts [L, X]."""
        return np.stack([np.bincount(of_layer.ravel(), minlength=self.num_experts) for of_layer in self.by_layer()])

    def by_layer(self) -> npt.NDArray[np.uint8]:
        """[L, T, K]."""
        return self.choices.transpose(1, 0, 2)

    def _only(self, tokens: npt.NDArray[np.bool_]) -> RoutingTrace:
        return RoutingTrace(self.choices[tokens], self.texts[tokens], self.num_experts)


def read(path: Path = TRACE) -> RoutingTrace:
    with np.load(path) as found:
        return RoutingTrace(found["choices"], found["texts"], int(found["num_experts"]))


def split(gates: npt.NDArray[np.float32], num_experts: int, seed: int = 0, rounds: int = 12) -> I64:
    """gates [F, E] -> the expert of every neuron [F]: k-means on directions, then equally many by nearest centre."""
    rng = np.random.default_rng(seed)
    rows = gates / np.maximum(np.linalg.norm(gates, axis=1, keepdims=True), 1e-12)
    centres = rows[rng.choice(len(rows), num_experts, replace=False)]
    owner: I64 = np.zeros(len(rows), np.int64)
    for _ in range(rounds):
        owner = _evenly(rows @ centres.T, len(rows) // num_experts)
        sums = np.stack([rows[owner == x].sum(axis=0) for x in range(num_experts)])
        centres = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
    return owner


def membership(
    gates: npt.NDArray[np.float32], given: npt.NDArray[np.float32], num_experts: int
) -> npt.NDArray[np.float32]:
    """gates [F, E], what neurons give on average [F] -> [F, X]: 1 where a neuron is of an expert; zeros: shared."""
    routed = np.sort(np.argsort(-given, kind="stable")[len(given) // 4 :])
    out = np.zeros((len(given), num_experts), np.float32)
    out[routed, split(gates[routed], num_experts)] = 1
    return out


def _evenly(nearness: npt.NDArray[Any], most: int) -> I64:
    """nearness [F, X] -> [F]: the nearest pairs first, at most `most` neurons each (the rest where there is room)."""
    num, num_experts = nearness.shape
    owner = np.full(num, -1, np.int64)
    room = np.full(num_experts, most)
    room[: num - most * num_experts] += 1
    for pair in np.argsort(-nearness, axis=None, kind="stable"):
        neuron, expert = divmod(int(pair), num_experts)
        if owner[neuron] < 0 and room[expert]:
            owner[neuron], room[expert] = expert, room[expert] - 1
    return owner


def record(args: argparse.Namespace) -> RoutingTrace:
    from rich.progress import track

    from penstock.backends.reference import BlasBackend
    from penstock.config import from_kwargs
    from penstock.eval.scorer import ProgramScorer, load
    from penstock.ops.blas import BLAS
    from penstock.ops.ref.product import rows_as_float32

    model = load(from_kwargs(model=args.model, max_model_len=max(512, args.tokens), ops="blas", dtype="float32"))
    assert model.tokenizer is not None
    layers = range(len(model.spec.layers))

    def matrix(layer: int, name: str) -> npt.NDArray[np.float32]:
        found = model.weights[f"layers.{layer}.{name}"]
        return rows_as_float32(found, 0, found.shape[0])

    lengths = [np.linalg.norm(matrix(i, "down"), axis=0) for i in layers]
    given: list[npt.NDArray[np.float32]] = []
    plain = BLAS["activate_gated"]

    def watch(gate: Any, up: Any, *bound: Any) -> Any:
        inner = plain(gate, up, *bound)
        given.append(np.abs(inner) * lengths[len(given) % len(layers)])
        return inner

    table = BLAS.replaced("routing", {"activate_gated": watch}, batch_invariant=False)
    scorer = ProgramScorer(model, BlasBackend(table=table))
    member: list[npt.NDArray[np.float32]] = []
    choices, texts = [], []
    windows = [(text, i) for text in args.texts for i in range(args.windows)]
    for number, (text, i) in enumerate(track(windows, "reading")):
        ids = model.tokenizer.encode(Path(text).read_text("utf-8")[:_CHARACTERS])
        start = (len(ids) - args.tokens) * (2 * i + 1) // (2 * args.windows)
        given.clear()
        scorer.logits(ids[start : start + args.tokens])
        if not member:  # the first window says what is shared
            member = [membership(matrix(j, "gate"), given[j].mean(axis=0), args.experts) for j in layers]
        shares = (g @ m for g, m in zip(given, member, strict=True))
        best = [np.argsort(-s, axis=1, kind="stable")[:, : args.top_k].astype(np.uint8) for s in shares]
        choices.append(np.stack(best, axis=1))
        texts.append(np.full(len(choices[-1]), number, np.uint8))
    return RoutingTrace(np.concatenate(choices), np.concatenate(texts), args.experts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--texts", nargs="+", required=True)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--windows", type=int, default=4, help="of each text")
    parser.add_argument("--tokens", type=int, default=256, help="of each window, at most 512")
    parser.add_argument("--out", type=Path, default=TRACE)
    args = parser.parse_args()
    trace = record(args)
    names = [Path(text).name for text in args.texts]
    np.savez_compressed(
        args.out, choices=trace.choices, texts=trace.texts, num_experts=trace.num_experts, names=np.array(names)
    )
    print(args.out, trace.choices.shape, args.out.stat().st_size)


if __name__ == "__main__":
    main()
