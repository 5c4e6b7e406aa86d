"""Vectors of all-MiniLM-L6-v2 beside sentence-transformers: the same texts, the same vectors, one after the other.

    python -m venv ~/.cache/penstock-peers/venv/st    # once; a build of torch for CPUs is enough
    ~/.cache/penstock-peers/venv/st/bin/pip install torch==2.13.0 sentence-transformers
    python tools/models.py all-minilm-l6-v2
    python -m benchmarks.engine.encoders [--rounds 15] [--out FILE]

Both are loaded once, each in a process of its own with as many threads as the machine has cores, and take turns: a text
or a batch, tokenizing included, until vectors of float32 are there. Between two turns nobody computes for `PAUSE_S`, so
that the other's threads have gone to sleep. Printed are medians in ms, and the median of the ratios of neighbours (more
than 1: Penstock is faster). Texts are drawn (seed 1) of 16 and 128 words, and of 4 to 200, where sentence-transformers
pads. All vectors are compared, within 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.launch.llm import LLM

MODEL = Path.home() / ".cache" / "penstock" / "all-minilm-l6-v2"
PEER = Path.home() / ".cache" / "penstock-peers" / "venv" / "st" / "bin" / "python"
PAUSE_S = 0.3
ATOL = 1e-5
WORDS = [
    "the", "mill", "stands", "by", "river", "water", "wheel", "turns", "stone", "grain", "flour", "bread", "village",
    "people", "walk", "along", "path", "morning", "light", "over", "field", "engine", "serves", "many", "readers", "a",
    "small", "model", "that", "knows", "what", "texts", "are", "about", "and", "nothing", "else",
]  # fmt: skip
_PEER = """
import json, sys, time
import torch
from sentence_transformers import SentenceTransformer
torch.set_num_threads(int(sys.argv[2]))
model = SentenceTransformer(sys.argv[1], device="cpu")
print(json.dumps({"torch": torch.__version__}), flush=True)
for line in sys.stdin:
    texts = json.loads(line)
    began = time.perf_counter()
    found = model.encode(texts, batch_size=64, show_progress_bar=False)
    took = time.perf_counter() - began
    print(json.dumps({"s": took, "vectors": found.tolist()}), flush=True)
"""
"""What the other side runs: a line of texts in, a line with its time and vectors out."""


class Peer:
    """sentence-transformers in a process of its own."""

    def __init__(self, threads: int) -> None:
        self._process = subprocess.Popen(
            [PEER, "-c", _PEER, MODEL, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, cwd="/",
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )  # fmt: skip
        self.facts = self._line()

    def _line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"sentence-transformers ended; try {PEER} -c 'import sentence_transformers'")
        return json.loads(line)

    def embed(self, texts: Sequence[str]) -> tuple[float, np.ndarray]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(texts) + "\n")
        self._process.stdin.flush()
        found = self._line()
        return found["s"], np.array(found["vectors"], np.float32)

    def close(self) -> None:
        self._process.kill()  # it keeps nothing
        self._process.wait()


def ours(llm: LLM, texts: Sequence[str]) -> tuple[float, np.ndarray]:
    began = time.perf_counter()
    found = llm.embed(list(texts), truncate_prompt_tokens=-1)
    took = time.perf_counter() - began
    return took, np.array([one.outputs.embedding for one in found], np.float32)


def cases() -> dict[str, list[str]]:
    rng = random.Random(1)

    def text(num_words: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(num_words))

    out = {}
    for words in (16, 128):
        out |= {
            f"1 text of {words} words": [text(words)],
            f"64 texts of {words} words": [text(words) for _ in range(64)],
        }
    out["64 texts of 4 to 200 words"] = [text(rng.randint(4, 200)) for _ in range(64)]
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="embeddings beside sentence-transformers")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if not PEER.exists() or not MODEL.exists():
        raise SystemExit(f"{PEER if not PEER.exists() else MODEL} is missing; the head of this file says how to get it")
    threads = len(os.sched_getaffinity(0))
    llm, peer = LLM(MODEL), Peer(threads)
    rows: list[dict[str, Any]] = []
    try:
        for name, texts in cases().items():
            mine: list[float] = []
            theirs: list[float] = []
            worst = 0.0
            for number in range(args.rounds + 2):  # the first two warm up
                turns = [(mine, lambda t: ours(llm, t)), (theirs, peer.embed)]
                vectors = []
                for times, embed in turns if number % 2 else reversed(turns):
                    time.sleep(PAUSE_S)
                    took, found = embed(texts)
                    vectors.append(found)
                    if number >= 2:
                        times.append(took)
                worst = max(worst, float(np.abs(vectors[0] - vectors[1]).max()))
            rows.append({
                "case": name, "penstock_ms": 1e3 * statistics.median(mine), "peer_ms": 1e3 * statistics.median(theirs),
                "ratio": statistics.median(b / a for a, b in zip(mine, theirs, strict=True)),
                "best_ratio": min(theirs) / min(mine), "worst_difference": worst,
            })  # fmt: skip
    finally:
        peer.close()
    table = Table("texts", "Penstock", "sentence-transformers", "ratio", "of the fastest", "difference")
    for row in rows:
        table.add_row(
            row["case"], f"{row['penstock_ms']:.2f} ms", f"{row['peer_ms']:.2f} ms", f"{row['ratio']:.2f}",
            f"{row['best_ratio']:.2f}", f"{row['worst_difference']:.1e}",
        )  # fmt: skip
    Console().print(table)
    if args.out is not None:
        facts = {"cores": threads, "processor": platform.processor(), "rounds": args.rounds, **peer.facts}
        args.out.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
    return int(any(row["worst_difference"] > ATOL for row in rows))


if __name__ == "__main__":
    sys.exit(main())
