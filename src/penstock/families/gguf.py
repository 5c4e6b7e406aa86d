"""Models in GGUF files: llama (Llama, Mistral and Mixtral), qwen2, qwen3, qwen2moe, qwen3moe.

Names and their meaning: gguf-py/gguf/constants.py and the `llama_model` loaders of github.com/ggml-org/llama.cpp. Files
of the llama architecture have the rows of q and k in an order in which rotary pairs are neighbours; the others do not.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import Attention, Experts, FeedForward, Layer, ModelSpec, Norm, QkNorm, Rope, Router
from penstock.core.weight_map import Cut
from penstock.families.blocks import beside_blocks, block_refs
from penstock.families.chat_templates import gguf_templates
from penstock.families.checkpoint import (
    LOADABLE_DTYPES,
    Checkpoint,
    TokenizerFiles,
    check_count,
    check_weights,
)
from penstock.families.fields import Fields
from penstock.families.naming import named
from penstock.formats.files import quoted, read_exactly
from penstock.formats.gguf import Gguf, is_first_part, read_gguf, split_paths
from penstock.formats.tensor_ref import TensorRef

_MAX_SIZE = 2**24
_MAX_LAYERS = 4096
_MAX_EXPERTS = 4096
_MAX_POSITION = 2**31 - 1
_CODED_DTYPE = "bfloat16"
"""What decoded weights are held in. float16 keeps three bits more of them and reads prompts at half the speed; both
are nearer to the exact values than engines that round rows to 8 bits (docs/guides/models-and-weights.md)."""


@dataclass(frozen=True)
class _Architecture:
    """What the name of an architecture alone says."""

    interleaved: bool = False
    qk_norm: bool = False
    experts: bool = False
    shared: bool = False
    """An expert for every token, behind a gate."""
    renormalize: bool = True


ARCHITECTURES = {
    "llama": _Architecture(interleaved=True),
    "qwen2": _Architecture(),
    "qwen3": _Architecture(qk_norm=True),
    "qwen2moe": _Architecture(experts=True, shared=True, renormalize=False),
    "qwen3moe": _Architecture(qk_norm=True, experts=True),
}
"""`general.architecture` -> how it differs from the others."""

_TOP = {"embed": "token_embd", "final_norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "attn_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "ffn_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "router": "ffn_gate_inp",
    "shared.gate": "ffn_gate_shexp", "shared.up": "ffn_up_shexp", "shared.down": "ffn_down_shexp",
}  # fmt: skip
_ROPE_FACTORS = "rope_freqs.weight"
_IGNORED = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")  # frequencies that follow from the metadata
# How the training code laid its tensors out, and whether scaling was trained in: neither changes what is computed.
_HARMLESS = frozenset({"tensor_data_layout", "rope.scaling.finetuned"})


def open_gguf_folder(folder: Path, names: list[str]) -> Checkpoint:
    """The one GGUF model in a folder; `names` is its listing. Raises ModelError if there are several."""
    models = sorted(name for name in names if name.endswith(".gguf") and is_first_part(name))
    if not models:
        raise ModelError(f"the first part of the GGUF model in {quoted(folder)} is missing")
    if len(models) > 1:
        listed = ", ".join(quoted(name) for name in models[:8]) + (", ..." if len(models) > 8 else "")
        raise ModelError(f"{quoted(folder)} holds several models, {listed}: name the file to be read")
    return open_gguf_file(folder / models[0])


def open_gguf_file(path: Path) -> Checkpoint:
    """The model in one GGUF file, or in all parts of a split one of which `path` is any.

    Raises ModelError if anything in it is broken, UnsupportedError if it needs what Penstock does not have.
    """
    first, tensors = _joined(path)
    name = first.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedError(
            f"{quoted(path)} has the architecture {quoted(name, 60)}; GGUF files are read of {', '.join(ARCHITECTURES)}"
        )
    spec = _spec(first, tensors, name)
    check_count(spec)
    places = _places(spec)
    wanted = {place if isinstance(place, str) else place.name for place in places.values()}
    missing = sorted(wanted - tensors.keys())
    if missing:
        raise ModelError(f"{quoted(path)} lacks {len(missing)} of {len(wanted)} tensors, first {quoted(missing[0])}")
    others = tensors.keys() - wanted - beside_blocks(tensors)
    unexpected = sorted(n for n in others if n != _ROPE_FACTORS and not _IGNORED.fullmatch(n))
    if unexpected:
        raise UnsupportedError(
            f"{quoted(path)} holds {len(unexpected)} tensors that a {name} model does not have here, first "
            f"{quoted(unexpected[0])}"
        )
    weights = block_refs(tensors, places, spec)
    check_weights(weights, spec)
    return Checkpoint(path, spec, weights, _tokenizer(first, spec))


def _joined(path: Path) -> tuple[Gguf, dict[str, TensorRef]]:
    """The first part, which has the metadata, and the tensors of all."""
    paths = split_paths(path)
    parts = [read_gguf(part) for part in paths]
    tensors: dict[str, TensorRef] = {}
    for number, part in enumerate(parts):
        if part.metadata.get("split.count", 1) != len(parts) or part.metadata.get("split.no", 0) != number:
            raise ModelError(f"{quoted(part.path)} does not say of itself that it is part {number + 1} of {len(parts)}")
        twice = sorted(tensors.keys() & part.tensors.keys())
        if twice:
            raise ModelError(f"{quoted(part.path)} has the tensor {quoted(twice[0])}, which an earlier part has too")
        tensors |= part.tensors
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ModelError(f"the parts of {quoted(path)} have {len(tensors)} tensors, but {quoted(total, 40)} were split")
    return parts[0], tensors


def _section(gguf: Gguf, prefix: str) -> Fields:
    """The metadata under `prefix`, by the rest of their keys. A list of equal values, one per layer, is that value."""
    found: dict[str, Any] = {}
    for key, value in gguf.metadata.items():
        if key.startswith(prefix):
            same = isinstance(value, list) and value and all(v == value[0] for v in value)
            found[key[len(prefix) :]] = value[0] if same else value
    return Fields(found, f"the metadata {prefix}* of {quoted(gguf.path)}")


def _spec(gguf: Gguf, tensors: dict[str, TensorRef], name: str) -> ModelSpec:
    kind, fields = ARCHITECTURES[name], _section(gguf, name + ".")
    embed = tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise ModelError(f"{quoted(gguf.path)} has no embedding token_embd.weight of two dimensions")
    vocab_size, hidden_size = embed.shape
    if fields.integer("vocab_size", high=_MAX_SIZE, default=vocab_size) != vocab_size:
        raise ModelError(f"{quoted(gguf.path)} gives another vocab_size than its embedding's {vocab_size} rows")
    if fields.integer("embedding_length", high=_MAX_SIZE) != hidden_size:
        raise ModelError(f"{quoted(gguf.path)} gives another embedding_length than its embedding's {hidden_size}")
    if not fields.flag("attention.causal", default=True):
        raise UnsupportedError(f"{quoted(gguf.path)} is no causal model (attention.causal is false)")
    num_layers = fields.integer("block_count", high=_MAX_LAYERS)
    max_position = fields.integer("context_length", high=_MAX_POSITION)
    norm = Norm(eps=fields.number("attention.layer_norm_rms_epsilon"))
    layer = Layer(
        mixer=_attention(gguf, fields, tensors, kind, hidden_size, norm.eps, max_position),
        ffn=_feed_forward(fields, tensors, kind),
        norm=norm,
    )
    fields.refuse_unread(_HARMLESS)
    bos, eos = _special_tokens(gguf, vocab_size)
    return ModelSpec(
        family=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=(layer,) * num_layers,
        final_norm=norm,
        tie_embeddings="output.weight" not in tensors,
        max_position=max_position,
        bos_token_id=bos,
        eos_token_ids=eos,
        dtype=LOADABLE_DTYPES.get(embed.dtype, _CODED_DTYPE),
    )


def _attention(
    gguf: Gguf, fields: Fields, tensors: dict[str, TensorRef], kind: _Architecture, hidden_size: int, eps: float,
    max_position: int,
) -> Attention:  # fmt: skip
    heads = fields.integer("attention.head_count", high=_MAX_SIZE)
    kv_heads = fields.integer("attention.head_count_kv", high=heads, default=heads)
    if heads % kv_heads:
        raise ModelError(f"{quoted(gguf.path)}: {kv_heads} kv heads do not divide {heads} heads")
    head_dim = fields.integer("attention.key_length", high=_MAX_SIZE, default=max(hidden_size // heads, 1))
    sizes = {
        fields.integer("attention.value_length", high=_MAX_SIZE, default=head_dim),
        fields.integer("rope.dimension_count", high=_MAX_SIZE, default=head_dim),
    }
    if sizes != {head_dim} or head_dim % 2:
        raise UnsupportedError(
            f"{quoted(gguf.path)} has keys, values and rotated parts of {head_dim} and {sorted(sizes)} components; one "
            "even number for all is what Penstock computes"
        )
    return Attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=_rope(gguf, fields, tensors, Rope(dim=head_dim, interleaved=kind.interleaved), max_position),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        qk_norm=QkNorm(eps=eps) if kind.qk_norm else None,
    )


def _rope(gguf: Gguf, fields: Fields, tensors: dict[str, TensorRef], plain: Rope, max_position: int) -> Rope:
    theta = fields.number("rope.freq_base", default=10000.0)
    factor = fields.number("rope.scaling.factor", default=fields.number("rope.scale_linear", default=1.0))
    scaling = fields.string("rope.scaling.type", default="linear" if factor != 1.0 else "none")
    original = fields.integer("rope.scaling.original_context_length", high=_MAX_POSITION, default=max_position)
    common: dict[str, Any] = {"dim": plain.dim, "interleaved": plain.interleaved, "theta": theta}
    factors = tensors.get(_ROPE_FACTORS)
    if factors is not None:
        if scaling != "none":
            raise UnsupportedError(f"{quoted(gguf.path)} has both {_ROPE_FACTORS} and rope scaling {quoted(scaling)}")
        # One divisor per pair, worked out by the converter of Llama 3.1: what `longrope` does with a list it is given.
        divisors = _rope_factors(factors, plain.dim)
        return Rope(kind="longrope", short_factor=divisors, long_factor=divisors, **common)
    match scaling:
        case "none":
            return Rope(**common)
        case "linear":
            return Rope(kind="linear", factor=factor, **common)
        case "yarn":
            growth = 1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0
            return Rope(kind="yarn", factor=factor, original_max_position=original, attention_factor=growth, **common)
    raise UnsupportedError(f"{quoted(gguf.path)} asks for rope scaling {quoted(scaling)}; known: none, linear, yarn")


def _rope_factors(tensor: TensorRef, dim: int) -> tuple[float, ...]:
    """The few numbers of `rope_freqs.weight`: positions, not weights, so they are read here."""
    where = f"tensor {quoted(tensor.name)} of {quoted(tensor.path)}"
    if tensor.dtype != "F32" or tensor.shape != (dim // 2,):
        raise ModelError(f"{where} must be F32 of shape ({dim // 2},), not {tensor.dtype} of {quoted(tensor.shape)}")
    values = struct.unpack(f"<{dim // 2}f", read_exactly(tensor.path, tensor.offset, tensor.nbytes))
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ModelError(f"{where} holds a divisor that is not a positive number")
    return values


def _feed_forward(fields: Fields, tensors: dict[str, TensorRef], kind: _Architecture) -> FeedForward | Experts:
    bias = "blk.0.ffn_up.bias" in tensors
    num_experts = fields.integer("expert_count", high=_MAX_EXPERTS, low=0, default=0)
    used = fields.integer("expert_used_count", high=_MAX_EXPERTS, low=0, default=0)
    if not num_experts and not kind.experts:
        return FeedForward(width=fields.integer("feed_forward_length", high=_MAX_SIZE), bias=bias)
    if not 0 < used <= num_experts:
        raise ModelError(f"the model uses {used} of {num_experts} experts, which makes no sense")
    # Mixtral's experts are as wide as feed_forward_length says; in the other files that number is not used.
    width = fields.integer("feed_forward_length", high=_MAX_SIZE, low=0, default=0)
    if kind.experts:
        width = fields.integer("expert_feed_forward_length", high=_MAX_SIZE)
    if fields.integer("expert_gating_func", high=16, default=1) != 1:
        raise UnsupportedError("the model's router is no softmax (expert_gating_func), which is not read from GGUF")
    if fields.number("expert_weights_scale", above=-1.0, default=1.0) not in (0.0, 1.0):
        raise UnsupportedError(
            "the model scales what its router says (expert_weights_scale), which is not read from GGUF"
        )
    renormalize = fields.flag("expert_weights_norm", default=kind.renormalize)
    shared = fields.integer("expert_shared_feed_forward_length", high=_MAX_SIZE) if kind.shared else 0
    return Experts(
        num_experts=num_experts,
        top_k=used,
        expert=FeedForward(width=width),
        router=Router(renormalize=renormalize),
        shared=FeedForward(width=shared) if shared else None,
        shared_gate=bool(shared),
    )


def _places(spec: ModelSpec) -> dict[str, str | Cut]:
    places = named(spec, _TOP, _LAYER, "blk")
    for i, layer in enumerate(spec.layers):
        if not isinstance(layer.ffn, Experts):
            continue
        x, f, e = layer.ffn.num_experts, layer.ffn.expert.width, spec.hidden_size
        for name, shape in (("gate", (x, f, e)), ("up", (x, f, e)), ("down", (x, e, f))):
            for n in range(x):
                places[f"layers.{i}.experts.{n}.{name}"] = Cut(f"blk.{i}.ffn_{name}_exps.weight", shape, (n,))
        if layer.ffn.shared_gate:  # stored as a vector
            places[f"layers.{i}.shared_gate"] = Cut(f"blk.{i}.ffn_gate_inp_shexp.weight", (e,))
    return places


def _special_tokens(gguf: Gguf, vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    """The token a text begins with, and those that end it: of a text, of a turn, of a message."""
    fields = _section(gguf, "tokenizer.ggml.")
    tokens = gguf.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or len(tokens) > vocab_size:
        raise ModelError(f"{quoted(gguf.path)} has more tokens than the {vocab_size} rows of its embedding")
    # Files of SentencePiece vocabularies may leave out what is always the same there.
    pieces = gguf.metadata.get("tokenizer.ggml.model") == "llama" and vocab_size > 2
    bos = fields.token_ids("bos_token_id", vocab_size, default=(1,) if pieces else ())
    ends: list[int] = []
    for name in ("eos_token_id", "eot_token_id", "eom_token_id"):
        ends += fields.token_ids(name, vocab_size, default=(2,) if pieces and name.startswith("eos") else ())
    return (bos[0] if bos else None), tuple(dict.fromkeys(ends))


def _tokenizer(gguf: Gguf, spec: ModelSpec) -> TokenizerFiles:
    templates = gguf_templates(gguf.path, gguf.metadata)
    if not gguf.metadata.get("tokenizer.ggml.tokens"):
        return TokenizerFiles("none", reason=f"{quoted(gguf.path)} holds no tokenizer", **templates)
    return TokenizerFiles("gguf", gguf.path, **templates)
