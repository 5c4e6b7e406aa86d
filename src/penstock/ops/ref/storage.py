"""Reading and writing planes: paged [num_pages, S, heads, dim] in float32, float16, bfloat16 bits (uint16) or int8.

An int8 plane has beside it one of scales, float32 [num_pages, S, heads, 1]: a head of a token stands for scale * int8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32, narrow
from penstock.core.cache_spec import scale_name
from penstock.ops.plan import I32, Planes
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


def write_kv(step: Step, a: F32, b: F32, group: int, layer: int, names: tuple[str, str]) -> None:
    """Store a and b [T, G, D] at the tokens' slots, their positions, in the planes `names`. Mutates those planes.

    Attention reads back what is stored here, so a token attends to the same rounded values whether its context came
    in this step or in another one.
    """
    pages, offsets = step.token_pages(group)
    planes, lanes = step.planes[group], step.plan.groups[group].lanes
    for lane in range(lanes):
        line = layer * lanes + lane
        own, at = pages[line], offsets if offsets.ndim == 1 else offsets[line]
        for name, x in zip(names, (a, b), strict=True):
            plane, heads = planes[name], x.shape[1] // lanes
            part = x if lanes == 1 else x[:, lane * heads : (lane + 1) * heads]
            if plane.dtype == np.int8:
                plane[own, at], planes[scale_name(name)][own, at] = quantise(part)
            else:
                plane[own, at] = to_storage(part, plane.dtype)


def observe(q: F32, step: Step, group: int, layer: int) -> None:
    """Show the queries [T, H, D] of a layer of cache group `group` to who looks at attention beside the program."""
    step.observed.append(q)


def read_kv(planes: Planes, name: str, pages: I32, lo: int, hi: int) -> F32:
    """What the plane called `name` stands for at positions lo ... hi. As `gather`."""
    x = gather(planes[name], pages, lo, hi)
    if planes[name].dtype == np.int8:
        x *= gather(planes[scale_name(name)], pages, lo, hi)
    return x


def gather(plane: npt.NDArray[Any], pages: I32, lo: int, hi: int) -> F32:
    """Positions lo ... hi of one sequence whose blocks are `pages` [M], in order, as float32 [hi-lo, heads, dim].

    Blocks that lie wholly before `lo` are not looked up. int8 comes without its scale.
    """
    size = plane.shape[1]
    first = lo // size
    blocks = plane[pages[first : -(-hi // size)]]
    tokens = blocks.reshape(-1, *plane.shape[2:])[lo - first * size : hi - first * size]
    return as_float32(tokens)
