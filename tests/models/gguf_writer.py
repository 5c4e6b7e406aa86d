"""A model as llama.cpp's converter writes it: from a spec and logical weights to metadata and tensors of a GGUF file.

Written from convert_hf_to_gguf.py of github.com/ggml-org/llama.cpp, and compared with its output, not from
`families.gguf`, whose inverse it is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np

from penstock.core.model_spec import (
    Attention,
    Experts,
    FeedForward,
    GatedDelta,
    Latent,
    Layer,
    Mamba,
    Mamba2,
    ModelSpec,
    Norm,
    Qrwkv6,
    Rope,
    Rwkv6,
    Rwkv7,
    ShortConv,
)  # fmt: skip
from tests.ggml import F32, write_gguf

Weights = dict[str, F32]
Metadata = dict[str, Any]
TURNED = {
    "llama",
    "arcee",
    "granite",
    "smollm3",
    "mistral3",
    "internlm2",
    "minicpm",
    "deci",
    "granitemoe",
    "granitehybrid",
    "bailingmoe",
}
"""Rows of q and k are put in an order in which rotary pairs, halves of a head before, are neighbours."""
FUSED_QKV = {"gpt2", "starcoder", "bloom", "mpt", "falcon", "gptneox", "phi3", "bailingmoe2"}
FUSED_UP = {"phi3", "glm4", "chatglm"}
UNSAID = {"gpt2", "starcoder", "bloom", "mpt", "falcon", "gptneox", "phi2", "phi3", "granite", "chatglm", "stablelm",
          "phimoe", "jamba"}  # fmt: skip
"""Their files say no size of a head."""
BLOCKS_ARE_HALVES = {"nemotron_h", "nemotron_h_moe"}
LAYERS_OF_BLOCKS = {"falcon-h1": 3}
"""Layers of a spec that one block is, where it is several."""
TOP = {
    "embed": "token_embd", "embed_norm": "token_embd_norm", "positions": "position_embd", "final_norm": "output_norm",
    "lm_head": "output", "ple_embed": "per_layer_token_embd", "ple_in": "per_layer_model_proj",
    "ple_norm": "per_layer_proj_norm",
}  # fmt: skip
LAYER = {
    "attn_norm": "attn_norm", "attn_post_norm": "post_attention_norm", "ffn_norm": "ffn_norm",
    "ffn_post_norm": "post_ffw_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "sinks": "attn_sinks", "gate": "ffn_gate", "up": "ffn_up",
    "down": "ffn_down", "router": "ffn_gate_inp", "shared.gate": "ffn_gate_shexp", "shared.up": "ffn_up_shexp",
    "shared.down": "ffn_down_shexp", "shared_gate": "ffn_gate_inp_shexp", "q_a": "attn_q_a", "q_b": "attn_q_b",
    "q_a_norm": "attn_q_a_norm", "kv_a": "attn_kv_a_mqa", "kv_a_norm": "attn_kv_a_norm", "in": "ssm_in",
    "conv": "ssm_conv1d", "x": "ssm_x", "dt": "ssm_dt", "gate_norm": "ssm_norm", "experts_in": "ffn_latent_down",
    "experts_out": "ffn_latent_up", "dt_norm": "ssm_dt_norm", "b_norm": "ssm_b_norm", "c_norm": "ssm_c_norm",
    "o_gate": "attn_gate", "index_q": "indexer.attn_q_b", "index_k": "indexer.attn_k", "index_k_norm": "indexer.k_norm",
    "index_weights": "indexer.proj", "ple_gate": "inp_gate", "ple_out": "proj", "ple_post_norm": "post_norm",
    "layer_scale": "layer_output_scale", "altup_norm": "altup_router_norm", "altup_router": "altup_router",
    "altup_predict": "altup_predict_coef", "altup_correct": "altup_correct_coef", "altup_scale": "altup_correct_scale",
    "laurel_in": "laurel_l", "laurel_out": "laurel_r", "laurel_norm": "laurel_post_norm",
}  # fmt: skip
POST = {"attn_norm": "post_attention_norm", "ffn_norm": "post_ffw_norm"}
SECOND = {"ffn_norm": "post_attention_norm"}
SHORT = {"in": "shortconv.in_proj", "conv": "shortconv.conv"}
GEMMA4 = {
    "experts_norm": "pre_ffw_norm_2", "experts_post_norm": "post_ffw_norm_2", "shared_post_norm": "post_ffw_norm_1",
    "shared.gate": "ffn_gate", "shared.up": "ffn_up", "shared.down": "ffn_down",
}  # fmt: skip
RENAMED: dict[str, dict[str, str]] = {
    "gpt-oss": SECOND, "glm4moe": SECOND, "seed_oss": SECOND, "qwen3next": SECOND,
    "qwen35": SECOND, "qwen35moe": SECOND, "olmo2": POST, "exaone4": POST,
    "bitnet": {"o_norm": "attn_sub_norm", "down_norm": "ffn_sub_norm"},
    "gemma4": GEMMA4, "lfm2": SHORT, "lfm2moe": SHORT,
    "kimi-linear": {
        "dt_down": "ssm_f_a", "dt": "ssm_f_b", "z_down": "ssm_g_a", "z": "ssm_g_b", "beta": "ssm_beta",
        "head_norm": "ssm_norm",
    },
    "rwkv6": {
        "ffn_norm": "attn_norm_2", "r": "time_mix_receptance", "k": "time_mix_key", "v": "time_mix_value",
        "g": "time_mix_gate", "o": "time_mix_output", "head_norm": "time_mix_ln", "time_decay": "time_mix_decay",
        "w1": "time_mix_decay_w1", "w2": "time_mix_decay_w2", "mix_x": "time_mix_lerp_x", "mix_down": "time_mix_w1",
        "ffn_mix_k": "channel_mix_lerp_k", "ffn_mix_r": "channel_mix_lerp_r", "ffn_r": "channel_mix_receptance",
        "up": "channel_mix_key", "down": "channel_mix_value",
    },
    "rwkv7": {
        "ffn_norm": "attn_norm_2", "r": "time_mix_receptance", "k": "time_mix_key", "v": "time_mix_value",
        "o": "time_mix_output", "head_norm": "time_mix_ln", "ffn_mix_k": "channel_mix_lerp_k", "up": "channel_mix_key",
        "down": "channel_mix_value", "k_k": "time_mix_k_k", "k_a": "time_mix_k_a", "r_k": "time_mix_r_k",
        **{f"{part}{n}": f"time_mix_{part}{n}" for part in "wavg" for n in (0, 1, 2)},
    },
    "nemotron_h": {"ffn_norm": "attn_norm"}, "nemotron_h_moe": {"ffn_norm": "attn_norm"},
}  # fmt: skip


for turned_arch, own_arch in (("rwkv6qwen2", "rwkv6"), ("arwkv7", "rwkv7")):
    RENAMED[turned_arch] = {n: to for n, to in RENAMED[own_arch].items() if n not in ("ffn_norm", "up", "down")}


def write_model(path: Path, spec: ModelSpec, weights: Weights, arch: str) -> Path:
    """`weights`: float32, by logical names."""
    kinds = {name: ("F32", array) for name, array in file_tensors(spec, weights, arch).items()}
    return write_gguf(path, file_metadata(spec, arch), kinds)


def file_tensors(spec: ModelSpec, weights: Weights, arch: str) -> Weights:
    found = tensors_of(spec, weights, arch) | positions_of(spec)
    return {name: np.ascontiguousarray(array, np.float32) for name, array in found.items()}


def file_metadata(spec: ModelSpec, arch: str) -> Metadata:
    metadata: Metadata = {"general.architecture": arch, "tokenizer.ggml.model": "no_vocab"}
    metadata |= {f"tokenizer.ggml.{n}_token_id": i for n, i in (("bos", spec.bos_token_id), ("eos", ends(spec))) if i}
    return metadata | {f"{arch}.{key}": value for key, value in metadata_of(spec, arch).items()}


def write_with_head(path: Path, spec: ModelSpec, weights: Weights, head: ModelSpec, own: Weights, arch: str) -> Path:
    """The same, with a head for multi-token prediction behind the layers; `own`: its weights."""
    n, block = len(spec.layers), f"blk.{len(spec.layers)}.nextn."
    layer = {f"layers.{n}.{name.removeprefix('layers.0.')}": a for name, a in own.items() if name.startswith("layers.")}
    longer = msgspec.structs.replace(spec, layers=(*spec.layers, *head.layers))
    tensors = file_tensors(longer, weights | layer, arch)
    around = {"token_norm": "enorm", "hidden_norm": "hnorm", "final_norm": "shared_head_norm", "embed_in": "eh_proj"}
    for name, stored in around.items():
        tensors[f"{block}{stored}.weight"] = plus(own[name], head.final_norm if name.endswith("norm") else None)
    metadata = file_metadata(spec, arch) | {f"{arch}.block_count": n + 1, f"{arch}.nextn_predict_layers": 1}
    return write_gguf(path, metadata, {name: ("F32", array) for name, array in tensors.items()})


def ends(spec: ModelSpec) -> int | None:
    return spec.eos_token_ids[0] if spec.eos_token_ids else None


# --- tensors


def tensors_of(spec: ModelSpec, weights: Weights, arch: str) -> Weights:
    out: Weights = {}
    weights = folded(spec, weights) if arch == "falcon-h1" else weights
    weights = halved(weights) if arch == "rwkv6" else weights
    norms = {"final_norm": spec.final_norm, "embed_norm": spec.embed_norm}
    for name, array in weights.items():
        if name.startswith(("altup_in_", "altup_out_")):
            continue
        if not name.startswith("layers."):
            base, ending = parts_of(name)
            own_name = "token_embd_norm" if arch.startswith("lfm2") and base == "final_norm" else TOP[base]
            out[f"{own_name}.{ending}"] = plus(array, norms.get(name))
    if spec.altup is not None:
        for own_name, stored in (("altup_in", "altup_proj"), ("altup_out", "altup_unembd_proj")):
            out[f"{stored}.weight"] = np.stack([weights[f"{own_name}_{i}"] for i in range(1, spec.altup.streams)])
    block = 0
    for i, layer in enumerate(spec.layers):
        own = {name.split(".", 2)[2]: a for name, a in weights.items() if name.startswith(f"layers.{i}.")}
        if arch == "gemma3n" and layer.kv_from is not None:  # checkpoints carry along what nobody uses
            kept = {
                name.split(".", 2)[2]: a for name, a in weights.items() if name.startswith(f"layers.{layer.kv_from}.")
            }
            own |= {name: np.zeros_like(kept[name]) for name in ("k", "v", "k_norm")}
        ffn = {n for n in own if n.split(".")[0] in FEED_FORWARD} if layer.ffn is not None else set()
        second = block + (arch in BLOCKS_ARE_HALVES and layer.mixer is not None)
        out |= {f"blk.{block}.{n}": a for n, a in half(layer, {n: own[n] for n in own if n not in ffn}, arch).items()}
        out |= {f"blk.{second}.{n}": a for n, a in half(layer, {n: own[n] for n in ffn}, arch).items()}
        if arch in BLOCKS_ARE_HALVES:
            block = second + (layer.ffn is not None)
        else:
            block += (i + 1) % LAYERS_OF_BLOCKS.get(arch, 1) == 0
    return out


def folded(spec: ModelSpec, weights: Weights) -> Weights:
    """Falcon-H1: the multipliers go into the weights."""
    out = dict(weights)

    def scale(name: str, by: Any) -> None:
        if name in out:
            out[name] = out[name] * np.asarray(by, np.float32)

    scale("embed", spec.embed_scale)
    scale("lm_head", spec.logit_scale)
    for i, layer in enumerate(spec.layers):
        at, m = f"layers.{i}.", layer.mixer
        scale(f"{at}o", layer.residual_scale)
        if isinstance(m, Mamba2):
            sizes = (m.inner, m.inner, m.groups * m.state, m.groups * m.state, m.num_heads)
            scale(f"{at}in", layer.mixer_scale * np.repeat(m.scales, sizes)[:, None])
        elif isinstance(m, Attention):
            assert m.scale is not None
            for name in "qkv":
                scale(at + name, layer.mixer_scale * (m.scale * m.head_dim**0.5 if name == "k" else 1.0))
        elif isinstance(layer.ffn, FeedForward):
            scale(f"{at}gate", layer.ffn.gate_scale)
            scale(f"{at}down", layer.residual_scale)
    return out


RESCALE_EVERY = 2
"""Layers of RWKV-6 behind which llama.cpp halves the residual."""


def halved(weights: Weights) -> Weights:
    """RWKV-6: what adds to the residual, by how often that was halved."""
    out = dict(weights)
    for name, array in weights.items():
        if name.endswith((".o", ".down")):
            out[name] = array / 2 ** (int(name.split(".")[1]) // RESCALE_EVERY)
    return out


FEED_FORWARD = {
    "ffn_norm", "ffn_post_norm", "gate", "up", "down", "router", "router_correction", "experts", "shared",
    "shared_gate", "experts_in", "experts_out", "router_norm", "router_scale", "experts_norm", "experts_post_norm",
    "shared_post_norm", "down_norm",
}  # fmt: skip


def parts_of(name: str) -> tuple[str, str]:
    return (name[:-5], "bias") if name.endswith(".bias") else (name, "weight")


def plus(array: F32, norm: Norm | None) -> F32:
    return array if norm is None else array + np.float32(norm.offset)


def half(layer: Layer, own: Weights, arch: str) -> Weights:
    names = LAYER | RENAMED.get(arch, {})
    own = reshaped(layer, turned(layer, own, arch), arch)
    out: Weights = {}
    for name, array in own.items():
        base, ending = parts_of(name)
        if base in ("attn_norm", "attn_post_norm", "ffn_norm", "ffn_post_norm") and ending == "weight":
            array = plus(array, layer.norm)
        elif base in ("q_norm", "k_norm") and isinstance(layer.mixer, Attention) and layer.mixer.qk_norm:
            array = array + np.float32(layer.mixer.qk_norm.offset)
        if arch == "falcon" and layer.parallel and not layer.shared_norm and base.endswith("_norm"):
            out[f"{'attn_norm_2' if base == 'attn_norm' else 'attn_norm'}.{ending}"] = array
        elif arch == "falcon-h1" and base == "ffn_norm":
            out["ffn_norm"] = array  # as the package of names has it
        elif base in names:
            ssm = base == "o" and isinstance(layer.mixer, Mamba | Mamba2)
            short = base == "o" and isinstance(layer.mixer, ShortConv)
            out[f"{'ssm_out' if ssm else 'shortconv.out_proj' if short else names[base]}.{ending}"] = array
        else:
            out[name] = array  # already by its own name
    return out


def turned(layer: Layer, own: Weights, arch: str) -> Weights:
    if arch not in TURNED or not isinstance(layer.mixer, Attention):
        return own
    out = dict(own)
    for name, heads in (("q", layer.mixer.num_heads), ("k", layer.mixer.num_kv_heads)):
        for full in (name, f"{name}.bias"):
            if full in own:
                a = own[full]
                out[full] = a.reshape(heads, 2, -1, *a.shape[1:]).swapaxes(1, 2).reshape(a.shape)
    return out


def reshaped(layer: Layer, own: Weights, arch: str) -> Weights:
    """Stacks of experts, fused projections, halves of latent attention, decays."""
    out = {name: a for name, a in own.items() if not name.startswith("experts.")}
    mixer, ffn = layer.mixer, layer.ffn
    if isinstance(ffn, Experts) and "router" in own:
        for part in ("gate", "up", "down"):
            for end in ("", ".bias"):
                found = [own[n] for i in range(ffn.num_experts) if (n := f"experts.{i}.{part}{end}") in own]
                if found:
                    out[f"ffn_{part}_exps.{'bias' if end else 'weight'}"] = np.stack(found)
        if "router_correction" in own:
            out["exp_probs_b.bias"] = out.pop("router_correction")
        if ffn.apart is not None:
            out["ffn_gate_inp.scale"], out["ffn_down_exps.scale"] = out.pop("router_norm"), out.pop("router_scale")
        if "shared_gate" in own:
            out["shared_gate"] = own["shared_gate"][0]
    for end in ("", ".bias"):
        if arch in FUSED_QKV and f"q{end}" in own:
            out[f"attn_qkv.{'bias' if end else 'weight'}"] = np.concatenate([out.pop(f"{n}{end}") for n in "qkv"])
    if arch in FUSED_UP and "gate" in own:
        out["up"] = np.concatenate([out.pop("gate"), out["up"]])
    if isinstance(mixer, Latent) and "kv_b" in own:
        both = out.pop("kv_b").reshape(mixer.num_heads, mixer.nope_dim + mixer.v_dim, mixer.kv_rank)
        out["attn_k_b.weight"] = both[:, : mixer.nope_dim].swapaxes(1, 2)
        out["attn_v_b.weight"] = both[:, mixer.nope_dim :]
    if isinstance(mixer, Qrwkv6) and "mix_r" in own:
        parts = own["mix_down"].reshape(5, mixer.mix_rank, -1)
        own = own | {"mix_down": parts[[mixer.mixed.index(n) for n in "wkvrg"]].reshape(own["mix_down"].shape)}
        out |= {"mix_down": own["mix_down"]}
    if isinstance(mixer, Rwkv6 | Qrwkv6) and "mix_r" in own:
        out = {n: a for n, a in out.items() if not n.startswith("mix_") or n in ("mix_x", "mix_down")}
        rows = np.stack([own[f"mix_{n}"] for n in "wkvrg"])
        out["time_mix_lerp_fused.weight"] = rows.reshape(5, 1, 1, -1)
        out["time_mix_w2.weight"] = np.stack([own[f"mix_up_{n}"] for n in "wkvrg"])
        if isinstance(mixer, Rwkv6):
            out["time_mix_first.weight"] = out.pop("time_first").reshape(mixer.num_heads, -1)
    if isinstance(mixer, Rwkv7) and "mix_r" in own:
        out = {n: a for n, a in out.items() if not n.startswith("mix_")}
        rows = np.stack([own[f"mix_{n}"] for n in mixer.mixed])
        out["time_mix_lerp_fused.weight"] = rows.reshape(len(rows), 1, 1, -1)
        if mixer.first:  # llama.cpp wants something there
            out |= {f"v{n}": own[f"a{n}"] for n in (0, 1, 2)}
    if isinstance(mixer, GatedDelta) and mixer.channel_decay and "a_log" in own:
        out = {n: a for n, a in out.items() if not n.endswith(".conv")}
        out |= {f"ssm_conv1d_{n}.weight": own[f"{n}.conv"].reshape(1, -1, 1, mixer.conv) for n in "qkv"}
        out |= {"ssm_a": -np.exp(out.pop("a_log")).reshape(1, 1, -1, 1), "ssm_dt.bias": out.pop("dt.bias")}
    elif isinstance(mixer, GatedDelta) and "a_log" in own:
        out = {n: a for n, a in out.items() if n not in DELTA} | delta(mixer, own, arch)
    if isinstance(mixer, Attention) and mixer.output_gate and "q" in own and arch != "afmoe":
        for end in ("", ".bias"):
            if f"q{end}" in own:
                both = [out.pop(f"{n}{end}").reshape(mixer.num_heads, mixer.head_dim, -1) for n in ("q", "o_gate")]
                columns = own[f"q{end}"].shape[1:]
                out[f"q{end}"] = np.concatenate(both, axis=1).reshape(-1, *columns)
    if isinstance(mixer, Mamba | Mamba2) and "a_log" in own:
        column = (lambda a: a.reshape(-1, 1)) if isinstance(mixer, Mamba2) else (lambda a: a)
        out["ssm_a"], out["ssm_d"] = column(-np.exp(out.pop("a_log"))), column(out.pop("d"))
        if "gate_norm" in own:
            assert isinstance(mixer, Mamba2)
            out["gate_norm"] = own["gate_norm"].reshape(mixer.groups, -1)
    for name in ("q_norm", "k_norm"):
        split = [own[n] for i in range(64) if (n := f"{name}.{i}") in own]
        if split:
            out = {n: a for n, a in out.items() if not n.startswith(name + ".")} | {name: np.stack(split)}
    return out


DELTA = {"q", "k", "v", "z", "beta", "dt", "dt.bias", "a_log", "head_norm", "o", "q.conv", "k.conv", "v.conv"}


def delta(m: GatedDelta, own: Weights, arch: str) -> Weights:
    """The gated delta rule: Qwen3.5 has value heads so that each next one has the next key head."""
    share = m.value_heads // m.key_heads

    def turn(a: F32, axis: int = 0, size: int = m.value_dim) -> F32:
        if arch == "qwen3next":
            return a
        shape = a.shape
        parts = a.reshape(*shape[:axis], m.key_heads, share, size, *shape[axis + 1 :])
        return parts.swapaxes(axis, axis + 1).reshape(shape)

    out = {
        "attn_qkv.weight": np.concatenate([own["q"], own["k"], turn(own["v"])]), "attn_gate.weight": turn(own["z"]),
        "ssm_conv1d.weight": np.concatenate([own["q.conv"], own["k.conv"], turn(own["v.conv"])]),
        "ssm_dt.bias": turn(own["dt.bias"], size=1), "ssm_a": turn(-np.exp(own["a_log"]), size=1),
        "ssm_norm.weight": own["head_norm"], "ssm_out.weight": turn(own["o"], axis=1),
    }  # fmt: skip
    if arch != "qwen3next":
        return out | {"ssm_beta.weight": turn(own["beta"], size=1), "ssm_alpha.weight": turn(own["dt"], size=1)}
    parts = [own[n].reshape(m.key_heads, share, -1) for n in ("beta", "dt")]
    return out | {"ssm_ba.weight": np.concatenate(parts, axis=1).reshape(2 * m.value_heads, -1)}


# --- positions and metadata


def ropes(spec: ModelSpec) -> list[Rope]:
    mixers = [layer.mixer for layer in spec.layers]
    return [m.rope for m in mixers if isinstance(m, Attention | Latent) and m.rope is not None]


def positions_of(spec: ModelSpec) -> Weights:
    found = [r for r in ropes(spec) if r.kind in ("longrope", "llama3", "proportional")]
    if found and found[0].kind == "proportional":
        turned = int(found[0].dim * found[0].part / 2)
        return {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * (found[0].dim // 2 - turned), np.float32)}
    if found and found[0].kind == "llama3":
        return {"rope_freqs.weight": llama3_factors(found[0])}
    if not found:
        return {}
    return {f"rope_factors_{n}.weight": np.array(getattr(found[0], f"{n}_factor")) for n in ("short", "long")}


def llama3_factors(r: Rope) -> F32:
    """Plain frequencies over the scaled ones."""
    waves = 2 * np.pi * r.theta ** (np.arange(0, r.dim, 2) / r.dim)
    smooth = (r.original_max_position / waves - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor)
    smooth = np.clip(smooth, 0, 1)
    return (1 / ((1 - smooth) / r.factor + smooth)).astype(np.float32)


def metadata_of(spec: ModelSpec, arch: str) -> Metadata:
    norm = spec.layers[0].norm
    layer_norm = (norm.kind == "layer" or arch in BLOCKS_ARE_HALVES) and arch != "phimoe"
    kind = "layer_norm_epsilon" if layer_norm else "layer_norm_rms_epsilon"
    own: Metadata = {
        "context_length": spec.max_position, "embedding_length": spec.hidden_size, "vocab_size": spec.vocab_size,
        "block_count": len(spec.layers) // LAYERS_OF_BLOCKS.get(arch, 1), f"attention.{kind}": norm.eps,
    }  # fmt: skip
    for layer in spec.layers[::-1]:  # what the first layers say counts
        own |= _mixer(layer, arch) | _feed_forward(layer.ffn, arch)
    own |= _windows(spec) | _rope(spec)
    return own | EXTRA.get(arch, lambda s: {})(spec)


def _mixer(layer: Layer, arch: str) -> Metadata:
    m = layer.mixer
    if isinstance(m, Attention):
        own = {"attention.head_count": m.num_heads, "attention.head_count_kv": m.num_kv_heads}
        if arch not in UNSAID:
            own |= {"attention.key_length": m.head_dim, "attention.value_length": m.value_dim}
        if m.clip:
            own["attention.clamp_kqv"] = m.clip
        return own | ({"rope.dimension_count": m.rope.dim} if m.rope is not None else {})
    if isinstance(m, Latent):
        own = {
            "attention.head_count": m.num_heads, "attention.head_count_kv": 1, "attention.kv_lora_rank": m.kv_rank,
            "attention.key_length": m.kv_rank + m.rope_dim, "attention.value_length": m.kv_rank,
            "attention.key_length_mla": m.nope_dim + m.rope_dim, "attention.value_length_mla": m.v_dim,
            "rope.dimension_count": m.rope_dim,
        }  # fmt: skip
        if m.indexer is not None:
            own |= {
                "attention.indexer.head_count": m.indexer.num_heads, "attention.indexer.top_k": m.indexer.top_k,
                "attention.indexer.key_length": m.indexer.head_dim,
            }  # fmt: skip
        return own | ({"attention.q_lora_rank": m.q_rank} if m.q_rank else {})
    if isinstance(m, GatedDelta) and m.channel_decay:
        return {"ssm.conv_kernel": m.conv, "kda.head_dim": m.key_dim}
    if isinstance(m, Mamba):
        return {
            "attention.head_count": 0, "feed_forward_length": 0, "ssm.conv_kernel": m.conv, "ssm.inner_size": m.inner,
            "ssm.state_size": m.state, "ssm.time_step_rank": m.dt_rank,
            **({} if arch == "jamba" else {"ssm.dt_b_c_rms": m.norm_eps is not None}),
        }  # fmt: skip
    if isinstance(m, GatedDelta):
        return {
            "ssm.conv_kernel": m.conv, "ssm.inner_size": m.values, "ssm.state_size": m.key_dim,
            "ssm.time_step_rank": m.value_heads, "ssm.group_count": m.key_heads,
        }  # fmt: skip
    if isinstance(m, Mamba2):
        return {
            "attention.head_count": 0, "feed_forward_length": 0, "ssm.conv_kernel": m.conv, "ssm.inner_size": m.inner,
            "ssm.state_size": m.state, "ssm.time_step_rank": m.num_heads, "ssm.group_count": m.groups,
        }  # fmt: skip
    if isinstance(m, ShortConv):
        return {"shortconv.l_cache": m.conv}
    return {}


SAY_NORM = {"deepseek2", "glm4moe", "nemotron_h_moe", "dots1", "deepseek32", "glm-dsa", "afmoe", "exaone-moe",
            "cohere2moe", "step35", "bailingmoe", "bailingmoe2", "mistral4"}  # fmt: skip
SAY_SHARED = {"deepseek2", "glm4moe", "nemotron_h_moe", "dots1", "ernie4_5-moe", "deepseek32", "glm-dsa", "afmoe",
              "exaone-moe", "cohere2moe", "kimi-linear", "bailingmoe", "bailingmoe2", "mistral4"}  # fmt: skip


def _feed_forward(ffn: Any, arch: str) -> Metadata:
    if isinstance(ffn, FeedForward):
        return {"feed_forward_length": ffn.width}
    if not isinstance(ffn, Experts):
        return {}
    r = ffn.router
    own: Metadata = {
        "expert_count": ffn.num_experts, "expert_used_count": ffn.top_k, "feed_forward_length": ffn.expert.width
    }  # fmt: skip
    if arch not in ("llama", "olmoe", "granitemoe", "granitehybrid", "jamba", "phimoe"):
        own["expert_feed_forward_length"] = ffn.expert.width
    if arch in SAY_NORM:
        own["expert_weights_norm"] = r.renormalize or r.chosen_only
    if r.groups > 1:
        own |= {"expert_group_count": r.groups, "expert_group_used_count": r.top_groups}
    if r.scale != 1.0 and arch != "cohere2moe":
        own["expert_weights_scale"] = r.scale
    if ffn.latent is not None:
        own["moe_latent_size"] = ffn.latent
    if arch == "cohere2moe":
        own["expert_gating_func"] = 1
    if r.score == "sigmoid":
        own["expert_gating_func"] = 2
    if ffn.shared is not None and arch in (
        "qwen2moe",
        "qwen3next",
        "qwen35moe",
        "nemotron_h_moe",
        "granitemoe",
        "granitehybrid",
        "hunyuan-moe",
        "exaone-moe",
        "cohere2moe",
        "step35",
        "ernie4_5-moe",
        "bailingmoe2",
    ):
        own |= {"expert_shared_feed_forward_length": ffn.shared.width}
    if ffn.shared is not None and arch in SAY_SHARED:
        own |= {"expert_shared_count": ffn.shared.width // ffn.expert.width}
    return own


def _windows(spec: ModelSpec) -> Metadata:
    windows = [layer.mixer.window for layer in spec.layers if isinstance(layer.mixer, Attention)]
    if not any(windows):
        return {}
    own: Metadata = {"attention.sliding_window": max(w or 0 for w in windows)}
    return own | ({} if all(windows) else {"attention.sliding_window_pattern": [w is not None for w in windows]})


def _rope(spec: ModelSpec) -> Metadata:
    found = sorted(set(ropes(spec)), key=lambda r: r.kind != "default", reverse=True)
    if not found:
        return {}
    r = found[0]
    own: Metadata = {"rope.freq_base": r.theta}
    if r.kind in ("linear", "yarn"):
        own |= {"rope.scaling.type": r.kind, "rope.scaling.factor": r.factor}
    if r.kind in ("yarn", "longrope"):
        own["rope.scaling.original_context_length"] = r.original_max_position
    if r.kind == "longrope":
        own["rope.scaling.attn_factor"] = r.attention_factor
    return own


def _first(spec: ModelSpec) -> Attention:
    return next(layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention))


def _dense(spec: ModelSpec) -> int:
    return sum(isinstance(layer.ffn, FeedForward) for layer in spec.layers)


def _dense_width(spec: ModelSpec) -> int:
    found = (layer.ffn.width for layer in spec.layers if isinstance(layer.ffn, FeedForward))
    first = spec.layers[0].ffn
    return next(found, first.expert.width if isinstance(first, Experts) else 0)


def _halves(spec: ModelSpec) -> Metadata:
    heads: list[int] = []
    widths: list[int] = []
    for layer in spec.layers:
        if layer.mixer is not None:
            heads.append(layer.mixer.num_kv_heads if isinstance(layer.mixer, Attention) else 0)
            widths.append(0)
        if layer.ffn is not None:
            heads.append(0)
            widths.append(layer.ffn.width if isinstance(layer.ffn, FeedForward) else layer.ffn.expert.width)
    return {
        "block_count": len(heads), "attention.head_count": _first(spec).num_heads, "attention.head_count_kv": heads,
        "feed_forward_length": widths, "rope.dimension_count": 8, "rope.scaling.finetuned": False,
    }  # fmt: skip


def _blocks(spec: ModelSpec) -> Metadata:
    mixers = [layer.mixer for layer in spec.layers]
    return {
        "attention.head_count": [m.num_heads if isinstance(m, Attention) else 0 for m in mixers],
        "attention.head_count_kv": [m.num_kv_heads if isinstance(m, Attention) else 0 for m in mixers],
        "feed_forward_length": [layer.ffn.width if layer.ffn is not None else 0 for layer in spec.layers],
    }  # fmt: skip


def _some_attend(spec: ModelSpec) -> Metadata:
    groups = [m.num_kv_heads if isinstance(m := layer.mixer, Attention) else 0 for layer in spec.layers]
    return {"attention.head_count": _first(spec).num_heads, "attention.head_count_kv": groups}


def _hybrid(spec: ModelSpec) -> Metadata:
    width = next((f.expert.width for x in spec.layers if isinstance(f := x.ffn, Experts)), None)
    return _granite(spec) | _some_attend(spec) | {
        "rope.scaling.finetuned": _first(spec).rope is not None, "rope.freq_base": 10000.0,
        "feed_forward_length": width or _dense_width(spec),
    }  # fmt: skip


def _recurrent(spec: ModelSpec) -> Metadata:
    flags = [isinstance(layer.mixer, GatedDelta) for layer in spec.layers]
    return {"attention.recurrent_layers": flags, "full_attention_interval": 4}


def _granite(spec: ModelSpec) -> Metadata:
    return {
        "attention.scale": _first(spec).scale, "embedding_scale": spec.embed_scale,
        "residual_scale": spec.layers[0].residual_scale, "logit_scale": 1 / spec.logit_scale,
    }  # fmt: skip


def _routed(spec: ModelSpec) -> Metadata:
    return {"leading_dense_block_count": _dense(spec), "feed_forward_length": _dense_width(spec)}


def _local_theta(spec: ModelSpec) -> Metadata:
    found = {r.theta for layer in spec.layers if isinstance(m := layer.mixer, Attention) and m.window and (r := m.rope)}
    return {"rope.freq_base_swa": min(found)} if found else {}


def _latent(spec: ModelSpec) -> Metadata:
    m = spec.layers[0].mixer
    assert isinstance(m, Latent)
    grown = 1.0 if m.scale is None else m.scale * (m.nope_dim + m.rope_dim) ** 0.5
    yarn = m.rope.kind == "yarn"
    return _routed(spec) | (
        {"rope.scaling.yarn_log_multiplier": (grown**0.5 - 1) / np.log(m.rope.factor).item()} if yarn else {}
    )


def _attention_heads(spec: ModelSpec) -> Metadata:
    """Where most layers have other mixers: as those say that attend."""
    own = _mixer(next(layer for layer in spec.layers if isinstance(layer.mixer, Attention)), "falcon-h1")
    return {key: own[key] for key in ("attention.head_count", "attention.head_count_kv")}


def _each(spec: ModelSpec) -> Metadata:
    """Heads, windows and thetas of every layer, in files of models whose kinds of layers differ in these."""
    mixers = [m for layer in spec.layers if isinstance(m := layer.mixer, Attention)]
    full = next(m for m in mixers if m.window is None)
    return {
        "attention.head_count": [m.num_heads for m in mixers],
        "attention.head_count_kv": [m.num_kv_heads for m in mixers],
        "attention.sliding_window_pattern": [m.window is not None for m in mixers],
        "rope.freq_base": full.rope.theta, **_local_theta(spec),  # type: ignore[union-attr]
    }  # fmt: skip


def _mimo(spec: ModelSpec) -> Metadata:
    return _each(spec) | {"attention.value_scale": _first(spec).value_scale, "feed_forward_length": _dense_width(spec)}


def _step(spec: ModelSpec) -> Metadata:
    own = _each(spec) | _routed(spec) | {"moe_every_n_layers": 1, "rope.dimension_count": _first(spec).head_dim}
    limits: dict[str, list[float]] = {"exp": [], "shexp": []}
    for layer in spec.layers:
        routed = isinstance(layer.ffn, Experts)
        limits["exp"].append((layer.ffn.expert.limit if routed else None) or 0.0)  # type: ignore[union-attr]
        limits["shexp"].append((layer.ffn.shared if routed else layer.ffn).limit or 0.0)  # type: ignore[union-attr]
    return own | {f"swiglu_clamp_{name}": values for name, values in limits.items() if any(values)}


def _kimi(spec: ModelSpec) -> Metadata:
    m = next(layer.mixer for layer in spec.layers if isinstance(layer.mixer, Latent))
    own = _mixer(next(layer for layer in spec.layers if layer.mixer is m), "kimi-linear")
    flags = [1 if isinstance(layer.mixer, Latent) else 0 for layer in spec.layers]
    return own | _routed(spec) | {"attention.head_count_kv": flags}


def _rwkv6(spec: ModelSpec) -> Metadata:
    m, ffn = spec.layers[0].mixer, spec.layers[0].ffn
    assert isinstance(m, Rwkv6)
    return {
        "attention.head_count": 0, "wkv.head_size": m.head_dim, "time_mix_extra_dim": m.mix_rank,
        "time_decay_extra_dim": m.decay_rank, "rescale_every_n_layers": RESCALE_EVERY,
        "feed_forward_length": ffn.width,  # type: ignore[union-attr]
    }  # fmt: skip


def _rwkv6qwen2(spec: ModelSpec) -> Metadata:
    m = spec.layers[0].mixer
    assert isinstance(m, Qrwkv6)
    return {
        "attention.head_count": 0, "attention.head_count_kv": m.kv_heads, "wkv.head_size": m.head_dim,
        "time_mix_extra_dim": m.mix_rank, "time_decay_extra_dim": m.decay_rank, "token_shift_count": 1,
    }  # fmt: skip


def _rwkv7(spec: ModelSpec) -> Metadata:
    m, ffn = spec.layers[1].mixer, spec.layers[1].ffn
    assert isinstance(m, Rwkv7)
    return {
        "attention.head_count": 0, "wkv.head_size": m.head_dim, "attention.decay_lora_rank": m.decay_rank,
        "attention.iclr_lora_rank": m.rate_rank, "attention.value_residual_mix_lora_rank": m.value_rank,
        "attention.gate_lora_rank": m.gate_rank, "feed_forward_length": ffn.width,  # type: ignore[union-attr]
    }  # fmt: skip


def _per_layer(spec: ModelSpec) -> Metadata:
    ple, own = spec.per_layer, _local_theta(spec) | {"final_logit_softcapping": spec.logit_soft_cap}
    shared = sum(layer.kv_from is not None for layer in spec.layers)
    return own | {"embedding_length_per_layer_input": ple.width if ple else 0, "attention.shared_kv_layers": shared}


def _gemma3n(spec: ModelSpec) -> Metadata:
    assert spec.altup is not None
    shares = [layer.ffn.sparsity for layer in spec.layers if isinstance(layer.ffn, FeedForward)]
    full = next(m.rope for x in spec.layers if isinstance(m := x.mixer, Attention) and m.window is None)
    return _per_layer(spec) | {
        "rope.freq_base": full.theta,  # type: ignore[union-attr]
        "altup.active_idx": spec.altup.active, "altup.num_inputs": spec.altup.streams,
        "activation_sparsity_scale": [NormalDist().inv_cdf(x) if x else float("-inf") for x in shares],
    }  # fmt: skip


def _gemma4(spec: ModelSpec) -> Metadata:
    mixers = [m for layer in spec.layers if isinstance(m := layer.mixer, Attention)]
    full, local = (next(m for m in mixers if (m.window is None) == whole) for whole in (True, False))
    ffns: list[Any] = [layer.ffn for layer in spec.layers]
    widths = [f.shared.width if isinstance(f, Experts) else f.width for f in ffns]
    return _per_layer(spec) | {
        "attention.key_length": full.head_dim, "attention.value_length": full.head_dim,
        "attention.key_length_swa": local.head_dim, "attention.value_length_swa": local.head_dim,
        "attention.head_count_kv": [m.num_kv_heads for m in mixers], "feed_forward_length": widths,
        "rope.dimension_count": full.head_dim, "rope.dimension_count_swa": local.head_dim,
        "rope.freq_base": full.rope.theta,  # type: ignore[union-attr]
    }  # fmt: skip


EXTRA: dict[str, Callable[[ModelSpec], Metadata]] = {
    "afmoe": lambda s: _routed(s),
    "cohere2moe": lambda s: {
        "logit_scale": s.logit_scale, "leading_dense_block_count": _dense(s),
        "feed_forward_length": _dense_width(s) if _dense(s) else s.layers[0].ffn.expert.width,  # type: ignore[union-attr]
    },
    "bailingmoe": lambda s: _routed(s) | {"expert_weights_scale": 1.0},
    "bailingmoe2": lambda s: _routed(s) | {
        "expert_shared_feed_forward_length": s.layers[-1].ffn.expert.width,  # type: ignore[union-attr]
    },
    "bitnet": lambda s: {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
    "deepseek32": _latent,
    "exaone-moe": _routed,
    "falcon-h1": lambda s: _attention_heads(s) | {"feed_forward_length": _dense_width(s)},
    "glm-dsa": lambda s: _latent(s) | {
        "attention.indexer.types": [not layer.mixer.reads_choice for layer in s.layers]  # type: ignore[union-attr]
    },
    "jamba": _some_attend,
    "kimi-linear": _kimi,
    "mimo2": _mimo,
    "rwkv6": _rwkv6, "rwkv7": _rwkv7, "rwkv6qwen2": _rwkv6qwen2,
    "arwkv7": lambda spec: _rwkv7(spec) | {"token_shift_count": 1},
    "step35": _step,
    "granite": _granite,
    "granitemoe": _granite,
    "granitehybrid": _hybrid,
    "dots1": _routed,
    "ernie4_5-moe": lambda s: _routed(s) | {"interleave_moe_layer_step": 1},
    "hunyuan-moe": lambda s: {"feed_forward_length": s.layers[0].ffn.shared.width},  # type: ignore[union-attr]
    "lfm2": _some_attend,
    "lfm2moe": lambda s: _some_attend(s) | _routed(s),
    "minicpm": lambda s: {k: v for k, v in _granite(s).items() if k != "attention.scale"},
    "command-r": lambda s: {"logit_scale": s.logit_scale},
    "cohere2": lambda s: {"logit_scale": s.logit_scale},
    "gemma2": lambda s: {
        "attn_logit_softcapping": _first(s).soft_cap, "final_logit_softcapping": s.logit_soft_cap,
    },
    "gemma3": lambda s: _local_theta(s) | ({"final_logit_softcapping": s.logit_soft_cap} if s.logit_soft_cap else {}),
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "olmo2": _local_theta,
    "gptneox": lambda s: {"use_parallel_residual": s.layers[0].parallel},
    "stablelm": lambda s: {"use_parallel_residual": True},
    "mpt": lambda s: {"attention.max_alibi_bias": _first(s).alibi.max_bias},  # type: ignore[union-attr]
    "deci": _blocks,
    "nemotron_h": _halves,
    "nemotron_h_moe": _halves,
    "glm4moe": _routed,
    "deepseek2": _latent,
    "llama4": lambda s: {
        "interleave_moe_layer_step": 2, "feed_forward_length": _dense_width(s),
        "expert_feed_forward_length": next(x.ffn.expert.width for x in s.layers if isinstance(x.ffn, Experts)),
    },
    "qwen3next": _recurrent,
    "qwen35": lambda s: _recurrent(s) | {"rope.dimension_sections": [1, 1, 0, 0]},
    "qwen35moe": lambda s: _recurrent(s) | {"rope.dimension_sections": [1, 1, 0, 0]},
    "qwen2vl": lambda s: {"rope.dimension_sections": [1, 1, 2, 0]},
    "qwen3vl": lambda s: {"rope.dimension_sections": [2, 2, 1, 0], "n_deepstack_layers": 1},
    "qwen3vlmoe": lambda s: {"rope.dimension_sections": [2, 1, 1, 0], "n_deepstack_layers": 1},
    "mistral4": lambda s: _latent(s) | (
        {} if s.layers[0].mixer.query_scale is None else {  # type: ignore[union-attr]
            "attention.temperature_scale": s.layers[0].mixer.query_scale.beta,  # type: ignore[union-attr]
            "attention.temperature_length": s.layers[0].mixer.query_scale.floor,  # type: ignore[union-attr]
        }
    ),
    "mistral3": lambda s: {
        "attention.temperature_scale": _first(s).query_scale.beta, "rope.scaling.yarn_log_multiplier": 1.0,  # type: ignore[union-attr]
    },
}  # fmt: skip
"""What an architecture's files have besides."""
