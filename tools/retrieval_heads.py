"""Measures which heads of a model find facts, and writes the profile that `kv_selector=retrieval` reads.

    python tools/retrieval_heads.py MODEL heads.json [--tokens 512 1024] [--texts 20]

What is measured: `penstock.eval.heads`. The profile holds a score per layer and kv head, and the fingerprint of the
weights, so that it is never used for another model. A bundled model's lies in its folder as retrieval_heads.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from penstock.config import from_kwargs
from penstock.eval.heads import head_scores, needle_texts
from penstock.eval.maps import MapReader
from penstock.eval.scorer import load
from penstock.eval.tasks.prose import noise_of, prose
from penstock.weights.load import fingerprint


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024], help="lengths of the texts")
    parser.add_argument("--texts", type=int, default=20, help="of each length")
    parser.add_argument("--prose", type=Path, help="file to hide facts in; the package's own sample if not said")
    options = parser.parse_args(arguments)
    model = load(from_kwargs(model=options.model, ops="ref"))
    assert model.tokenizer is not None, "a model with a tokenizer"
    noise = noise_of(prose(options.prose))
    texts = [
        text
        for tokens in options.tokens
        for text in needle_texts(model.tokenizer, model.spec.bos_token_id, noise, tokens, options.texts)
    ]
    found = head_scores(MapReader(model), texts)
    rows = [[round(float(x), 4) for x in found.scores.get(n, ())] for n in range(len(model.spec.layers))]
    lengths = " and ".join(str(n) for n in options.tokens)
    profile = {
        "fingerprint": fingerprint(model.weights),
        "measured": f"attention on a needle's number in {found.num_texts} texts of {lengths} tokens; "
        f"{found.right:.0%} of the numbers' tokens would have been given",
        "scores": rows,
    }
    options.out.write_text(json.dumps(profile, indent=1) + "\n", "utf-8")
    console = Console()
    console.print(profile["measured"])
    for n, row in enumerate(rows):
        console.print(f"layer {n}: {'  '.join(f'{x:.3f}' for x in row)}")


if __name__ == "__main__":
    main()
