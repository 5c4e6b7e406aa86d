"""Merging an adapter into a copy of the weights: never, at once, or by a threshold, on skewed and on uniform loads.

    python -m benchmarks.engine.merging MODEL [--rounds 3] [--out FILE]

Made adapters (seeded) on all linear layers, a float32 base. Skewed: waves of requests that all have one adapter, now
and then one with others. Uniform: waves whose requests have adapters in turn. Of every load and mode the tokens per
second, modes in turns; the threshold has to be within 5 % of the best of the other two.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.engine.adapters import ALL, made

from penstock import LLM, SamplingParams

MODES = {"never": None, "at once": 1 / 32, "threshold": 0.5}


def waves(load: str, count: int, batch: int, adapters: list[Any]) -> list[list[Any]]:
    """Of each wave, the adapters of its requests."""
    many = [[adapters[(i + w) % len(adapters)] for i in range(batch)] for w in range(count)]
    if load == "uniform":
        return many
    return [many[w] if w % 8 == 7 else [adapters[0]] * batch for w in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--waves", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    how: dict[str, Any] = {
        "enable_lora": True, "max_loras": 4, "dtype": "float32", "max_num_seqs": options.batch, "max_model_len": 256,
        "threads": options.threads, "skip_tokenizer_init": True, "enable_prefix_caching": False,
    }  # fmt: skip
    engines = {mode: LLM(options.model, lora_merge_threshold=share, **how) for mode, share in MODES.items()}
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True, detokenize=False)
    speeds: dict[str, dict[str, list[float]]] = {load: {mode: [] for mode in MODES} for load in ("skewed", "uniform")}
    with tempfile.TemporaryDirectory() as scratch:
        book = engines["never"].engine.adapters
        assert book is not None
        adapters = [
            made(Path(scratch) / f"a{i}", book.sites, list(ALL), options.rank, i, 0.02) for i in range(options.batch)
        ]
        prompts = [{"prompt_token_ids": rng.integers(3, 4000, 8).tolist()} for _ in range(options.batch)]
        for llm in engines.values():
            llm.generate(prompts, params, lora_request=adapters)
        for _ in range(options.rounds):
            for load, found in speeds.items():
                for mode, llm in engines.items():
                    start = time.perf_counter()
                    for wave in waves(load, options.waves, options.batch, adapters):
                        llm.generate(prompts, params, lora_request=wave)
                    number = options.waves * options.batch * options.tokens
                    found[mode].append(number / (time.perf_counter() - start))
                print(load, {mode: round(each[-1], 1) for mode, each in found.items()}, flush=True)
    result: dict[str, Any] = {"model": Path(options.model).name, "batch": options.batch, "rank": options.rank,
                              "threads": options.threads}  # fmt: skip
    for load, found in speeds.items():
        rounds = list(zip(found["never"], found["at once"], found["threshold"], strict=True))
        result[load] = {mode: float(np.median(each)) for mode, each in found.items()}
        result[load]["threshold_to_best"] = float(np.median([t / max(n, a) for n, a, t in rounds]))
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
