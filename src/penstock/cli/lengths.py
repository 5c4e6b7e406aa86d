"""`penstock lengths MODEL --data FILE`: a table of lengths, learned from answers that were given."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

EXIT_OK = 0
MAX_BYTES = 1 << 30
MOST_TOKENS = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder, file or id of the model that gave the answers")
    parser.add_argument("--tokenizer", metavar="PATH", help="as for the engine, if it is not the model's own")
    parser.add_argument(
        "--data", metavar="FILE", required=True,
        help='a JSON object a line: {"prompt": text or ids, "output_tokens": number}, and "max_tokens" if it is known',
    )  # fmt: skip
    parser.add_argument("--out", metavar="FILE", help="write what was learned, for length_predictor learned:file=FILE")
    parser.add_argument(
        "--held-out", type=float, default=0.2, metavar="X", help="share of the lines, the last ones, that are predicted"
    )


def lengths(args: argparse.Namespace) -> int:
    """Raises PenstockError, before anything is written."""
    from rich.console import Console

    from penstock.base.errors import InputError
    from penstock.families.registry import open_model
    from penstock.launch.hub import local_path
    from penstock.launch.tokenizer import load_tokenizer, named_tokenizer
    from penstock.lengths.history import HistoryPredictor
    from penstock.lengths.learned import LearnedPredictor
    from penstock.lengths.taught import EndedRequest, taught
    from penstock.report.tables import table

    if not 0 <= args.held_out < 1:
        raise InputError(f"held-out must be at least 0 and below 1, not {args.held_out}", param="held_out")
    checkpoint = open_model(local_path(args.model))
    files = checkpoint.tokenizer if args.tokenizer is None else named_tokenizer(args.tokenizer, checkpoint)
    tokenizer = load_tokenizer(files, checkpoint.spec)
    examples = [EndedRequest(*found) for found in _read(Path(args.data), tokenizer)]
    split = len(examples) - int(args.held_out * len(examples))
    learned = LearnedPredictor()
    rows = []
    for predictor in (HistoryPredictor(), learned):
        score = taught(predictor, examples[:split], examples[split:])
        if score.num:
            shares = (score.num_hits / score.num, score.num_outgrown / score.num)
            rho = score.correlation
            rows.append([predictor.name, f"{score.num}", *(f"{share:.0%}" for share in shares),
                         f"{score.error_tokens / score.num:.0f}", "-" if rho is None else f"{rho:.2f}"])  # fmt: skip
    if rows:
        columns = ["predictor", "predicted", "in their bucket", "longer", "mean error, tokens", "rank correlation"]
        Console().print(table(columns, rows, title=f"{len(examples) - split} held-out lines of {len(examples)}"))
    if args.out is not None:
        learned.save(Path(args.out))
        print(f"{args.out}: learned from {learned.num_learned} lines")
    return EXIT_OK


def _read(path: Path, tokenizer: Tokenizer | None) -> list[tuple[list[int], int, int]]:
    """(prompt, max_tokens, output tokens) of each line. Raises InputError, naming the line."""
    import msgspec

    from penstock.base.errors import InputError
    from penstock.formats.files import quoted, read_text

    found = []
    for number, line in enumerate(read_text(path, MAX_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{quoted(path)} line {number}"
        try:
            one: Any = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise InputError(f"{where} is not JSON: {error}", param="data") from None
        prompt = one.get("prompt") if isinstance(one, dict) else None
        if isinstance(prompt, str) and tokenizer is None:
            raise InputError("without a tokenizer no text can be read; name one with --tokenizer", param="tokenizer")
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) and tokenizer is not None else prompt
        if not isinstance(ids, list) or not ids or any(type(i) is not int or not 0 <= i < 1 << 31 for i in ids):
            raise InputError(f"{where} needs a prompt, a text or token ids", param="data")
        length = one.get("output_tokens")
        most = one.get("max_tokens", MOST_TOKENS)
        if type(length) is not int or type(most) is not int or not 1 <= length <= most <= MOST_TOKENS:
            raise InputError(
                f"{where} needs output_tokens from 1 to max_tokens, which is at most {MOST_TOKENS}", param="data"
            )
        found.append((ids, most, length))
    if not found:
        raise InputError(f"{quoted(path)} has no lines", param="data")
    return found
