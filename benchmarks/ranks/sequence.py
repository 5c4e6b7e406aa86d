"""A model whose steps are shared out over ranks by their rows: what each method gives away, keeps and computes.

    python -m benchmarks.ranks.sequence MODEL [--ranks 4] [--methods ring,striped,...] [--prompt 128] [--chunk 64]
        [--decode 8] [--capacity TOKENS] [--out FILE]

Every rank is a process with all weights, on reference operations; a prompt is read in chunks, and tokens follow. Logits
are compared with one process. Bytes, operations and memory are counted; how long it took says nothing of other
machines, so it is not shown. Rows H05, H06, H08, H09, H10, H14.
"""

from __future__ import annotations

import argparse
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import about, save
from rich.console import Console
from rich.table import Table

from penstock.backends.sequence import SequenceModel, check_method
from penstock.base.bf16 import F32
from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.core.model_spec import cache_groups
from penstock.eval.scorer import LoadedModel, load
from penstock.model.builder import build
from penstock.model.graph import Graph
from penstock.parallel.messages import Messages
from penstock.parallel.sequence import SEQUENCE_METHODS
from penstock.parallel.team import RankTeam


@cache
def loaded(name: str) -> LoadedModel:
    return load(from_kwargs(model=name, ops="ref"))


def graph_of(name: str) -> Graph:
    model = loaded(name)
    return build(
        model.spec, dict(model.weights), cache_groups(model.spec, "float32"), max_model_len=model.max_len
    )  # fmt: skip


def steps_of(prompt: int, chunk: int, decode: int, vocab: int) -> list[tuple[list[int], list[int]]]:
    ids = [3 + i * 7919 % (vocab - 3) for i in range(prompt + decode)]
    cuts = [*range(0, prompt, chunk), *range(prompt, prompt + decode), prompt + decode]
    return [(ids[a:b], [b - a - 1]) for a, b in pairwise(cuts)]


def played(
    comm: Messages, name: str, method: str, steps: list[tuple[list[int], list[int]]], capacity: int | None
) -> dict[str, Any]:
    """One rank's end."""
    ranked, before = SequenceModel(graph_of(name), comm, method, capacity=capacity), comm.given.copy()
    logits: list[F32] = [ranked.run({"a": (ids, rows)})["a"] for ids, rows in steps]
    return {
        "logits": np.concatenate(logits), "given": dict(comm.given - before), "flops": ranked.work.flops,
        "workspace": ranked.work.workspace, "kv_bytes": ranked.held.peak_bytes,
        "activation_bytes": ranked.program.peak_bytes,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--methods", default=",".join(sorted(SEQUENCE_METHODS)))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--capacity", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    steps = steps_of(args.prompt, args.chunk, args.decode, loaded(args.model).spec.vocab_size)
    tokens = args.prompt + args.decode
    with RankTeam(1) as one:
        (want,) = one.run(played, args.model, "gather", steps, None)
    shown = Table(
        "method", "largest difference", "bytes given per rank and token", "most work / mean", "KV per rank",
        "activations", "scores at once", title=f"{args.model}: {args.ranks} ranks, {tokens} tokens",
    )  # fmt: skip
    found: dict[str, Any] = {}
    with RankTeam(args.ranks) as team:
        for method in args.methods.split(","):
            try:
                check_method(graph_of(args.model), method, args.ranks)
            except ConfigError as error:
                print(error)
                continue
            ranks = team.run(played, args.model, method, steps, args.capacity)
            flops = [rank["flops"] for rank in ranks]
            largest = max(float(np.abs(rank["logits"] - want["logits"]).max()) for rank in ranks)
            row = {
                "relative_difference": largest / float(np.abs(want["logits"]).max()),
                "bytes_given_per_rank_and_token": sum(sum(rank["given"].values()) for rank in ranks)
                / args.ranks
                / tokens,
                "most_work_over_mean": max(flops) / (sum(flops) / args.ranks),
                **{name: max(rank[name] for rank in ranks) for name in ("kv_bytes", "activation_bytes", "workspace")},
            }
            found[method] = {**row, "given": [rank["given"] for rank in ranks]}
            shown.add_row(
                method, f"{row['relative_difference']:.1e}", f"{row['bytes_given_per_rank_and_token']:,.0f}",
                f"{row['most_work_over_mean']:.2f}", f"{row['kv_bytes']:,}", f"{row['activation_bytes']:,}",
                f"{row['workspace']:,}",
            )  # fmt: skip
    own = (f"{want[name]:,}" for name in ("kv_bytes", "activation_bytes", "workspace"))
    shown.add_row("one process", "", "0", "1.00", *own)
    Console(width=140).print(shown)
    if args.out:
        how = {"ranks": args.ranks, "prompt": args.prompt, "chunk": args.chunk, "decode": args.decode}
        one_process = {name: want[name] for name in ("kv_bytes", "activation_bytes", "workspace", "flops")}
        kept = {"about": about(), "model": args.model, **how, "one_process": one_process, "methods": found}
        save(str(args.out), kept)


if __name__ == "__main__":
    main()
