"""Caches of codes with the newest and the first tokens beside them: writing, encoding, and what a token reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.ops.kept import Kept
from penstock.ops.plan import I32
from penstock.ops.ref.codecs.number import to_storage
from penstock.ops.ref.product import as_float32
from penstock.ops.ref.storage import read_kv, store
from penstock.ops.step import Step


def write_kept(step: Step, k: F32, v: F32, group: int, layer: int, kept: Kept) -> None:
    """Store k and v [T, G, D] as float16, and encode every block that is complete with them.

    A block is encoded from what the window holds of it. Those that it shares with tokens of earlier steps are still
    there: a window begins with the block of its first token, or before. Mutates: planes of two groups, of three with
    sinks.
    """
    pages, offsets = step.token_pages(kept.group)
    recent, size = step.planes[kept.group], step.plan.groups[group].block_size
    for name, x in (("k", k), ("v", v)):
        store(recent, name, (pages[kept.layer], offsets), x)
        for state, first, n in _sinks(step, kept, name):
            own = x[first : first + n]
            at = int(step.plan.positions[first])
            state[at : at + n] = to_storage(own, state.dtype)
    for b, start, end in _sequences(step):
        blocks = slice(start // size, end // size)
        codes = step.plan.groups[group].pages(b, layer)[blocks]
        if len(codes):
            whole = step.plan.groups[kept.group].pages(b, kept.layer)
            for name in ("k", "v"):
                x = read_kv(recent, name, whole, blocks.start * size, blocks.stop * size)
                store(step.planes[group], name, (codes,), x.reshape(-1, size, *x.shape[1:]))


def contexts(step: Step, group: int, layer: int, kept: Kept) -> Iterator[tuple[F32, F32]]:
    """k and v [p+1, G, D] of every token of the step, in order, where p is its position."""
    size = step.plan.groups[group].block_size
    for b, start, end in _sequences(step):
        begin, last = kept.whole(start, size), kept.whole(end - 1, size)
        codes, newest = [], []
        for name in ("k", "v"):
            codes.append(read_kv(step.planes[group], name, step.plan.groups[group].pages(b, layer), 0, last))
            pages = step.plan.groups[kept.group].pages(b, kept.layer)
            newest.append(read_kv(step.planes[kept.group], name, pages, begin, end))
            if kept.sinks:
                held = min(kept.sinks, last)
                codes[-1][:held] = as_float32(_state(step, kept, name, b)[:held])
        for p in range(start, end):
            first = kept.whole(p, size)
            k, v = (np.concatenate([c[:first], n[first - begin : p + 1 - begin]])
                    for c, n in zip(codes, newest, strict=True))  # fmt: skip
            yield k, v


def _sequences(step: Step) -> Iterator[tuple[int, int, int]]:
    """(sequence, first position of the step, last one + 1) of all that run tokens."""
    assert step.plan.mask is None or not step.plan.mask.any(), "blocks of drafts cannot be encoded"
    for b in range(step.num_sequences):
        lo, hi = step.bounds[b], step.bounds[b + 1]
        if lo < hi:
            start = int(step.plan.positions[lo])
            yield b, start, start + hi - lo


def _sinks(step: Step, kept: Kept, name: str) -> Iterator[tuple[npt.NDArray[Any], int, int]]:
    """A view of the sinks [sinks, G, D] of every sequence that runs some of them, the first of them among the tokens
    of the step, and how many there are."""
    if not kept.sinks:
        return
    for b, start, end in _sequences(step):
        n = min(kept.sinks, end) - start
        if n > 0:
            yield _state(step, kept, name, b), step.bounds[b], n


def _state(step: Step, kept: Kept, name: str, b: int) -> npt.NDArray[Any]:
    pages: I32 = step.plan.groups[kept.sink_group].pages(b, kept.sink_layer)
    plane = step.planes[kept.sink_group][name]
    state: npt.NDArray[Any] = plane[int(pages[0])].reshape(kept.sinks, -1, plane.shape[-1])
    return state
