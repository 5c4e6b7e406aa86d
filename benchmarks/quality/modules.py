"""What modules lose, and what computing some of their tokens again brings back (catalogue rows B11, J04).

    PYTHONPATH=. python -m benchmarks.quality.modules MODEL --corpus CORPUS --questions nq_open_oracle.jsonl --out FILE

Each text is four modules of 256 tokens and what follows them. `prose`: consecutive pieces of a book, and its next 64
tokens. `passages`: retrieved passages (one answers the question), and question and answer, of which the answer counts;
the order is drawn. The model reads it four ways, over the same weights and kernels: *full*, as one text; *reuse*, each
module computed by itself; *blend x*, with the share x computed again (`runner.blending`); *heads x*, with as many
tokens, the first ones of each module (the tokens that EPIC, arXiv 2410.15332, computes again). `--layers`: how many
layers all tokens run through before some are chosen.

`gap`: how far its expectations are from those of *full*, as a mean over texts of the mean over tokens of
KL(full || it), in nats. `gap ratio`: of the gaps' means, to that of *reuse*, with a 95 % interval (texts drawn again
2,000 times). `nll`: nats a token more than *full*, with half of a 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks.common import about, save
from rich.console import Console

from penstock.config import from_kwargs
from penstock.core.batch import AddedRow, TableUpdate
from penstock.core.model_spec import cache_groups
from penstock.core.page_ops import BlendOp
from penstock.core.sampling import TokenRules
from penstock.eval.scorer import load
from penstock.launch.backend import backend_of
from penstock.model.emitter import Reading
from penstock.ops.plan import I32, GroupPlan, StepPlan
from penstock.runner.assemble import DecoderModel
from penstock.runner.blending import NUM_LAYERS, Blender
from penstock.runner.rows import RowStore
from penstock.runner.storage import Storage
from penstock.text.modules import joined, padding_id

SIZE, MODULE, NUM = 32, 256, 4
SHARES = (0.05, 0.15, 0.3, 1.0)


class Text(NamedTuple):
    """`scored`: of the tokens, the last so many count."""

    ids: list[int]
    ends: list[int]
    scored: int


class Heads(Blender):
    """The first tokens of each module instead of those that change most."""

    def _most_changed(self, seq_id: int, positions: I32) -> I32:
        return positions[np.argsort((positions - positions[0]) % MODULE, kind="stable")]


class Reader:
    """`model` on the kernels that serve it, raw keys, three places for a text: full, by itself, put together."""

    def __init__(self, name: str, most: int, layers: Sequence[int]) -> None:
        config = from_kwargs(model=name, max_model_len=4096)
        model = load(config)
        assert model.tokenizer is not None
        self.tokenizer = model.tokenizer
        groups = cache_groups(model.spec, model.kv_dtype)
        made = DecoderModel(
            spec=model.spec, weights=model.weights, groups=groups, max_model_len=4096, reading=Reading(raw_keys=True)
        )
        backend = backend_of(config)
        self.forward = made.on(backend, max_tokens=most)
        self.blocks, self.width = -(-most // SIZE), groups[0].pages_per_slab
        self.storage = Storage(groups, [3 * self.blocks], SIZE)
        self.rows = RowStore(groups, [3 * self.blocks], SIZE, model.spec.vocab_size)

        def part(layers: Any) -> Any:
            return made.part(backend, self.forward, layers, max_tokens=most)

        own = (self.forward, part, self.rows, self.storage, most)
        self.blenders: dict[str, Blender] = {"heads": Heads(*own)}
        for num in layers:
            self.blenders["blend" if num == NUM_LAYERS else f"blend ({num} layers)"] = Blender(*own, num)

    def _run(self, tokens: Sequence[int], runs: Sequence[tuple[int, int, int]], wanted: int = 0) -> Any:
        """Runs of tokens as (first page, first position, tokens); logits of the last `wanted` tokens."""
        lens = [count for _, _, count in runs]
        tables = tuple(
            np.arange(page, page + -(-(at + count) // SIZE), dtype=np.int32)[None] for page, at, count in runs
        )
        positions = [np.arange(at, at + count, dtype=np.int32) for _, at, count in runs]
        bounds = np.array([sum(lens[:b]) for b in range(len(lens) + 1)], np.int32)
        plan = StepPlan(
            np.asarray(tokens, np.int32), np.concatenate(positions), bounds,
            np.array([at + count for _, at, count in runs], np.int32),
            np.arange(len(tokens) - wanted, len(tokens), dtype=np.int32), (GroupPlan(self.width, SIZE, tables),),
        )  # fmt: skip
        return self.forward.run(plan, self.storage.planes).copy()

    def read(self, text: Text, ways: Sequence[tuple[str, float]]) -> dict[str, tuple[float, float]]:
        """Way -> (nats a token more than read as one text, mean KL to that)."""
        ids, end, blocks = text.ids, text.ends[-1], self.blocks
        wanted, targets = text.scored + 1, np.array(ids[-text.scored :])
        full = _log_softmax(self._run(ids, [(0, 0, len(ids))], wanted)[:-1])
        starts = [0, *text.ends[:-1]]
        self._run(ids[:end], [(blocks + s // SIZE, 0, e - s) for s, e in zip(starts, text.ends, strict=True)])
        self.rows.add(AddedRow(0, 0, ids, len(ids), TokenRules()))
        self.rows.update_tables([TableUpdate(0, 0, 0, list(range(2 * blocks, 3 * blocks)))])
        found = {}
        for kind, share in ways:
            for array in self.storage.planes[0].values():
                third = blocks * self.width
                array[2 * third : 3 * third] = array[third : 2 * third]
            if share:
                num = math.ceil(share * (end - text.ends[0]) - 1e-9)
                self.blenders[kind].blend(BlendOp(0, tuple(text.ends), num))
            mine = _log_softmax(self._run(ids[end:], [(2 * blocks, end, len(ids) - end)], wanted)[:-1])
            more = float((full - mine)[np.arange(len(targets)), targets].mean())
            found[f"{kind} {share:.0%}" if share else "reuse"] = (
                more, float((np.exp(full) * (full - mine)).sum(axis=1).mean())
            )  # fmt: skip
        self.rows.remove(0)
        return found


def _log_softmax(x: Any) -> Any:
    x = x.astype(np.float64)
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def prose(encode: Any, corpus: Path, count: int, rng: random.Random) -> Iterator[Text]:
    books = sorted((corpus / "novels").glob("*.txt")) + sorted((corpus / "children").glob("*.txt"))
    rng.shuffle(books)
    for book in books[:count]:
        said = book.read_text(errors="ignore")
        at = rng.randrange(len(said) // 4, max(len(said) // 4 + 1, 3 * len(said) // 4))
        ids = encode(said[at : at + 12_000])[: NUM * MODULE + 64]
        if len(ids) == NUM * MODULE + 64:
            yield Text(ids, [MODULE * (i + 1) for i in range(NUM)], 64)


def passages(encode: Any, padding: int, questions: Path, count: int, rng: random.Random) -> Iterator[Text]:
    lines = [json.loads(line) for line in questions.read_text().splitlines()]
    rng.shuffle(lines)
    for n, line in enumerate(lines[:count]):
        others = [lines[(n + 1 + i) % len(lines)]["ctxs"][0] for i in range(NUM - 1)]
        chosen = [line["ctxs"][0], *others]
        rng.shuffle(chosen)
        modules = [encode(f"{c['title']}\n{c['text']}\n")[:MODULE] for c in chosen]
        question = encode(f"\nQuestion: {line['question']}?\nAnswer:")
        answer = encode(" " + line["answers"][0] + "\n")
        ids, ends = joined(modules, [*question, *answer], SIZE, padding)
        yield Text(ids, ends, len(answer))


def summary(found: Sequence[dict[str, tuple[float, float]]], rng: np.random.Generator) -> dict[str, Any]:
    """By way. Texts are drawn again for the interval of a ratio."""
    out: dict[str, Any] = {}
    draws = rng.integers(0, len(found), (2000, len(found)))
    base = np.array([one["reuse"][1] for one in found])
    for way in found[0]:
        more, gap = (np.array([one[way][i] for one in found]) for i in range(2))
        ratios = gap[draws].mean(axis=1) / base[draws].mean(axis=1)
        out[way] = {
            "gap": round(float(gap.mean()), 5), "gap ratio": round(float(gap.mean() / base.mean()), 4),
            "gap ratio 95 %": [round(float(x), 4) for x in np.percentile(ratios, [2.5, 97.5])],
            "nll": round(float(more.mean()), 4), "nll ±": round(float(1.96 * more.std() / len(found) ** 0.5), 4),
        }  # fmt: skip
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--kinds", type=lambda s: s.split(","), default=["prose", "passages"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=lambda s: [int(x) for x in s.split(",")], default=[NUM_LAYERS])
    parser.add_argument("--shares", type=lambda s: [float(x) for x in s.split(",")], default=SHARES)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    rng, reader = random.Random(args.seed), Reader(args.model, 2048, args.layers)

    def encode(text: str) -> list[int]:
        ids: list[int] = reader.tokenizer.encode(text, add_special_tokens=False)
        return ids

    ways = [("reuse", 0.0), *[(kind, s) for kind in reader.blenders for s in args.shares if kind != "heads" or s < 1]]
    kinds = {
        "prose": prose(encode, args.corpus, args.texts, rng),
        "passages": passages(encode, padding_id(reader.tokenizer), args.questions, args.texts, rng),
    }
    console, result = Console(), {"about": about(), "seed": args.seed}
    for kind, texts in ((kind, kinds[kind]) for kind in args.kinds):
        found = []
        for text in texts:
            found.append(reader.read(text, ways))
            console.print(kind, len(found), found[-1], highlight=False)
        result[kind] = {"texts": len(found), **summary(found, np.random.default_rng(args.seed))}
        for way, figures in result[kind].items():
            console.print(kind, way, figures, highlight=False)
    if args.out is not None:
        save(args.out, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
