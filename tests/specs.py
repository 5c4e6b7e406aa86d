"""Tiny random models with fixed seeds: one for every shape of layer the engine has to get right.

`make(name)` gives the same spec and bit-equal weights on every call. Sizes are odd on purpose (vocabulary 61,
feed-forward width 43 or 45), so that nothing depends on round numbers.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.core.model_spec import (
    Alibi,
    AltUp,
    Attention,
    BlockAttention,
    ChannelMix,
    Diagonal,
    EntryAttention,
    EntryIndexer,
    Experts,
    FeedForward,
    GatedDelta,
    GatedLru,
    Indexer,
    Latent,
    Layer,
    Lightning,
    Mamba,
    Mamba2,
    Mixer,
    Mlstm,
    ModelSpec,
    Norm,
    PerLayer,
    QkNorm,
    Qrwkv6,
    QueryScale,
    Recurrent,
    Rope,
    Router,
    Rwkv4,
    Rwkv5,
    Rwkv6,
    Rwkv7,
    SharedBlock,
    ShortConv,
    Streams,
    cache_groups,
    weight_shapes,
)

Weights = dict[str, npt.NDArray[np.float32]]
E = 32
MAX_POSITION = 1024


def _attention(heads: int, kv_heads: int, **more: object) -> Attention:
    options: dict[str, object] = {"rope": Rope(dim=8), **more}
    return Attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=8, **options)  # type: ignore[arg-type]


def _spec(*mixers: Mixer, vocab: int = 61, width: int | None = 43, tied: bool = False, **more: object) -> ModelSpec:
    ffn = None if width is None else FeedForward(width=width)
    layers = tuple(Layer(mixer=m, ffn=ffn) for m in mixers)
    return ModelSpec(
        family="test", vocab_size=vocab, hidden_size=E, layers=layers, tie_embeddings=tied, max_position=MAX_POSITION,
        bos_token_id=1, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def _stack(*layers: Layer, **more: object) -> ModelSpec:
    return ModelSpec(
        family="test", vocab_size=61, hidden_size=E, layers=layers, max_position=MAX_POSITION, bos_token_id=1,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


def _streams(mixer: Mixer, sparsity: float = 0.0) -> Layer:
    return Layer(
        mixer=mixer, ffn=FeedForward(width=43, activation="gelu_tanh", sparsity=sparsity), placement="both",
        per_layer=PerLayer(width=6, rows=50), altup=AltUp(streams=3, active=1), laurel=5,
    )  # fmt: skip


def _rwkv(version: Literal[4, 6, 7], *mixers: Mixer) -> ModelSpec:
    norm = Norm(kind="layer")
    layers = tuple(Layer(mixer=m, ffn=ChannelMix(version=version, width=43), norm=norm) for m in mixers)
    return ModelSpec(
        family="test", vocab_size=61, hidden_size=E, layers=layers, final_norm=norm, embed_norm=norm,
        max_position=MAX_POSITION, bos_token_id=1,
    )  # fmt: skip


_LLAMA3 = Rope(
    dim=8, kind="llama3", theta=100.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32
)
_LATENT = Latent(num_heads=4, kv_rank=12, nope_dim=6, rope_dim=4, v_dim=5, rope=Rope(dim=4, interleaved=True))
_INDEXER = Indexer(num_heads=5, head_dim=6, top_k=8, rope=Rope(dim=4))
_INDEXED = Latent(
    num_heads=3, kv_rank=12, nope_dim=6, rope_dim=4, v_dim=5, rope=Rope(dim=4), q_rank=9, indexer=_INDEXER
)  # fmt: skip
_LATENT_LOW_RANK = Latent(num_heads=3, kv_rank=12, nope_dim=6, rope_dim=4, v_dim=5, rope=Rope(dim=4), q_rank=9)
_STATE = Recurrent(num_heads=3, key_dim=5, value_dim=7)
_MAMBA = Mamba(inner=44, state=5, conv=4, dt_rank=3)
_MAMBA2 = Mamba2(num_heads=6, head_dim=7, state=5, groups=2, conv=3, dt_min=0.02, dt_max=1.5, proj_bias=True)
_MAMBA2_PLAIN = Mamba2(num_heads=4, head_dim=9, state=6, groups=1, conv=4, conv_bias=False)
_RWKV7 = Rwkv7(num_heads=4, head_dim=8, decay_rank=5, rate_rank=4, value_rank=3, gate_rank=7)
_QRWKV6 = Qrwkv6(num_heads=4, kv_heads=2, head_dim=8, mix_rank=3, decay_rank=5)
_QRWKV6_PLAIN = Qrwkv6(num_heads=2, kv_heads=2, head_dim=16, mix_rank=4, decay_rank=3, bias=False, mixed="wkvrg")
_RWKV6 = Rwkv6(num_heads=4, head_dim=8, mix_rank=3, decay_rank=5)
_RWKV6_WIDE = Rwkv6(num_heads=1, head_dim=32, mix_rank=4, decay_rank=7)
_RWKV7_BARE = Rwkv7(num_heads=2, head_dim=16, decay_rank=4, rate_rank=5, value_rank=6, gate_rank=0, normed=False)
_RWKV7_FIRST = Rwkv7(num_heads=4, head_dim=8, decay_rank=6, rate_rank=3, gate_rank=9, first=True)
_DELTA = GatedDelta(key_heads=2, value_heads=4, key_dim=6, value_dim=7, conv=4)
_DELTA_CHANNELS = GatedDelta(
    key_heads=3,
    value_heads=3,
    key_dim=6,
    value_dim=5,
    conv=3,
    channel_decay=True,
    decay_rank=4,
    gate="sigmoid",
    gate_rank=5,
    beta_scale=2.0,
    decay_is_log=False,
)
_SHARED = SharedBlock(
    num_heads=4, num_kv_heads=4, head_dim=16, rope=Rope(dim=16), scale=8**-0.5, block=0, ffn_width=43, ffn_rank=5,
    qkv_rank=3,
)  # fmt: skip
_SHARED_PLAIN = msgspec.structs.replace(_SHARED, block=1, num_kv_heads=2, rope=None, ffn_rank=0, qkv_rank=0)
_PLAIN = FeedForward(width=45, activation="gelu_tanh", gated=False, bias=True)
_UNBIASED = Norm(kind="layer", bias=False)

_SOFTMAX_EXPERTS = Experts(
    num_experts=5,
    top_k=2,
    expert=FeedForward(width=11),
    router=Router(renormalize=True),
    shared=FeedForward(width=9),
    shared_gate=True,
)
_GROUPED_EXPERTS = Experts(
    num_experts=6, top_k=2, expert=FeedForward(width=13),
    router=Router(
        score="sigmoid", renormalize=True, correction=True, groups=3, top_groups=2, group_score="top2", scale=1.7
    ),
)  # fmt: skip
_OSS_EXPERTS = Experts(
    num_experts=4,
    top_k=3,
    expert=FeedForward(width=11, activation="swiglu_clamped", bias=True, limit=1.5),
    router=Router(chosen_only=True, bias=True),
)

_ROOT_EXPERTS = Experts(
    num_experts=5, top_k=2, expert=FeedForward(width=11, activation="silu_clamped", limit=0.7),
    router=Router(score="sqrtsoftplus", renormalize=True, correction=True, scale=1.5),
    shared=FeedForward(width=9, activation="silu_clamped", limit=0.7),
)  # fmt: skip
_LISTED_EXPERTS = msgspec.structs.replace(
    _ROOT_EXPERTS, router=Router(score="sqrtsoftplus", renormalize=True, listed=True)
)
_BLOCKS = BlockAttention(
    num_heads=4, num_kv_heads=2, head_dim=8, index_dim=6, rope=Rope(dim=4), norm=QkNorm(offset=1.0), block=3, top_k=3,
)  # fmt: skip
# Nobody chooses: a function of the token, alone and with a router that weighs; and a task.
_HASHED = Experts(num_experts=5, top_k=2, expert=FeedForward(width=11), router=Router(score="even", hash="random"))
_HASHED_WEIGHED = Experts(
    num_experts=4, top_k=2, expert=FeedForward(width=13), shared=FeedForward(width=9),
    router=Router(score="sigmoid", renormalize=True, hash="modulo", scale=1.5, expert_scale=True),
)  # fmt: skip
_OF_TASK = Experts(
    num_experts=6, top_k=2, expert=FeedForward(width=12), router=Router(renormalize=True, tasks=3, task=1)
)  # fmt: skip
_WINDOW_ALONE = EntryAttention(
    num_heads=4, head_dim=10, q_rank=9, window=5, rope=Rope(dim=4, interleaved=True), out_groups=2, out_rank=7
)
_ENTRIES = msgspec.structs.replace(
    _WINDOW_ALONE, every=2, overlap=True, indexer=EntryIndexer(num_heads=3, head_dim=6, top_k=4)
)
_LONG_ENTRIES = msgspec.structs.replace(_WINDOW_ALONE, every=5, window=7)

_SPECS: dict[str, ModelSpec] = {
    "llama_gqa": _spec(_attention(4, 2), _attention(4, 2)),
    "llama_mha": _spec(_attention(4, 4), _attention(4, 4), tied=True),
    "llama_mqa": _spec(_attention(4, 1, rope=Rope(dim=8, interleaved=True)), _attention(4, 1), vocab=67),
    "llama_rope3": _spec(_attention(6, 2, rope=_LLAMA3), _attention(6, 2, rope=_LLAMA3)),
    "llama_biased": _spec(*[_attention(4, 2, qkv_bias=True, o_bias=True, qk_norm=QkNorm())] * 2, width=45),
    # Layer norm, a plain feed-forward with biases, a rope on half of each head, and one cache group per kv head count.
    "layernorm": ModelSpec(
        family="test", vocab_size=61, hidden_size=E, max_position=MAX_POSITION, bos_token_id=1,
        layers=tuple(
            Layer(mixer=_attention(4, g, rope=Rope(dim=4)), ffn=_PLAIN, norm=Norm(kind="layer")) for g in (2, 4)
        ),
        final_norm=Norm(kind="layer"),
    ),
    "slots": _spec(_STATE, _attention(4, 2), _STATE, _attention(4, 2)),
    "latent": _spec(_LATENT, _LATENT_LOW_RANK),
    # A choice of fewer tokens than prompts have, and a layer that reads the choice of the one before.
    "indexed": _spec(_INDEXED, msgspec.structs.replace(_LATENT_LOW_RANK, reads_choice=True)),
    # Values of another size than keys, with a window too.
    "narrow_values": _spec(_attention(4, 2, v_dim=4, o_bias=True), _attention(6, 1, v_dim=12, window=9, qkv_bias=True)),
    # Norms inside both halves, and latent attention whose queries grow and whose heads have gates.
    "inner_norms": _stack(
        *(Layer(mixer=m, ffn=FeedForward(width=43, activation="relu2", down_norm=1e-5)) for m in (
            _attention(4, 2, o_norm=1e-5),
            msgspec.structs.replace(_LATENT, head_gate=True, query_scale=QueryScale(beta=0.3, floor=7)),
        )),
    ),
    # Scores with a bias of every key, and residuals weighed by channel.
    "key_bias": _stack(*(
        Layer(mixer=_attention(4, g, key_bias=True, qk_norm=QkNorm(), qkv_bias=g == 1, window=w),
              ffn=FeedForward(width=43), residual_weights=True) for g, w in ((2, None), (1, 9))
    )),
    "mamba": _spec(_MAMBA, _MAMBA, width=None),
    "mamba2": _spec(_MAMBA2, _MAMBA2, width=None),
    "mamba2_hybrid": _spec(_MAMBA2_PLAIN, _attention(4, 2, rope=None), _MAMBA2_PLAIN),
    "rwkv4": _rwkv(4, Rwkv4(width=E), Rwkv4(width=E, decay_is_log=False)),
    "rwkv5": _rwkv(4, Rwkv5(num_heads=4, head_dim=8), Rwkv5(num_heads=2, head_dim=16, eps=1e-5)),
    "rwkv6": _rwkv(6, _RWKV6, _RWKV6_WIDE),
    "qrwkv6": _spec(_QRWKV6, _attention(4, 2), _QRWKV6_PLAIN),
    "rwkv7": _rwkv(7, _RWKV7_FIRST, _RWKV7, _RWKV7_BARE),
    "gated": _spec(_attention(4, 2, output_gate=True, qkv_bias=True), _attention(3, 3, output_gate=True)),
    "delta": _spec(_DELTA, _attention(4, 2), _DELTA_CHANNELS),
    "short_conv": _spec(ShortConv(width=E, conv=3), _attention(4, 2), ShortConv(width=E, conv=4, bias=True)),
    "lightning": _spec(Lightning(num_heads=4, head_dim=7, decay=(0.5, 0.9, 0.98, 1.0)), _attention(4, 2)),
    # Windows shorter than prompts; entries that overlap and are chosen, and entries that fit no block; three streams,
    # and experts that are listed for every token.
    "entries": ModelSpec(
        family="test", vocab_size=61, hidden_size=E, max_position=MAX_POSITION, bos_token_id=1,
        layers=tuple(
            Layer(mixer=m, ffn=f, streams=Streams(num=3, iterations=3))
            for m, f in (
                (_ENTRIES, _LISTED_EXPERTS), (_WINDOW_ALONE, FeedForward(width=43)), (_LONG_ENTRIES, _ROOT_EXPERTS)
            )
        ),
    ),
    "experts": ModelSpec(
        family="test", vocab_size=61, hidden_size=E, max_position=MAX_POSITION, bos_token_id=1,
        layers=tuple(Layer(mixer=_attention(4, 2), ffn=f) for f in (_SOFTMAX_EXPERTS, _GROUPED_EXPERTS, _OSS_EXPERTS)),
    ),
    "fixed_experts": ModelSpec(
        family="test", vocab_size=61, hidden_size=E, max_position=MAX_POSITION, bos_token_id=1,
        layers=tuple(
            Layer(mixer=_attention(4, 2), ffn=f)
            for f in (_HASHED, _HASHED_WEIGHED, _OF_TASK, FeedForward(width=43))
        ),
    ),
    # All that bends scores at once: no rope but a slope, chunks, sinks, caps, norms of q and k, queries that grow.
    "scores": _spec(
        _attention(
            4, 2, rope=None, alibi=Alibi(), chunk=12, sinks=True, soft_cap=5.0, scale=0.5,
            qk_norm=QkNorm(kind="layer", over="each", bias=True), query_scale=QueryScale(beta=0.6, floor=5, shift=1),
        ),
        _attention(
            4, 4, window=9, sinks=True, soft_cap=3.0, qk_norm=QkNorm(over="all", offset=1.0), clip=1.5,
            query_scale=QueryScale(beta=0.3, floor=7),
        ),
        _attention(4, 1, qk_norm=QkNorm(kind="unit", after_rope=True)),
    ),
    "parallel": _stack(
        Layer(mixer=_attention(4, 2), ffn=_PLAIN, norm=_UNBIASED, parallel=True, shared_norm=True),
        Layer(mixer=_attention(4, 2), ffn=FeedForward(width=43), norm=Norm(kind="layer"), parallel=True,
              residual_scale=0.8),
        final_norm=_UNBIASED, logit_scale=0.7, lm_head_bias=True,
    ),
    "sandwich": _stack(
        Layer(mixer=_attention(4, 2, window=11), ffn=FeedForward(width=43, activation="gelu_tanh"),
              norm=Norm(offset=1.0), placement="both", residual_scale=0.9),
        Layer(mixer=_attention(4, 2), ffn=FeedForward(width=43), placement="post"),
        Layer(mixer=_attention(4, 2), ffn=FeedForward(width=43), norm=Norm(weight=False), placement="sum"),
        embed_scale=0.6, logit_scale=0.4, logit_soft_cap=3.0,
    ),
    # Layers that read the keys and values of the one before (CLA2).
    "shared_kv": _spec(
        _attention(4, 2), _attention(6, 2, kv_from=0, o_bias=True),
        *[_attention(4, 2, kv_from=n, qk_norm=QkNorm(after_rope=True, in_query=True)) for n in (None, 2)],
    ),
    # Blocks that no block of the cache is a multiple of, chosen for each kv head; norms that add one.
    "blocks": _spec(_BLOCKS, _attention(4, 2), msgspec.structs.replace(_BLOCKS, block=5, top_k=4, local=2)),
    # Windows below; above, layers that read what the first of them keeps (YOCO).
    "yoco": _spec(
        _attention(4, 2, window=7), _attention(4, 2, window=7), _attention(4, 2),
        *[_attention(4, 2, kv_from=2)] * 2, width=35,
    ),
    # All that Gemma 3n does at once: streams, embeddings for every layer, sparse gates, last layers that share.
    "streams": _stack(
        _streams(_attention(4, 2, window=7, qk_norm=QkNorm(), v_norm=1e-6), 0.8),
        _streams(_attention(4, 2)),
        _streams(_attention(4, 2, window=7, kv_from=0), 0.5),
        _streams(_attention(4, 2, kv_from=1, qkv_bias=True)),
        embed_scale=1.5,
    ),
    # Windows shorter than any prompt worth caching: with full layers between them, and with nothing else.
    "windowed": _spec(_attention(4, 2, window=5), _attention(4, 2), _attention(4, 2, window=5)),
    "all_windowed": _spec(_attention(4, 2, window=5), _attention(4, 2, window=5)),
    "gated_lru": _spec(
        GatedLru(width=36, blocks=4, conv=4), _attention(4, 1, window=11), GatedLru(width=E, blocks=1, conv=2)
    ),
    "mlstm": _spec(
        Mlstm(num_heads=3, key_dim=5, value_dim=7), _attention(4, 2), Mlstm(num_heads=2, key_dim=8, value_dim=6)
    ),
    "diagonal": _spec(
        Diagonal(inner=37, state=5, activation="gelu"), _attention(4, 2), Diagonal(inner=21, form="lru"), width=45
    ),
    "gated_diagonal": _spec(
        Diagonal(inner=37, state=5, gates="h3", taps=4), _attention(4, 2),
        Diagonal(inner=19, state=3, activation="gelu", gates="gss", outer=45), width=41,
    ),
    "retention": _spec(
        Lightning(num_heads=4, head_dim=6, v_dim=10, decay=(0.6, 0.9, 0.97, 0.99), activation=None, rope=Rope(dim=6),
                  scale=6**-0.5, norm="head", gate="silu"),
        _attention(4, 2),
    ),
    # A block that two layers share, one of another kind, and Mamba-2 that alone reads what they add.
    "shared": _stack(
        Layer(mixer=_MAMBA2_PLAIN, ffn=None),
        Layer(mixer=_SHARED, ffn=None, placement="bare"), Layer(mixer=_MAMBA2_PLAIN, ffn=None, forgets=True),
        Layer(mixer=_SHARED_PLAIN, ffn=None, placement="bare"), Layer(mixer=_MAMBA2_PLAIN, ffn=None, forgets=True),
        Layer(mixer=_SHARED, ffn=None, placement="bare"), Layer(mixer=_MAMBA2_PLAIN, ffn=None, forgets=True),
    ),
}  # fmt: skip

ALL = list(_SPECS)

_SEEDS = {
    "llama_gqa": (0, 4), "llama_mha": (1, 9), "llama_mqa": (2, 34), "llama_rope3": (3, 29), "llama_biased": (4, 0),
    "layernorm": (5, 3), "slots": (6, 23), "latent": (7, 1), "mamba": (8, 47), "mamba2": (9, 48),
    "mamba2_hybrid": (10, 28), "rwkv4": (11, 38), "rwkv7": (12, 55), "delta": (16, 0), "gated": (17, 0),
    "short_conv": (17, 0), "lightning": (18, 0), "experts": (13, 1), "scores": (14, 3), "parallel": (15, 5),
    "sandwich": (16, 1), "windowed": (8, 21), "all_windowed": (9, 39), "narrow_values": (17, 0), "indexed": (18, 0),
    "gated_lru": (19, 0), "mlstm": (19, 1), "diagonal": (19, 2), "retention": (19, 3), "shared": (19, 4),
    "blocks": (21, 0), "yoco": (21, 0), "fixed_experts": (21, 0), "gated_diagonal": (21, 0), "shared_kv": (19, 0),
    "streams": (20, 0), "entries": (19, 0), "inner_norms": (19, 0), "key_bias": (20, 2),
    "rwkv5": (21, 0), "rwkv6": (21, 1), "qrwkv6": (21, 2),
}  # fmt: skip
"""Chosen so that greedy text stays varied for long (a test says how much): a constant loop would hide mistakes.

