"""Conversations that come back when their KV has long left the memory: tiers (host and disk) against computing anew.

    python -m benchmarks.serving.multi_turn MODEL --num-gpu-blocks 96 --out multi-turn.json

So many conversations that their KV is `--times` that of the memory. Each begins with a document; at every turn it says
something more and gets an answer. All say their turn before anyone says the next, in an order that a seed draws, so
whoever comes back finds its place in memory taken. `--clients` of them are answered at a time, the next as soon as one
has ended. Three engines in one process take the same turn one after the other, the first of them in turn: `tiers`,
`recompute` (the same memory without tiers) and `stateless` (nothing is kept between turns).

Throughput is of generated tokens over all turns, and over those that come back (the first one is computed by both).
Tokens are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import about, save
from rich.console import Console

from penstock.core.page_ops import DISK
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.sim.driver import hits_by_tier

BLOCK = 32
ENGINES = ("tiers", "recompute", "stateless")
GOALS = {"throughput": 1.5, "p99_ttft": 0.5}


@dataclass
class Engine:
    """An engine and what it has said: `texts` by conversation; `ttft_s` and `seconds` by turn."""

    llm: Any
    texts: list[list[int]]
    ttft_s: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def turn(self, order: Sequence[int], number: int, reply: int, clients: int) -> None:
        """All conversations get an answer. Mutates: `texts`."""
        core = self.llm.engine.core
        todo, asked_s, first_s = list(reversed(order)), dict[str, float](), dict[str, float]()
        began_s = time.perf_counter()
        running = 0
        while todo or running:
            while todo and running < clients:
                n = todo.pop()
                name = f"{n}/{number}"
                core.add(Request(
                    request_id=name, prompt_token_ids=list(self.texts[n]), rules=TokenRules(temperature=0.0),
                    max_tokens=reply,
                ))  # fmt: skip
                asked_s[name] = time.perf_counter()
                running += 1
            for out in core.step():
                assert out.error is None, out.error
                if out.token_ids:
                    first_s.setdefault(out.request_id, time.perf_counter() - asked_s[out.request_id])
                    self.texts[int(out.request_id.partition("/")[0])] += out.token_ids
                running -= out.finish_reason is not None
        self.seconds.append(time.perf_counter() - began_s)
        self.ttft_s.append([first_s[f"{n}/{number}"] for n in order])
        while core.has_work:  # what is still to be written; nobody waits for it
            core.step()


def sizes(args: argparse.Namespace) -> tuple[int, int]:
    """(tokens of a conversation at its end, conversations)."""
    whole = args.document + args.turns * (args.say + args.reply)
    blocks = -(-whole // BLOCK)
    return whole, -(-args.times * args.num_gpu_blocks // blocks)


def engine(args: argparse.Namespace, name: str, folder: str) -> Any:
    from penstock import LLM

    whole, _ = sizes(args)
    more: dict[str, Any] = {"enable_prefix_caching": name != "stateless"}
    if name == "tiers":
        more |= {"kv_offload": f"disk:{folder},{args.folder}", "kv_load_policy": args.policy}
        more |= {"kv_offload_eviction": args.eviction}
        if args.swap_space:
            more |= {"swap_space": args.swap_space, "enable_hierarchical_cache": True}
    return LLM(
        args.model, skip_tokenizer_init=True, block_size=BLOCK, num_gpu_blocks_override=args.num_gpu_blocks,
        max_model_len=-(-whole // BLOCK) * BLOCK, speculative_config='{"method": "none"}', **more,
    )  # fmt: skip


def measure(args: argparse.Namespace, folder: str, say: Any = lambda text: None) -> dict[str, Any]:
    rng = random.Random(args.seed)
    _, count = sizes(args)
    engines = {}
    for name in ENGINES:
        llm = engine(args, name, folder)
        engines[name] = Engine(llm, [[] for _ in range(count)])
        warm = Engine(llm, [[5] * 40])
        warm.turn([0], -1, 4, 1)
    vocab = llm.engine.spec.vocab_size
    alike = True
    for turn in range(args.turns):
        said = [[rng.randrange(3, vocab) for _ in range(args.say + args.document * (turn == 0))] for _ in range(count)]
        order = rng.sample(range(count), count)
        for name in ENGINES[turn % 3 :] + ENGINES[: turn % 3]:
            for text, more in zip(engines[name].texts, said, strict=True):
                text += more
            engines[name].turn(order, turn, args.reply, args.clients)
            say(f"turn {turn}, {name}: {engines[name].seconds[-1]:.1f} s")
        alike = alike and all(engines[name].texts == engines["tiers"].texts for name in ENGINES)
    engines["tiers"].llm.engine.core.executor._runner.storage.outside.tiers[DISK].close(60.0)
    told = {name: told_of(e, count * args.reply) for name, e in engines.items()}
    stored = engines["tiers"].llm.engine.core.kv.stored
    return {
        "conversations": count, "alike": alike, "engines": told,
        "choices": stored.choices, "evicted": sum(tier.index.num_evicted for tier in stored.tiers),
        "over": {name: over(told["tiers"], told[name]) for name in ENGINES[1:]}, "goals": GOALS,
    }  # fmt: skip


def over(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    return {
        "throughput_ratio": one["tokens_per_s"] / other["tokens_per_s"],
        "returning_throughput_ratio": one["returning_tokens_per_s"] / other["returning_tokens_per_s"],
        "p99_ttft_ratio": one["returning_ttft_s"]["p99"] / other["returning_ttft_s"]["p99"],
    }


def told_of(e: Engine, tokens: int) -> dict[str, Any]:
    """`tokens`: that a turn of all conversations gives."""
    back = [s for turn in e.ttft_s[1:] for s in turn]
    core = e.llm.engine.core
    return {
        "tokens_per_s": tokens * len(e.seconds) / sum(e.seconds),
        "returning_tokens_per_s": tokens * (len(e.seconds) - 1) / sum(e.seconds[1:]),
        "returning_ttft_s": {f"p{q}": float(np.percentile(back, q)) for q in (50, 99)},
        "seconds_of_turns": e.seconds, "hits": hits_by_tier(core.kv), "preemptions": core.stats.num_preemptions,
    }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    out.add_argument("model")
    out.add_argument("--num-gpu-blocks", type=int, default=96, help=f"KV memory, in blocks of {BLOCK} tokens")
    out.add_argument("--times", type=int, default=8, help="KV of all conversations over that")
    out.add_argument("--swap-space", type=float, default=0.05, help="of the host's tier, GiB; 0: the disk alone")
    out.add_argument("--document", type=int, default=512)
    out.add_argument("--say", type=int, default=48, help="tokens that are said at a turn")
    out.add_argument("--reply", type=int, default=16)
    out.add_argument("--turns", type=int, default=4)
    out.add_argument("--clients", type=int, default=4)
    out.add_argument("--policy", default="auto", help="kv_load_policy")
    out.add_argument("--eviction", default="lru", help="kv_offload_eviction")
    out.add_argument("--folder", default="20GiB", help="how large the folder may get")
    out.add_argument("--seed", type=int, default=1)
    out.add_argument("--place", help="where the folder is made (default: the system's temporary folder)")
    out.add_argument("--out")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    console = Console()
    with tempfile.TemporaryDirectory(dir=args.place) as place, console.status("") as status:
        found = measure(args, str(Path(place) / "kv"), status.update)
    console.print_json(json.dumps(found))
    asked = {name: value for name, value in vars(args).items() if name not in ("out", "place", "model")}
    save(args.out, about(model=Path(args.model).name, asked=asked, found=found))
    return 0 if found["alike"] else 1


if __name__ == "__main__":
    sys.exit(main())
