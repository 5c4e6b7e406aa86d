"""Which of the experts that a token will use can be named before its router is asked (C73, C74)? Nothing is timed.

    python -m benchmarks.engine.expert_recall --out benchmarks/results/expert-recall.json

The model is that of `expert_memory`. Passages of `SEEN` kinds of text choose the constants of the activation matrices
(how fast recent uses fade, and how much they say beside the nearest matrix): the pair that names most in their held-out
passages. With these, once, passages of `FRESH` kinds are judged, of which nothing chose anything. In each kind some
passages come first, as sequences that have ended, and others are asked about.

Of as many experts as a token uses, the share that is right: by what the token before used (`recent`, what a cache in
order of use would hold), by what ended passages use most (`frequent`), by what the passage itself has used most so far
(`own_frequent`), by matrices (`matched`), by a trained map (`trained`), by the next layer's router (`router`). `over`
has means and 95 % intervals of differences by passage (bootstrap). `strange`: the matrices are those of the seen kinds.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks.common import about, save
from benchmarks.engine.expert_memory import CORPUS, NOVELS, Bench
from rich.console import Console

from penstock.backends.native.experts import activations
from penstock.backends.native.experts.next_router import NextRouter
from penstock.backends.native.experts.predictor import LayerRun
from penstock.backends.native.experts.recorder import RoutingRecorder
from penstock.backends.native.experts.trained import fit

PASSAGES, HELD_OUT, TOKENS = 10, 3, 64
EVAL = CORPUS.parent / "eval"
OWN = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0)
KEEPS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
WAYS = ("recent", "frequent", "own_frequent", "matched", "trained", "router")
_NOBODY = np.zeros(1, np.int32)


def _code() -> str:
    rows = [json.loads(line) for line in (CORPUS / "code" / "python_stdlib.jsonl").read_text().splitlines()[:40]]
    return "\n".join(max(map(str, row.values()), key=len) for row in rows)


def _german() -> str:
    rows = [json.loads(line) for line in (EVAL / "spec_bench.jsonl").read_text().splitlines()]
    return " ".join(r["turns"][0].split(":", 1)[1].strip() for r in rows if r["category"] == "translation")


def _cpp() -> str:
    sources = sorted((Path(__file__).resolve().parents[2] / "csrc" / "src").glob("*.cpp"))
    return "\n".join(path.read_text() for path in sources)


SEEN: dict[str, Callable[[], str]] = {
    "python": _code,
    "dialogue": lambda: (CORPUS / "dialogue" / "sgd_train.jsonl").read_text()[:80000],
    "doyle": lambda: (CORPUS / "novels" / "doyle_a_study_in_scarlet.txt").read_text(),
    "carroll": lambda: (CORPUS / NOVELS[0]).read_text(),
}
FRESH: dict[str, Callable[[], str]] = {
    "sums": lambda: (CORPUS / "qa" / "gsm8k_train.jsonl").read_text()[:200000],
    "tool calls": lambda: (CORPUS / "dialogue" / "taskmaster4_tools.jsonl").read_text()[:200000],
    "json schemas": lambda: (EVAL / "jsonschemabench_sample.jsonl").read_text()[:200000],
    "german": _german,
    "c++": _cpp,
    "encyclopedia": lambda: (EVAL / "wikitext2_valid.txt").read_text()[:400000],
    "austen": lambda: (CORPUS / "novels" / "austen_pride_and_prejudice.txt").read_text(),
    "shakespeare": lambda: (CORPUS / "tinyshakespeare.txt").read_text(),
}


class Passage(NamedTuple):
    """`chosen` [layers][TOKENS, K] and `rows` [layers][TOKENS, E] of all layers but the last."""

    kind: str
    chosen: list[Any]
    rows: list[Any]
    recorder: RoutingRecorder


class Traces(NamedTuple):
    """[TOKENS, layers, experts]: shares of uses lately, and of the nearest matrix, after each layer of each token."""

    own: Any
    nearest: Any


def passages(bench: Bench, kinds: dict[str, Callable[[], str]]) -> tuple[list[Passage], list[Passage]]:
    """Those that have ended, and those that are held out."""
    ended: list[Passage] = []
    held: list[Passage] = []
    for kind, read in kinds.items():
        ids = bench.tokenizer.encode_inner(read())
        assert len(ids) >= PASSAGES * TOKENS, f"{kind} is too short"
        starts = np.linspace(0, len(ids) - TOKENS, PASSAGES).astype(int)
        for i, at in enumerate(starts):
            r = bench.record(ids[at : at + TOKENS], TOKENS)
            found = [[np.concatenate(x) for x in each[:-1]] for each in (r.chosen, r.rows)]
            (held if i >= PASSAGES - HELD_OUT else ended).append(Passage(kind, *found, r))
    return ended, held


def follow(matching: activations.ActivationMatching, passage: Passage, sequence: int) -> Traces:
    """Of a sequence, which then ends."""
    own: list[Any] = []
    nearest: list[Any] = []
    num = len(passage.chosen)
    for t in range(len(passage.chosen[0])):
        matching.begin([sequence], ())
        for n in range(num):
            run = LayerRun(n, passage.chosen[n][t : t + 1], np.zeros((1, 1), np.float32), _NOBODY)
            matching.after(run)
            for part, found in ((1.0, own), (0.0, nearest)):
                activations._OWN = part
                found.append(matching.expected(matching.running[sequence]))
    matching.begin([], [sequence])
    shape = (-1, num, len(own[0]))
    return Traces(np.array(own, np.float32).reshape(shape), np.array(nearest, np.float32).reshape(shape))


def traces(bench: Bench, ended: list[Passage], held: list[Passage], keeps: float) -> list[Traces]:
    """Of those held out, each after all that have ended, which alone are kept."""
    before = activations._OWN, activations._KEEPS
    activations._KEEPS = keeps
    try:
        matching = activations.ActivationMatching([None] * len(ended[0].chosen), ended[0].recorder.sizes[:-1])
        for i, passage in enumerate(ended):
            follow(matching, passage, i)
        kept, found = matching._kept.copy(), []
        for i, passage in enumerate(held):
            found.append(follow(matching, passage, 1000 + i))
            matching._kept = kept.copy()
        return found
    finally:
        activations._OWN, activations._KEEPS = before


def recall(passage: Passage, named: Callable[[int, int], Any]) -> float:
    """`named(layer, token)`: experts of the layer, by what is known when the layer before it has chosen."""
    right = total = 0
    for n in range(1, len(passage.chosen)):
        for t in range(1, TOKENS):
            used = passage.chosen[n][t]
            right += len(np.intersect1d(used, named(n, t)))
            total += len(used)
    return right / total


def best(likely: Any, count: int) -> Any:
    return np.argsort(-likely, kind="stable")[:count]


def matched(passage: Passage, trace: Traces, own: float, num: int, top_k: int) -> float:
    likely = own * trace.own + (1 - own) * trace.nearest
    return recall(passage, lambda n, t: best(likely[t, n - 1, n * num : (n + 1) * num], top_k))


def judge(bench: Bench, ended: list[Passage], held: list[Passage], keeps: float, own: float) -> dict[str, list[float]]:
    """Of each way, the recall of each held-out passage."""
    num, top_k = bench.args.experts, bench.args.top_k
    frequent = sum(p.recorder.used().sum(axis=0) for p in ended)
    fitted = fit(np.concatenate([p.rows[0] for p in ended]), np.concatenate([p.recorder.used() for p in ended]))
    router = NextRouter(bench.routers, ended[0].recorder.sizes)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for p, trace in zip(held, traces(bench, ended, held, keeps), strict=True):
        for way, named in _ways(p, frequent, fitted, router, num, top_k).items():
            found[way].append(recall(p, named))
        found["matched"].append(matched(p, trace, own, num, top_k))
    return found


def _ways(
    p: Passage, frequent: Any, fitted: Any, router: NextRouter, num: int, top_k: int
) -> dict[str, Callable[[int, int], Any]]:
    """All but `matched`."""
    used, mapped = np.cumsum(p.recorder.used(), axis=0), p.rows[0] @ fitted[0] + fitted[1]
    return {
        "recent": lambda n, t: p.chosen[n][t - 1],
        "frequent": lambda n, t: best(frequent[n * num : (n + 1) * num], top_k),
        "own_frequent": lambda n, t: best(used[t - 1][n * num : (n + 1) * num], top_k),
        "trained": lambda n, t: best(mapped[t][n * num : (n + 1) * num], top_k),
        "router": lambda n, t: np.asarray(router.choose(n - 1, p.rows[n - 1][t : t + 1], top_k)),
    }


def table(held: list[Passage], found: dict[str, list[float]], seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(held), (4000, len(held)))
    over = {}
    for way in ("recent", "frequent", "own_frequent"):
        gain = np.array(found["matched"]) - np.array(found[way])
        low, high = np.quantile(gain[draws].mean(axis=1), [0.025, 0.975])
        over[way] = {"mean": gain.mean(), "low": low, "high": high, "passages_better": int((gain > 0).sum())}
    kinds: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(p.kind for p in held):
        mine = [i for i, p in enumerate(held) if p.kind == kind]
        kinds[kind] = {way: np.mean([each[i] for i in mine]) for way, each in found.items()}
    return {"recall": {way: np.mean(each) for way, each in found.items()}, "over": over, "kinds": kinds,
            "passages": len(held)}  # fmt: skip


def plain(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items()}
    return round(float(found), 5) if isinstance(found, np.floating) else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--scheme", default="int4-wo:32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--train", type=int, default=64)
    parser.add_argument("--text", default=NOVELS[1], help=argparse.SUPPRESS)
    parser.add_argument("--unbalanced", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bench, console = Bench(args), Console()
    seen = passages(bench, SEEN)
    grid = {}
    for keeps in KEEPS:
        known = traces(bench, *seen, keeps)
        for own in OWN:
            each = [matched(p, t, own, args.experts, args.top_k) for p, t in zip(seen[1], known, strict=True)]
            grid[own, keeps] = float(np.mean(each))
    own, keeps = max(itertools.product(OWN, KEEPS), key=lambda pair: grid[pair])
    fresh = passages(bench, FRESH)
    result = plain({
        "chosen": {"own": own, "keeps": keeps}, "engine": {"own": activations._OWN, "keeps": activations._KEEPS},
        "grid": [{"own": o, "keeps": k, "recall": round(value, 5)} for (o, k), value in grid.items()],
        "seen": table(seen[1], judge(bench, *seen, keeps, own), args.seed),
        "fresh": table(fresh[1], judge(bench, *fresh, keeps, own), args.seed),
        "strange": table(fresh[1], judge(bench, seen[0], fresh[1], keeps, own), args.seed),
    })  # fmt: skip
    console.print_json(json.dumps({name: result[name] for name in ("chosen", "seen", "fresh", "strange")}))
    if args.out:
        shown = {name: str(value) for name, value in vars(args).items() if name != "out"}
        save(args.out, about(**shown) | {"passages": PASSAGES, "held_out": HELD_OUT, "tokens": TOKENS} | result)


if __name__ == "__main__":
    main()
