"""Contexts beyond the trained one (catalogue rows G05, G06, G07, G09) and factors per head (G37), on nano.

    PYTHONPATH=.:tools python benchmarks/quality/positions.py --corpus CORPUS [--parts perplexity needle heads]

perplexity: windows of held-out prose, the same for every method, at 1, 2 and 4 times the trained length; whole windows
and their tokens beyond the trained length. Intervals (95 %, bootstrap over windows) are of paired differences.
needle: a pass key in held-out prose by depth and length, the same prompts for every method; the answer must be exact.
heads: factors per head (Ms-PoE) at the trained length: the needle map and key-value lookup by position, against the
same model without them, with one factor for all heads, and with the ranking turned round.

Nothing is trained here. `--model` measures another folder of nano's shape (as one that was fine-tuned with a changed
rope: tools/train/README.md) under `--label`. Results are added to --out, part by part.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from penstock import LLM
from penstock.config import from_kwargs
from penstock.core.matrix_format import NONE
from penstock.eval.perplexity import Passage, Score, Window, token_nats
from penstock.eval.scorer import LoadedModel, ProgramScorer, load
from penstock.launch.bundled import bundled_model
from penstock.ops.blas import BLAS
from train.evaluate import Reader, lookup_grid, needle_grid
from train.text import books, held_out_prose

TRAINED = 2048
RATIOS = (1, 2, 4)
OUT = Path("benchmarks/results/positions.json")
Scaling = Mapping[str, Any] | None
console = Console(stderr=True)


def methods(ratio: float, longrope: Scaling = None) -> dict[str, Scaling]:
    """Name -> what `rope_scaling` is for contexts `ratio` times as long; plain is the model as it is."""
    kinds = ("linear", "ntk", "dynamic", "yarn")
    made: dict[str, Scaling] = {"plain": None} | {kind: {"rope_type": kind, "factor": float(ratio)} for kind in kinds}
    if longrope is not None and longrope["factor"] == ratio:
        made["longrope"] = longrope
    return made


# -- perplexity ----------------------------------------------------------------------------------------------------


def prose_windows(corpus: Path, encode: Any, per_book: int, length: int, bos: int, which: slice = slice(None)) -> list[
    list[int]
]:  # fmt: skip
    """Stretches of `length` tokens of the held-out books, `per_book` of each, evenly spaced; those of shorter lengths
    begin where the longer ones do."""
    made = []
    longest = TRAINED * max(RATIOS)
    for book in books(corpus / "children", held=True)[which]:
        ids = encode(book)
        starts = np.linspace(0, max(0, len(ids) - longest), per_book + 2).astype(int)[1:-1]
        made += [[bos, *ids[s : s + length - 1]] for s in starts if len(ids) >= longest]
    return made


def stretched_model(model: Path, scaling: Scaling, length: int) -> LoadedModel:
    """The model with other positions, to be read up to `length` tokens even if it was made for fewer."""
    given = {} if scaling is None else {"rope_scaling": dict(scaling)}
    loaded = load(from_kwargs(model=str(model), threads=1, **given))
    return replace(loaded, max_len=length)


def scorer_of(model: LoadedModel) -> ProgramScorer:
    return ProgramScorer(model, BLAS, NONE if model.threads else None)


def read(model: LoadedModel, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Nats of every token but the first, of each text."""
    scorer = scorer_of(model)
    return [token_nats(scorer.logits(ids), Window(tuple(ids), 1)) for ids in texts]


def scores(nats: Sequence[np.ndarray], passages: Mapping[str, tuple[Passage, int]]) -> dict[str, Score]:
    """Name of a passage -> its score; each counts tokens from a place on."""
    return {
        name: Score(np.array([each[first - 1 :].sum() for each in nats]), passage)
        for name, (passage, first) in passages.items()
    }


def perplexity(model: Path, corpus: Path, per_book: int, longrope: Scaling) -> dict[str, Any]:
    out: dict[str, Any] = {"books": len(books(corpus / "children", held=True))}
    plain = load(from_kwargs(model=str(model)))
    assert plain.tokenizer is not None
    assert plain.spec.bos_token_id is not None
    for ratio in RATIOS:
        length = ratio * TRAINED
        texts = prose_windows(corpus, plain.tokenizer.encode, per_book, length, plain.spec.bos_token_id)
        passages = {"all": (passage_of(texts, 1), 1)}
        if ratio > 1:
            passages["beyond"] = (passage_of(texts, TRAINED), TRAINED)
        rows: dict[str, dict[str, Score]] = {}
        # At the trained length: what the factors for longer contexts cost where none is needed.
        asked = methods(ratio, longrope) if ratio > 1 else {"plain": None}
        if ratio == 1:
            for r in RATIOS[1:]:
                asked |= {f"{name} x{r}": how for name, how in methods(r, longrope).items() if how is not None}
        for name, how in asked.items():
            began = time.perf_counter()
            rows[name] = scores(read(stretched_model(model, how, length), texts), passages)
            seconds = time.perf_counter() - began
            console.print(f"{length} {name}: {rows[name]['all'].perplexity:.2f} ({seconds:.0f} s)")
        out[f"x{ratio}"] = {
            "tokens": length, "windows": len(texts),
            "methods": {name: _compared(found, rows) for name, found in rows.items()},
        }  # fmt: skip
    return out


def passage_of(texts: Sequence[Sequence[int]], first: int) -> Passage:
    windows = tuple(Window(tuple(ids), first) for ids in texts)
    return Passage(windows, 1, len(texts[0]), len(texts[0]) - 1)


