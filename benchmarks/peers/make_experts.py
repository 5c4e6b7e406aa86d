"""A GGUF file in the shape of a mixture of experts, its codes drawn at random: what one token of 30 billion costs.

    python -m benchmarks.peers.make_experts qwen3-30b-a3b --layers 6 --out qwen3-30b-a3b-6-q4_k_m.gguf       # 2.6 GB
    python -m benchmarks.peers.make_experts gpt-oss-20b --layers 5 --out gpt-oss-20b-5-mxfp4.gguf            # 3.4 GB

As `make_blocks` does it; of Qwen3's shape Q4_K_M, of gpt-oss's experts of MXFP4 beside matrices of Q8_0, as both are
published. `--layers`: fewer than the shape has where memory asks for it; a step's time less that of a file with fewer
layers is that of the layers between.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.peers.convert import metadata, pad, write_header
from benchmarks.peers.make_blocks import BLOCK, BLOCK_BYTES, F32, Q4_K, Q6_K, q4_k, q6_k
from benchmarks.peers.make_blocks import kind as kind_of_dense
from benchmarks.peers.make_models import DEVIATION, tokenizer

Tensor = tuple[str, tuple[int, ...], int]
"""Name, row-major shape, ggml's type."""
Q8_0, MXFP4 = 8, 39
_UNIT = 32
_UNIT_BYTES = {Q8_0: 34, MXFP4: 17}
_AT_ONCE = 1 << 17
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "bos_token_id": 0,
        "eos_token_id": 1, "experts": 128, "chosen": 8, "expert_width": 768,
    },
    "gpt-oss-20b": {
        "model_type": "gpt-oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201088,
        "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "max_position_embeddings": 131072, "bos_token_id": 0,
        "eos_token_id": 1, "experts": 32, "chosen": 4, "expert_width": 2880,
    },
}  # fmt: skip


def tensors(c: dict[str, Any], num_layers: int) -> Iterator[Tensor]:
    """In the order of the file."""
    is_oss = c["model_type"] == "gpt-oss"
    e, f, x = c["hidden_size"], c["expert_width"], c["experts"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]

    def kind(name: str, shape: tuple[int, ...]) -> int:
        if len(shape) == 1 or "ffn_gate_inp" in name or name.endswith(".bias"):
            return F32
        if is_oss:
            return MXFP4 if "_exps" in name else Q8_0
        return kind_of_dense(name.replace("_exps", ""), shape, num_layers)

    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (c["vocab_size"], e)}
    for i in range(num_layers):
        own: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (e,), "attn_q.weight": (q, e), "attn_k.weight": (kv, e), "attn_v.weight": (kv, e),
            "attn_output.weight": (e, q), "ffn_gate_inp.weight": (x, e), "ffn_gate_exps.weight": (x, f, e),
            "ffn_up_exps.weight": (x, f, e), "ffn_down_exps.weight": (x, e, f),
        }  # fmt: skip
        if is_oss:
            own |= {
                "post_attention_norm.weight": (e,), "attn_sinks.weight": (c["num_attention_heads"],),
                "attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,), "attn_output.bias": (e,),
                "ffn_gate_inp.bias": (x,), "ffn_gate_exps.bias": (x, f), "ffn_up_exps.bias": (x, f),
                "ffn_down_exps.bias": (x, e),
            }  # fmt: skip
        else:
            own |= {
                "ffn_norm.weight": (e,),
                "attn_q_norm.weight": (c["head_dim"],),
                "attn_k_norm.weight": (c["head_dim"],),
            }
        shapes |= {f"blk.{i}.{name}": shape for name, shape in own.items()}
    shapes |= {"output_norm.weight": (e,), "output.weight": (c["vocab_size"], e)}
    for name, shape in shapes.items():
        yield name, shape, kind(name, shape)


def num_bytes(shape: tuple[int, ...], kind: int) -> int:
    count = int(np.prod(shape))
    if kind == F32:
        return 4 * count
    return count // BLOCK * BLOCK_BYTES[kind] if kind in BLOCK_BYTES else count // _UNIT * _UNIT_BYTES[kind]


def mxfp4(count: int, rng: np.random.Generator) -> bytes:
    """Blocks of an exponent and 32 codes: 2^-7, so that weights have about the deviation of the others."""
    made = np.zeros(count, np.dtype([("scale", "u1"), ("codes", "u1", 16)]))
    made["scale"] = 127 - 7
    made["codes"] = rng.integers(0, 256, (count, 16), np.uint8)
    return made.tobytes()


def q8_0(count: int, rng: np.random.Generator) -> bytes:
    """Blocks of a half and 32 codes."""
    made = np.zeros(count, np.dtype([("d", "<f2"), ("codes", "i1", 32)]))
    made["codes"] = rng.integers(-127, 128, (count, 32), np.int8)
    made["d"] = DEVIATION / 73.3
    return made.tobytes()


def pieces(name: str, shape: tuple[int, ...], kind: int, rng: np.random.Generator) -> Iterator[bytes]:
    if kind == F32:
        values = np.ones(shape) if "norm" in name else rng.standard_normal(shape) * DEVIATION
        # A router's logits must differ, so that experts are chosen by tokens, not by ids.
        yield (values * (5 if "gate_inp.weight" in name else 1)).astype("<f4").tobytes()
        return
    make = {Q4_K: q4_k, Q6_K: q6_k, Q8_0: q8_0, MXFP4: mxfp4}[kind]
    left = int(np.prod(shape)) // (BLOCK if kind in BLOCK_BYTES else _UNIT)
    while left:
        count = min(left, _AT_ONCE)
        yield make(count, rng)
        left -= count


def header(c: dict[str, Any], num_layers: int) -> dict[str, Any]:
    arch = c["model_type"]
    own: dict[str, Any] = {
        "expert_count": c["experts"],
        "expert_used_count": c["chosen"],
        "expert_feed_forward_length": c["expert_width"],
    }
    if arch == "gpt-oss":
        own |= {
            "attention.sliding_window": 128, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        }  # fmt: skip
    found = metadata(c | {"num_hidden_layers": num_layers}, tokenizer(c["vocab_size"]))
    return found | {f"{arch}.{key}": value for key, value in own.items()}


def write(
    found: Sequence[Tensor],
    values: dict[str, Any],
    out: Path,
    seed: int = 0,
    make: Callable[[str, tuple[int, ...], int, np.random.Generator], Iterator[bytes]] = pieces,
) -> None:
    """A file of `found`, `make` drawing each. Equal seeds make equal bytes. Raises
    ValueError, before anything is written, if the disk has no room."""
    told = [(name, size, kind, num_bytes(size, kind)) for name, size, kind in found]
    total, free = sum(t[-1] for t in told), shutil.disk_usage(out.parent).free
    if free < total:
        raise ValueError(f"{out.parent} has {free / 1e9:.1f} GB left, and {total / 1e9:.1f} are needed")
    part, rng = out.with_name(out.name + ".part"), np.random.default_rng(seed)
    with part.open("wb") as file:
        write_header(file, values, told)
        for name, size, kind in found:
            for piece in make(name, size, kind, rng):
                file.write(piece)
            pad(file)
    part.replace(out)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        c, layers = SHAPES[args.shape], args.layers or SHAPES[args.shape]["num_hidden_layers"]
        write(list(tensors(c, layers)), header(c, layers), args.out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
