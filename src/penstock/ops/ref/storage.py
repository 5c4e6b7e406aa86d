"""Reading and writing planes: paged [num_pages, S, heads, elements], bfloat16 as its bits (uint16).

What encodes numbers in fewer bits has a plane of scales beside it (`core.kv_codec`), whose name says how:
[num_pages, S, heads, width] by token and by group, [num_pages, 1, heads, width] by block. Heads that share a codec have
planes of their own (`core.cache_spec.run_name`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.core.cache_spec import run_name
from penstock.core.kv_codec import KV_CODECS, scales_name
from penstock.ops.plan import I32, Planes
from penstock.ops.ref.codecs.number import to_storage
from penstock.ops.ref.product import as_float32
from penstock.ops.step import Step

_DTYPES = {"uint16": "bfloat16"}
"""numpy's name -> ours, where they differ."""


def write_kv(
    step: Step, a: F32, b: F32, group: int, layer: int, names: tuple[str, str], *, bounds: tuple[str, ...] = ()
) -> None:
    """Store a and b [T, G, D] at the tokens' slots, their positions, in the planes `names`. Mutates those planes
    and `bounds`: two of a page, of what it now holds of `a` (see `page_bounds`).

    Attention reads back what is stored here, so a token attends to the same rounded values whether its context came
    in this step or in another one.
    """
    pages, offsets = step.token_pages(group)
    planes, lanes = step.planes[group], step.plan.groups[group].lanes
    for lane in range(lanes):
        line = layer * lanes + lane
        own, at = pages[line], offsets if offsets.ndim == 1 else offsets[line]
        for name, x in zip(names, (a, b), strict=True):
            heads = x.shape[1] // lanes
            store(planes, name, (own, at), x if lanes == 1 else x[:, lane * heads : (lane + 1) * heads])
    if bounds:
        _write_bounds(step, group, layer, names[0], bounds)


def page_bounds(k: F32) -> tuple[F32, F32]:
    """The least and the largest of keys [n, G, D], each [G, D]; NaN where one is not finite."""
    spoilt = ~np.isfinite(k).all(axis=0)
    low, high = k.min(axis=0), k.max(axis=0)
    low[spoilt] = high[spoilt] = np.nan
    return low, high


def _write_bounds(step: Step, group: int, layer: int, keys: str, bounds: tuple[str, ...]) -> None:
    where, planes = step.plan.groups[group], step.planes[group]
    for b in range(step.num_sequences):
        count = step.bounds[b + 1] - step.bounds[b]
        for lane in range(where.lanes if count else 0):
            start = int(step.plan.positions[step.bounds[b]]) - where.num_dropped(b, layer, lane)
            pages, size = where.pages(b, layer, lane), where.block_size
            for block in range(start // size, -(-(start + count) // size)):
                held = read_kv(planes, keys, pages, block * size, min((block + 1) * size, start + count))
                for name, x in zip(bounds, page_bounds(held), strict=True):
                    planes[name][pages[block], 0] = to_storage(x, planes[name].dtype)


def observe(q: F32, step: Step, group: int, layer: int) -> None:
    """Show the queries [T, H, D] of a layer of cache group `group` to who looks at attention beside the program."""
    step.observed.append(q)


def store(planes: Planes, name: str, at: tuple[I32, ...], x: F32) -> None:
    """x [n, G, D] into the planes of `name` at pages and offsets, or [n, S, G, D] at whole pages. Mutates them."""
    first = 0
    for own in _runs(planes, name):
        plane = planes[own]
        heads = x[..., first : first + plane.shape[2], :]
        first += plane.shape[2]
        codec, scales = codec_of(planes, own)
        plane[at], beside = KV_CODECS.get(codec).encode(heads)
        if scales is not None:
            scales[at] = beside


def read_kv(planes: Planes, name: str, pages: I32, lo: int, hi: int) -> F32:
    """What the planes of `name` stand for at positions lo ... hi. As `gather`."""
    heads = [_read(planes, own, pages, lo, hi) for own in _runs(planes, name)]
    return heads[0] if len(heads) == 1 else np.concatenate(heads, axis=1)


def _read(planes: Planes, name: str, pages: I32, lo: int, hi: int) -> F32:
    plane, (codec, scales) = planes[name], codec_of(planes, name)
    decode = KV_CODECS.get(codec).decode
    if KV_CODECS.traits(codec).scales != "block":
        return decode(_tokens(plane, pages, lo, hi), None if scales is None else _tokens(scales, pages, lo, hi))
    size = plane.shape[1]
    own = pages[lo // size : -(-hi // size)]
    x = decode(np.asarray(plane[own]), None if scales is None else np.asarray(scales[own]))
    return x.reshape(-1, *x.shape[2:])[lo % size :][: hi - lo]


def _runs(planes: Planes, name: str) -> Iterator[str]:
    """The planes of `name`, heads in order."""
    run = 0
    while (own := run_name(name, run)) in planes:
        yield own
        run += 1


def codec_of(planes: Planes, name: str) -> tuple[str, npt.NDArray[Any] | None]:
    """How the plane `name` is encoded, and the plane of its scales, if there is one."""
    plain, scaled = _codecs(planes[name].dtype, len(KV_CODECS))
    for codec in scaled:
        if (beside := scales_name(name, codec)) in planes:
            return codec, planes[beside]
    assert plain is not None, f"plane {name} is encoded, and nothing says how"
    return plain, None


@cache
def _codecs(dtype: np.dtype[Any], number: int) -> tuple[str | None, tuple[str, ...]]:
    """Which codec keeps numbers of the type as they are, and which keep codes of it, among so many that there are."""
    own = _DTYPES.get(dtype.name, dtype.name)
    found = [(codec, KV_CODECS.traits(codec)) for codec in KV_CODECS]
    plain = [codec for codec, traits in found if traits.dtype == own and traits.scales == "none"]
    scaled = tuple(codec for codec, traits in found if traits.dtype == own and traits.scales != "none")
    return (plain[-1] if plain else None), scaled


def gather(plane: npt.NDArray[Any], pages: I32, lo: int, hi: int) -> F32:
    """Positions lo ... hi of one sequence whose blocks are `pages` [M], in order, as float32 [hi-lo, heads, dim].

    Blocks that lie wholly before `lo` are not looked up. int8 comes without its scale.
    """
    return as_float32(_tokens(plane, pages, lo, hi))


def _tokens(plane: npt.NDArray[Any], pages: I32, lo: int, hi: int) -> npt.NDArray[Any]:
    size = plane.shape[1]
    first = lo // size
    blocks = np.asarray(plane[pages[first : -(-hi // size)]])  # planes of other devices come here
    return blocks.reshape(-1, *plane.shape[2:])[lo - first * size : hi - first * size]
