"""The turns of a model's heads, for `--kv-selector infinigen` with a rank below 1.

    python tools/rehearsal_turns.py MODEL turns.npz [--text FILE] [--tokens 512]

Of the text's last tokens (by default a sample that comes with Penstock); the file holds the fingerprint of the weights.
Source: InfiniGen, arXiv 2406.19707, section 4.2.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from penstock.backends.reference import BlasBackend
from penstock.config import from_kwargs
from penstock.eval.rehearsal import turns_of_text
from penstock.eval.sample import SAMPLE
from penstock.eval.scorer import load
from penstock.weights.load import fingerprint


def write(model_name: str, target: str, text: str, tokens: int) -> None:
    """Raises: ConfigError, ModelError for a model that cannot be loaded."""
    model = load(from_kwargs(model=model_name, ops="ref", max_model_len=tokens))
    assert model.tokenizer is not None, "a model without a tokenizer reads no text"
    ids = model.tokenizer.encode(text)[-tokens:]
    turns = {f"layers.{n}": turn for n, turn in enumerate(turns_of_text(model, BlasBackend(), ids))}
    np.savez(target, fingerprint=np.array(fingerprint(model.weights)), **turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("target")
    parser.add_argument("--text", help="a file")
    parser.add_argument("--tokens", type=int, default=512, help="at most 512")
    args = parser.parse_args()
    write(args.model, args.target, Path(args.text).read_text() if args.text else SAMPLE, min(512, args.tokens))


if __name__ == "__main__":
    main()
