"""What every AttentionBackend owes (core.protocols). Registering one enrols it here."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from penstock.base.bf16 import narrow, widen
from penstock.core.mixers.rope import Alibi
from penstock.core.protocols import AttentionBackend
from penstock.ops.attention import ATTENTION_BACKENDS
from penstock.ops.plan import GroupPlan, StepPlan
from penstock.ops.ref.attention.full import attend_row
from penstock.ops.ref.attention.online import CHUNK_TOKENS, combine, partial
from penstock.ops.ref.attention.online import attend_row as attend_online
from penstock.ops.ref.attention.rows import Rule
from penstock.ops.step import Step
from tests.oracle import softmax_attention

BLOCK = 4


@pytest.fixture(params=ATTENTION_BACKENDS.names())
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    found: AttentionBackend = ATTENTION_BACKENDS.get(request.param)
    assert found.name == request.param
    assert isinstance(found.online, bool)
    return found


@dataclass
class Context:
    """One sequence with its whole history: q [T, H, D], k [T, G, D], v [T, G, W]; `pages` name its blocks."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    pages: np.ndarray
    start: int = 0

    @property
    def length(self) -> int:
        return len(self.q)


def context(rng: np.random.Generator, t: int, h: int, g: int, d: int, w: int, pool: list[int]) -> Context:
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((t, h, d), (t, g, d), (t, g, w)))
    return Context(q, k, v, np.array([pool.pop() for _ in range(-(-t // BLOCK))], np.int32))


def attend(
    backend: AttentionBackend, contexts: list[Context], dtype: Any = np.float32, **options: Any
) -> list[np.ndarray]:
    """One step that runs every context's tokens from its `start` on. Storage outside the contexts is NaN."""
    g, d, w = contexts[0].k.shape[1], contexts[0].k.shape[2], contexts[0].v.shape[2]
    num_pages = 1 + max(int(c.pages.max()) for c in contexts)
    nan = 0x7FC0 if dtype == np.uint16 else np.nan
    planes = {"k": np.full((num_pages, BLOCK, g, d), nan, dtype), "v": np.full((num_pages, BLOCK, g, w), nan, dtype)}
    for c in contexts:
        for p in range(c.length):
            at = c.pages[p // BLOCK], p % BLOCK
            for name, x in (("k", c.k), ("v", c.v)):
                planes[name][at] = narrow(x[p]) if dtype == np.uint16 else x[p]
    positions = np.concatenate([np.arange(c.start, c.length) for c in contexts]).astype(np.int32)
    bounds = np.array([0, *np.cumsum([c.length - c.start for c in contexts])], np.int32)
    group = GroupPlan(1, BLOCK, tuple(c.pages[None] for c in contexts))
    lens = np.array([c.length for c in contexts], np.int32)
    plan = StepPlan(np.zeros_like(positions), positions, bounds, lens, np.zeros(0, np.int32), (group,))
    q = np.concatenate([c.q[c.start :] for c in contexts])
    options = {"keys": ("k",), "value": "v", "scale": d**-0.5, **options}
    before = {name: plane.copy() for name, plane in planes.items()}
    out = backend.attend(q, Step(plan, [planes]), 0, 0, **options)
    assert out.shape == (*q.shape[:2], w)
    assert out.dtype == np.float32
    assert out.flags.c_contiguous
    for name, plane in planes.items():
        np.testing.assert_array_equal(plane, before[name])
    return [out[a:b] for a, b in pairwise(bounds.tolist())]


@pytest.mark.parametrize(("h", "g", "d", "w"), [(4, 4, 8, 8), (4, 2, 8, 8), (6, 1, 7, 5), (1, 1, 1, 1), (3, 3, 16, 4)])
def test_equals_softmax_by_the_book(backend: AttentionBackend, h: int, g: int, d: int, w: int) -> None:
    rng = np.random.default_rng([h, g, d])
    pool = rng.permutation(60).tolist()
    contexts = [context(rng, t, h, g, d, w, pool) for t in (1, 70, 4, 13)]
    for c, got in zip(contexts, attend(backend, contexts), strict=True):
        wide = [x.astype(np.float64) for x in (c.q, c.k, c.v)]
        np.testing.assert_allclose(got, softmax_attention(*wide, d**-0.5), atol=2e-6)


@pytest.mark.parametrize(
    "options", [{"window": 1}, {"window": 9}, {"window": 300}, {"soft_cap": 0.7}, {"scale": 3.0, "window": 5}],
)  # fmt: skip
def test_options_equal_softmax_by_the_book(backend: AttentionBackend, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(5)
    pool = rng.permutation(200).tolist()
    c = context(rng, 600, 4, 2, 8, 8, pool)
    c.start = 520
    want = softmax_attention(*(x.astype(np.float64) for x in (c.q, c.k, c.v)), **{"scale": 8**-0.5, **options})
    np.testing.assert_allclose(attend(backend, [c], **options)[0], want[520:], atol=3e-6)
    plain = attend(backend, [c])[0]
    assert np.abs(plain - want[520:]).max() > 1e-3, "the option must change something"


def masked_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, *, window: int | None = None, chunk: int | None = None,
    soft_cap: float | None = None, slopes: np.ndarray | None = None, sinks: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Softmax attention as one masked matrix per head, in float64. Arrays as in `Context`."""
    t, h, g = len(q), q.shape[1], k.shape[1]
    i, j = np.indices((t, t))
    seen = (j <= i) & (i - j < (window or t)) & (j // (chunk or t) == i // (chunk or t))
    out = np.empty((t, h, v.shape[2]))
    for n in range(h):
        key, value = (x[:, n * g // h].astype(np.float64) for x in (k, v))
        scores = q[:, n].astype(np.float64) @ key.T * scale
        if soft_cap is not None:
            scores = np.tanh(scores / soft_cap) * soft_cap
        if slopes is not None:
            scores = scores - float(slopes[n]) * (i - j)
        scores = np.where(seen, scores, -np.inf)
        if sinks is not None:  # a key that everybody sees and that has no value
            scores = np.concatenate([scores, np.full((t, 1), float(sinks[n]))], axis=1)
            value = np.concatenate([value, np.zeros((1, v.shape[2]))])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, n] = weights @ value / weights.sum(axis=1, keepdims=True)
    return out


def slopes_of(heads: int, max_bias: float = 8.0) -> np.ndarray:
    return np.array(Alibi(max_bias=max_bias).slopes(heads), np.float32)


SINKS = np.array([0.5, -2.0, 6.0, 0.0, 1.5, -9.0], np.float32)
RULES: list[dict[str, Any]] = [
    {"chunk": 1}, {"chunk": 16}, {"chunk": 256}, {"chunk": 300}, {"chunk": 64, "window": 20},
    {"chunk": 20, "window": 64},
    {"slopes": slopes_of(6)}, {"slopes": slopes_of(6, 1.0), "window": 40}, {"slopes": slopes_of(6), "chunk": 37},
    {"slopes": slopes_of(6, 3.0), "soft_cap": 1.5, "scale": 0.7},
    {"sinks": SINKS}, {"sinks": SINKS, "window": 3}, {"sinks": SINKS, "chunk": 256, "soft_cap": 2.0},
    {"sinks": SINKS, "slopes": slopes_of(6), "window": 300, "chunk": 450, "scale": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(rule))
@pytest.mark.parametrize("kv_heads", [1, 3, 6])
@pytest.mark.sampled
def test_G02_rules_equal_a_masked_matrix_in_float64(
    backend: AttentionBackend, rule: dict[str, Any], kv_heads: int
) -> None:
    rng = np.random.default_rng(21)
    pool = rng.permutation(250).tolist()
    contexts = [context(rng, t, 6, kv_heads, 7, 5, pool) for t in (600, 1, 70)]
    contexts[0].start = 470
    for c, got in zip(contexts, attend(backend, contexts, **rule), strict=True):
        want = masked_attention(c.q, c.k, c.v, **{"scale": 7**-0.5, **rule})[c.start :]
        np.testing.assert_allclose(got, want, atol=1e-5)
        plain = masked_attention(c.q, c.k, c.v, 7**-0.5)[c.start :]
        assert c.length < 600 or np.abs(plain - want).max() > 0.01, "the rule must change something"


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 71])
def test_G02_alibi_slopes_are_those_of_the_paper(heads: int) -> None:
    """2^(-8/n), 2^(-16/n), ... for n a power of two; else those of the next lower power and every other one of its
    double. Source: Press et al., arXiv 2108.12409, section 3, and the function in its published code."""

    def power(n: int) -> list[float]:
        first = 2.0 ** -(2.0 ** -(np.log2(n) - 3))
        return [first * first**i for i in range(n)]

    low = 2 ** int(np.floor(np.log2(heads)))
    want = power(low) if low == heads else power(low) + power(2 * low)[0::2][: heads - low]
    np.testing.assert_allclose(Alibi().slopes(heads), want, rtol=1e-12)
    np.testing.assert_allclose(Alibi(factor=0.25).slopes(heads), np.array(want) / 4, rtol=1e-12)
    np.testing.assert_allclose(Alibi(max_bias=16.0).slopes(heads), np.array(want) ** 2, rtol=1e-12)


@pytest.mark.parametrize(("sink", "share"), [(1e4, 0.0), (-1e4, 1.0)])
def test_a_sink_far_above_takes_all_and_far_below_nothing(backend: AttentionBackend, sink: float, share: float) -> None:
    rng = np.random.default_rng(22)
    c = context(rng, 300, 4, 2, 8, 8, rng.permutation(90).tolist())
    got = attend(backend, [c], sinks=np.full(4, sink, np.float32))[0]
    np.testing.assert_allclose(got, share * attend(backend, [c])[0], atol=1e-7)


@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_reads_what_16_bits_kept(backend: AttentionBackend, dtype: Any) -> None:
    rng = np.random.default_rng(6)
    c = context(rng, 30, 4, 2, 8, 8, rng.permutation(20).tolist())
    kept = [widen(narrow(x)) if dtype == np.uint16 else x.astype(dtype).astype(np.float32) for x in (c.k, c.v)]
    same = Context(c.q, *kept, c.pages)
    np.testing.assert_array_equal(attend(backend, [c], dtype)[0], attend(backend, [same])[0])


@pytest.mark.parametrize("rule", [
    {}, {"window": 37}, {"chunk": 64}, {"slopes": slopes_of(6)}, {"sinks": SINKS},
    {"slopes": slopes_of(6, 2.0), "sinks": SINKS, "window": 90, "chunk": 256},
], ids=lambda rule: "-".join(rule) or "plain")  # fmt: skip
def test_bits_do_not_depend_on_company_chunks_or_pages(backend: AttentionBackend, rule: dict[str, Any]) -> None:
    rng = np.random.default_rng(8)
    pool = rng.permutation(400).tolist()
    c = context(rng, 301, 6, 2, 8, 8, pool)
    others = [context(rng, t, 6, 2, 8, 8, pool) for t in (5, 290, 1)]
    whole = attend(backend, [c], **rule)[0]
    for start in (1, 100, 255, 256, 257, 300):
        moved = Context(c.q, c.k, c.v, np.array([pool.pop(0) for _ in c.pages], np.int32)[::-1], start)
        batch = [others[0], moved, *others[1:]]
        np.testing.assert_array_equal(attend(backend, batch, **rule)[1], whole[start:])
        pool.extend(moved.pages.tolist())


def test_a_sequence_of_nan_spoils_nobody_else(backend: AttentionBackend) -> None:
    rng = np.random.default_rng(9)
    pool = rng.permutation(60).tolist()
    a, b = context(rng, 20, 4, 2, 8, 8, pool), context(rng, 20, 4, 2, 8, 8, pool)
    clean = attend(backend, [b])[0]
    a.v[:] = np.nan
    bad, good = attend(backend, [a, b])
    assert np.isnan(bad).all()
    np.testing.assert_array_equal(good, clean)


def test_keys_of_several_planes_are_laid_side_by_side(backend: AttentionBackend) -> None:
    rng = np.random.default_rng(10)
    latent, k_rope = (
        rng.standard_normal((11, 1, 6)).astype(np.float32),
        rng.standard_normal((11, 1, 3)).astype(np.float32),
    )
    q = rng.standard_normal((11, 4, 9)).astype(np.float32)
    pages = np.array([2, 0, 1], np.int32)
    planes = {"latent": np.zeros((3, BLOCK, 1, 6), np.float32), "k_rope": np.zeros((3, BLOCK, 1, 3), np.float32)}
    for p in range(11):
        planes["latent"][pages[p // BLOCK], p % BLOCK] = latent[p]
        planes["k_rope"][pages[p // BLOCK], p % BLOCK] = k_rope[p]
    ints = [np.array(x, np.int32) for x in (np.zeros(11), np.arange(11), [0, 11], [11], [])]
    step = Step(StepPlan(*ints, (GroupPlan(1, BLOCK, (pages[None],)),)), [planes])
    got = backend.attend(q, step, 0, 0, keys=("latent", "k_rope"), value="latent", scale=0.3)
    want = softmax_attention(q, np.concatenate([latent, k_rope], axis=-1), latent, 0.3)
    np.testing.assert_allclose(got, want, atol=1e-6)


def adversarial(kind: str, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [1, 1, 1], k [n, 1, 1], v [n, 1, 4] whose scores are the named worst case of magnitude 1e4."""
    rng = np.random.default_rng(11)
    s = {
        "rising": np.linspace(-1e4, 1e4, n),
        "falling": np.linspace(1e4, -1e4, n),
        "alternating": np.where(np.arange(n) % 2, 1e4, -1e4),
        "peak in the first chunk": np.where(np.arange(n) == 3, 1e4, -1e4),
        "peak in the last chunk": np.where(np.arange(n) == n - 1, 1e4, -1e4),
        "close together at the top": 1e4 + rng.standard_normal(n),
        "close together at the bottom": -1e4 + rng.standard_normal(n),
        "random": rng.uniform(-1e4, 1e4, n),
    }[kind]
    v = rng.standard_normal((n, 1, 4))
    return np.ones((1, 1, 1), np.float32), s.astype(np.float32)[:, None, None], v.astype(np.float32)


PLAIN = Rule(1.0, None, None, None)
ADVERSARIES = (
    "rising", "falling", "alternating", "peak in the first chunk", "peak in the last chunk",
    "close together at the top", "close together at the bottom", "random",
)  # fmt: skip


@pytest.mark.parametrize("n", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("kind", ADVERSARIES)
def test_C41_blockwise_equals_full_softmax(kind: str, n: int) -> None:
    q, k, v = adversarial(kind, n)
    full = attend_row(q, k, v, 0, PLAIN)
    online = attend_online(q, k, v, 0, PLAIN)
    s, wide = k[:, 0, 0].astype(np.float64), v[:, 0].astype(np.float64)
    e = np.exp(s - s.max())
    np.testing.assert_allclose(online[0], (e @ wide)[None] / e.sum(), atol=1e-6)
    np.testing.assert_allclose(online, full, atol=1e-6)


@pytest.mark.parametrize("kind", ADVERSARIES)
def test_C41_every_cut_gives_the_same_sum(kind: str) -> None:
    q, k, v = adversarial(kind, 300)
    full = attend_row(q, k, v, 0, PLAIN)
    rng = np.random.default_rng(12)
    for _ in range(20):
        cuts = [0, *sorted(rng.choice(np.arange(1, 300), 5, replace=False).tolist()), 300]
        parts = [partial(q, k[a:b], v[a:b], PLAIN, 0) for a, b in pairwise(cuts)]
        running = parts[0]
        for part in parts[1:]:
            running = combine(running, part)
        np.testing.assert_allclose(running[2] / running[1], full, atol=1e-6)


def test_C41_chunks_stand_at_absolute_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window moves a token's first key, but never the cuts."""
    seen: list[int] = []
    monkeypatch.setattr(
        "penstock.ops.ref.attention.online.partial", lambda q, k, *rest: seen.append(len(k)) or partial(q, k, *rest)
    )
    q, k, v = adversarial("random", 700)
    attend_online(q, k[:600], v[:600], 100, PLAIN)
    assert seen == [CHUNK_TOKENS - 100, CHUNK_TOKENS, 700 - 2 * CHUNK_TOKENS]
    assert CHUNK_TOKENS == 256
    seen.clear()
    attend_online(q, k[:256], v[:256], 256, PLAIN)
    assert seen == [256]
