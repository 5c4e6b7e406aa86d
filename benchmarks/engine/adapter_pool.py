"""One pool for adapters and KV against two of the same bytes together.

    python -m benchmarks.engine.adapter_pool [MODEL] [--rounds 3] [--out FILE]

Two kinds of traffic, one after the other and three times each: `texts` (few adapters, more cached texts than half of
the memory holds) and `tenants` (more adapters than half of it holds, short requests). Memory: `--blocks` blocks of KV,
or half of them and as many bytes for adapters. Told of each: the share of prompt tokens that came from the prefix
cache, the share of requests whose adapter was in memory, adapters given up, and seconds. Requests come one by one, so
all but the seconds follow from the order of requests.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.engine.adapters import made

import penstock
from penstock import LLM, LoRARequest, SamplingParams

NANO = Path(penstock.__file__).parent / "bundled" / "nano"
BLOCK = 16


class Traffic:
    """Requests: (adapter, prompt)."""

    def __init__(self, adapters: list[LoRARequest], blocks: int, vocab: int, per_adapter: int) -> None:
        rng = np.random.default_rng(1)
        few = adapters[:4]
        length = 4 * BLOCK
        room = (blocks - len(few) * per_adapter) // (length // BLOCK + 1) - 2
        texts = rng.integers(5, vocab, (room, length)).tolist()
        short = rng.integers(5, vocab, 8).tolist()
        self.texts = [(few[i % len(few)], text) for i, text in enumerate(texts)]
        self.tenants = [(adapter, short) for adapter in adapters]


def run(llm: LLM, asked: list[tuple[LoRARequest, list[int]]], rounds: int) -> dict[str, float]:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    core, stats = llm.engine.core, llm.engine.core.stats
    had = core.kv.stats(), stats.num_adapters_wanted, stats.num_adapter_hits, stats.num_adapters_given_up
    start = time.perf_counter()
    for _ in range(rounds):
        for adapter, ids in asked:
            llm.generate({"prompt_token_ids": ids}, params, lora_request=adapter)
    spent, now = time.perf_counter() - start, core.kv.stats()
    looked = now.num_prefix_query_tokens - had[0].num_prefix_query_tokens
    found = now.num_prefix_hit_tokens - had[0].num_prefix_hit_tokens
    wanted, hits = stats.num_adapters_wanted - had[1], stats.num_adapter_hits - had[2]
    return {
        "prefix_hits": round(found / looked, 3), "adapter_hits": round(hits / wanted, 3),
        "given_up": stats.num_adapters_given_up - had[3], "s": round(spent, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(NANO))
    parser.add_argument("--blocks", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--ops", default="native")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    same: dict[str, Any] = {
        "enable_lora": True, "max_loras": 4, "max_cpu_loras": 256, "max_model_len": 128, "block_size": BLOCK,
        "ops": options.ops, "threads": 2, "skip_tokenizer_init": True,
    }  # fmt: skip
    result: dict[str, Any] = {"model": Path(options.model).name, "blocks": options.blocks, "rank": options.rank}
    with tempfile.TemporaryDirectory() as scratch:
        one = LLM(options.model, num_gpu_blocks_override=options.blocks, **same)
        assert one.engine.adapters is not None
        block_bytes = sum(group.slab_bytes(BLOCK) for group in one.engine.plan.groups)
        first = made(Path(scratch) / "a0", one.engine.adapters.sites, ["q_proj", "v_proj"], options.rank, 0, 0.02)
        ref = one.engine.adapters.read(first.lora_path)
        per_adapter = -(-ref.num_units // one.engine.limits.adapter_units)
        sites = one.engine.adapters.sites
        adapters = [first] + [
            made(Path(scratch) / f"a{i}", sites, ["q_proj", "v_proj"], options.rank, i, 0.02)
            for i in range(1, (options.blocks - 3) // per_adapter)
        ]
        traffic = Traffic(adapters, options.blocks, one.engine.spec.vocab_size, per_adapter)
        half = options.blocks // 2
        gib = half * block_bytes / 2**30
        result["adapters"], result["blocks_of_an_adapter"] = len(adapters), per_adapter
        two = LLM(options.model, num_gpu_blocks_override=options.blocks - half, lora_memory=gib, **same)
        for name, llm in (("one pool", one), ("two", two)):
            for kind in ("texts", "tenants"):
                result[f"{name}, {kind}"] = found = run(llm, getattr(traffic, kind), options.rounds)
                print(name, kind, found, flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
