"""The main configurations of the kernels: calls at the shapes of served models, for compilers and for benchmarks.

`CASES` names them; each makes its tensors on a device ("meta" holds no numbers: enough to compile) and returns a call.
Shapes are those of Llama-3.1-8B (32 query heads on 8 kv heads of 128, hidden 4096, inner 14336, vocabulary 128256) and
of DeepSeek-V3's attention (128 heads on one latent of 512 with 64 rotated components) where nothing else is said;
experts are those of Qwen3-30B-A3B (8 of 128, hidden 2048, inner 768).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from penstock.backends.gpu.kernels.activation import activate_gated
from penstock.backends.gpu.kernels.adapters import FIELDS, TILE, AdapterSlots, adapt
from penstock.backends.gpu.kernels.attention_decode import Cache, Rule, attend_tokens
from penstock.backends.gpu.kernels.attention_prefill import attend_rows
from penstock.backends.gpu.kernels.experts import Stack, run_experts
from penstock.backends.gpu.kernels.inputs import embed, token_places
from penstock.backends.gpu.kernels.norm import layer_norm, rms_norm
from penstock.backends.gpu.kernels.products import product_fixed, product_int4, product_int8
from penstock.backends.gpu.kernels.rope import rope_write
from penstock.backends.gpu.kernels.routes import route
from penstock.backends.gpu.kernels.row_products import coded_row, product_row
from penstock.backends.gpu.kernels.sample import argmax, draw
from penstock.backends.gpu.kernels.word_products import product_words

Call = Callable[[], Any]
BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
E, F, H, G, D, V = 4096, 14336, 32, 8, 128, 128256
BLOCK = 32


class Case(NamedTuple):
    """`make(device)` is the call. `num_bytes`: what it must read and write at least; 0 where it is not the measure."""

    kernel: str
    make: Callable[[str], Call]
    num_bytes: int = 0


def _normal(device: str, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    x = torch.empty(shape, dtype=F32, device=device)
    return x.normal_().to(dtype) if device != "meta" else x.to(dtype)


def _cache(device: str, sequences: int, keys: int, kind: torch.dtype, heads: int = G, dim: int = D) -> Cache:
    blocks = -(-keys // BLOCK)
    shape = sequences * blocks, BLOCK, heads, dim
    pages = torch.arange(sequences * blocks, dtype=torch.int32, device=device).reshape(sequences, blocks)
    scales: list[torch.Tensor | None] = [None, None]
    if kind == torch.int8:
        planes = [torch.ones(shape, dtype=kind, device=device) for _ in range(2)]
        scales = [torch.ones((*shape[:3], 1), dtype=F32, device=device) for _ in range(2)]
    else:
        planes = [_normal(device, *shape, dtype=kind) for _ in range(2)]
    return Cache(planes[0], planes[1], pages, *scales)


def decode(device: str, sequences: int, keys: int, kind: torch.dtype = BF16, q_kind: torch.dtype = BF16, *,
           tree: bool = False, **rule: Any) -> Call:  # fmt: skip
    """One token of each sequence behind `keys` - 1 others; a tree: eight of one sequence."""
    cache = _cache(device, sequences, keys, kind)
    tokens = 8 * sequences if tree else sequences
    q = _normal(device, tokens, H, D, dtype=q_kind)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=device) * (tokens // sequences)
    positions = torch.full((tokens,), keys - 1, dtype=torch.int32, device=device)
    owners = torch.arange(tokens, dtype=torch.int32, device=device) // (tokens // sequences)
    mask = torch.zeros(tokens, dtype=torch.int64, device=device) if tree else None
    for name in ("slopes", "sinks"):
        if rule.get(name):
            rule[name] = _normal(device, H, dtype=F32)
    own = Rule(D**-0.5, **rule)
    return lambda: attend_tokens(q, cache, own, starts, positions, keys - 1, sequences=owners, mask=mask)


def latent_decode(device: str, sequences: int, keys: int) -> Call:
    cache = _cache(device, sequences, keys, BF16, 1, 512)
    cache = cache._replace(values=cache.keys, rope_keys=_normal(device, *cache.keys.shape[:3], 64))
    q = _normal(device, sequences, 128, 576)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=device)
    positions = torch.full((sequences,), keys - 1, dtype=torch.int32, device=device)
    own = Rule(192**-0.5)
    return lambda: attend_tokens(q, cache, own, starts, positions, keys - 1, sequences=starts[:-1])


def prefill(device: str, sequences: int, tokens: int, kind: torch.dtype = BF16, q_kind: torch.dtype = BF16,
            dim: int = D, **rule: Any) -> Call:  # fmt: skip
    """Prompts of `tokens` from their first token on."""
    cache = _cache(device, sequences, tokens, kind, dim=dim)
    q = _normal(device, sequences * tokens, H, dim, dtype=q_kind)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=device) * tokens
    positions = torch.arange(sequences * tokens, dtype=torch.int32, device=device) % tokens
    own = Rule(dim**-0.5, **rule)
    return lambda: attend_rows(q, cache, own, starts, positions, tokens)


def places(device: str, tokens: int) -> Call:
    """Of 32 layers."""
    ids, positions = (torch.zeros(tokens, dtype=torch.int32, device=device) for _ in range(2))
    tables = torch.zeros((tokens, 128), dtype=torch.int32, device=device)
    return lambda: token_places(ids, positions, tables, BLOCK, 32, 99)


def embedding(device: str, tokens: int) -> Call:
    weight, ids = _normal(device, V, E), torch.arange(tokens, dtype=torch.int64, device=device)
    return lambda: embed(ids, weight)


def norm(device: str, tokens: int, centred: bool = False) -> Call:
    x, r, w = _normal(device, tokens, E), _normal(device, tokens, E), _normal(device, E)
    return (lambda: layer_norm(x, w, w, 1e-5, r)) if centred else (lambda: rms_norm(x, w, 1e-5, r))


def rope(device: str, tokens: int, kind: torch.dtype = BF16) -> Call:
    cache = _cache(device, 1, tokens, kind)
    q, k, v = (_normal(device, tokens, heads, D) for heads in (H, G, G))
    at = torch.arange(tokens, dtype=torch.int32, device=device)
    table = _normal(device, 2, max(tokens, 16), D // 2, dtype=F32)
    return lambda: rope_write(q, k, v, at, table, cache.keys, cache.values, at // BLOCK, at % BLOCK,
                              key_scales=cache.key_scales, value_scales=cache.value_scales)  # fmt: skip


def gate(device: str, tokens: int, name: str = "silu", limit: float | None = None) -> Call:
    both = _normal(device, tokens, 2 * F)
    return lambda: activate_gated(both[:, :F], both[:, F:], name, limit)


def product(device: str, tokens: int, bits: int, group: int = 0, zeros: bool = False, **how: Any) -> Call:
    """The gate of a feed-forward layer: 4096 inputs, 14336 outputs."""
    x = _normal(device, tokens, E)
    groups = E // group if group else 1
    scales = torch.ones((F, groups), dtype=F32, device=device)
    if bits == 16:
        weight = _normal(device, F, E)
        return lambda: product_fixed(x, weight)
    if bits == 8:
        codes = torch.ones((F, E), dtype=torch.uint8 if how else torch.int8, device=device)
        return lambda: product_int8(x, codes, scales, zeros=scales if zeros else None, **how)
    packed = torch.full((F, E // 2), 0x97, dtype=torch.uint8, device=device)
    return lambda: product_int4(x, packed, scales, scales if zeros else None, **how)


def row_product(device: str, bits: int, group: int = 128, **how: Any) -> Call:
    """`product` of one token."""
    x = _normal(device, 1, E)
    if bits == 16:
        weight = _normal(device, F, E)
        return lambda: product_row(x, weight)
    codes = torch.full((F, E * bits // 8), 0x57, dtype=torch.uint8, device=device)
    scales = torch.ones((F, E // group), dtype=F32, device=device)
    return lambda: coded_row(x, codes, scales, bits=bits, **how)


def words_product(device: str, tokens: int) -> Call:
    x = _normal(device, tokens, E)
    codes = torch.full((F, E // 2), 0x57, dtype=torch.uint8, device=device)
    scales = torch.ones((F, E // 128), dtype=F32, device=device)
    return lambda: product_words(x, codes, scales)


def expert_case(device: str, tokens: int, bits: int = 16) -> Call:
    """Experts with gates; codes with zero points in groups of 128."""
    num, choices, hidden, width = 128, 8, 2048, 768

    def stack(rows: int, columns: int) -> Stack:
        if bits == 16:
            return Stack(_normal(device, num * rows, columns))
        codes = torch.full((num * rows, columns * bits // 8), 0x77, dtype=torch.uint8, device=device)
        scales = torch.ones((num * rows, columns // 128), dtype=F32, device=device)
        return Stack(codes, bits, scales, scales, group=128)

    x = _normal(device, tokens, hidden, dtype=F32)
    ids = (torch.arange(tokens, device=device)[:, None] + 16 * torch.arange(choices, device=device)) % num
    shares = torch.ones((tokens, choices), dtype=F32, device=device)
    gate, up, down = stack(width, hidden), stack(width, hidden), stack(hidden, width)
    return lambda: run_experts(x, ids.sort(-1).values, shares, gate, up, down, num, "silu")


def adapter_case(device: str, rows: int, adapters: int, rank: int = 16, dtype: torch.dtype = BF16) -> Call:
    """Query projections of rows that each have another adapter, as long as there are some, and share them then."""
    x, y = _normal(device, rows, E, dtype=dtype), _normal(device, rows, E, dtype=dtype)
    a, b = _normal(device, adapters, rank, E, dtype=dtype), _normal(device, adapters, E, rank, dtype=dtype)
    own = [[a[n].data_ptr(), b[n].data_ptr(), 0, 0, rank, 0] if device != "meta" else [0] * FIELDS
           for n in range(adapters)]  # fmt: skip
    slots = AdapterSlots(torch.tensor(own, dtype=torch.int64).to(device), a, rank)
    each = -(-rows // adapters)
    tiles = [[n, n * each + i, min(TILE, each - i)] for n in range(-(-rows // each)) for i in range(0, each, TILE)]
    order = torch.arange(rows, dtype=torch.int32, device=device)
    places = torch.tensor(tiles, dtype=torch.int32).to(device)
    return lambda: (adapt(x, y, order, places, slots), b)


def routing(device: str, tokens: int) -> Call:
    logits = _normal(device, tokens, 128, dtype=F32)
    return lambda: route(logits, 8, renormalize=True)


def sampling(device: str, rows: int, truncated: bool = False) -> Call:
    logits = _normal(device, rows, V, dtype=F32)

    def numbers(value: float) -> torch.Tensor:
        return torch.full((rows,), value, device=device, dtype=torch.float64)

    whole = torch.arange(rows, dtype=torch.int64, device=device)
    return lambda: draw(
        logits, numbers(1.4426950408889634), whole, whole.int(), whole,
        min_p=numbers(0.0), top_k=torch.full((rows,), 50, dtype=torch.int32, device=device),
        top_p=numbers(0.9), truncated=truncated,
    )  # fmt: skip


def greedy(device: str, rows: int) -> Call:
    logits = _normal(device, rows, V, dtype=F32)
    return lambda: argmax(logits)


_KEY = 2 * G * D
CASES: dict[str, Case] = {
    "decode bf16": Case("attention_decode", lambda d: decode(d, 64, 2048), 64 * 2048 * _KEY * 2),
    "decode bf16, one of 128": Case("attention_decode", lambda d: decode(d, 1, 128), 128 * _KEY * 2),
    "decode bf16, one of 2 k": Case("attention_decode", lambda d: decode(d, 1, 2048), 2048 * _KEY * 2),
    "decode bf16, one of 32 k": Case("attention_decode", lambda d: decode(d, 1, 32768), 32768 * _KEY * 2),
    "decode bf16, float32 queries": Case("attention_decode", lambda d: decode(d, 64, 2048, q_kind=F32),
                                         64 * 2048 * _KEY * 2),
    "decode float32": Case("attention_decode", lambda d: decode(d, 8, 2048, F32, F32), 8 * 2048 * _KEY * 4),
    "decode int8": Case("attention_decode", lambda d: decode(d, 64, 2048, torch.int8), 64 * 2048 * (_KEY + 8 * G)),
    "decode e4m3": Case("attention_decode", lambda d: decode(d, 64, 2048, FP8), 64 * 2048 * _KEY),
    "decode window, cap, sinks, ALiBi": Case("attention_decode", lambda d: decode(
        d, 64, 2048, window=1024, soft_cap=50.0, sinks=True, slopes=True), 64 * 1024 * _KEY * 2),
    "decode tree": Case("attention_decode", lambda d: decode(d, 8, 2048, tree=True)),
    "decode latent": Case("latent_decode", lambda d: latent_decode(d, 16, 2048), 16 * 2048 * 576 * 2),
    "decode latent, one of 2 k": Case("latent_decode", lambda d: latent_decode(d, 1, 2048), 2048 * 576 * 2),
    "decode latent, one of 32 k": Case("latent_decode", lambda d: latent_decode(d, 1, 32768), 32768 * 576 * 2),
    "decode latent, 64 of 2 k": Case("latent_decode", lambda d: latent_decode(d, 64, 2048), 64 * 2048 * 576 * 2),
    "prefill bf16": Case("attention_prefill", lambda d: prefill(d, 1, 8192)),
    "prefill bf16, heads of 256": Case("attention_prefill", lambda d: prefill(d, 1, 2048, dim=256)),
    "prefill bf16, heads of 64": Case("attention_prefill", lambda d: prefill(d, 1, 2048, dim=64)),
    "prefill float32": Case("attention_prefill", lambda d: prefill(d, 1, 1024, F32, F32)),
    "prefill int8": Case("attention_prefill", lambda d: prefill(d, 1, 4096, torch.int8)),
    "prefill e4m3": Case("attention_prefill", lambda d: prefill(d, 1, 4096, FP8)),
    "prefill window, cap": Case("attention_prefill", lambda d: prefill(d, 1, 4096, window=1024, soft_cap=50.0)),
    "places of 64 tokens": Case("inputs", lambda d: places(d, 64)),
    "embedding, 512 tokens": Case("inputs", lambda d: embedding(d, 512), 512 * E * 6),
    "rms_norm": Case("norm", lambda d: norm(d, 512), 512 * E * 8),
    "layer_norm": Case("norm", lambda d: norm(d, 512, centred=True), 512 * E * 8),
    "rope, bf16 cache": Case("rope", lambda d: rope(d, 512), 512 * (H + 2 * G) * D * 4),
    "rope, int8 cache": Case("rope", lambda d: rope(d, 512, torch.int8), 512 * (2 * H + 3 * G) * D * 2),
    "rope, e4m3 cache": Case("rope", lambda d: rope(d, 512, FP8), 512 * (2 * H + 3 * G) * D * 2),
    "silu": Case("activation", lambda d: gate(d, 512), 512 * F * 6),
    "gelu": Case("activation", lambda d: gate(d, 512, "gelu"), 512 * F * 6),
    "swiglu_clamped": Case("activation", lambda d: gate(d, 512, "swiglu_clamped", 7.0), 512 * F * 6),
    "int8, 1 token": Case("products", lambda d: product(d, 1, 8), E * F),
    "int8, 512 tokens": Case("products", lambda d: product(d, 512, 8)),
    "int8 in groups of 128, 1 token": Case("products", lambda d: product(d, 1, 8, 128), E * F),
    "int4 in groups of 128, 1 token": Case("products", lambda d: product(d, 1, 4, 128), E * F // 2),
    "int4 in groups of 32, zeros, 16 tokens": Case("products", lambda d: product(d, 16, 4, 32, True), E * F // 2),
    "int4 in groups of 32, zeros as values, 1 token": Case(
        "products", lambda d: product(d, 1, 4, 32, True, zeros_are="values"), E * F // 2),
    "e2m1 in groups of 32, 1 token": Case("products", lambda d: product(d, 1, 4, 32, code="e2m1", offset=0),
                                          E * F // 2),
    "e4m3 in groups of 128, 1 token": Case("products", lambda d: product(d, 1, 8, 128, code="e4m3"), E * F),
    "e4m3 in groups of 128, 512 tokens": Case("products", lambda d: product(d, 512, 8, 128, code="e4m3")),
    "6 bits in groups of 16, 1 token": Case("products", lambda d: product(d, 1, 8, 16, offset=32), E * F),
    "int4 in groups of 128, 512 tokens": Case("products", lambda d: product(d, 512, 4, 128)),
    "a row, bf16": Case("row_products", lambda d: row_product(d, 16), E * F * 2),
    "a row, int8 in groups of 128": Case("row_products", lambda d: row_product(d, 8), E * F),
    "a row, int4 in groups of 128": Case("row_products", lambda d: row_product(d, 4, offset=8), E * F // 2),
    "a row, int4 in groups of 32": Case("row_products", lambda d: row_product(d, 4, 32, offset=8), E * F // 2),
    "a row, e2m1 in groups of 32": Case("row_products", lambda d: row_product(d, 4, 32, code="e2m1"), E * F // 2),
    "int4 words, 4 tokens": Case("word_products", lambda d: words_product(d, 4), E * F // 2),
    "int4 words, 16 tokens": Case("word_products", lambda d: words_product(d, 16), E * F // 2),
    "int4 words, 64 tokens": Case("word_products", lambda d: words_product(d, 64), E * F // 2),
    "bf16 in a fixed order": Case("products", lambda d: product(d, 64, 16), E * F * 2),
    "experts, 1 token": Case("experts", lambda d: expert_case(d, 1), 8 * 3 * 2048 * 768 * 2),
    "experts, 512 tokens": Case("experts", lambda d: expert_case(d, 512), 128 * 3 * 2048 * 768 * 2),
    "experts int8 in groups of 128, 1 token": Case("experts", lambda d: expert_case(d, 1, 8), 8 * 3 * 2048 * 768),
    "experts int4 in groups of 128, 1 token": Case("experts", lambda d: expert_case(d, 1, 4), 8 * 3 * 2048 * 384),
    "experts int4 in groups of 128, 512 tokens": Case("experts", lambda d: expert_case(d, 512, 4)),
    "adapters of rank 16, 32 rows": Case("adapters", lambda d: adapter_case(d, 32, 32), 32 * 2 * E * 16 * 2),
    "adapters of rank 64, 512 tokens of 4": Case("adapters", lambda d: adapter_case(d, 512, 4, 64)),
    "adapters float32, 8 rows": Case("adapters", lambda d: adapter_case(d, 8, 8, dtype=F32), 8 * 2 * E * 16 * 4),
    "routes, 1 token": Case("routes", lambda d: routing(d, 1)),
    "routes, 512 tokens": Case("routes", lambda d: routing(d, 512)),
    "argmax": Case("sample", lambda d: greedy(d, 64), 64 * V * 4),
    "draw": Case("sample", lambda d: sampling(d, 64), 64 * V * 12),
    "draw, top-k and top-p": Case("sample", lambda d: sampling(d, 64, truncated=True)),
}  # fmt: skip
"""By name. `num_bytes` counts keys and values, weights, or activations."""
