"""Where the weights of a model are in a GGUF file: names as llama.cpp gives them, and parts of fused tensors.

Source: gguf-py/gguf/constants.py of github.com/ggml-org/llama.cpp (TENSOR_NAMES), and the shapes that
convert_hf_to_gguf.py writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.core.mixers import Shapes
from penstock.core.mixers.rwkv import MIXED_6
from penstock.core.model_spec import (
    Attention,
    EncoderAttention,
    Experts,
    FeedForward,
    GatedDelta,
    Latent,
    Layer,
    Mamba,
    Mamba2,
    ModelSpec,
    Qrwkv6,
    Rwkv6,
    Rwkv7,
    ShortConv,
    layer_shapes,
    weight_shapes,
)
from penstock.core.weight_map import Cut
from penstock.families.gguf.delta import delta_places
from penstock.families.gguf.gemma import stream_place
from penstock.formats.tensor_ref import TensorRef

TOP = {
    "embed": "token_embd", "embed_norm": "token_embd_norm", "positions": "position_embd", "final_norm": "output_norm",
    "lm_head": "output", "ple_embed": "per_layer_token_embd", "ple_in": "per_layer_model_proj",
    "ple_norm": "per_layer_proj_norm",
}  # fmt: skip
NAMES = {
    "attn_norm": "attn_norm", "attn_post_norm": "post_attention_norm", "ffn_norm": "ffn_norm",
    "ffn_post_norm": "post_ffw_norm",
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "sinks": "attn_sinks",
    "q_a": "attn_q_a", "q_a_norm": "attn_q_a_norm", "q_b": "attn_q_b", "kv_a": "attn_kv_a_mqa",
    "kv_a_norm": "attn_kv_a_norm", "kv_b": "attn_kv_b", "k_b": "attn_k_b", "v_b": "attn_v_b",
    "in": "ssm_in", "conv": "ssm_conv1d", "x": "ssm_x", "dt": "ssm_dt", "a_log": "ssm_a!", "d": "ssm_d!",
    "gate_norm": "ssm_norm", "dt_norm": "ssm_dt_norm", "b_norm": "ssm_b_norm", "c_norm": "ssm_c_norm",
    "index_q": "indexer.attn_q_b", "index_k": "indexer.attn_k", "index_k_norm": "indexer.k_norm",
    "index_weights": "indexer.proj",
    "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "router": "ffn_gate_inp",
    "router_correction": "exp_probs_b.bias!", "shared.gate": "ffn_gate_shexp", "shared.up": "ffn_up_shexp",
    "shared.down": "ffn_down_shexp", "shared_gate": "ffn_gate_inp_shexp",
    "experts_in": "ffn_latent_down", "experts_out": "ffn_latent_up",
    "ple_gate": "inp_gate", "ple_out": "proj", "ple_post_norm": "post_norm", "layer_scale": "layer_output_scale",
    "altup_norm": "altup_router_norm", "altup_predict": "altup_predict_coef", "altup_correct": "altup_correct_coef",
    "altup_scale": "altup_correct_scale", "laurel_in": "laurel_l", "laurel_out": "laurel_r",
    "laurel_norm": "laurel_post_norm",
}  # fmt: skip
"""Logical name in a layer -> tensor in a block, `.weight` or `.bias` behind it; "!": the name as it stands."""
_POST = {"attn_norm": "post_attention_norm", "ffn_norm": "post_ffw_norm"}
"""Norms of layers that norm only what their halves give."""


@dataclass(frozen=True)
class _Half:
    """One half of a layer: its weights, the block they are in, and what goes by another name than in NAMES."""

    block: int
    shapes: Shapes
    names: Mapping[str, str]


def find_places(
    spec: ModelSpec,
    tensors: Mapping[str, TensorRef],
    names: Mapping[str, str],
    *,
    halves_apart: bool,
    per_block: int = 1,
    in_turn: bool = False,
) -> dict[str, str | Cut]:
    """Logical name -> tensor, or a part of one, for every weight of `spec`; the tensor may be missing.

    `names`, `halves_apart`, `per_block`, `in_turn` (`value_heads_in_turn`): see `architectures.Architecture`.
    """
    out: dict[str, str | Cut] = {}
    for name, shape in weight_shapes(spec).items():
        if not name.startswith("layers."):
            base, ending = _split(name)
            out[name] = stream_place(name, spec) or _whole(
                tensors, f"{names.get(base) or TOP.get(base, base)}.{ending}", shape
            )
    block = 0
    for i, layer in enumerate(spec.layers):
        found = layer_places(layer, spec.hidden_size, block, tensors, names, halves_apart=halves_apart, in_turn=in_turn)
        out |= {f"layers.{i}.{name}": place for name, place in found.items()}
        held = (layer.mixer is not None) + (layer.ffn is not None) if halves_apart else (i + 1) % per_block == 0
        block += held
    return out


def layer_places(
    layer: Layer,
    e: int,
    block: int,
    tensors: Mapping[str, TensorRef],
    names: Mapping[str, str],
    *,
    halves_apart: bool = False,
    in_turn: bool = False,
) -> dict[str, str | Cut]:
    """The same for one layer of a model of hidden size `e`, names without its prefix."""
    out: dict[str, str | Cut] = {}
    for half in _halves(layer, e, block, names, halves_apart):
        out |= _half_places(half, layer, e, tensors)
    if isinstance(layer.mixer, GatedDelta) and not layer.mixer.channel_decay:
        out |= delta_places(f"blk.{block}.", layer.mixer, e, apart=in_turn)
    return out


def _halves(layer: Layer, e: int, block: int, names: Mapping[str, str], apart: bool) -> Iterator[_Half]:
    shapes = layer_shapes(layer, e)
    ffn = {n: s for n, s in shapes.items() if n.startswith("ffn_")}
    if layer.ffn is not None:
        ffn |= layer_shapes(Layer(mixer=None, ffn=layer.ffn, norm=layer.norm, shared_norm=True), e)
    more = {**(_POST if layer.placement == "post" else {}), **names}
    if layer.mixer is not None:
        out = {"o": "ssm_out"} if isinstance(layer.mixer, Mamba | Mamba2) else {}
        out = {"o": "shortconv.out_proj"} if isinstance(layer.mixer, ShortConv) else out
        yield _Half(block, {n: s for n, s in shapes.items() if n not in ffn}, {**more, **out})
    yield _Half(block + (apart and layer.mixer is not None), ffn, more)


def _half_places(half: _Half, layer: Layer, e: int, tensors: Mapping[str, TensorRef]) -> dict[str, str | Cut]:
    blk = f"blk.{half.block}."
    out: dict[str, str | Cut] = {}
    for name, shape in half.shapes.items():
        base, ending = _split(name)
        parts = base.split(".")
        if parts[0] == "experts":
            assert isinstance(layer.ffn, Experts)
            place: str | Cut = _expert(
                blk, int(parts[1]), parts[2], ending, layer.ffn, layer.ffn.expert_size(e), tensors
            )
        elif parts[0] in ("q_norm", "k_norm") and len(parts) == 2:
            assert isinstance(layer.mixer, Attention)
            heads = layer.mixer.num_heads if parts[0][0] == "q" else layer.mixer.num_kv_heads
            place = Cut(f"{blk}{NAMES[parts[0]]}.weight", (heads, *shape), (int(parts[1]),))
        elif parts[0].startswith("mix_") and isinstance(layer.mixer, Rwkv7):
            place = _mix(blk, parts[0], layer.mixer.mixed, e, tensors)
        elif parts[0].startswith("mix_up_") and isinstance(layer.mixer, Rwkv6 | Qrwkv6):
            row = MIXED_6.index(parts[0].removeprefix("mix_up_"))
            place = Cut(f"{blk}time_mix_w2.weight", (len(MIXED_6), e, layer.mixer.mix_rank), (row,))
        elif parts[0].startswith("mix_") and isinstance(layer.mixer, Rwkv6 | Qrwkv6) and parts[0] not in half.names:
            place = _mix(blk, parts[0], MIXED_6, e, tensors)
        elif base in ("q", "o_gate") and _gate_below(layer, half.names):
            assert isinstance(layer.mixer, Attention)
            place = _gated_query(blk, base, ending, layer.mixer, e)
        elif base == "k_b":
            assert isinstance(layer.mixer, Latent)
            stored = (layer.mixer.num_heads, layer.mixer.kv_rank, layer.mixer.nope_dim)
            place = Cut(f"{blk}{NAMES[base]}.weight", stored, axes=(0, 2, 1))
        elif base == "v_b":
            assert isinstance(layer.mixer, Latent)
            place = Cut(f"{blk}{NAMES[base]}.weight", (layer.mixer.num_heads, layer.mixer.v_dim, layer.mixer.kv_rank))
        else:
            found = (half.names.get(name) or half.names.get(base) or NAMES.get(base, base)).split("|")
            ends = [f"{blk}{name[:-1] if name.endswith('!') else f'{name}.{ending}'}" for name in found]
            stored_name = next((name for name in ends if name in tensors), ends[-1])
            place = _fused(blk, base, ending, layer, e, tensors) or _whole(tensors, stored_name, shape)
        out[name] = place
    return out


def _split(name: str) -> tuple[str, str]:
    return (name.removesuffix(".bias"), "bias") if name.endswith(".bias") else (name, "weight")


def _whole(tensors: Mapping[str, TensorRef], name: str, shape: tuple[int, ...]) -> str | Cut:
    """The tensor itself; in the weight's shape if it is stored with axes of one, or a vector is as a matrix."""
    ref = tensors.get(name)
    if ref is None or ref.shape == shape:
        return name
    same = tuple(n for n in ref.shape if n != 1) == tuple(n for n in shape if n != 1)
    vector = len(shape) == 1 and len(ref.shape) == 2 and ref.shape[0] * ref.shape[1] == shape[0]
    return Cut(name, ref.shape) if same or vector else name


