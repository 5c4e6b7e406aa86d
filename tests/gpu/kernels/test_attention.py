"""Paged attention against the plain sum: what a token sees, and what its bits depend on."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.gpu.kernels import naive  # noqa: E402

decode: Any = pytest.importorskip("penstock.backends.gpu.kernels.attention_decode", reason=naive.ABSENT)
prefill: Any = pytest.importorskip("penstock.backends.gpu.kernels.attention_prefill", reason=naive.ABSENT)

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2, "int8": 2e-5, "e4m3": 2e-5}
"""Of results that are averages of normal numbers. Codes are exact where products are in float32."""


def cache_of(step: naive.Paged) -> Any:
    names = {"k": "keys", "v": "values", "rope": "rope_keys"}
    planes = {names[name]: plane for name, plane in step.planes.items()}
    return decode.Cache(pages=step.pages, key_scales=step.scales.get("k"), value_scales=step.scales.get("v"), **planes)


def rule_of(heads: int, **named: Any) -> Any:
    draw = torch.Generator().manual_seed(5)
    for name in ("slopes", "sinks"):
        if name in named:
            named[name] = torch.rand(heads, generator=draw) * (0.3 if name == "slopes" else 2) if named[name] else None
    return decode.Rule(0.3, **named)


def run(kernel: str, step: naive.Paged, rule: Any, operands: Any = None) -> Any:
    cache, where = cache_of(step), (step.query_start_loc, step.positions)
    if kernel == "decode":
        last = int(step.positions.max())
        return decode.attend_tokens(step.q, cache, rule, *where, last, mask=step.mask, operands=operands)
    longest = int(step.query_start_loc.diff().max())
    return prefill.attend_rows(step.q, cache, rule, *where, longest, operands=operands)


def far(a: Any, b: Any) -> float:
    assert a.shape == b.shape
    assert not a.isnan().any()
    return float((a.double() - b.double()).abs().max())


RULES: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 7}, "chunk": {"chunk": 24}, "window and chunk": {"window": 20, "chunk": 32},
    "soft cap": {"soft_cap": 1.5}, "alibi": {"slopes": True}, "sinks": {"sinks": True},
    "all": {"window": 40, "soft_cap": 2.0, "slopes": True, "sinks": True},
}  # fmt: skip


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
@pytest.mark.parametrize("rule", RULES)
def test_a_token_sees_what_its_rule_says(kernel: str, rule: str) -> None:
    """One token, an empty sequence, tables of different lengths, and query heads that are no power of two."""
    new = (1, 0, 5, 1) if kernel == "prefill" else (1, 0, 2, 1)
    step = naive.paged_step(1, (0, 9, 37, 90), new, heads=6, size=32, dims={"k": 24, "v": 24})
    own = rule_of(6, **RULES[rule])
    assert far(run(kernel, step, own), naive.attention(step, own)) < TOLERANCE["float32"]


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "int8", "e4m3"])
def test_planes_of_every_type(kernel: str, kind: str) -> None:
    step = naive.paged_step(2, (30, 65), (1, 2), dims={"k": 16, "v": 16}, kind=kind, size=32)
    rule = rule_of(4, window=50)
    exact = run(kernel, step, rule, torch.float32)
    assert far(exact, naive.attention(step, rule)) < 2e-5
    narrow = far(run(kernel, step, rule), naive.attention(step, rule))
    assert 1e-6 < narrow < (4e-3 if kind == "float16" else 3e-2), "operands of 16 bits, which show"


@pytest.mark.parametrize("q_kind", ["float16", "bfloat16"])
def test_results_have_the_type_of_the_queries(q_kind: str) -> None:
    step = naive.paged_step(3, (12, 3), (1, 1), dims={"k": 16, "v": 16}, kind=q_kind, q_kind=q_kind)
    rule = rule_of(4)
    for kernel in ("decode", "prefill"):
        out = run(kernel, step, rule)
        assert out.dtype == naive.FLOATS[q_kind]
        assert far(out, naive.attention(step, rule)) < TOLERANCE[q_kind]


@pytest.mark.parametrize("rule", ["plain", "window", "all"])
def test_a_node_of_a_tree_sees_its_path(rule: str) -> None:
    step = naive.paged_step(4, (5, 40, 0), (7, 1, 2), size=32, dims={"k": 16, "v": 16}, trees=True)
    own = rule_of(4, **RULES[rule])
    assert far(run("decode", step, own), naive.attention(step, own)) < TOLERANCE["float32"]


def test_the_largest_tree() -> None:
    step = naive.paged_step(5, (3,), (64,), size=64, heads=1, kv_heads=1, dims={"k": 16, "v": 16}, trees=True)
    assert step.mask is not None
    assert step.mask.min() < 0, "the last node's bit is the sign of int64"
    own = rule_of(1)
    assert far(run("decode", step, own), naive.attention(step, own)) < TOLERANCE["float32"]


def test_an_accepted_node_has_the_bits_of_plain_decoding() -> None:
    """A path through a tree, and the same keys standing in order."""
    step = naive.paged_step(6, (21,), (8,), dims={"k": 16, "v": 16}, trees=True)
    assert step.mask is not None
    last = int(step.positions.argmax())
    nodes = [i for i in range(8) if int(step.mask[last]) >> i & 1]
    out = run("decode", step, rule_of(4))[last]
    for name in ("k", "v"):
        plane = step.planes[name]
        kept = [plane[step.pages[0, (21 + i) // 16].long(), (21 + i) % 16].clone() for i in nodes]
        for j, row in enumerate(kept):
            plane[step.pages[0, (21 + j) // 16].long(), (21 + j) % 16] = row
    starts, at = torch.tensor([0, 1], dtype=torch.int32), step.positions[last : last + 1]
    plain = step._replace(q=step.q[last : last + 1], positions=at, query_start_loc=starts, mask=None)
    assert len(nodes) >= 3
    assert nodes != list(range(len(nodes))), "a path with gaps"
    assert torch.equal(run("decode", plain, rule_of(4))[0], out)


def test_long_contexts_are_cut_at_fixed_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several cuts, with a window that begins inside one; and a token alone has the bits it has in company."""
    monkeypatch.setattr(decode, "SPLIT", 64)
    step = naive.paged_step(7, (163, 63, 64), (1, 1, 1), heads=2, kv_heads=1, dims={"k": 16, "v": 16}, size=32)
    for rule in (rule_of(2), rule_of(2, window=88, sinks=True)):
        out = run("decode", step, rule)
        assert far(out, naive.attention(step, rule)) < TOLERANCE["float32"]
        starts = torch.tensor([0, 1], dtype=torch.int32)
        for b in range(3):
            alone = step._replace(q=step.q[b : b + 1], pages=step.pages[b : b + 1], query_start_loc=starts,
                                  positions=step.positions[b : b + 1])  # fmt: skip
            assert torch.equal(run("decode", alone, rule)[0], out[b])


