"""Writing keys and values, and reading them back: see `ops.ref.storage` and `ops.ref.attention.kept`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.backends.gpu.codecs import TORCH_CODECS
from penstock.backends.gpu.step import TorchStep
from penstock.core.cache_spec import run_name
from penstock.core.kv_codec import KV_CODECS
from penstock.ops.kept import Kept
from penstock.ops.plan import I32
from penstock.ops.ref.storage import codec_of

Planes = Any
"""Plane name -> `device_array.DeviceArray`."""


def write_kv(
    step: TorchStep, a: Tensor, b: Tensor, group: int, layer: int, names: tuple[str, str], *,
    bounds: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """See `ops.ref.storage.write_kv`. Mutates: the planes `names` and `bounds`."""
    pages, offsets = step.slots_of(group)
    planes, lanes = step.planes[group], step.plan.groups[group].lanes
    for lane in range(lanes):
        line = layer * lanes + lane
        at = pages[line], offsets if offsets.ndim == 1 else offsets[line]
        for name, x in zip(names, (a, b), strict=True):
            n = x.shape[1] // lanes
            store(planes, name, at, x if lanes == 1 else x[:, lane * n : (lane + 1) * n])
    if bounds:
        _write_bounds(step, group, layer, names[0], bounds)


def _write_bounds(step: TorchStep, group: int, layer: int, keys: str, bounds: tuple[str, ...]) -> None:
    where = step.plan.groups[group]
    for b in range(step.num_sequences):
        count = step.bounds[b + 1] - step.bounds[b]
        for lane in range(where.lanes if count else 0):
            start = int(step.plan.positions[step.bounds[b]]) - where.num_dropped(b, layer, lane)
            pages, size = where.pages(b, layer, lane), where.block_size
            for block in range(start // size, -(-(start + count) // size)):
                held = read_kv(step, group, keys, pages, block * size, min((block + 1) * size, start + count))
                spoilt = ~torch.isfinite(held).all(dim=0)
                for name, x in zip(bounds, (held.amin(dim=0), held.amax(dim=0)), strict=True):
                    tensor = step.tensor(group, name)
                    tensor[int(pages[block]), 0] = torch.where(spoilt, torch.nan, x).to(tensor.dtype)


def store(planes: Planes, name: str, at: tuple[Tensor, ...], x: Tensor) -> None:
    """x [n, G, D] at pages and offsets, or [n, S, G, D] at whole pages. Mutates: the planes of `name`."""
    first = 0
    for own in _runs(planes, name):
        plane = planes[own]
        part = x[..., first : first + plane.shape[2], :]
        first += plane.shape[2]
        codec, scales = codec_of(planes, own)
        elements, beside = TORCH_CODECS[codec].encode(part)
        plane.tensor[at] = elements
        if scales is not None:
            assert beside is not None, "a codec with a plane of scales"
            kept: Any = scales
            kept.tensor[at] = beside.to(kept.tensor.dtype)


def read_kv(step: TorchStep, group: int, name: str, pages: I32, lo: int, hi: int) -> Tensor:
    """What the planes of `name` stand for at positions lo ... hi - 1 of one sequence's line: [hi - lo, G, D]."""
    parts = [_read(step, group, own, pages, lo, hi) for own in _runs(step.planes[group], name)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _read(step: TorchStep, group: int, name: str, pages: I32, lo: int, hi: int) -> Tensor:
    codec, beside = codec_of(step.planes[group], name)
    scales: Any = beside
    tensor = step.tensor(group, name)
    size = step.plan.groups[group].block_size
    own = step.on_device(pages[lo // size : -(-hi // size)])
    decode = TORCH_CODECS[codec].decode
    if KV_CODECS.traits(codec).scales == "block":
        x = decode(tensor[own], None if scales is None else scales.tensor[own])
        return x.reshape(-1, *x.shape[2:])[lo % size :][: hi - lo]

    def tokens(plane: Tensor) -> Tensor:
        return plane[own].reshape(-1, *plane.shape[2:])[lo % size :][: hi - lo]

    return decode(tokens(tensor), None if scales is None else tokens(scales.tensor))


def _runs(planes: Planes, name: str) -> Iterator[str]:
    """The planes of `name`, heads in order."""
    run = 0
    while (own := run_name(name, run)) in planes:
        yield own
        run += 1


def observe(q: Tensor, step: TorchStep, group: int, layer: int) -> None:
    step.observed.append(q)


# -- newest and first tokens beside codes ------------------------------------------------------------------------------


def write_kept(step: TorchStep, k: Tensor, v: Tensor, group: int, layer: int, kept: Kept) -> None:
    """See `ops.ref.attention.kept.write_kept`. Mutates: planes of two groups, of three with sinks."""
    pages, offsets = step.slots_of(kept.group)
    size = step.plan.groups[group].block_size
    for name, x in (("k", k), ("v", v)):
        store(step.planes[kept.group], name, (pages[kept.layer], offsets), x)
        for b, start, end in _sequences(step):
            n = min(kept.sinks, end) - start
            if n > 0:
                first = step.bounds[b]
                state = _state(step, kept, name, b)
                state[start : start + n] = x[first : first + n].to(state.dtype)
    for b, start, end in _sequences(step):
        blocks = slice(start // size, end // size)
        codes = step.plan.groups[group].pages(b, layer)[blocks]
        if len(codes):
            whole = step.plan.groups[kept.group].pages(b, kept.layer)
            for name in ("k", "v"):
                x = read_kv(step, kept.group, name, whole, blocks.start * size, blocks.stop * size)
                store(step.planes[group], name, (step.on_device(codes),), x.reshape(-1, size, *x.shape[1:]))


def contexts(step: TorchStep, group: int, layer: int, kept: Kept) -> Iterator[tuple[Tensor, Tensor]]:
    """k and v [p+1, G, D] of every token of the step, in order, where p is its position."""
    size = step.plan.groups[group].block_size
    for b, start, end in _sequences(step):
        begin, last = kept.whole(start, size), kept.whole(end - 1, size)
        codes, newest = [], []
        for name in ("k", "v"):
            codes.append(read_kv(step, group, name, step.plan.groups[group].pages(b, layer), 0, last))
            pages = step.plan.groups[kept.group].pages(b, kept.layer)
            newest.append(read_kv(step, kept.group, name, pages, begin, end))
            if kept.sinks:
                held = min(kept.sinks, last)
                codes[-1][:held] = _state(step, kept, name, b)[:held].float()
        for p in range(start, end):
            first = kept.whole(p, size)
            k, v = (torch.cat([c[:first], n[first - begin : p + 1 - begin]])
                    for c, n in zip(codes, newest, strict=True))  # fmt: skip
            yield k, v


def _sequences(step: TorchStep) -> Iterator[tuple[int, int, int]]:
    """(sequence, first position of the step, last one + 1) of all that run tokens."""
    assert step.plan.mask is None or not step.plan.mask.any(), "blocks of drafts cannot be encoded"
    for b in range(step.num_sequences):
        lo, hi = step.bounds[b], step.bounds[b + 1]
        if lo < hi:
            start = int(step.plan.positions[lo])
            yield b, start, start + hi - lo


def _state(step: TorchStep, kept: Kept, name: str, b: int) -> Tensor:
    """A view of the sinks [sinks, G, D] of a sequence."""
    pages = step.plan.groups[kept.sink_group].pages(b, kept.sink_layer)
    plane = step.tensor(kept.sink_group, name)
    return plane[int(pages[0])].view(kept.sinks, -1, plane.shape[-1])


CACHE_OPS: dict[str, Callable[..., Any]] = {"write_kv": write_kv, "write_kept": write_kept, "observe": observe}