def _fused(blk: str, base: str, ending: str, layer: Layer, e: int, tensors: Mapping[str, TensorRef]) -> Cut | None:
    """Rows of q, k and v below each other, or of gate and up, where the file has them in one tensor."""
    mixer, ffn = layer.mixer, layer.ffn
    columns = (e,) if ending == "weight" else ()
    if base in ("q", "k", "v") and isinstance(mixer, EncoderAttention):
        stored, sizes = f"{blk}attn_qkv.{ending}", dict.fromkeys(("q", "k", "v"), mixer.num_heads * mixer.head_dim)
    elif base in ("q", "k", "v") and isinstance(mixer, Attention):
        stored, rows = f"{blk}attn_qkv.{ending}", mixer.num_kv_heads * mixer.head_dim
        sizes = {"q": mixer.num_heads * mixer.head_dim, "k": rows, "v": mixer.num_kv_heads * mixer.value_dim}
    elif base in ("gate", "up") and isinstance(ffn, FeedForward) and ffn.gated:
        if f"{blk}ffn_gate.{ending}" in tensors:
            return None
        stored, sizes = f"{blk}ffn_up.{ending}", {"gate": ffn.width, "up": ffn.width}
    else:
        return None
    ref, total = tensors.get(stored), sum(sizes.values())
    if ref is None or ref.shape[0] != total:
        return None
    start = sum(list(sizes.values())[: list(sizes).index(base)])
    return Cut(stored, (total, *columns), ((start, start + sizes[base]),))


