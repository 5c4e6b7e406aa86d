"""What a context switch costs: seconds that steps wait for copies of swapped sequences, by tier, and clients' shares.

    python -m benchmarks.serving.context_switch MODEL --rounds 3 --out context-switch.json

Two clients' long texts hold all places, a third comes again and again with short ones; under policy `fair` it takes a
place each time, so that somebody is swapped out and comes back. `host` copies block by block within the step;
`fastswitch` is the other tier. Engines run in turns; tokens are compared. Stalled: time of the step's
thread in copies, and steps without rows, which wait for a load. A switch is one sequence that goes out and back.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import Any

import numpy as np
from benchmarks.common import about, figures, save
from rich.console import Console

TIERS = ("host", "fastswitch")


def load(scale: int) -> list[Any]:
    from penstock.core.request import Request
    from penstock.core.sampling import TokenRules

    def asked(name: str, tenant: str, length: int, answer: int) -> Request:
        ids = [(7 * i * i + 13 * i + sum(name.encode())) % 1000 + 300 for i in range(length)]
        rules = TokenRules(temperature=0.0)
        return Request(request_id=name, prompt_token_ids=ids, rules=rules, max_tokens=answer, tenant=tenant)

    long = [asked(f"{t}{i}", t, 512 + 128 * i, 24 * scale) for i, t in enumerate("abab")]
    return long + [asked(f"c{i}", "c", 48 + i % 5, 6) for i in range(2 * scale)]


class Stalls:
    """Around a rank's storage and its steps."""

    def __init__(self, core: Any) -> None:
        from penstock.core.page_ops import LoadOp, StoreOp

        self.out_s = self.back_s = self.waiting_s = 0.0
        self.num_ops = self.num_pages = 0
        storage = core.executor._runner.storage
        apply = storage.apply

        def timed(ops: Any, pack: Any = None) -> Any:
            ops = list(ops)
            swaps = [op for op in ops if isinstance(op, StoreOp | LoadOp)]
            if not swaps:
                return apply(ops, pack)
            self.num_ops += len(swaps)
            self.num_pages += sum(op.count for op in swaps)
            found: dict[int, bool] = {}
            for op in ops:  # one by one, so that only copies of swaps are timed
                began = time.thread_time()
                found |= apply([op], pack)
                took_s = time.thread_time() - began
                self.out_s += took_s * isinstance(op, StoreOp)
                self.back_s += took_s * isinstance(op, LoadOp)
            return found

        storage.apply = timed

    @property
    def parts(self) -> tuple[float, float, float]:
        """Seconds in copies out, in copies back, and in steps without rows."""
        return self.out_s, self.back_s, self.waiting_s


def measured(llm: Any, scale: int) -> dict[str, Any]:
    core = llm.engine.core
    stalls = getattr(core, "stalls", None) or Stalls(core)
    core.stalls = stalls
    before = (np.array(stalls.parts), core.stats.num_swaps, stalls.num_ops, core.kv.swaps.kept.num_reused)
    todo = load(scale)
    by_id = {r.request_id: r.tenant for r in todo}
    tokens: dict[str, list[int]] = {}
    served: Counter[str] = Counter()
    for r in todo[:4]:
        core.add(r)
    rest, steps, began = todo[4:], 0, time.perf_counter()
    while rest or core.has_work:
        if rest and (steps % 12 == 8 or not core.has_work):
            core.add(rest.pop(0))
        step_began, scheduled = time.perf_counter(), core.stats.num_scheduled_tokens
        for out in core.step():
            tokens.setdefault(out.request_id, []).extend(out.token_ids)
            if len(core.groups) > 2:
                served[by_id[out.request_id]] += len(out.token_ids)
        if core.stats.num_scheduled_tokens == scheduled:
            stalls.waiting_s += time.perf_counter() - step_began
        steps += 1
    parts, switches = np.array(stalls.parts) - before[0], core.stats.num_swaps - before[1]
    stalled = float(parts.sum())
    total = sum(served.values())
    return {
        "out_s": float(parts[0]), "back_s": float(parts[1]), "waiting_s": float(parts[2]),
        "stalled_s": stalled, "num_switches": switches, "per_switch_ms": 1000 * stalled / max(1, switches),
        "operations": stalls.num_ops - before[2], "reused_blocks": core.kv.swaps.kept.num_reused - before[3],
        "shares": {t: round(n / total, 3) for t, n in sorted(served.items())},
        "seconds": time.perf_counter() - began, "tokens": tokens,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=int, default=12, help="how long the load is")
    parser.add_argument("--out")
    args = parser.parse_args()
    from penstock import LLM

    engines = {
        tier: LLM(
            args.model, max_model_len=2048, max_num_seqs=3, scheduling_policy="fair", preemption_mode="swap",
            swap_space=0.5, swap_tier=tier, enable_prefix_caching=False, skip_tokenizer_init=True,
        )
        for tier in TIERS
    }  # fmt: skip
    rounds: list[dict[str, Any]] = []
    for number in range(args.rounds + 1):
        order = TIERS if number % 2 else TIERS[::-1]
        found = {tier: measured(engines[tier], args.scale) for tier in order}
        assert found["host"].pop("tokens") == found["fastswitch"].pop("tokens"), "tokens differ"
        if number:
            rounds.append(found)
            Console().print(found)
    ratios = [r["host"]["per_switch_ms"] / r["fastswitch"]["per_switch_ms"] for r in rounds]
    result = {"about": about(), "model": args.model, "rounds": rounds, "stall_ratio": figures(ratios)}
    Console().print({"host / fastswitch, stalled per switch": result["stall_ratio"]})
    if args.out:
        save(args.out, result)


if __name__ == "__main__":
    main()
