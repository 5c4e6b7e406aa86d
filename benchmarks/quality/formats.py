"""The table of weight formats: bytes, exactness, perplexity and distance from float32, of one real model.

    PYTHONPATH=. python benchmarks/quality/formats.py ORIGINAL.gguf --files FOLDER/*.gguf --text FILE --out TABLE.json
        [--schemes int8-w8a8,int4-w4a8:128] [--speeds STORED-FORMATS.json ...] [--markdown PAGE.md]

ORIGINAL is what everything is compared with: its own weights, activations, keys and values in float32. Rows of the
table are the original as it is served, the same model in other formats (`benchmarks.peers.requantise` makes such
files), and the original under `--quantization` of each of `--schemes`. One row is measured at a time and kept in
`--out` at once; a run that was stopped goes on there. `--kept`: a folder that keeps the reference's logits, too.

*resident*: what a second start adds to the process's memory (`engine/resident.py`). *exact*: whether the values that
Penstock decodes are bit for bit those that the gguf package decodes, of the first rows of one matrix of every block
type in the file. *perplexity*: of the first `--max-tokens` tokens, in windows; *over float32* is paired by window, and
like KL(float32 || format) told with 95 % intervals over windows (`eval.perplexity`, `eval.compare`). Speeds are those
that `peers/stored_formats.py` has measured; without its file the columns are empty.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import about, save, show
from benchmarks.engine.resident import second_start
from benchmarks.quality.deviation import FLOAT32
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.base.bf16 import F32
from penstock.base.errors import PenstockError
from penstock.config import from_kwargs
from penstock.core.matrix_format import parse_scheme
from penstock.eval.compare import Comparison, compare
from penstock.eval.perplexity import Passage, passage
from penstock.eval.scorer import LoadedModel, ProgramScorer, Scorer, load, make_scorer
from penstock.formats.ggml import GGML_FORMATS
from penstock.formats.gguf import Gguf, read_gguf
from penstock.formats.tensor_ref import BLOCKS, TensorRef
from penstock.weights.stored.ggml.matrix import decoded_blocks

NAME, ROWS = "as stored", 64
COLUMNS = (
    "format",
    "MB",
    "resident",
    "exact",
    "perplexity",
    "over float32",
    "KL, 1e-5",
    "same",
    "prompt/s",
    "decode/s",
)


@dataclass(frozen=True)
class Cell:
    """One row of the table: a file, and the scheme that rounds it."""

    name: str
    file: Path
    scheme: str = "none"


class KeptOnDisk:
    """A scorer whose logits stay in a folder: [T, V] of a large vocabulary are too many for memory."""

    def __init__(self, scorer: Scorer, folder: Path) -> None:
        self.vocab_size, self.max_len = scorer.vocab_size, scorer.max_len
        self._scorer, self._folder = scorer, folder

    def logits(self, token_ids: Sequence[int]) -> F32:
        key = hashlib.sha256(np.array(token_ids, np.int32).tobytes()).hexdigest()[:16]
        file = self._folder / f"{key}.npy"
        if not file.exists():
            part = file.with_suffix(".part.npy")
            np.save(part, self._scorer.logits(token_ids))
            part.replace(file)
        found: F32 = np.load(file, mmap_mode="r")
        return found


def cells(original: Path, files: Sequence[Path], schemes: Sequence[str]) -> list[Cell]:
    """The original, the others by size, the schemes."""
    others = sorted((f for f in files if f != original), key=lambda f: -f.stat().st_size)
    return [Cell(NAME, original), *(Cell(f.stem, f) for f in others), *(Cell(s, original, s) for s in schemes)]


def exact(model: Gguf) -> dict[str, bool | None]:
    """Block type -> whether some rows have the gguf package's bits; None where that cannot decode the type."""
    import gguf

    found: dict[str, bool | None] = {}
    for tensor in model.tensors.values():
        if tensor.dtype not in GGML_FORMATS or tensor.dtype in found:
            continue
        blocks = first_blocks(tensor)
        try:
            theirs = gguf.quants.dequantize(blocks.reshape(-1), gguf.GGMLQuantizationType[tensor.dtype])
        except (KeyError, NotImplementedError):
            found[tensor.dtype] = None
            continue
        ours = decoded_blocks(tensor.dtype, blocks).reshape(-1)
        found[tensor.dtype] = bool((ours.view(np.uint32) == theirs.reshape(-1).view(np.uint32)).all())
    return found


def first_blocks(tensor: TensorRef) -> Any:
    """[blocks, bytes of one] of the first rows."""
    numbers, size = BLOCKS[tensor.dtype]
    per_row = tensor.shape[-1] // numbers * size
    count = min(ROWS, int(np.prod(tensor.shape[:-1]))) * per_row
    return np.fromfile(tensor.path, np.uint8, count, offset=tensor.offset).reshape(-1, size)


def quality(found: Comparison) -> dict[str, Any]:
    """Figures with their intervals, as plain data."""
    own, reference = found.score, found.reference
    return {
        "perplexity": own.perplexity, "perplexity_interval": own.interval(), "float32_perplexity": reference.perplexity,
        "over_float32": own.perplexity / reference.perplexity - 1,
        "over_float32_interval": [x / reference.perplexity for x in own.difference(reference) or ()],
        "kl": found.mean_kl, "kl_interval": found.kl_interval(), "kl_p99": found.p99_kl, "same": found.agreement,
        "tokens": own.passage.num_tokens, "windows": len(own.passage.windows),
    }  # fmt: skip


