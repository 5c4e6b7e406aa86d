"""DeepSeek-V4: attention over a window and over entries of several tokens, residual streams, and experts.

Source: DeepSeek-V4 (2026), section 2; the published config.json files; absent fields as in transformers'
DeepseekV4Config.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import (
    Activation,
    EntryAttention,
    EntryIndexer,
    Experts,
    FeedForward,
    Layer,
    ModelSpec,
    Norm,
    Rope,
    Router,
    Streams,
)
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.fields import Fields
from penstock.families.naming import named
from penstock.families.positions import read_scaling
from penstock.families.reading import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_POSITION,
    MAX_SIZE,
    WHERE,
    Sizes,
    finish,
    read_sizes,
    require,
)
from penstock.families.sparse import read_experts, read_width
from penstock.formats.files import quoted

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {SPARSE: 4, HEAVY: 128}
LISTED, CHOSEN = "hash_moe", "moe"
_TOP = {"embed": "embed", "final_norm": "norm", "lm_head": "head", "head_streams": "hc_head_fn!"}
_PARTS = {
    "attn_norm": "attn_norm", "ffn_norm": "ffn_norm", "sinks": "attn.attn_sink!",
    "q_a": "attn.wq_a", "q_a_norm": "attn.q_norm", "q_b": "attn.wq_b", "kv": "attn.wkv", "kv_norm": "attn.kv_norm",
    "o_a": "attn.wo_a", "o": "attn.wo_b",
    "pool_kv": "attn.compressor.wkv", "pool_gate": "attn.compressor.wgate", "pool_norm": "attn.compressor.norm",
    "index_kv": "attn.indexer.compressor.wkv", "index_gate": "attn.indexer.compressor.wgate",
    "index_norm": "attn.indexer.compressor.norm", "index_q": "attn.indexer.wq_b",
    "index_weights": "attn.indexer.weights_proj",
    "attn_streams": "hc_attn_fn!", "ffn_streams": "hc_ffn_fn!",
    "router": "ffn.gate", "router_correction": "ffn.gate.bias!", "router_table": "ffn.gate.tid2eid!",
    "experts.*.gate": "ffn.experts.*.w1", "experts.*.up": "ffn.experts.*.w3", "experts.*.down": "ffn.experts.*.w2",
    "shared.gate": "ffn.shared_experts.w1", "shared.up": "ffn.shared_experts.w3",
    "shared.down": "ffn.shared_experts.w2",
}  # fmt: skip
"""Names of the published files."""
_BESIDE = {
    "pool.bias": "attn.compressor.ape", "index.bias": "attn.indexer.compressor.ape",
    "attn_streams.base": "hc_attn_base", "attn_streams.scale": "hc_attn_scale",
    "ffn_streams.base": "hc_ffn_base", "ffn_streams.scale": "hc_ffn_scale",
}  # fmt: skip
"""Of what is no module's weight."""
# How the experts are stored is about the file, and the head for multi-token prediction is not run.
_HARMLESS = ("expert_dtype", "num_nextn_predict_layers")


