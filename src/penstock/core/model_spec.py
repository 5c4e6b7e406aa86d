"""A decoder described as data. From it follow program, weight names, memory plan and costs.

Shape letters: V vocab, E hidden, H query heads, G kv heads, D head dim, F feed-forward width, L layers, X experts.
What mixes tokens is in `core.mixers`.
"""

from __future__ import annotations

from math import prod
from typing import Literal

import msgspec

from penstock.core.cache_spec import HIDDEN, CacheGroup, CacheSpec, PlaneSpec, group_layers
from penstock.core.kv_codec import KV_CODECS
from penstock.core.kv_format import parse_kv_format
from penstock.core.mixers import Shapes
from penstock.core.mixers.attention import Attention, Indexer, Latent, QkNorm
from penstock.core.mixers.blocks import BlockAttention
from penstock.core.mixers.compressed import EntryAttention, EntryIndexer
from penstock.core.mixers.delta import GatedDelta
from penstock.core.mixers.diagonal import Diagonal
from penstock.core.mixers.encoder import EncoderAttention
from penstock.core.mixers.gated_lru import GatedLru
from penstock.core.mixers.lightning import Lightning
from penstock.core.mixers.mamba import Mamba, Mamba2
from penstock.core.mixers.mlstm import Mlstm
from penstock.core.mixers.recurrent import Recurrent
from penstock.core.mixers.rope import Alibi, QueryScale, Rope
from penstock.core.mixers.rwkv import ChannelMix, Qrwkv6, Rwkv4, Rwkv5, Rwkv6, Rwkv7
from penstock.core.mixers.shared_block import SharedBlock
from penstock.core.mixers.short_conv import ShortConv
from penstock.core.mixers.streams import Streams
from penstock.core.pooler import PoolingSpec
from penstock.core.router import Router
from penstock.core.selection import BOUNDS, PARTIAL, num_components

__all__ = [
    "Activation", "Alibi", "AltUp", "Attention", "BlockAttention", "ChannelMix", "Diagonal", "EncoderAttention",
    "EntryAttention", "EntryIndexer", "Experts", "FeedForward", "FeedForwardKind", "GatedDelta", "GatedLru", "Indexer",
    "Latent", "Layer", "Lightning", "Mamba", "Mamba2", "Mixer", "Mlstm", "ModelSpec", "Norm", "Pair", "PerLayer",
    "QkNorm",
    "Qrwkv6", "QueryScale", "Recurrent", "Rope", "Router", "Rwkv4", "Rwkv5", "Rwkv6", "Rwkv7", "SharedBlock",
    "ShortConv", "Streams", "cache_groups", "cache_spec", "cache_specs", "layer_shapes", "weight_shapes",
]  # fmt: skip

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped", "silu_clamped", "xielu"]
Mixer = (
    Attention | Latent | EntryAttention | Recurrent | Mamba | Mamba2 | Rwkv4 | Rwkv5 | Rwkv6 | Rwkv7 | Qrwkv6
    | GatedDelta | ShortConv | Lightning | GatedLru | Mlstm | Diagonal | SharedBlock | BlockAttention
    | EncoderAttention
)  # fmt: skip


