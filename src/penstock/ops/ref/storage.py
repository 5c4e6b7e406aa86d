"""Reading and writing planes: paged [num_pages, S, heads, dim] in float32, float16, bfloat16 bits (uint16) or int8.

An int8 plane has beside it one of scales, float32 [num_pages, S, heads, 1]: a head of a token stands for scale * int8.
A uint8 plane is packed (`ops.ref.codec`) and has beside it one of scales and minima, float16, whose name says how:
[num_pages, S, heads, 2 D / group] by token, [num_pages, 1, heads, 2 D] by channel. Heads that share a codec have planes
of their own (`core.cache_spec.run_name`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32, narrow
from penstock.core.cache_spec import bounds_name, group_size, run_name, scale_name
from penstock.core.kv_format import CHANNEL, PACKED_BITS
from penstock.ops.plan import I32, Planes
from penstock.ops.ref.codec import decode_channels, decode_tokens, encode_channels, encode_tokens
from penstock.ops.ref.product import as_float32
from penstock.ops.step import Step


def to_storage(x: F32, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """x rounded to a plane's dtype. float16 turns what is too large into infinity. Shapes: any."""
    if dtype == np.uint16:
        return narrow(x)
    with np.errstate(over="ignore"):
        return x.astype(dtype, copy=False)


def quantise(x: F32) -> tuple[npt.NDArray[np.int8], F32]:
    """x [..., D] in 8 bits and one scale [..., 1] per vector: max |x| / 127, to the nearest, ties to even.

    The scale is 0 if all of a vector is 0, and NaN if one number of it is not finite, so that what is read back is no
    number either. Source: ZeroQuant, arXiv 2206.01861, section 4.1 (token-wise).
    """
    largest = np.abs(x).max(axis=-1, keepdims=True)
    scale: F32 = largest / np.float32(127)
    scale[~np.isfinite(largest)] = np.nan
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        # The quotient is beyond 127 where the scale is so small that it has lost digits.
        whole = np.clip(np.rint(x / scale), -127, 127)
    return np.where(scale > 0, whole, np.float32(0)).astype(np.int8), scale


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
        if plane.dtype == np.int8:
            plane[at], planes[scale_name(own)][at] = quantise(heads)
        elif plane.dtype == np.uint8:
            bounds, bits, by_channel = _packing(planes, own)
            if by_channel:
                plane[at], bounds[at] = encode_channels(heads, bits)
            else:
                plane[at], bounds[at] = encode_tokens(heads, bits, group_size(x.shape[-1]))
        else:
            plane[at] = to_storage(heads, plane.dtype)


def read_kv(planes: Planes, name: str, pages: I32, lo: int, hi: int) -> F32:
    """What the planes of `name` stand for at positions lo ... hi. As `gather`."""
    heads = [_read(planes, own, pages, lo, hi) for own in _runs(planes, name)]
    return heads[0] if len(heads) == 1 else np.concatenate(heads, axis=1)


def _read(planes: Planes, name: str, pages: I32, lo: int, hi: int) -> F32:
    plane = planes[name]
    if plane.dtype == np.uint8:
        bounds, bits, by_channel = _packing(planes, name)
        if not by_channel:
            return decode_tokens(_tokens(plane, pages, lo, hi), gather(bounds, pages, lo, hi), bits)
        size = plane.shape[1]
        own = pages[lo // size : -(-hi // size)]
        x = decode_channels(plane[own], bounds[own].astype(np.float32), bits)
        return x.reshape(-1, *x.shape[2:])[lo % size :][: hi - lo]
    x = gather(plane, pages, lo, hi)
    if plane.dtype == np.int8:
        x *= gather(planes[scale_name(name)], pages, lo, hi)
    return x


def _runs(planes: Planes, name: str) -> Iterator[str]:
    """The planes of `name`, heads in order."""
    run = 0
    while (own := run_name(name, run)) in planes:
        yield own
        run += 1


def _packing(planes: Planes, name: str) -> tuple[npt.NDArray[Any], int, bool]:
    """The plane of scales and minima beside a packed one, its bits, and whether they are those of channels."""
    for codec, bits in PACKED_BITS.items():
        if bounds_name(name, codec) in planes:
            return planes[bounds_name(name, codec)], bits, codec in CHANNEL
    raise AssertionError(f"plane {name} is packed, and nothing says how")


def gather(plane: npt.NDArray[Any], pages: I32, lo: int, hi: int) -> F32:
    """Positions lo ... hi of one sequence whose blocks are `pages` [M], in order, as float32 [hi-lo, heads, dim].

    Blocks that lie wholly before `lo` are not looked up. int8 comes without its scale.
    """
    return as_float32(_tokens(plane, pages, lo, hi))


def _tokens(plane: npt.NDArray[Any], pages: I32, lo: int, hi: int) -> npt.NDArray[Any]:
    size = plane.shape[1]
    first = lo // size
    blocks = plane[pages[first : -(-hi // size)]]
    return blocks.reshape(-1, *plane.shape[2:])[lo - first * size : hi - first * size]