@pytest.mark.parametrize("size", [64, 128, 256])
def test_smaller_cuts_say_the_same(size: int) -> None:
    """Over more cuts than are put together at once, and with a window that begins behind some."""
    step = naive.paged_step(7, (1233, 63), (1, 1), heads=2, kv_heads=1, dims={"k": 16, "v": 16}, size=32)
    most = int(step.positions.max())
    cache = decode.Cache(step.planes["k"], step.planes["v"], step.pages)
    for rule in (rule_of(2), rule_of(2, window=400, sinks=True)):
        out = decode.attend_tokens(step.q, cache, rule, step.query_start_loc, step.positions, most, split=size)
        assert far(out, naive.attention(step, rule)) < TOLERANCE["float32"]


def test_few_programs_have_smaller_cuts() -> None:
    assert [decode.split_of(n, 4095) for n in (8, 16, 64, 512)] == [64, 128, 512, 512]
    assert decode.split_of(8, 32767) == 512
    assert decode.split_of(1, 0) == 64


@pytest.mark.parametrize("shape", [(64, 64, 4, 2), (16, 128, 4, 2), (128, 32, 4, 1)])
def test_tiles_of_several_pages(shape: tuple[int, int, int, int]) -> None:
    """Of prompts: pages of 32 tokens, one of which is gone, and tiles that some rows see in part."""
    step = naive.paged_step(8, (170, 3), (40, 77), heads=4, kv_heads=2, dims={"k": 16, "v": 16}, size=32)
    cache = prefill.Cache(step.planes["k"], step.planes["v"], step.pages)
    for rule in (rule_of(4), rule_of(4, window=70, sinks=True), rule_of(4, chunk=48), rule_of(4, soft_cap=2.0)):
        out = prefill.attend_rows(step.q, cache, rule, step.query_start_loc, step.positions, 77, shape=shape)
        assert far(out, naive.attention(step, rule)) < TOLERANCE["float32"]


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_pages_before_the_window_may_be_gone(kernel: str) -> None:
    step = naive.paged_step(8, (70,), (3,), dims={"k": 16, "v": 16}, drop=3)
    rule = rule_of(4, window=20)
    assert far(run(kernel, step, rule), naive.attention(step, rule)) < TOLERANCE["float32"]


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_two_planes_of_keys(kernel: str, kind: str) -> None:
    """Latent attention: the latent plane is keys and values, the second plane holds rotated keys; heads share both."""
    step = naive.paged_step(9, (40, 3), (2, 1), heads=20, kv_heads=1, dims={"k": 32, "rope": 8, "v": 32}, kind=kind)
    step.planes["v"], step.decoded["v"] = step.planes["k"], step.decoded["k"]
    rule = rule_of(20)
    assert far(run(kernel, step, rule, torch.float32), naive.attention(step, rule)) < TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("kind", "size", "split"),
    [("bfloat16", 16, None), ("float16", 32, None), ("bfloat16", 64, 128), ("bfloat16", 128, 64)],
)
def test_a_latent_is_read_once(kind: str, size: int, split: int | None) -> None:
    """Keys that are the values, too: heads that fill a program in part, pages smaller and larger than a tile, a token
    alone, one at a tile's end and one behind it, sinks."""
    step = naive.paged_step(10, (150, 0, 63, 64), (1, 1, 1, 1), heads=72, kv_heads=1, size=size, kind=kind,
                            dims={"k": 64, "rope": 24, "v": 64})  # fmt: skip
    step.planes["v"], step.decoded["v"] = step.planes["k"], step.decoded["k"]
    rule = rule_of(72, sinks=True)
    cache, where = cache_of(step), (step.query_start_loc, step.positions, 150)
    assert decode.latent_decode.takes_latent(step.q, cache, rule, kind)
    out = decode.attend_tokens(step.q, cache, rule, *where, split=split)
    assert far(out, naive.attention(step, rule)) < TOLERANCE[kind]


