"""ALISA against plain offloading in the same memory: tokens per second, and bytes between device and host. Row B25.

    python -m benchmarks.serving.set_aside MODEL --rounds 3 --out set-aside.json

All requests are there at once and their KV is several times the memory. `offload`: who finds no room goes to host
memory whole, and comes back whole. `recompute`: nobody goes there. `alisa`: a part of each sequence's tokens is read,
what is not chosen goes to host memory; `alisa, no host` computes again. Engines run in turns, in one process. `whole`,
`offload` and `recompute` must give the same tokens, and so must all three kinds of `alisa`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import about, figures, save
from rich.console import Console

from penstock.core.page_ops import AnyPageOp, LoadOp, StoreOp
from penstock.core.request import Request
from penstock.core.sampling import TokenRules


class Traffic:
    """Bytes that the copies of a rank's storage move out and back."""

    def __init__(self, core: Any) -> None:
        self.out = self.back = 0
        self._storage = core.executor.runner.storage
        (group,) = core.kv.groups
        self.page_bytes = core.kv.swaps.page_bytes[0]
        self.line_token_bytes = self.page_bytes / core.kv.block_size
        assert group.pages_per_slab
        self._apply, self._storage.apply = self._storage.apply, self.apply

    def apply(self, ops: Sequence[AnyPageOp], pack: Any = None) -> Any:
        ops = list(ops)
        self.out += sum(op.count for op in ops if isinstance(op, StoreOp)) * self.page_bytes
        self.back += sum(op.count for op in ops if isinstance(op, LoadOp)) * self.page_bytes
        return self._apply(ops, pack)


def engine(args: argparse.Namespace, blocks: int, **more: Any) -> Any:
    from penstock import LLM

    llm = LLM(
        args.model, skip_tokenizer_init=True, block_size=args.block, num_gpu_blocks_override=blocks,
        max_model_len=args.prompt + args.answer, max_num_seqs=args.requests, speculative_config='{"method": "none"}',
        enable_prefix_caching=False, **more,
    )  # fmt: skip
    llm.traffic = Traffic(llm.engine.core)
    return llm


def engines_of(args: argparse.Namespace) -> dict[str, Any]:
    alisa = {
        "kv_selector": "alisa", "kv_budget": args.budget,
        "kv_selector_config": json.dumps({"interval": args.interval}),
    }  # fmt: skip
    swap = {"swap_space": args.swap_space, "preemption_mode": "swap"}
    ample = 2 * args.requests * (-(-(args.prompt + args.answer) // args.block))
    return {
        "whole": engine(args, ample),
        "recompute": engine(args, args.blocks),
        "offload": engine(args, args.blocks, **swap),
        "alisa, all near": engine(args, ample, **alisa),
        "alisa, no host": engine(args, args.blocks, **alisa),
        "alisa": engine(args, args.blocks, swap_space=args.swap_space, **alisa),
    }


def served(llm: Any, requests: Sequence[tuple[int, ...]], answer: int) -> dict[str, Any]:
    core, traffic = llm.engine.core, llm.traffic
    selections = getattr(core.executor.runner, "selections", None)
    before = (traffic.out, traffic.back, core.stats.num_preemptions, core.kv.selections.num_sent)
    looked = (selections.num_fetched, selections.num_scored) if selections else (0, 0)
    tokens: dict[str, list[int]] = {}
    for i, ids in enumerate(requests):
        rules = TokenRules(temperature=0.0)
        core.add(Request(request_id=str(i), prompt_token_ids=list(ids), rules=rules, max_tokens=answer))
    began, most = time.perf_counter(), 0
    while core.has_work:
        for out in core.step():
            assert out.error is None, out.error
            tokens.setdefault(out.request_id, []).extend(out.token_ids)
        most = max(most, len(core.scheduler.running))
    seconds = time.perf_counter() - began
    fetched, scored = (selections.num_fetched, selections.num_scored) if selections else (0, 0)
    per = traffic.line_token_bytes
    return {
        "tokens_per_s": answer * len(requests) / seconds, "at_once": most,
        "out_bytes": traffic.out - before[0],
        "back_bytes": traffic.back - before[1] + per * (fetched - looked[0]),
        # Keys are half of what a token has; they are read where they are.
        "scored_bytes": per * (scored - looked[1]) / 2,
        "preemptions": core.stats.num_preemptions - before[2], "sent_blocks": core.kv.selections.num_sent - before[3],
        "tokens": tokens,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--blocks", type=int, default=120, help="KV memory")
    parser.add_argument("--block", type=int, default=16, help="tokens of a block")
    parser.add_argument("--swap-space", type=float, default=1.0, help="GiB")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--budget", default="20%")
    parser.add_argument("--interval", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    console, engines, rounds = Console(), engines_of(args), []
    alike = True
    for number in range(args.rounds + 1):
        rng = random.Random(args.seed + number)
        vocab = next(iter(engines.values())).engine.spec.vocab_size
        asked = [tuple(rng.randrange(3, vocab) for _ in range(args.prompt)) for _ in range(args.requests)]
        order = list(engines) if number % 2 else list(reversed(engines))
        found = {name: served(engines[name], asked, args.answer) for name in order}
        said = {name: one.pop("tokens") for name, one in found.items()}
        alike = alike and said["whole"] == said["offload"] == said["recompute"]
        alike = alike and said["alisa"] == said["alisa, no host"] == said["alisa, all near"]
        if number:
            rounds.append(found)
            console.print(found)
    ratios = {
        f"{a} / {b}": figures([r[a]["tokens_per_s"] / r[b]["tokens_per_s"] for r in rounds])
        for a, b in (("alisa", "offload"), ("alisa", "recompute"), ("alisa", "alisa, no host"), ("alisa", "whole"))
    }
    console.print(ratios, alike)
    asked_for = {name: value for name, value in vars(args).items() if name not in ("out", "model")}
    save(args.out, about(model=Path(args.model).name, asked=asked_for, alike=alike, rounds=rounds, ratios=ratios))
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
