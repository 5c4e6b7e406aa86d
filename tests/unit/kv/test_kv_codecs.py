"""Codecs of keys and values (rows F36, F37, F39, F41): bytes, bounds, what a token reads, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from penstock.base.bf16 import F32
from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.core.cache_spec import CacheGroup, vector_planes
from penstock.core.kv_codec import group_size
from penstock.core.kv_format import parse_kv_format
from penstock.core.machine import Machine
from penstock.core.model_spec import ModelSpec, cache_groups, cache_specs
from penstock.kv.manager import KVManager
from penstock.launch.backend import choose_ops
from penstock.ops.ref.codecs.packed import (
    decode_channels,
    decode_tokens,
    encode_channels,
    encode_tokens,
    pack,
    quantise_along,
    unpack,
)
from penstock.ops.ref.rotation import hadamard, hadamard_matrix
from penstock.plan.resolve import resolve
from penstock.runner.storage import Storage
from tests import naive_kv, specs
from tests.oracle import NaiveModel
from tests.paged import Paged
from tests.unit.kv.test_kv_model import run, started

MACHINE = Machine(num_cores=4, memory_bytes=9 << 30, available_bytes=8 << 30)
SINKS = json.dumps({"dtype": "kivi2", "recent": 5, "sinks": 6})
TOKENS_AND_SINKS = json.dumps({"dtype": "int4", "recent": 9, "sinks": 3})
BY_LAYER = json.dumps({"dtype": "int2", "layers": {"0": {"k": "int8", "v": "int4"}}})
BY_HEAD = json.dumps({"dtype": {"k": ["int4", "int8"], "v": ["int2", "float16"]}})
CHANNELS_BY_HEAD = json.dumps({"dtype": {"k": ["channel2", "int8"], "v": "int4"}, "recent": 3})
KIVI = json.dumps({"dtype": "kivi2", "recent": 7})
FORMATS = ["int4", "int2", "kivi4", KIVI, SINKS, TOKENS_AND_SINKS, BY_LAYER, BY_HEAD, CHANNELS_BY_HEAD]


def normal(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


# -- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4])
def test_F36_every_code_is_packed_and_unpacked_exactly(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (5, 3, 16), dtype=np.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (5, 3, 16 * bits // 8)
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(unpack(packed, bits), codes)
    assert pack(np.array([1, 2, 3, 0], np.uint8), 2).tolist() == [1 | 2 << 2 | 3 << 4], "the first in the lowest bits"


@pytest.mark.parametrize("bits", [2, 4])
def test_F36_an_error_is_at_most_half_a_step(bits: int) -> None:
    x = normal(40, 3, 64) * 3 + 1
    packed, bounds = encode_tokens(x, bits, 32)
    back = decode_tokens(packed, bounds.astype(np.float32), bits)
    scale = np.repeat(bounds[..., :2].astype(np.float32), 32, axis=-1)
    # float16 ends: the smallest and the largest may lie 2^-11 of themselves outside.
    assert (np.abs(back - x) <= scale * 0.5 + np.abs(x).max() * 2.0**-10).all()
    np.testing.assert_array_equal(naive_kv.rounded(x, f"int{bits}"), back)
    assert (np.abs(back - x) > scale * 0.4).any(), "the bound is not empty"


def test_F37_channels_have_scales_of_their_own() -> None:
    """A channel a hundred times as large costs the others nothing, unlike by token."""
    x = normal(2, 32, 3, 8)
    x[..., 5] *= 100
    by_channel, bounds = encode_channels(x, 2)
    assert bounds.shape == (2, 1, 3, 16)
    back = decode_channels(by_channel, bounds.astype(np.float32), 2)
    np.testing.assert_array_equal(naive_kv.coded(x.reshape(64, 3, 8), ("channel2",), 32), back.reshape(64, 3, 8))
    others = np.arange(8) != 5
    tokens = decode_tokens(*_both(encode_tokens(x, 2, 8)), 2)
    assert np.abs(back - x)[..., others].mean() < 0.3 * np.abs(tokens - x)[..., others].mean()


def test_what_is_equal_is_kept_and_what_is_no_number_stays_none() -> None:
    x = np.array([[0.5] * 4, [0, np.nan, 1, 2], [np.inf, 0, 1, 2], [5e5, 0, 1, 2], [0, 0, 0, 0]], np.float32)
    packed, bounds = encode_tokens(x, 4, 4)
    back = decode_tokens(packed, bounds.astype(np.float32), 4)
    np.testing.assert_array_equal(back[[0, 4]], x[[0, 4]])
    assert np.isnan(back[1:3]).all()
    assert np.abs(back[3] - x[3]).max() <= 5e5 / 15, "too large for float16, but its steps are not"
    assert np.isnan(decode_tokens(*_both(encode_tokens(x[3:4] * -1, 4, 4)), 4)).all(), "its minimum is"
    codes, scale, minimum = quantise_along(x[:1], -1, 2)
    assert (codes.max(), scale[0, 0], minimum[0, 0]) == (0, 0, 0.5)


def _both(encoded: tuple[Any, Any]) -> tuple[Any, Any]:
    return encoded[0], encoded[1].astype(np.float32)


@pytest.mark.parametrize("dim", [2, 8, 12, 32, 80, 96, 128])
def test_F41_a_rotation_can_be_undone(dim: int) -> None:
    x = normal(50, 3, dim) * 4
    turned = hadamard(x)
    np.testing.assert_allclose(hadamard(turned), x, atol=1e-5)
    np.testing.assert_allclose(turned, naive_kv.hadamard(x), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)
    q = normal(50, 3, dim, seed=1)
    np.testing.assert_allclose((hadamard(q) * turned).sum(-1), (q * x).sum(-1), atol=1e-4)
    assert np.abs(hadamard_matrix(dim)).max() == pytest.approx((dim & -dim) ** -0.5)


def test_F41_keys_with_outliers_lose_less_when_they_are_turned() -> None:
    x = normal(400, 2, 64)
    x[..., [3, 40]] *= 20
    plain, turned = naive_kv.rounded(x, "int4"), naive_kv.hadamard(naive_kv.rounded(naive_kv.hadamard(x), "int4"))
    assert np.square(turned - x).mean() < 0.5 * np.square(plain - x).mean()


# -- what a model reads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kv_dtype", "rotation"),
    [("llama_gqa", kv_dtype, "none") for kv_dtype in FORMATS]
    + [("llama_gqa", "int4", "hadamard"), ("llama_gqa", SINKS, "hadamard")]
    + [("windowed", kv_dtype, "none") for kv_dtype in ("int4", SINKS, BY_HEAD)]
    + [("latent", "int4", "none"), ("scores", KIVI, "none"), ("slots", SINKS, "none")],
)
def test_F36_F37_F39_chunks_and_pages_change_no_bit(name: str, kv_dtype: str, rotation: str) -> None:
    spec, weights = specs.make(name)
    ids = np.random.default_rng(5).integers(0, spec.vocab_size, 50).tolist()
    for block_size, chunks in ((4, [50]), (4, [3, 8, 1, 7]), (4, [37, 1]), (16, [9, 1, 21]), (1, [10])):
        want = NaiveModel(spec, weights, kv_dtype, block_size=block_size, rotation=rotation).logits(ids)
        paged = Paged(spec, weights, kv_dtype=kv_dtype, block_size=block_size, rotation=rotation)
        if chunks[0] == 3:
            paged.make_ragged("a")
        np.testing.assert_array_equal(paged.chunked("a", ids, chunks), want)


def test_F41_rotation_alone_changes_only_the_last_bits() -> None:
    spec, weights = specs.make("llama_gqa")
    ids = list(range(3, 40))
    plain = Paged(spec, weights).one_go("a", ids)
    turned = Paged(spec, weights, rotation="hadamard").one_go("a", ids)
    np.testing.assert_allclose(turned, plain, atol=1e-4)
    assert (turned != plain).any()


def test_F37_newest_tokens_are_whole_and_older_ones_are_not() -> None:
    """Within the newest tokens 2 bits give the logits of float16; a token later they do not."""
    spec, weights = specs.make("llama_gqa")
    ids = np.random.default_rng(5).integers(0, spec.vocab_size, 30).tolist()
    kivi = Paged(spec, weights, kv_dtype=json.dumps({"dtype": "kivi2", "recent": 16})).one_go("a", ids)
    half = Paged(spec, weights, kv_dtype="float16").one_go("a", ids)
    # Token 18 still reads from the block of 18 + 1 - 16 = 3 on: all of them.
    np.testing.assert_array_equal(kivi[:19], half[:19])
    assert (kivi[19:] != half[19:]).any(axis=1).all()


def test_F39_first_tokens_are_whole() -> None:
    """12 first tokens and a block of the newest: the first 16 read nothing else, the 17th reads codes of 4."""
    spec, weights = specs.make("llama_gqa")
    ids = np.random.default_rng(5).integers(0, spec.vocab_size, 30).tolist()
    how = json.dumps({"dtype": "int2", "recent": 1, "sinks": 12})
    got = Paged(spec, weights, kv_dtype=how).one_go("a", ids)
    half = Paged(spec, weights, kv_dtype="float16").one_go("a", ids)
    np.testing.assert_array_equal(got[:16], half[:16])
    assert (got[16:] != half[16:]).any(axis=1).all()


# -- bytes -----------------------------------------------------------------------------------------------------------


def model(dim: int = 128, layers: int = 2) -> ModelSpec:
    from penstock.core.model_spec import Attention, FeedForward, Layer

    one = Layer(mixer=Attention(num_heads=4, num_kv_heads=2, head_dim=dim), ffn=FeedForward(width=8))
    return ModelSpec(family="test", vocab_size=8, hidden_size=8, layers=(one,) * layers, max_position=1 << 16)


def held_bytes(groups: tuple[CacheGroup, ...], num_tokens: int, block_size: int = 32) -> int:
    """What one sequence holds after so many tokens, 32 a step: slabs that the allocator counts as used, times the
    bytes that storage took for a slab."""
    slabs = [4 if g.spec.kind == "slot" else num_tokens // block_size + 8 for g in groups]
    kv = KVManager(groups, slabs, block_size, step_tokens=32)
    seq = started(kv, 0, list(range(num_tokens)))
    while seq.lag:
        until = min(seq.num_known, seq.num_computed + 32)
        assert kv.grow(seq, until)
        run(kv, seq, until)
        kv.drain()
    storage = Storage(groups, slabs, block_size)
    each = [sum(a.nbytes for a in planes.values()) // n for planes, n in zip(storage.planes, slabs, strict=True)]
    return sum(own.used * size for own, size in zip(kv.stats().groups, each, strict=True))


@pytest.mark.parametrize(("kv_dtype", "dim", "share"), [("int8", 128, 132 / 256), ("int4", 128, 80 / 256),
                                                        ("int4", 32, 20 / 64), ("int2", 64, 24 / 128)])  # fmt: skip
def test_F36_the_allocator_counts_scales_and_all(kv_dtype: str, dim: int, share: float) -> None:
    half, few = (held_bytes(cache_groups(model(dim), name), 1024) for name in ("float16", kv_dtype))
    assert half == 1024 * 2 * 2 * 2 * dim * 2
    assert few / half == share


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_F37_2_bits_take_a_fifth_of_16_at_long_context(dim: int) -> None:
    """Measured: codes, scales, and the newest tokens as float16. Short contexts have more of the latter."""
    half, kivi = cache_groups(model(dim), "float16"), cache_groups(model(dim), "kivi2")
    shares = {n: held_bytes(kivi, n) / held_bytes(half, n) for n in (512, 2048, 16384)}
    assert shares[16384] <= 0.2
    assert shares[512] > shares[2048] > shares[16384] > 3 / 16
    assert held_bytes(kivi, 16384) - held_bytes(kivi, 8192) == 8192 * 2 * 2 * dim * 3 // 4, "12 bytes for 64"


def test_F39_bytes_follow_layers_and_heads() -> None:
    spec = model(32, layers=4)
    mixed = json.dumps({"dtype": "int4", "layers": {"1-2": "int8", "3": {"k": ["int8", "int4"], "v": "int2"}}})
    groups = cache_groups(spec, mixed)
    assert [(g.layers, g.spec.num_bytes) for g in groups] == [((0,), 80), ((1, 2), 144), ((3,), 36 + 20 + 24)]
    assert held_bytes(groups, 320) == 320 * (80 + 2 * 144 + 80)
    kept = cache_specs(spec, json.dumps({"dtype": "int4", "layers": {"0": "kivi2"}, "recent": 10, "sinks": 5}))
    assert [[c.kind for c in own] for own in kept] == [["paged", "window", "slot"]] * 4
    assert kept[0][2].num_bytes == 5 * 2 * 2 * 32 * 2


def test_planes_say_how_they_are_packed() -> None:
    assert [group_size(d) for d in (4, 32, 80, 96, 128, 17)] == [4, 32, 20, 32, 32, 17]
    k, v, k_bounds, _ = vector_planes({"k": (2, 64), "v": (2, 64)}, "int4")
    assert (k.dtype, k.dim, v.num_bytes, k_bounds.name, k_bounds.dim) == ("uint8", 32, 64, "k_int4", 4)


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("int5", "must be one of auto, .*, int2, int4, int8, kivi4, kivi2 or a JSON object, not"),
        ("channel2", "must be one of"),
        ('{"dtype": "int4"', "is not JSON: .*; for example"),
        ('{"layers": {"0": "int4"}}', "dtype is missing"),
        ('{"dtype": "int4", "bits": 4}', "bits: unknown; known: dtype, layers, recent, sinks"),
        ('{"dtype": {"k": "int4"}}', "must be a name or have exactly the keys k and v"),
        ('{"dtype": {"k": "int4", "v": "channel2"}}', 'dtype: v: must be one of .*, not "channel2"'),
        ('{"dtype": {"k": [], "v": "int4"}}', "a list needs one codec for each kv head"),
        ('{"dtype": "int4", "layers": {"3-1": "int8"}}', "is no layer and no range"),
        ('{"dtype": "int4", "layers": {"0-2": "int8", "2": "int2"}}', "2 is named twice"),
        ('{"dtype": "int4", "layers": [1]}', "layers: must be an object"),
        ('{"dtype": "kivi2", "recent": 0}', "recent: 0 leaves nowhere to collect a block"),
        ('{"dtype": "kivi2", "recent": true}', "recent: must be a number of tokens, not true"),
        ('{"dtype": "int4", "sinks": -1}', "sinks: must be a number of tokens, not -1"),
    ],
)
def test_a_format_that_makes_no_sense_is_refused_at_once(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"kv_cache_dtype: .*{message}") as refused:
        from_kwargs(model="m", kv_cache_dtype=given)
    assert refused.value.field == "kv_cache_dtype"


@pytest.mark.parametrize(
    ("name", "given", "more", "message"),
    [
        ("llama_gqa", "kivi2", {"block_size": 8}, "block_size 8 would make the scales .* at least 16"),
        ("llama_gqa", '{"dtype": "int4", "layers": {"1-2": "int8"}}', {}, "2 is named, but .* layers 0 to 1"),
        ("llama_gqa", '{"dtype": {"k": ["int4", "int8", "int8"], "v": "int4"}}', {}, "k: 3 codecs for the 2 kv heads"),
        ("latent", "kivi2", {}, "layer 0 keeps latents"),
        ("blocks", "kivi2", {}, "layer 0 chooses blocks by keys of their own"),
        ("mamba", "int4", {}, "int4 is for keys and values, of which this model keeps none"),
        ("all_windowed", "kivi2", {}, "all layers of this model see a window; use int8 or int4"),
        ("llama_gqa", "kivi2", {"speculative_config": {"method": "ngram"}}, "cannot take back rejected drafts"),
        ("llama_gqa", "kivi2", {"kv_selector": "streaming"}, "kv_selector streaming cannot drop tokens"),
    ],
)
def test_a_model_that_it_does_not_fit_is_refused(name: str, given: str, more: dict[str, Any], message: str) -> None:
    spec, _ = specs.make(name)
    with pytest.raises(ConfigError, match=rf"kv_cache_dtype: .*{message}"):
        resolve(from_kwargs(model="m", kv_cache_dtype=given, **more), spec, MACHINE)


def test_dimensions_that_do_not_pack_are_refused() -> None:
    for dim, codec, instead in ((7, "int4", "use int8"), (6, "int2", "use int4 or int8")):
        with pytest.raises(ConfigError, match=rf"{codec} packs .* layer 0 have {dim}; {instead}"):
            resolve(from_kwargs(model="m", kv_cache_dtype=codec), model(dim), MACHINE)
    with pytest.raises(ConfigError, match=r"kv_rotation: hadamard turns .* an odd number of components; use none"):
        resolve(from_kwargs(model="m", kv_rotation="hadamard"), model(7), MACHINE)
    with pytest.raises(ConfigError, match=r"kv_rotation: .* no heads of keys and values"):
        resolve(from_kwargs(model="m", kv_rotation="hadamard"), specs.make("latent")[0], MACHINE)
    with pytest.raises(ConfigError, match=r"kv_rotation: .* no heads of keys and values"):
        resolve(from_kwargs(model="m", kv_rotation="hadamard"), specs.make("blocks")[0], MACHINE)


@pytest.mark.parametrize("more", [{"kv_cache_dtype": "int4"}, {"kv_cache_dtype": "kivi2"}, {"kv_rotation": "hadamard"}])
def test_kernels_that_do_not_exist_are_not_asked_for(more: dict[str, str]) -> None:
    spec, _ = specs.make("llama_gqa")
    with pytest.raises(ConfigError, match=r"native kernels cannot run this: .*no kernels.*; use ops auto"):
        choose_ops(from_kwargs(model="m", ops="native", **more), spec)
    config, decisions = choose_ops(from_kwargs(model="m", **more), spec)
    assert config.execution.ops == "ref"
    assert "the reference operations are slow" in decisions[0].why


def test_a_dictionary_is_as_good_as_its_text() -> None:
    given = {"dtype": "int4", "layers": {"0-1": {"k": "int8", "v": "int2"}}, "sinks": 4}
    config = from_kwargs(model="m", kv_cache_dtype=given)
    kv = parse_kv_format(config.cache.kv_cache_dtype)
    assert [(kv.of(n).keys, kv.of(n).values, kv.of(n).recent) for n in (0, 1, 2)] == [
        (("int8",), ("int2",), 64), (("int8",), ("int2",), 64), (("int4",), ("int4",), 64),
    ]  # fmt: skip