def _gate_below(layer: Layer, names: Mapping[str, str]) -> bool:
    """Whether a gate lies below each query, in the same tensor."""
    return isinstance(layer.mixer, Attention) and layer.mixer.output_gate and "o_gate" not in names


def _mix(blk: str, part: str, order: str, e: int, tensors: Mapping[str, TensorRef]) -> str | Cut:
    """One of the rows of one tensor, [6, 1, 1, E] or without axes of one; or a tensor, in older files of RWKV-6."""
    own, name = part.removeprefix("mix_"), f"{blk}time_mix_lerp_fused.weight"
    apart = f"{blk}time_mix_lerp_{own}.weight"
    if name not in tensors and apart in tensors:
        return _whole(tensors, apart, (e,))
    shape = tensors[name].shape if name in tensors else (len(order), 1, 1, e)
    return Cut(name, shape, (order.index(own),), (len(order), e))


def _gated_query(blk: str, base: str, ending: str, m: Attention, e: int) -> Cut:
    """A head's query or its gate, which lies below it."""
    inner = (e,) if ending == "weight" else ()
    shape, view = (2 * m.num_heads * m.head_dim, *inner), (m.num_heads, 2, m.head_dim, *inner)
    return Cut(f"{blk}attn_q.{ending}", shape, ((0, m.num_heads), int(base == "o_gate")), view)


def _expert(
    blk: str, index: int, part: str, ending: str, ffn: Experts, e: int, tensors: Mapping[str, TensorRef]
) -> Cut:
    """One expert of a stack; gates may lie above ups in one."""
    x, f = ffn.num_experts, ffn.expert.width
    rows, columns = (e, f) if part == "down" else (f, e)
    inner = (columns,) if ending == "weight" else ()
    both = f"{blk}ffn_gate_up_exps.{ending}"
    if part != "down" and both in tensors:
        start = f if part == "up" else 0
        return Cut(both, (x, 2 * f, *inner), (index, (start, start + f)))
    return Cut(f"{blk}ffn_{part}_exps.{ending}", (x, rows, *inner), (index,))
