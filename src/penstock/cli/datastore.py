"""`penstock datastore build MODEL`: texts as the drafter `rest` wants them."""

from __future__ import annotations

import argparse
from pathlib import Path

EXIT_OK = 0
MAX_TEXT_BYTES = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="build", required=True)
    build = actions.add_parser("build", allow_abbrev=False, help="write a datastore for a model's tokenizer")
    build.add_argument("model", metavar="MODEL", help="folder, file or id of the model that will read it")
    build.add_argument("--tokenizer", metavar="PATH", help="as for the engine, if it is not the model's own")
    build.add_argument("--text", metavar="FILE", nargs="+", required=True, help="texts, UTF-8, to draft from")
    build.add_argument("--out", metavar="FILE", required=True, help="where to write it")


def datastore(args: argparse.Namespace) -> int:
    """Raises PenstockError, before anything is written."""
    from penstock.base.errors import InputError
    from penstock.drafters.datastore import fingerprint, write
    from penstock.families.registry import open_model
    from penstock.formats.files import read_text
    from penstock.launch.hub import local_path
    from penstock.launch.tokenizer import load_tokenizer, named_tokenizer

    texts = [read_text(Path(file), MAX_TEXT_BYTES) for file in args.text]
    checkpoint = open_model(local_path(args.model))
    files = checkpoint.tokenizer if args.tokenizer is None else named_tokenizer(args.tokenizer, checkpoint)
    tokenizer = load_tokenizer(files, checkpoint.spec)
    if tokenizer is None:
        raise InputError("without a tokenizer no text can be read; name one with --tokenizer", param="tokenizer")
    encode = tokenizer.encode_inner
    count = write(Path(args.out), map(encode, texts), checkpoint.spec.vocab_size, fingerprint(encode))
    print(f"{args.out}: {count:,} tokens of {len(texts)} texts, {Path(args.out).stat().st_size:,} bytes")
    return EXIT_OK
