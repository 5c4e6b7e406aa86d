"""A GGUF file in the shape of a model whose layers keep a state or latent keys, its codes drawn at random.

    python -m benchmarks.peers.make_mixers mamba2-1.3b --out mamba2-1.3b-q8_0.gguf                 # 1.5 GB
    python -m benchmarks.peers.make_mixers qwen3.5-0.8b --out qwen3.5-0.8b-q8_0.gguf               # 0.8 GB
    python -m benchmarks.peers.make_mixers rwkv7-1.5b --out rwkv7-1.5b-q8_0.gguf                   # 1.7 GB
    python -m benchmarks.peers.make_mixers deepseek-v2-lite --layers 8 --out v2-lite-8-q8_0.gguf   # 5.2 GB

As `make_experts` does it, every matrix of Q8_0. `--layers`: fewer than the shape has where memory asks for it. Decays,
steps and their like have values as trained models have them, so that states neither vanish nor grow.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.peers.convert import metadata
from benchmarks.peers.make_experts import F32, Q8_0, Tensor, pieces, write
from benchmarks.peers.make_models import DEVIATION, tokenizer

Shape = dict[str, tuple[int, ...]]
FILE_Q8_0 = 7
_COMMON = {"rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1, "rope_theta": 10000.0}
SHAPES: dict[str, dict[str, Any]] = {
    "mamba2-1.3b": _COMMON | {
        "model_type": "mamba2", "hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 50288,
        "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 0, "max_position_embeddings": 1 << 20,
        "inner": 4096, "state": 128, "heads": 64, "groups": 1, "conv": 4,
    },
    "qwen3.5-0.8b": _COMMON | {
        "model_type": "qwen35", "hidden_size": 1024, "num_hidden_layers": 24, "vocab_size": 248320,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 3584,
        "max_position_embeddings": 262144, "rope_theta": 1e7, "rms_norm_eps": 1e-6, "inner": 2048, "state": 128,
        "heads": 16, "groups": 16, "conv": 4,
    },
    "rwkv7-1.5b": _COMMON | {
        "model_type": "rwkv7", "hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 65536,
        "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 8192,
        "max_position_embeddings": 1 << 20, "head": 64, "decay": 96, "rate": 96, "residual": 64, "gate": 256,
    },
    "deepseek-v2-lite": _COMMON | {
        "model_type": "deepseek2", "hidden_size": 2048, "num_hidden_layers": 27, "vocab_size": 102400,
        "num_attention_heads": 16, "num_key_value_heads": 1, "intermediate_size": 10944, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 16384, "rank": 512, "rope": 64, "nope": 128, "value": 128, "experts": 64,
        "chosen": 6, "expert_width": 1408, "shared": 2,
    },
}  # fmt: skip


def _mamba2(c: dict[str, Any], _layer: int) -> Shape:
    e, inner, channels = c["hidden_size"], c["inner"], c["inner"] + 2 * c["groups"] * c["state"]
    return {
        "attn_norm.weight": (e,), "ssm_in.weight": (inner + channels + c["heads"], e),
        "ssm_conv1d.weight": (channels, c["conv"]), "ssm_conv1d.bias": (channels,), "ssm_dt.bias": (c["heads"],),
        "ssm_a": (c["heads"], 1), "ssm_d": (c["heads"], 1), "ssm_norm.weight": (c["groups"], inner // c["groups"]),
        "ssm_out.weight": (e, inner),
    }  # fmt: skip


def _qwen35(c: dict[str, Any], layer: int) -> Shape:
    e, f, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    own: Shape = {
        "attn_norm.weight": (e,), "post_attention_norm.weight": (e,), "ffn_gate.weight": (f, e),
        "ffn_up.weight": (f, e), "ffn_down.weight": (e, f),
    }  # fmt: skip
    if layer % 4 == 3:
        q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
        return own | {
            "attn_q.weight": (2 * q, e), "attn_k.weight": (kv, e), "attn_v.weight": (kv, e),
            "attn_output.weight": (e, q), "attn_q_norm.weight": (d,), "attn_k_norm.weight": (d,),
        }  # fmt: skip
    keys, heads = c["groups"] * c["state"], c["heads"]
    return own | {
        "attn_qkv.weight": (2 * keys + c["inner"], e), "attn_gate.weight": (c["inner"], e),
        "ssm_conv1d.weight": (2 * keys + c["inner"], c["conv"]), "ssm_dt.bias": (heads,), "ssm_a": (heads,),
        "ssm_beta.weight": (heads, e), "ssm_alpha.weight": (heads, e), "ssm_norm.weight": (c["state"],),
        "ssm_out.weight": (e, c["inner"]),
    }  # fmt: skip


def _rwkv7(c: dict[str, Any], layer: int) -> Shape:
    e, f, residual = c["hidden_size"], c["intermediate_size"], c["residual"] if layer else c["rate"]
    own: Shape = {"token_embd_norm.weight": (e,), "token_embd_norm.bias": (e,)} if not layer else {}
    for name in ("attn_norm", "attn_norm_2", "time_mix_ln"):
        own |= {f"{name}.weight": (e,), f"{name}.bias": (e,)}
    for name, rank in (("w", c["decay"]), ("a", c["rate"]), ("v", residual)):
        own |= {
            f"time_mix_{name}0.weight": (e,),
            f"time_mix_{name}1.weight": (rank, e),
            f"time_mix_{name}2.weight": (e, rank),
        }
    own |= {"time_mix_g1.weight": (c["gate"], e), "time_mix_g2.weight": (e, c["gate"])}
    own |= {"time_mix_lerp_fused.weight": (6, 1, 1, e), "channel_mix_lerp_k.weight": (1, 1, e)}
    own |= {f"time_mix_{name}.weight": (e,) for name in ("k_k", "k_a", "r_k")}
    own |= {f"time_mix_{name}.weight": (e, e) for name in ("key", "value", "receptance", "output")}
    return own | {"channel_mix_key.weight": (f, e), "channel_mix_value.weight": (e, f)}


def _deepseek2(c: dict[str, Any], layer: int) -> Shape:
    e, h, rank, rope, nope, value = (
        c[k] for k in ("hidden_size", "num_attention_heads", "rank", "rope", "nope", "value")
    )
    own: Shape = {
        "attn_norm.weight": (e,), "ffn_norm.weight": (e,), "attn_kv_a_norm.weight": (rank,),
        "attn_q.weight": (h * (nope + rope), e), "attn_kv_a_mqa.weight": (rank + rope, e),
        "attn_k_b.weight": (h, rank, nope), "attn_v_b.weight": (h, value, rank), "attn_output.weight": (e, h * value),
    }  # fmt: skip
    if not layer:
        f = c["intermediate_size"]
        return own | {"ffn_gate.weight": (f, e), "ffn_up.weight": (f, e), "ffn_down.weight": (e, f)}
    x, f, shared = c["experts"], c["expert_width"], c["shared"] * c["expert_width"]
    return own | {
        "ffn_gate_inp.weight": (x, e), "ffn_gate_exps.weight": (x, f, e), "ffn_up_exps.weight": (x, f, e),
        "ffn_down_exps.weight": (x, e, f), "ffn_gate_shexp.weight": (shared, e), "ffn_up_shexp.weight": (shared, e),
        "ffn_down_shexp.weight": (e, shared),
    }  # fmt: skip


_LAYERS = {"mamba2": _mamba2, "qwen35": _qwen35, "rwkv7": _rwkv7, "deepseek2": _deepseek2}
_WIDE = ("conv1d", "gate_inp", "lerp", "norm", "ssm_a", "ssm_d")
"""Parts of names whose tensors are of float32 whatever their shape."""


def tensors(c: dict[str, Any], num_layers: int) -> Iterator[Tensor]:
    e, arch = c["hidden_size"], c["model_type"]
    found: Shape = {"token_embd.weight": (c["vocab_size"], e)}
    for i in range(num_layers):
        found |= {f"blk.{i}.{name}": shape for name, shape in _LAYERS[arch](c, i).items()}
    if arch == "rwkv7":
        found = {k.replace("blk.0.token_embd_norm", "token_embd_norm"): v for k, v in found.items()}
        found |= {"output_norm.bias": (e,)}
    found |= {"output_norm.weight": (e,)}
    if arch in ("deepseek2", "rwkv7"):
        found |= {"output.weight": (c["vocab_size"], e)}
    for name, shape in found.items():
        is_vector = len(shape) == 1 or any(part in name for part in _WIDE)
        yield name, shape, F32 if is_vector else Q8_0


def drawn(name: str, shape: tuple[int, ...], kind: int, rng: np.random.Generator) -> Iterator[bytes]:
    """As `pieces`, but what states need is as in trained models: decays between 0 and 1, small steps."""
    if kind != F32:
        yield from pieces(name, shape, kind, rng)
        return
    values = rng.standard_normal(shape) * DEVIATION
    if name.endswith("ssm_a"):
        values = -rng.uniform(1.0, 16.0, shape)
    elif name.endswith("ssm_dt.bias"):
        values = np.log(np.expm1(rng.uniform(0.001, 0.1, shape)))
    elif "time_mix_w0" in name:
        values = rng.uniform(-6.0, -1.0, shape)
    elif "lerp" in name or name.endswith("k_a.weight"):
        values = rng.uniform(0.0, 1.0, shape)
    elif "conv1d.weight" in name:
        values = values * 15
    elif "gate_inp" in name:
        values = values * 5
    elif name.endswith("bias"):
        values = values * 0
    elif "norm" in name or "_ln" in name or name.endswith(("ssm_d", "k_k.weight")):
        values = np.ones(shape)
    yield values.astype("<f4").tobytes()


def header(c: dict[str, Any], num_layers: int) -> dict[str, Any]:
    arch = c["model_type"]
    found = metadata(c | {"num_hidden_layers": num_layers}, tokenizer(c["vocab_size"]))
    if arch in ("mamba2", "rwkv7"):
        found = {
            k: v for k, v in found.items() if not k.startswith((f"{arch}.attention.key", f"{arch}.attention.value"))
        }
        found = {k: v for k, v in found.items() if not k.startswith(f"{arch}.rope")} | {
            f"{arch}.attention.head_count": 0
        }
        found.pop(f"{arch}.attention.head_count_kv")
    own: dict[str, Any] = {}
    if "inner" in c:
        own = {
            "ssm.conv_kernel": c["conv"], "ssm.inner_size": c["inner"], "ssm.state_size": c["state"],
            "ssm.time_step_rank": c["heads"], "ssm.group_count": c["groups"],
        }  # fmt: skip
    if arch == "qwen35":
        own |= {"rope.dimension_sections": [11, 11, 10, 0], "full_attention_interval": 4, "rope.dimension_count": 64}
    if arch == "rwkv7":
        own |= {
            "attention.layer_norm_epsilon": 1e-5, "wkv.head_size": c["head"], "attention.decay_lora_rank": c["decay"],
            "attention.iclr_lora_rank": c["rate"], "attention.value_residual_mix_lora_rank": c["residual"],
            "attention.gate_lora_rank": c["gate"], "token_shift_count": 2,
        }  # fmt: skip
    if arch == "deepseek2":
        rank, rope = c["rank"], c["rope"]
        own |= {
            "attention.kv_lora_rank": rank, "attention.key_length": rank + rope, "attention.value_length": rank,
            "attention.key_length_mla": c["nope"] + rope, "attention.value_length_mla": c["value"],
            "rope.dimension_count": rope, "leading_dense_block_count": 1, "expert_count": c["experts"],
            "expert_used_count": c["chosen"], "expert_feed_forward_length": c["expert_width"],
            "expert_shared_count": c["shared"], "expert_weights_scale": 1.0, "attention.q_lora_rank": 0,
        }  # fmt: skip
    return found | {"general.file_type": FILE_Q8_0} | {f"{arch}.{key}": value for key, value in own.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    c, layers = SHAPES[args.shape], args.layers or SHAPES[args.shape]["num_hidden_layers"]
    try:
        write(list(tensors(c, layers)), header(c, layers), args.out, make=drawn)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