After a prompt of one or two tokens, llama_mha, layernorm and latent may still fall into one; give them three or more.
"""


@cache
def _weights(name: str) -> Weights:
    spec = _SPECS[name]
    rng = np.random.default_rng(_SEEDS[name])
    out: Weights = {}
    for weight, shape in weight_shapes(spec).items():
        noise = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            norm = weight.endswith("norm")
            out[weight] = (1.0 + 0.1 * noise if norm else 0.2 * noise).astype(np.float32)
            if weight.endswith("time_decay") or weight == "layers.2.a_log":
                out[weight] = -np.abs(noise)
        elif weight in ("embed", "lm_head"):
            out[weight] = noise
        elif weight.endswith("router_table"):
            order = np.argsort(rng.random((shape[0], _LISTED_EXPERTS.num_experts)))
            out[weight] = order[:, : shape[1]].astype(np.float32)
        else:
            # Larger than usual: what the layers add must outweigh the embedding, or a tied model repeats its input.
            # But four products of a shared block follow each other with no residual between them.
            gain = 1.0 if name == "shared" else 2.0
            out[weight] = (noise * (gain / np.sqrt(shape[1]))).astype(np.float32)
    return out


def make(name: str) -> tuple[ModelSpec, Weights]:
    """(spec, weights by logical name) of one of `ALL`. The weights are shared: copy before changing them."""
    return _SPECS[name], dict(_weights(name))


@cache
def kinds(name: str) -> frozenset[str]:
    """What an engine and its memory have to do with a model of `ALL`: kinds of layers and of what they keep. Samples of
    models show each of these; norms, activations and ropes are for tests of the operations."""
    spec, found = _SPECS[name], set[str]()
    for layer in spec.layers:
        found |= {type(layer.mixer).__name__, type(layer.ffn).__name__}
        found |= {option for option in ("kv_from", "chunk", "window") if getattr(layer.mixer, option, None) is not None}
    for group in cache_groups(spec, "float32"):
        found.add(f"{group.spec.kind}: {', '.join(plane.name for plane in group.spec.planes)}")
    found.add(" and ".join(sorted({group.spec.kind for group in cache_groups(spec, "float32")})))
    return frozenset(found)