def measured(cell: Cell, reference: Scorer, read: Passage, max_len: int) -> dict[str, Any]:
    model = read_gguf(cell.file)
    found: dict[str, Any] = {
        "name": cell.name, "file": cell.file.name, "scheme": cell.scheme, "file_bytes": cell.file.stat().st_size,
        "tensor_bytes": sum(t.nbytes for t in model.tensors.values()),
        "types": dict(Counter(t.dtype for t in model.tensors.values()).most_common()),
        "exact": exact(model) if cell.scheme == "none" else {},
    }  # fmt: skip
    try:
        scorer = scorer_of(loaded(cell.file, {}, max_len), cell.scheme)
        found |= quality(compare(reference, scorer, read))
        del scorer
        found |= second_start(str(cell.file), {"quantization": cell.scheme})
    except PenstockError as error:
        found["error"] = str(error)
    return found


def loaded(file: Path, settings: Mapping[str, str], max_len: int) -> LoadedModel:
    return load(from_kwargs(model=str(file), ops="native", max_model_len=max_len, **settings))


def scorer_of(model: LoadedModel, scheme: str) -> ProgramScorer:
    return make_scorer(model, parse_scheme(scheme))


def speeds(files: Sequence[Path]) -> dict[tuple[str, str], dict[str, Any]]:
    """(file, scheme) -> the engines' figures, as `peers/stored_formats.py` writes them; later files win."""
    found = {}
    for path in files:
        result = json.loads(path.read_text())
        asked = json.loads(result["asked"]["options"]).get("penstock", {})
        for one in result["files"]:
            found[one["file"], asked.get("quantization", "none")] = one["engines"]
    return found


def row(cell: Mapping[str, Any], speed: Mapping[str, Any]) -> list[str]:
    """A line of the table. Speeds: Penstock's, in brackets the fastest peer's."""
    told = [cell["name"], f"{cell['file_bytes'] / 1e6:.0f}" if cell["scheme"] == "none" else ""]
    if "error" in cell:
        return [*told, cell["error"][:60], *[""] * (len(COLUMNS) - 3)]
    says = cell["exact"].values()
    word = "no" if False in says else "yes" if True in says else "float" if cell["scheme"] == "none" else "rounded"
    low, high = cell["over_float32_interval"]
    kl_low, kl_high = cell["kl_interval"]
    return [
        *told, f"{cell['resident'] / 1e6:.0f}", word, f"{cell['perplexity']:.3f}",
        f"{cell['over_float32']:+.2%} ({low:+.2%} to {high:+.2%})",
        f"{cell['kl'] * 1e5:.0f} ({kl_low * 1e5:.0f} to {kl_high * 1e5:.0f})", f"{cell['same']:.1%}",
        *(beside(speed, figure) for figure in ("prefill_tps", "decode_tps")),
    ]  # fmt: skip


def beside(speed: Mapping[str, Any], figure: str) -> str:
    rates = {name: e[figure]["median"] for name, e in speed.items() if figure in e}
    if "penstock" not in rates:
        return ""
    peer = max((rate for name, rate in rates.items() if name != "penstock"), default=None)
    return f"{rates['penstock']:,.0f}" + ("" if peer is None else f" ({peer:,.0f})")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original", type=Path, metavar="ORIGINAL.gguf")
    parser.add_argument("--files", nargs="*", type=Path, default=[])
    parser.add_argument("--schemes", default="int8-w8a8,int4-w4a8:128", help="comma-separated; empty: none")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--stride", type=int, default=192)
    parser.add_argument("--speeds", nargs="*", type=Path, default=[])
    parser.add_argument("--kept", type=Path, help="default: a folder that goes with the run")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--markdown", type=Path, help="write the table there, too")
    args = parser.parse_args()
    wanted = cells(args.original, args.files, [s for s in args.schemes.split(",") if s])
    asked = {k: getattr(args, k) for k in ("max_tokens", "window", "stride")}
    asked |= {"text": args.text.name, "original": args.original.name}
    done = json.loads(args.out.read_text()) if args.out.exists() else {"asked": asked, "cells": []}
    if done["asked"] != asked:
        raise SystemExit(f"{args.out} was measured with {done['asked']}: ask for the same, or name another file")
    kept = {cell["name"]: cell for cell in done["cells"]}
    missing = [cell for cell in wanted if cell.name not in kept]
    if missing:
        measure(missing, kept, asked, args)
    speed = speeds(args.speeds)
    rows = [row(kept[c.name], speed.get((c.file.name, c.scheme), {})) for c in wanted]
    show(Console(), f"{args.original.name}, {args.text.name}", COLUMNS, rows)
    if args.markdown is not None:
        args.markdown.write_text(markdown(COLUMNS, rows), "utf-8")


def measure(
    missing: Sequence[Cell], kept: dict[str, dict[str, Any]], asked: dict[str, Any], args: argparse.Namespace
) -> None:
    """Every missing cell, kept in `kept` and in the file as soon as it is there."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, bar:
        task = bar.add_task("float32", total=len(missing))
        model = loaded(args.original, FLOAT32, args.window)
        assert model.tokenizer is not None, "a GGUF file has its tokenizer"
        logits = args.kept or Path(folder)
        logits.mkdir(parents=True, exist_ok=True)
        reference = KeptOnDisk(scorer_of(model, "none"), logits)
        read = passage(
            args.text.read_text("utf-8"), model.tokenizer, reference, window=args.window, stride=args.stride,
            max_tokens=args.max_tokens,
        )  # fmt: skip
        for cell in missing:
            bar.update(task, description=cell.name)
            kept[cell.name] = measured(cell, reference, read, args.window)
            save(str(args.out), about(benchmark="formats", asked=asked, cells=list(kept.values())))
            bar.advance(task)


if __name__ == "__main__":
    main()