def test_a_row_without_a_latent_is_zero() -> None:
    """It fills up a captured step, and must not spoil what it runs beside."""
    step = naive.paged_step(11, (70, 0), (1, 1), heads=16, kv_heads=1, size=32, kind="bfloat16",
                            dims={"k": 64, "rope": 16, "v": 64})  # fmt: skip
    step.planes["v"] = step.planes["k"]
    step.planes["k"][int(step.pages[1, 0])] = float("nan")
    step.planes["k"][0] = step.planes["k"][0].nan_to_num()
    step.pages[1] = -1
    out = run("decode", step, rule_of(16))
    assert not out[0].isnan().any()
    assert not out[1].any()


@pytest.mark.parametrize(
    "change", [{"window": 7}, {"chunk": 24}, {"soft_cap": 1.5}, {"slopes": True}, "apart", "few heads", "float32"]
)
def test_whose_latent_is_not_read_once(change: Any) -> None:
    heads = 8 if change == "few heads" else 16
    step = naive.paged_step(12, (40,), (1,), heads=heads, kv_heads=1, size=32, kind="bfloat16",
                            dims={"k": 64, "rope": 16, "v": 64})  # fmt: skip
    if change != "apart":
        step.planes["v"] = step.planes["k"]
    rule = rule_of(heads, **change) if isinstance(change, dict) else rule_of(heads)
    kind = "float32" if change == "float32" else "bfloat16"
    assert not decode.latent_decode.takes_latent(step.q, cache_of(step), rule, kind)


@pytest.mark.parametrize("seed", range(5))
def test_random_steps(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def pick(*of: Any) -> Any:
        return of[int(torch.randint(len(of), (1,), generator=draw))]

    kv_heads, group, count = pick(1, 2, 3), pick(1, 2, 5), pick(1, 2, 3)
    new = (*(pick(0, 1, 2, 7) for _ in range(count - 1)), pick(1, 6))
    cached = tuple(pick(0, 1, 15, 16, 17, 63) for _ in new)
    heads = kv_heads * group
    kind = pick("float32", "float16", "bfloat16", "int8", "e4m3")
    dims = {"k": pick(8, 16, 40), "v": pick(8, 16, 40)}
    step = naive.paged_step(seed, cached, new, heads=heads, kv_heads=kv_heads, dims=dims, size=pick(32, 64), kind=kind)
    rule = rule_of(heads, window=pick(None, 1, 5, 30), chunk=pick(None, 16, 50), soft_cap=pick(None, 3.0),
                   slopes=pick(False, True), sinks=pick(False, True))  # fmt: skip
    wanted = naive.attention(step, rule)
    for kernel in ("decode", "prefill"):
        assert far(run(kernel, step, rule, torch.float32), wanted) < TOLERANCE["float32"]
