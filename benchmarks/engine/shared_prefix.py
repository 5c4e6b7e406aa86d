"""Tokens per second of a whole engine whose requests begin with the same cached tokens, read once or for each (C56).

    python -m benchmarks.engine.shared_prefix ~/.cache/penstock/smollm2-135m-instruct.gguf [--tokens 1024] [--out FILE]

Two engines with the same weights, `--cascade-attention` on and off, answer `--sequences` requests in turns: a beginning
of `--tokens` that the prefix cache has, and eight tokens of their own. Tokens are compared. `bound`: the same without
the beginning, so hardly any attention: no way of reading keys is faster than that against reading them for each.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import about, figures, ratios, save

from penstock import LLM, SamplingParams

OWN = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    length = options.tokens + OWN + options.steps + 64
    engines = {
        cascade: LLM(
            options.model, ops="native", threads=options.threads, max_num_seqs=options.sequences, max_model_len=length,
            cascade_attention=cascade, dtype=options.dtype, quantization=options.quantization, skip_tokenizer_init=True,
        )
        for cascade in (True, False)
    }  # fmt: skip
    # A process with one thread is measured by its own time, which leaves out most of what other programs take.
    clock = time.process_time if options.threads == 1 else time.perf_counter
    rng = np.random.default_rng(56)
    before = [int(i) for i in rng.integers(100, 10_000, options.tokens)]
    own = [[int(i) for i in rng.integers(100, 10_000, OWN)] for _ in range(options.sequences)]
    params = SamplingParams(temperature=0, max_tokens=options.steps, ignore_eos=True)

    def run(cascade: bool, prefix: list[int]) -> tuple[float, list[Any]]:
        began = clock()
        outs = engines[cascade].generate([{"prompt_token_ids": prefix + ids} for ids in own], params)
        return clock() - began, [tuple(out.outputs[0].token_ids) for out in outs]

    kinds = {"once": (True, before), "each": (False, before), "bound": (True, [])}
    for kind in kinds.values():
        run(*kind)
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(options.rounds):
        tokens = {}
        names = list(kinds)[turn % 3 :] + list(kinds)[: turn % 3]
        for name in names:
            seconds, tokens[name] = run(*kinds[name])
            taken[name].append(seconds)
        assert tokens["once"] == tokens["each"], "other tokens"
    count = options.sequences * options.steps
    found = {
        "model": Path(options.model).name, "dtype": options.dtype, "quantization": options.quantization,
        "threads": options.threads, "tokens": options.tokens,
        "sequences": options.sequences, "steps": options.steps,
        "tokens_per_s": {name: figures([count / s for s in of]) for name, of in taken.items()},
        "gain": ratios(taken["each"], taken["once"]), "bound": ratios(taken["each"], taken["bound"]),
    }  # fmt: skip
    for name, of in taken.items():
        print(f"{name:6} {count / min(of):7.0f} tokens/s at best")
    gain, bound = found["gain"], found["bound"]
    print(f"gain {gain['of_low']:.2f} (median {gain['median']:.2f}), bound {bound['of_low']:.2f}")
    if options.out:
        save(options.out, about(**found))


if __name__ == "__main__":
    main()