class DeepseekV4:
    """The `ModelFamily` of DeepseekV4ForCausalLM."""

    name = "deepseek_v4"
    architectures = ("DeepseekV4ForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields(config, WHERE)
        sizes = read_sizes(fields, default_positions=1048576)
        for name, value in (
            ("hidden_act", "silu"), ("num_key_value_heads", 1), ("norm_topk_prob", True), ("topk_method", "noaux_tc"),
            ("scoring_func", "sqrtsoftplus"), ("attention_bias", False), ("mlp_bias", False),
        ):  # fmt: skip
            require(fields, name, value)
        norm = Norm(eps=fields.number("rms_norm_eps", default=1e-6))
        streams = Streams(
            num=fields.integer("hc_mult", high=64, default=4),
            iterations=fields.integer("hc_sinkhorn_iters", high=1024, default=20),
            eps=fields.number("hc_eps", default=1e-6), norm_eps=norm.eps,
        )  # fmt: skip
        mixers = _mixers(fields, sizes, norm.eps)
        experts = _experts(fields)
        layers = [
            Layer(mixer=mixers[kind], ffn=experts[choice], norm=norm, streams=streams)
            for kind, choice in zip(_kinds(fields, sizes.num_layers), _choices(fields, sizes.num_layers), strict=True)
        ]
        return finish(fields, self.name, sizes, layers, bos=(0,), eos=(1,), final_norm=norm, harmless=_HARMLESS)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        return _places(spec)

    def told(self, config: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
        """See `core.protocols.SeveralParts`: the tensors tell nothing more."""
        return config

    def layout(self, spec: ModelSpec, tensors: Collection[str]) -> WeightMap:
        """The published names, or those that transformers writes."""
        places = _places(spec)
        if not any(name.startswith("model.") for name in tensors):
            return places
        return {logical: _rewritten(str(place)) for logical, place in places.items()}

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        """The head for multi-token prediction."""
        return name.removeprefix("model.").startswith("mtp.")


def _rewritten(stored: str) -> str:
    """A published name as transformers writes it: with an outer module, and a few modules by its own names for them."""
    for published, own in ((".attn.kv_norm.", ".attn.norm."), ("hc_head_", "hc_head.hc_"), ("embed.", "embed_tokens.")):
        stored = stored.replace(published, own)
    return stored if stored.startswith("head.") else "model." + stored


def _places(spec: ModelSpec) -> WeightMap:
    out: dict[str, str | Cut] = named(spec, _TOP, _PARTS, "layers")
    for part in ("base", "scale"):
        out["head_streams." + part] = f"hc_head_{part}"
    for i, layer in enumerate(spec.layers):
        m = layer.mixer
        assert isinstance(m, EntryAttention), "all layers of the family are"
        absent = {"pool.bias"} if m.every is None else set()
        absent |= {"index.bias"} if m.every is None or m.indexer is None else set()
        for logical, stored in _BESIDE.items():
            if logical not in absent:
                out[f"layers.{i}.{logical}"] = f"layers.{i}.{stored}"
    return out


def _kinds(fields: Fields, num_layers: int) -> list[str]:
    """`layer_types`, or how many tokens an entry has, layer by layer, with that of the head behind them."""
    kinds = fields.strings("layer_types")
    ratios = fields.integers("compress_ratios", low=0, high=MAX_POSITION)
    if kinds is None and ratios is not None:
        by_ratio = {0: SLIDING, 4: SPARSE, 128: HEAVY}
        if set(ratios) - set(by_ratio):
            raise UnsupportedError(f"{WHERE} gives compress_ratios other than {', '.join(map(str, by_ratio))}")
        kinds = [by_ratio[ratio] for ratio in ratios][:num_layers]
    if kinds is None:
        kinds = [HEAVY if i < 2 or i % 2 == 0 else SPARSE for i in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {SLIDING, SPARSE, HEAVY}:
        raise ModelError(
            f"{WHERE} must give one of {SLIDING}, {SPARSE} and {HEAVY} for each of {num_layers} layers (layer_types, "
            "or compress_ratios of 0, 4 and 128)"
        )
    return kinds


def _choices(fields: Fields, num_layers: int) -> list[str]:
    """Who chooses the experts of a layer: a list by token, in the first `num_hash_layers`, or its router."""
    kinds = fields.strings("mlp_layer_types")
    listed = fields.integer("num_hash_layers", low=0, high=MAX_LAYERS, default=3)
    if kinds is None:
        return [LISTED if i < listed else CHOSEN for i in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {LISTED, CHOSEN}:
        raise ModelError(f"{WHERE} gives mlp_layer_types that are not {num_layers} of {LISTED} and {CHOSEN}")
    return kinds


def _mixers(fields: Fields, sizes: Sizes, eps: float) -> dict[str, EntryAttention]:
    heads = fields.integer("num_attention_heads", high=MAX_SIZE, default=64)
    dim = fields.integer("head_dim", high=MAX_SIZE, default=512)
    groups = fields.integer("o_groups", high=MAX_SIZE, default=8)
    if heads * dim % groups:
        raise ModelError(f"{WHERE}: o_groups {groups} does not divide {heads} heads of {dim}")
    main, far = _ropes(fields, sizes, dim)
    rates = _rates(fields)
    plain = EntryAttention(
        num_heads=heads, head_dim=dim, q_rank=fields.integer("q_lora_rank", high=MAX_SIZE, default=1024),
        window=fields.integer("sliding_window", high=MAX_POSITION, default=128), rope=main, out_groups=groups,
        out_rank=fields.integer("o_lora_rank", high=MAX_SIZE, default=1024), eps=eps,
    )  # fmt: skip
    indexer = EntryIndexer(
        num_heads=fields.integer("index_n_heads", high=MAX_SIZE, default=64),
        head_dim=fields.integer("index_head_dim", high=MAX_SIZE, default=128),
        top_k=fields.integer("index_topk", high=MAX_POSITION, default=512),
    )
    if indexer.head_dim < far.dim:
        raise ModelError(f"{WHERE}: index_head_dim {indexer.head_dim} is smaller than the {far.dim} that are rotated")
    heavy = msgspec.structs.replace(plain, rope=far, every=rates[HEAVY])
    sparse = msgspec.structs.replace(plain, rope=far, every=rates[SPARSE], overlap=True, indexer=indexer)
    return {SLIDING: plain, HEAVY: heavy, SPARSE: sparse}


def _rates(fields: Fields) -> dict[str, int]:
    """Tokens of an entry, by kind of layer."""
    section = fields.section("compress_rates")
    found = {
        kind: rate if section is None else section.integer(kind, high=MAX_POSITION, default=rate)
        for kind, rate in _RATES.items()
    }
    for kind, name in ((SPARSE, "compress_rate_csa"), (HEAVY, "compress_rate_hca")):
        found[kind] = fields.integer(name, high=MAX_POSITION, default=found[kind])
    if section is not None:
        section.refuse_unread()
    return found


def _ropes(fields: Fields, sizes: Sizes, head_dim: int) -> tuple[Rope, Rope]:
    """That of layers with a window alone, which nothing stretches, and that of the others.

    YaRN's growth of attention is left out unless the file asks for it.
    """
    part = fields.number("partial_rotary_factor") if "partial_rotary_factor" in fields else None
    dim = fields.integer("qk_rope_head_dim", high=head_dim, default=64 if part is None else int(head_dim * part))
    old, new = fields.section("rope_scaling"), fields.section("rope_parameters")
    if old is not None and new is not None:
        raise ModelError(f"{WHERE} gives both rope_scaling and rope_parameters; leave one out")
    given = {
        "main": fields.number("rope_theta", default=10000.0),
        "compress": fields.number("compress_rope_theta", default=160000.0),
    }
    out = []
    for kind, theta in given.items():
        section = new.section(kind) if new is not None else old if kind == "compress" else None
        section = section or Fields({}, WHERE)
        inner = section.number("partial_rotary_factor") if "partial_rotary_factor" in section else None
        own = dim if inner is None else int(head_dim * inner)
        if own < 2 or own % 2 or own > head_dim:
            raise ModelError(f"{WHERE}: {own} of {head_dim} components of a head are rotated, which are no whole pairs")
        plain = Rope(dim=own, theta=section.number("rope_theta", default=theta), interleaved=True)
        stretched = read_scaling(section, fields, plain, sizes.max_position)
        if stretched.kind == "yarn" and "attention_factor" not in section:
            stretched = msgspec.structs.replace(stretched, attention_factor=1.0)
        section.refuse_unread()
        out.append(stretched)
    if new is not None:
        new.refuse_unread()
    if out[0].kind != "default":
        raise UnsupportedError(f"{WHERE} stretches the positions of {quoted('main')}, which this family never does")
    return out[0], out[1]


def _experts(fields: Fields) -> dict[str, Experts]:
    width = read_width(fields, "moe_intermediate_size", 2048)
    limit = fields.number("swiglu_limit", default=10.0)
    clamped: Activation = "silu_clamped"
    num_shared = fields.integer("n_shared_experts", high=MAX_EXPERTS, default=1)
    if num_shared != 1:
        raise UnsupportedError(f"{WHERE} gives n_shared_experts {num_shared}; this family computes one")
    scale = fields.number("routed_scaling_factor", default=1.5)
    one = FeedForward(width=width, activation=clamped, limit=limit)
    chosen = read_experts(
        fields, one, Router(score="sqrtsoftplus", renormalize=True, scale=scale, correction=True),
        number=("n_routed_experts", "num_local_experts"), default_top_k=6, shared=one,
    )  # fmt: skip
    router = Router(score="sqrtsoftplus", renormalize=True, scale=scale, listed=True)
    return {CHOSEN: chosen, LISTED: msgspec.structs.replace(chosen, router=router)}