class Norm(msgspec.Struct, frozen=True, kw_only=True):
    """RMS norm, or layer norm with a bias unless `bias` is off. `offset` is added to the weights (Gemma keeps w - 1).
    `weight` off: no weights at all."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    offset: float = 0.0
    bias: bool = True
    weight: bool = True


class FeedForward(msgspec.Struct, frozen=True, kw_only=True, tag="dense"):
    """`gated`: down(act(gate(x)) * up(x)); otherwise down(act(up(x))).

    `swiglu_clamped` (gpt-oss, always gated): with gate cut to at most `limit` and up cut to [-limit, limit],
    gate * sigmoid(1.702 gate) * (up + 1). `silu_clamped` (DeepSeek-V4, always gated) cuts both in the same way and is
    silu(gate) * up. `relu2` is relu(x)^2. With other activations a `limit` cuts act(gate) to at most `limit`, and up to
    [-limit, limit] (Step 3.7). `gate_scale` multiplies the gate before its activation.
    `sparsity` (gated only): from every gate is taken the mean of its row and as many standard deviations as a share
    `sparsity` of a normal distribution lies below; what is negative then is 0 (Gemma 3n). `xielu` (Apertus, never
    gated; Huang & Schlag, arXiv 2411.13010) has two numbers of its own, weights `act_p` and `act_n`. `down_norm`:
    epsilon of an RMS norm of what `down` reads (weight `down_norm` [F]; BitNet; not of experts).
    """

    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    limit: float | None = None
    gate_scale: float = 1.0
    sparsity: float = 0.0
    down_norm: float | None = None


class Experts(msgspec.Struct, frozen=True, kw_only=True, tag="experts"):
    """Sparse mixture: the `top_k` experts that `router` chooses, weighted, and `shared` for every token if there is
    one (times sigmoid(shared_gate x) if `shared_gate`, times `shared_scale`). Experts are added in id order.

    `latent`: the chosen experts work at this width: the weight `experts_in` [latent, E] leads there, `experts_out`
    [E, latent] back. Router and shared expert stay at E.

    `apart`: only the shared expert reads the layer's normed input. Router and chosen experts read the residual, each
    through a norm like this one: `router_norm` [E], whose result is divided by sqrt(E), and `experts_norm`. What the
    chosen ones give is normed by `experts_post_norm`, what the shared one gives by `shared_post_norm` (Gemma 4).
    """

    num_experts: int
    top_k: int
    expert: FeedForward
    router: Router = Router()
    shared: FeedForward | None = None
    shared_gate: bool = False
    shared_scale: float = 1.0
    latent: int | None = None
    apart: Norm | None = None

    def expert_size(self, hidden_size: int) -> int:
        """Width of what goes into an expert and comes out of it, in a model of this hidden size."""
        return hidden_size if self.latent is None else self.latent


FeedForwardKind = FeedForward | Experts | ChannelMix


class PerLayer(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer adds for a token besides its halves (per-layer embeddings; Gemma 3n, Google, 2025).

    The model has one table for all layers, weight `ple_embed` [rows, L * width], of which a token whose id is `rows` or
    more reads row 0. What a layer is given of a token is (its part of the row, times sqrt(width), plus norm(part of
    `ple_in` [L * width, E] times the embedding, divided by sqrt(E))) / sqrt(2); `ple_norm` [width] is the norm's. The
    layer adds norm'(`ple_out` act(`ple_gate` x) * given), with `ple_post_norm` [E].
    """

    width: int
    rows: int
    activation: Activation = "gelu_tanh"


