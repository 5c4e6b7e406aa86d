"""A mixture on ranks of one thread each, its experts shared out by outputs and whole, beside one process of as many.

    python -m benchmarks.engine.rank_experts [--ranks 2] [--rounds 7] [--experts 64] [--top-k 8] [--hidden 1024]
                                             [--width 512] [--layers 4] [--quantization none] [--out FILE]

The model is made of random numbers, in bfloat16, with Qwen3-MoE's layers. All engines stay up and answer in turns,
every round begun by another; all tokens must be the same. Ratios are of ranks to the one process, round by round, with
Student's interval of 95 % over their logarithms (above 1: ranks are faster). Row H15.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import about, save
from benchmarks.engine.ranks import WORKLOADS, asked, drawn
from rich.console import Console
from rich.table import Table

from penstock import LLM
from penstock.base.bf16 import narrow
from penstock.core.model_spec import weight_shapes
from penstock.families.qwen_moe import Qwen3Moe
from penstock.measure.intervals import ratio_interval


def made(folder: Path, args: argparse.Namespace) -> Path:
    """The model, written as a folder that `LLM` opens."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": args.hidden,
        "intermediate_size": args.width, "moe_intermediate_size": args.width, "num_hidden_layers": args.layers,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": args.hidden // 16, "vocab_size": 32_000,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
        "num_experts": args.experts, "num_experts_per_tok": args.top_k, "norm_topk_prob": True, "bos_token_id": 1,
        "eos_token_id": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    spec = Qwen3Moe().spec(config)
    rng, names = np.random.default_rng(1), Qwen3Moe().weight_map(spec)
    bits = {
        str(names[name]): narrow(rng.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5))
        if len(shape) > 1 else narrow(np.ones(shape, np.float32))
        for name, shape in weight_shapes(spec).items()
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, array in bits.items():  # safetensors' own writer for numpy knows no bfloat16
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": (at, at + array.nbytes)}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in bits.values():
            array.tofile(file)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"ranks": 2, "rounds": 7, "experts": 64, "top-k": 8, "hidden": 1024, "width": 512, "layers": 4}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured(made(Path(folder), args), args)


def measured(model: Path, args: argparse.Namespace) -> None:
    common: dict[str, Any] = {
        "max_model_len": 2048, "enable_prefix_caching": False, "executor": "multiproc", "skip_tokenizer_init": True,
        "dtype": "bfloat16", "quantization": args.quantization,
    }  # fmt: skip
    shared = {"tensor_parallel_size": args.ranks, "threads": 1}
    engines = {
        "one": LLM(model, threads=args.ranks, **common),
        "by outputs": LLM(model, **shared, **common),
        "whole experts": LLM(model, enable_expert_parallel=True, **shared, **common),
    }
    found: dict[str, Any] = {}
    table = Table("workload", "engine", "s", "ratio", "95 %", title=f"{args.ranks} ranks of one thread each")
    for name, (count, length, new) in WORKLOADS.items():
        times: dict[str, list[float]] = {kind: [] for kind in engines}
        for llm in engines.values():
            asked(llm, drawn(0, count, length), new)
        for round_ in range(1, args.rounds + 1):
            kinds, said = list(engines), {}
            turned = kinds[round_ % len(kinds) :] + kinds[: round_ % len(kinds)]
            for kind in turned:
                seconds, said[kind] = asked(engines[kind], drawn(round_, count, length), new)
                times[kind].append(seconds)
            assert all(tokens == said["one"] for tokens in said.values()), "other tokens"
        found[name] = {"seconds": times}
        table.add_row(name, "one", f"{statistics.median(times['one']):.3f}", "", "")
        for kind in list(engines)[1:]:
            middle = statistics.median(a / b for a, b in zip(times["one"], times[kind], strict=True))
            _, interval = ratio_interval(times["one"], times[kind])
            low, high = (math.nan, math.nan) if interval is None else (1 + interval[0], 1 + interval[1])
            found[name][kind] = {"ratio": middle, "interval": [low, high]}
            cells = f"{statistics.median(times[kind]):.3f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}"
            table.add_row("", kind, *cells)
    Console().print(table)
    if args.out:
        sizes = {key: value for key, value in vars(args).items() if key != "out"}
        save(args.out, {**about(), **sizes, "workloads": found})


if __name__ == "__main__":
    main()
