"""What every codec of keys and values owes its plane and whoever reads it. Being registered enrols it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.core.cache_spec import CACHE_DTYPE_BYTES, CacheSpec, group_layers, head_planes
from penstock.core.kv_codec import KV_CODECS, CodecTraits, codecs_by_token, group_size
from penstock.core.kv_format import parse_kv_format
from penstock.core.sampling import SamplingParams
from penstock.launch.llm import LLM
from penstock.ops.ref.storage import codec_of, read_kv, store
from penstock.runner.storage import Storage

PAGES, SIZE, HEADS = 7, 16, 3
F32 = npt.NDArray[np.float32]


class Nibbles:
    """4 bits and one float32 scale for each head of a token: one file and one line more than what is registered."""

    def encode(self, x: F32) -> tuple[npt.NDArray[np.uint8], F32]:
        scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(7)
        with np.errstate(all="ignore"):
            scale[~np.isfinite(scale)] = np.nan
            codes = np.where(scale > 0, np.rint(x / scale), 0).astype(np.int8) + 8
        return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8), scale

    def decode(self, elements: npt.NDArray[Any], scales: npt.NDArray[Any] | None) -> F32:
        assert scales is not None
        codes = np.stack([elements & 15, elements >> 4], axis=-1).reshape(*elements.shape[:-1], -1)
        x: F32 = (codes.astype(np.float32) - 8) * scales
        return x


NIBBLES = Nibbles()


@pytest.fixture
def nibbles() -> Iterator[str]:
    KV_CODECS.add("nibbles", f"{__name__}:NIBBLES", CodecTraits(4, "uint8", "token", "float32"))
    yield "nibbles"
    del KV_CODECS._entries["nibbles"]
    parse_kv_format.cache_clear()


@pytest.fixture(params=[*KV_CODECS.names(), "nibbles"])
def codec(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("nibbles") if request.param == "nibbles" else request.param)


@pytest.fixture(params=[8, 32, 80])
def dim(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def numbers(shape: tuple[int, ...], seed: int = 0) -> F32:
    """Of several sizes: channels and tokens differ a hundredfold."""
    rng = np.random.default_rng(seed)
    x = (
        rng.standard_normal(shape)
        * np.exp(rng.uniform(-2, 2, shape[-1]))
        * np.exp(rng.uniform(-2, 2, (shape[0], 1, 1)))
    )
    return x.astype(np.float32)


def planes_of(codec: str, dim: int) -> dict[str, npt.NDArray[Any]]:
    """As a rank makes them for one layer, poisoned: what nobody wrote is no number."""
    tokens, pages = head_planes("k", HEADS, dim, (codec,))
    spec = CacheSpec("paged", tuple(tokens), page_planes=tuple(pages))
    return Storage(group_layers([spec]), [PAGES], SIZE, poison=True).planes[0]


def written(codec: str, x: F32) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.int32]]:
    """x [tokens, heads, dim], a whole number of blocks, in pages that lie anyhow; token by token, if it goes."""
    planes, size = planes_of(codec, x.shape[-1]), SIZE
    pages = np.array([5, 0, 3, 6][: len(x) // size], np.int32)
    if KV_CODECS.traits(codec).scales == "block":
        store(planes, "k", (pages,), x.reshape(-1, size, *x.shape[1:]))
    else:
        for i in range(len(x)):
            store(planes, "k", (pages[i // size : i // size + 1], np.array([i % size], np.int32)), x[i : i + 1])
    return planes, pages


def sharing(codec: str, x: F32) -> F32:
    """x [tokens, heads, dim] -> [..., numbers that share a scale]; without scales each number is alone."""
    blocks = x.reshape(-1, SIZE, *x.shape[1:])
    group = group_size(x.shape[-1])
    return {
        "none": x[..., None], "token": x, "group": x.reshape(*x.shape[:-1], -1, group),
        "block": np.moveaxis(blocks, 1, -1),
    }[KV_CODECS.traits(codec).scales]  # fmt: skip


def test_its_planes_are_those_that_its_traits_say_and_are_known_again(codec: str, dim: int) -> None:
    traits, planes = KV_CODECS.traits(codec), planes_of(codec, dim)
    found, scales = codec_of(planes, "k")
    assert found == codec, "another codec has planes of this type and these names"
    assert planes["k"].shape == (PAGES, SIZE, HEADS, dim // traits.per_element)
    assert planes["k"].itemsize * 8 == traits.bits * traits.per_element == 8 * CACHE_DTYPE_BYTES[traits.dtype]
    if scales is None:
        assert traits.scales == "none"
        assert traits.width(dim) == 0
    else:
        assert scales.shape == (PAGES, 1 if traits.scales == "block" else SIZE, HEADS, traits.width(dim))


def test_what_it_encodes_has_the_shapes_and_types_of_its_planes(codec: str, dim: int) -> None:
    planes = planes_of(codec, dim)
    _, beside = codec_of(planes, "k")
    x = numbers((2 * SIZE, HEADS, dim)).reshape(2, SIZE, HEADS, dim)
    elements, scales = KV_CODECS.get(codec).encode(x)
    assert (elements.shape, elements.dtype) == ((2, *planes["k"].shape[1:]), planes["k"].dtype)
    assert (scales is None) == (beside is None)
    if scales is not None and beside is not None:
        assert (scales.shape, scales.dtype) == ((2, *beside.shape[1:]), beside.dtype)
    back = KV_CODECS.get(codec).decode(elements, scales)
    assert (back.shape, back.dtype) == (x.shape, np.float32)


def test_what_comes_back_is_within_a_step_of_what_was_kept(codec: str, dim: int) -> None:
    x = numbers((3 * SIZE, HEADS, dim))
    planes, pages = written(codec, x)
    traits = KV_CODECS.traits(codec)
    kept, back = sharing(codec, x), sharing(codec, read_kv(planes, "k", pages, 0, len(x)))
    if traits.scales == "none":
        bound = np.abs(kept) * 2.0 ** {"float32": -24, "float16": -11, "bfloat16": -8}[traits.dtype] + 2.0**-25
    elif traits.minima:
        low, high = kept.min(axis=-1, keepdims=True), kept.max(axis=-1, keepdims=True)
        # Half a step, and what float16 loses of scale and minimum.
        bound = (high - low) / (2**traits.bits - 1) / 2 + (np.abs(low) + np.abs(high - low)) * 2.0**-10 + 2.0**-24
    else:
        bound = np.abs(kept).max(axis=-1, keepdims=True) / (2 ** (traits.bits - 1) - 1) * 0.501
    assert (np.abs(back - kept) <= bound).all()
    assert (back != kept).any() or traits.dtype == "float32"


def test_reading_is_exact_at_every_cut(codec: str) -> None:
    x = numbers((3 * SIZE, HEADS, 32))
    planes, pages = written(codec, x)
    whole = read_kv(planes, "k", pages, 0, len(x)).copy()
    for lo in range(0, len(x), 5):
        for hi in range(lo + 1, len(x) + 1, 3):
            np.testing.assert_array_equal(read_kv(planes, "k", pages, lo, hi), whole[lo:hi])
    np.testing.assert_array_equal(read_kv(planes, "k", pages, 0, len(x)), whole, "reading changes nothing")


def test_zeros_are_zeros_and_equal_numbers_stay_equal(codec: str, dim: int) -> None:
    x = np.zeros((SIZE, HEADS, dim), np.float32)
    planes, pages = written(codec, x)
    np.testing.assert_array_equal(read_kv(planes, "k", pages, 0, SIZE), x)
    planes, pages = written(codec, x + np.float32(0.5))
    back = read_kv(planes, "k", pages, 0, SIZE)
    np.testing.assert_allclose(back, 0.5, rtol=1e-6)
    assert (back == back[0, 0, 0]).all()


@pytest.mark.parametrize("sick", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_visible_and_with_those_who_share_its_scale(codec: str, sick: float) -> None:
    x = numbers((2 * SIZE, HEADS, 32))
    planes, pages = written(codec, x)
    well = read_kv(planes, "k", pages, 0, len(x)).copy()
    x[SIZE + 3, 1, 5] = sick
    planes, pages = written(codec, x)
    back = read_kv(planes, "k", pages, 0, len(x))
    assert not np.isfinite(back[SIZE + 3, 1, 5])
    shared = np.broadcast_to(~np.isfinite(sharing(codec, x)).all(axis=-1, keepdims=True), sharing(codec, x).shape)
    np.testing.assert_array_equal(sharing(codec, back)[~shared], sharing(codec, well)[~shared])
    assert not np.isfinite(sharing(codec, back)[shared]).any()


def test_company_changes_nothing(codec: str) -> None:
    """A token, by block a block, is encoded alone as it is among others."""
    x = numbers((3 * SIZE, HEADS, 32)).reshape(3, SIZE, HEADS, 32)
    made = KV_CODECS.get(codec)
    together, again = made.encode(x), made.encode(x.copy())
    alone = made.encode(x[1:2])
    for all_of_it, twice, own in zip(together, again, alone, strict=True):
        if all_of_it is not None and twice is not None and own is not None:
            np.testing.assert_array_equal(all_of_it, twice)
            np.testing.assert_array_equal(all_of_it[1:2], own)


def test_it_is_a_name_of_the_setting_or_of_keys_alone(codec: str) -> None:
    if KV_CODECS.traits(codec).scales != "block":
        assert codec in codecs_by_token()
        assert parse_kv_format(codec).default.plain == codec
        return
    how = parse_kv_format(f'{{"dtype": {{"k": "{codec}", "v": "int8"}}}}').default
    assert how.recent > 0, "what waits for its block stands somewhere"
    for given in (codec, f'{{"dtype": {{"k": "int8", "v": "{codec}"}}}}'):
        with pytest.raises(ConfigError, match="kv_cache_dtype"):
            parse_kv_format(given)


def test_where_it_has_bounds_of_keys_they_are_kept_in_a_type_of_numbers(codec: str) -> None:
    bounds = KV_CODECS.traits(codec).bounds
    assert not bounds or not KV_CODECS.traits(bounds).quantises


def test_one_more_codec_is_a_name_of_the_setting_and_serves(nibbles: str) -> None:
    """Nothing else is told of it: planned, run on the reference operations, and how a prompt is cut changes nothing."""
    with pytest.raises(ConfigError, match="nibbles"):
        from_kwargs(model="nano", kv_cache_dtype="nibble")
    texts = []
    for chunk in (16, 7):
        llm = LLM(model="nano", kv_cache_dtype=nibbles, max_num_batched_tokens=chunk, max_model_len=256)
        assert set(llm.engine.core.kv.groups[0].spec.planes) >= set(head_planes("k", HEADS, 32, (nibbles,))[0])
        prompt = "Once upon a time there was a little boat"
        texts.append(llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].token_ids)
    assert texts[0] == texts[1]
    with pytest.raises(ConfigError, match="keeps bounds of keys"):
        LLM(model="nano", kv_cache_dtype=nibbles, kv_selector="quest")