def _compared(found: dict[str, Score], rows: dict[str, dict[str, Score]]) -> dict[str, Any]:
    """Perplexities, and their differences from every other method's on the same windows."""
    out: dict[str, Any] = {}
    for part, score in found.items():
        others = {name: score.difference(other[part]) for name, other in rows.items() if other[part] is not score}
        out[part] = {
            "perplexity": round(score.perplexity, 3), "interval": rounded(score.interval()),
            "minus": {name: rounded(interval) for name, interval in others.items()},
        }  # fmt: skip
    return out


def rounded(values: tuple[float, ...] | None) -> list[float] | None:
    return None if values is None else [round(v, 3) for v in values]


# -- needles -------------------------------------------------------------------------------------------------------


def reader(model: Path, scaling: Scaling, length: int) -> Reader:
    given: dict[str, Any] = {} if scaling is None else {"rope_scaling": dict(scaling)}
    return Reader(
        LLM(str(model), max_model_len=length, max_num_seqs=4, threads=1, enable_prefix_caching=False, **given)
    )


def lengthened(model: Path, folder: Path) -> Path:
    """A copy of the model that says it was made for longer contexts, to see what it does there as it is."""
    made = folder / "plain"
    shutil.copytree(model, made)
    config = json.loads((made / "config.json").read_text("utf-8"))
    config["max_position_embeddings"] = TRAINED * max(RATIOS)
    (made / "config.json").write_text(json.dumps(config), "utf-8")
    return made


def needles(
    model: Path, prose: str, n: int, longrope: Scaling, ratios: Sequence[int], found: dict[str, Any]
) -> dict[str, Any]:
    """`found` with the maps of these ratios in it."""
    with tempfile.TemporaryDirectory() as folder:
        long = lengthened(model, Path(folder))
        for ratio in ratios:
            length = ratio * TRAINED
            row: dict[str, Any] = found.setdefault(f"x{ratio}", {})
            for name, how in (methods(ratio, longrope) if ratio > 1 else {"plain": None}).items():
                row[name] = grid(reader(long if how is None else model, how, length), prose, n)
                console.print(f"{length} {name}: {row[name]['right']}/{row[name]['n']} {row[name]['by_depth']}")
    return found


def grid(reader: Reader, prose: str, n: int) -> dict[str, Any]:
    """Right answers by depth, `n` at each, at the longest context."""
    found = needle_grid(reader, prose, n, (reader.max_len,))
    cells = [row[0] for row in found["scores"]]
    right, asked = sum(c["right"] for c in cells), sum(c["n"] for c in cells)
    by_depth = {f"{depth:.0%}": c["right"] for depth, c in zip(found["depths"], cells, strict=True)}
    return {"right": right, "n": asked, "by_depth": by_depth, "mean_tokens": round(found["mean_tokens"][0])}


# -- factors per head ----------------------------------------------------------------------------------------------


def head_methods(ranked: Mapping[str, Any]) -> dict[str, Scaling]:
    """Ms-PoE and what it is compared with. `ranked`: the object that mspoe_heads.py wrote."""
    factors = ranked["head_factors"]
    low, high = min(f for row in factors for f in row), max(f for row in factors for f in row)
    middle = [[(low + high) / 2] * len(row) for row in factors]
    turned = [[low + high - f for f in row] for row in factors]
    made = {"ms-poe": factors, "one factor": middle, "turned round": turned}
    return {"plain": None} | {name: {"rope_type": "default", "head_factors": rows} for name, rows in made.items()}


def heads(model: Path, prose: str, n: int, ranked: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"per_cell": n, "head_factors": ranked["head_factors"]}
    for name, how in head_methods(ranked).items():
        asked = reader(model, how, TRAINED)
        found = needle_grid(asked, prose, n, (1024, TRAINED))
        table = lookup_grid(asked, n, (40, 120))
        out[name] = {
            "needle": {str(length): {f"{d:.0%}": row[i]["right"] for d, row in zip(found["depths"], found["scores"],
                       strict=True)} for i, length in enumerate(found["lengths"])},
            "lookup": {str(pairs): [cell["right"] for cell in row]
                       for pairs, row in zip(table["pairs"], table["scores"], strict=True)},
        }  # fmt: skip
        console.print(name, out[name])
    return out


# ------------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=["perplexity", "needle", "heads"])
    parser.add_argument("--model", type=Path, default=bundled_model("nano"))
    parser.add_argument("--label", default="nano")
    parser.add_argument("--windows", type=int, default=1, help="of each book")
    parser.add_argument("--needles", type=int, default=3, help="per cell of a map")
    parser.add_argument("--ratios", type=int, nargs="+", default=RATIOS, help="of the needle maps")
    parser.add_argument("--longrope", type=Path, default=Path("benchmarks/results/longrope_nano_x4.json"))
    parser.add_argument("--heads", type=Path, default=Path("benchmarks/results/mspoe_nano.json"))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    longrope = json.loads(args.longrope.read_text("utf-8")) if args.longrope.exists() else None
    prose = held_out_prose(args.corpus)
    results = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {"trained_tokens": TRAINED}
    for part in args.parts:
        if part == "perplexity":
            found = perplexity(args.model, args.corpus, args.windows, longrope)
        elif part == "needle":
            found = results.get(args.label, {}).get("needle", {})
            found = needles(args.model, prose, args.needles, longrope, args.ratios, found)
        else:
            found = heads(args.model, prose, args.needles, json.loads(args.heads.read_text("utf-8")))
        # Read again: other parts may have been added meanwhile.
        results = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {"trained_tokens": TRAINED}
        results.setdefault(args.label, {})[part] = found
        args.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