class AltUp(msgspec.Struct, frozen=True, kw_only=True):
    """Residuals of `streams` times E numbers, of which a layer computes one (Alternating Updates).

    Router: m(x) = tanh(`altup_router` [n, E] norm(x) / E), with `altup_norm`. A layer predicts each stream: s_i +
    sum over j of (`altup_predict` [n * n, n] m(s_active))_(n i + j) s_j. It works on the active one, giving x, and
    corrects each prediction p_i by (x - p_active) (1 + (`altup_correct` [n, n] m(x))_i). What a `PerLayer` reads is the
    corrected active one times `altup_scale` [E], and all streams but the first get what it adds.

    Stream 0 begins as the embedding, stream i as `altup_in_i` [E, E] times it, as large as it in the root mean square;
    behind the layers the mean of stream 0 and of `altup_out_i` s_i, as large as stream 0, is what is left.
    Source: Baykal et al., NeurIPS 2023, section 3; Gemma 3n's form of it.
    """

    streams: int
    active: int = 0
    scale: bool = True


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A mixer half and a feed-forward half; either may be missing.

    placement: `pre` x += f(norm(x)); `post` x += norm(f(x)); `both` x += norm'(f(norm(x))); `sum` x = norm(x + f(x));
    `normed` x = norm(x), then x = `keep` x + f(x); `bare` x += f(x).
    Weights `attn_norm` and `ffn_norm` are the norm of a half's input (`post`, `sum`: the only one there is);
    `attn_post_norm` and `ffn_post_norm` exist for `both`. `parallel` (with `pre`): x += mixer(norm(x)) + ffn(norm'(x)),
    where `shared_norm` means that both read the same normed input (no `ffn_norm`). `residual_scale` multiplies what a
    half adds, `mixer_scale` what the mixer reads. `beside` (with `pre`): the mixer reads what that of the layer before
    read, as if both stood in one layer; it has no `attn_norm`, and the layer before has no feed-forward.
    `forgets` (with `pre`): what the layer before added is read here and nowhere else; what the mixer gives is added to
    what the layer before read. The layer before has no feed-forward, nor has this one.
    `output_scale`: what the layer leaves is multiplied by a learned number (weight `layer_scale` [1]). `per_layer`,
    `altup`: in all layers of a model or in none. `laurel` (with `both`): half the mixer's sum is another path, x =
    (x + norm'(mixer) + h + norm''(`laurel_out` `laurel_in` h)) / sqrt(2), where h is what the mixer reads, through so
    many numbers (Learned Augmented Residual Layer, Gemma 3n; weight `laurel_norm`). `streams` (with `pre`, in all
    layers of a model or in none): x is several streams, see there.
    `raw_mixer` (with `pre`): the mixer reads the residual as it is, without `attn_norm` (ModernBERT's first layer).
    `residual_weights`: what a half is added to is multiplied by learned numbers (weights `attn_residual` and
    `ffn_residual` [E]; Doge).
    """

    mixer: Mixer | None
    ffn: FeedForwardKind | None
    norm: Norm = Norm()
    placement: Literal["pre", "post", "both", "sum", "normed", "bare"] = "pre"
    keep: float = 1.0
    parallel: bool = False
    shared_norm: bool = False
    residual_scale: float = 1.0
    output_scale: bool = False
    residual_weights: bool = False
    raw_mixer: bool = False
    mixer_scale: float = 1.0
    beside: bool = False
    forgets: bool = False
    per_layer: PerLayer | None = None
    altup: AltUp | None = None
    laurel: int | None = None
    streams: Streams | None = None

    @property
    def kv_from(self) -> int | None:
        """The layer whose keys and values this one reads in place of its own."""
        return self.mixer.kv_from if isinstance(self.mixer, Attention) else None


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """What a head that predicts further tokens reads instead of a token: norm(embedding of the token) and norm'(hidden
    state of the token before it), side by side; `hidden_first`: in the other order.

    Weights `token_norm` and `hidden_norm` [E] belong to the two. Whoever runs the head norms, writes pairs into the
    table `embed` [rows, 2E] and gives their rows in place of token ids. Source: DeepSeek-V3, arXiv 2412.19437, section
    2.2.
    """

    norm: Norm
    hidden_first: bool = False
    rows: int = 256


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder-only language model, as data.

    `dtype` is the checkpoint's own: float32, float16 or bfloat16. `max_position` is the longest context it was made
    for. `eos_token_ids` may be empty. `embed_size`: width of the embedding if not E (weights `embed_in` [E, embed_size]
    and `embed_out` [embed_size, E] lead in and out). Embeddings are multiplied by `embed_scale`; `positions`: learned
    ones (weight `positions` [max_position, E]) are added; then `embed_norm`. Logits are multiplied by `logit_scale`,
    then become cap * tanh(logit / cap) with `logit_soft_cap`. `pair`: it is a head on another model, which reads pairs
    (`embed_size` is 2E) and gives hidden states; the output matrix is that model's. `token_types`: kinds of tokens,
    each with a vector that is added to embeddings (weight `token_types` [n, E]); token i of kind t has the id t V + i.
    `pooler`: what becomes of hidden states where the model writes no text. `has_head` off: it has no output matrix.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    final_norm: Norm | None = Norm()
    tie_embeddings: bool = False
    max_position: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    embed_size: int | None = None
    embed_scale: float = 1.0
    embed_norm: Norm | None = None
    positions: bool = False
    lm_head_bias: bool = False
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    pair: Pair | None = None
    token_types: int = 0
    pooler: PoolingSpec | None = None
    has_head: bool = True

    def __post_init__(self) -> None:
        assert len({(layer.per_layer, layer.altup) for layer in self.layers}) <= 1, "layers differ in what all share"
        for n, layer in enumerate(self.layers):
            if (source := layer.kv_from) is not None:
                assert 0 <= source < n, f"layer {n} reads keys and values of layer {source}"
                assert _can_read(layer.mixer, self.layers[source].mixer), (
                    f"layers {n} and {source} differ in their keys"
                )

    @property
    def per_layer(self) -> PerLayer | None:
        return self.layers[0].per_layer if self.layers else None

    @property
    def altup(self) -> AltUp | None:
        return self.layers[0].altup if self.layers else None

    @property
    def streams(self) -> Streams | None:
        """What the residual consists of, if it is more than one vector."""
        return self.layers[0].streams if self.layers else None

    @property
    def is_encoder(self) -> bool:
        """Every token sees those behind it, too: it reads texts and writes none."""
        return any(isinstance(layer.mixer, EncoderAttention) for layer in self.layers)

    @property
    def num_ids(self) -> int:
        """Ids that a token may have: V of each kind."""
        return self.vocab_size * max(1, self.token_types)

    @property
    def vector_size(self) -> int:
        """Numbers of an embedding."""
        if self.pooler is not None and self.pooler.head and not self.pooler.labels:
            return self.pooler.head[-1].width
        return self.embed_size or self.hidden_size

    @property
    def num_params(self) -> int:
        """Numbers in all weights; a tied head counts once."""
        return sum(prod(shape) for shape in weight_shapes(self).values())


def _can_read(mixer: Mixer | None, source: Mixer | None) -> bool:
    """Whether queries of one layer can meet the keys and values that another keeps."""
    if not isinstance(mixer, Attention) or not isinstance(source, Attention) or source.kv_from is not None:
        return False
    alike = all(
        getattr(mixer, name) == getattr(source, name) for name in ("num_kv_heads", "head_dim", "value_dim", "rope")
    )
    return alike and (source.reach is None or (mixer.reach is not None and mixer.reach <= source.reach))


def cache_spec(
    layer: Layer, kv_dtype: str, lanes: int = 1, *, bounds: bool = False, part: float = 0.0
) -> CacheSpec | None:
    """What one layer keeps between steps; None for a layer without a mixer, for one of an encoder, and for one that
    reads the keys and values of another (`Layer.kv_from`). Recurrent state is always float32.

    `lanes`: runs of kv heads with pages of their own (attention only). `bounds`: pages have the bounds of their keys
    (`core.selection.PageReads`; attention without a window only). `part`: share of the keys' components that are kept
    once more, instead of bounds.
    """
    if layer.mixer is None or layer.kv_from is not None or isinstance(layer.mixer, EncoderAttention):
        return None
    spec = layer.mixer.cache(kv_dtype)
    if isinstance(layer.ffn, ChannelMix):
        assert isinstance(layer.mixer, Rwkv4 | Rwkv5 | Rwkv6 | Rwkv7), "channel mixing goes with RWKV's time mixing"
        shift = PlaneSpec("ffn_shift", 1, layer.mixer.width, "float32")
        spec = CacheSpec(kind=spec.kind, planes=(*spec.planes, shift))
    if bounds:
        keys = spec.planes[0]
        dtype = KV_CODECS.traits(kv_dtype).bounds
        besides = tuple(PlaneSpec(name, keys.heads, keys.dim, dtype) for name in BOUNDS)
        spec = msgspec.structs.replace(spec, page_planes=besides)
    if part:
        keys = spec.planes[0]
        once_more = PlaneSpec(PARTIAL, keys.heads, num_components(part, keys.dim), KV_CODECS.traits(kv_dtype).bounds)
        spec = msgspec.structs.replace(spec, planes=(*spec.planes, once_more))
    return spec if lanes == 1 else msgspec.structs.replace(spec, lanes=lanes)


def cache_specs(
    spec: ModelSpec, kv_dtype: str, lanes: int = 1, *, bounds: bool = False, part: float = 0.0, hidden: bool = False
) -> list[tuple[CacheSpec, ...]]:
    """What every layer keeps: mostly one cache, none without a mixer; newest and first tokens, if they are kept apart,
    are further ones (`core.mixers.attention.Attention.caches`), and so are entries of several tokens
    (`core.mixers.compressed.EntryAttention.caches`). `kv_dtype`: see `core.kv_format`.

    `lanes`, `bounds`, `part`: see `cache_spec`. Only attention has such formats; a recurrent layer's state is what it
    always is. `hidden`: pages also have what keys and values are made of, in their type (`plan.hidden` says of which
    models).
    """
    kv = parse_kv_format(kv_dtype)
    out: list[tuple[CacheSpec, ...]] = []
    for n, layer in enumerate(spec.layers):
        how = kv.of(n)
        if how.plain is None and isinstance(layer.mixer, Attention) and layer.kv_from is None:
            out.append(layer.mixer.caches(how))
        elif isinstance(layer.mixer, EntryAttention):
            out.append(layer.mixer.caches(how.plain or "float32"))
        else:
            one = cache_spec(layer, how.plain or "float32", lanes, bounds=bounds, part=part)
            if hidden and one is not None:
                more = PlaneSpec(HIDDEN, 1, spec.hidden_size, how.plain or "float32")
                one = msgspec.structs.replace(one, planes=(*one.planes, more))
            out.append(() if one is None else (one,))
    return out


def cache_groups(
    spec: ModelSpec, kv_dtype: str, lanes: int = 1, *, bounds: bool = False, part: float = 0.0, hidden: bool = False
) -> tuple[CacheGroup, ...]:
    """The groups of a model: first those of what every layer keeps, then those of newest, then of first tokens."""
    kept = cache_specs(spec, kv_dtype, lanes, bounds=bounds, part=part, hidden=hidden)
    groups: list[CacheGroup] = []
    for i in range(max((len(own) for own in kept), default=0)):
        more = group_layers([own[i] if i < len(own) else None for own in kept])
        groups += [CacheGroup(len(groups) + g.index, g.spec, g.layers) for g in more]
    return tuple(groups)


def weight_shapes(spec: ModelSpec) -> Shapes:
    """Logical weight name -> shape, for every weight the program reads, in the order of the program.

    Families map their checkpoint's names to these; the loader checks shapes against them before reading a byte. Linear
    weights are [out, in]; an expert's are `layers.N.experts.M.gate` and so on, a shared one's `layers.N.shared.gate`.
    """
    e = spec.hidden_size
    width = spec.embed_size or e
    out: Shapes = {"embed": (spec.vocab_size if spec.pair is None else spec.pair.rows, width)}
    if spec.pair is not None:
        out |= norm_shapes("token_norm", spec.pair.norm, e) | norm_shapes("hidden_norm", spec.pair.norm, e)
    if spec.positions:
        out["positions"] = (spec.max_position, e)
    if spec.token_types:
        out["token_types"] = (spec.token_types, e)
    if spec.embed_size is not None:
        out["embed_in"] = (e, width)
    if (ple := spec.per_layer) is not None:
        columns = len(spec.layers) * ple.width
        out |= {"ple_embed": (ple.rows, columns), "ple_in": (columns, e), "ple_norm": (ple.width,)}
    others = range(1, 1 if spec.altup is None else spec.altup.streams)
    out |= {f"altup_in_{i}": (e, e) for i in others}
    out |= norm_shapes("embed_norm", spec.embed_norm, e)
    for i, layer in enumerate(spec.layers):
        if isinstance(layer.mixer, SharedBlock):
            own = layer.mixer.shared_shapes(e)
            out |= {layer.mixer.shared + name: shape for name, shape in own.items()}
        out |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(layer, e).items()}
        if isinstance(layer.ffn, Experts) and layer.ffn.router.listed:
            out[f"layers.{i}.router_table"] = (spec.vocab_size, layer.ffn.top_k)
    out |= {f"altup_out_{i}": (e, e) for i in others}
    if spec.streams is not None:
        out |= spec.streams.weight_shapes("head_streams", e, last=True)
    out |= norm_shapes("final_norm", spec.final_norm, e)
    if not spec.has_head:
        return out | (spec.pooler.weight_shapes(e) if spec.pooler is not None else {})
    if spec.pair is not None:
        return out
    if spec.embed_size is not None:
        out["embed_out"] = (width, e)
    if not spec.tie_embeddings:
        out["lm_head"] = (spec.vocab_size, width)
    if spec.lm_head_bias:
        out["lm_head.bias"] = (spec.vocab_size,)
    return out


def layer_shapes(layer: Layer, e: int) -> Shapes:
    """The same for one layer, names without its prefix."""
    out: Shapes = {}
    if layer.streams is not None:
        for half in ("attn", "ffn"):
            out |= layer.streams.weight_shapes(half + "_streams", e)
    if layer.mixer is not None:
        if not layer.beside and not layer.raw_mixer and layer.placement != "bare":
            out |= norm_shapes("attn_norm", layer.norm, e)
        out |= layer.mixer.weight_shapes(e)
        if layer.placement == "both":
            out |= norm_shapes("attn_post_norm", layer.norm, e)
    if layer.ffn is not None:
        if not layer.shared_norm:
            out |= norm_shapes("ffn_norm", layer.norm, e)
        out |= _feed_forward_shapes(layer.ffn, e)
        if layer.placement == "both":
            out |= norm_shapes("ffn_post_norm", layer.norm, e)
    if layer.laurel is not None:
        out |= {"laurel_in": (layer.laurel, e), "laurel_out": (e, layer.laurel)}
        out |= norm_shapes("laurel_norm", layer.norm, e)
    if (up := layer.altup) is not None:
        n = up.streams
        out |= {"altup_norm": (e,), "altup_router": (n, e), "altup_predict": (n * n, n), "altup_correct": (n, n)}
        if up.scale:
            out["altup_scale"] = (e,)
    if (ple := layer.per_layer) is not None:
        out |= {"ple_gate": (ple.width, e), "ple_out": (e, ple.width)}
        out |= norm_shapes("ple_post_norm", layer.norm, e)
    if layer.output_scale:
        out["layer_scale"] = (1,)
    if layer.residual_weights:
        halves = {"attn_residual": layer.mixer, "ffn_residual": layer.ffn}
        out |= {name: (e,) for name, half in halves.items() if half is not None}
    return out


def norm_shapes(name: str, norm: Norm | None, e: int) -> Shapes:
    if norm is None or not norm.weight:
        return {}
    return {name: (e,), name + ".bias": (e,)} if norm.kind == "layer" and norm.bias else {name: (e,)}


def _feed_forward_shapes(ffn: FeedForwardKind, e: int) -> Shapes:
    if isinstance(ffn, ChannelMix):
        return ffn.weight_shapes(e)
    if isinstance(ffn, FeedForward):
        return _dense_shapes("", ffn, e)
    return _expert_shapes(ffn, e)


def _dense_shapes(prefix: str, ffn: FeedForward, e: int) -> Shapes:
    out: Shapes = {}
    for name in ("gate", "up") if ffn.gated else ("up",):
        out[prefix + name] = (ffn.width, e)
        if ffn.bias:
            out[prefix + name + ".bias"] = (ffn.width,)
    if ffn.activation == "xielu":
        out |= {prefix + "act_p": (1,), prefix + "act_n": (1,)}
    if ffn.down_norm is not None:
        out[prefix + "down_norm"] = (ffn.width,)
    out[prefix + "down"] = (e, ffn.width)
    if ffn.bias:
        out[prefix + "down.bias"] = (e,)
    return out


def _expert_shapes(ffn: Experts, e: int) -> Shapes:
    out = ffn.router.weight_shapes(ffn.num_experts, e)
    if ffn.apart is not None:
        for name in ("router_norm", "experts_norm", "experts_post_norm", "shared_post_norm"):
            out |= norm_shapes(name, ffn.apart, e)
    if ffn.latent is not None:
        out["experts_in"] = (ffn.latent, e)
    for i in range(ffn.num_experts):
        out |= _dense_shapes(f"experts.{i}.", ffn.expert, ffn.expert_size(e))
    if ffn.latent is not None:
        out["experts_out"] = (e, ffn.latent)
    if ffn.shared is not None:
        out |= _dense_shapes("shared.", ffn.shared, e)
        if ffn.shared_gate:
            out["shared_gate"] = (1, e)
    return out
