"""Trees of drafts: several continuations of a sequence in one step, each token seeing its own path only.

A step's mask is uint64 [T]. mask[t] = 0 is an ordinary token. Else t is a node of a tree: its sequence has at most 64
tokens in this step, of which t sees those whose bit is set (bit i: the sequence's i-th token of the step), and all that
was cached before. The highest bit is t's own. What t sees is its path from the root, standing at consecutive positions
from the sequence's first one on; the i-th token of the sequence is kept in slot start + i, whatever its position is.

Source: Miao et al., SpecInfer, arXiv 2305.09781, section 4.2 (tree attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]
MAX_NODES = 64
"""Tokens in a step of a sequence that has a tree: bits of a mask."""


def tree_mask(parents: Sequence[int]) -> tuple[U64, I32]:
    """Masks [n] and depths [n] of a tree whose i-th node hangs on node parents[i] < i; -1 is the root's, node 0.

    Positions are the root's plus depths. Raises: ValueError for what is no tree of 1 to 64 nodes.
    """
    if not 0 < len(parents) <= MAX_NODES:
        raise ValueError(f"a tree has 1 to {MAX_NODES} nodes, not {len(parents)}")
    seen: list[int] = []
    for i, parent in enumerate(parents):
        if not (parent == -1 if i == 0 else 0 <= parent < i):
            raise ValueError(f"node {i} cannot hang on node {parent}: the root is first, and parents before children")
        seen.append((seen[parent] if i else 0) | 1 << i)
    return np.array(seen, np.uint64), np.array([bits.bit_count() - 1 for bits in seen], np.int32)


def path(bits: int, own: int) -> list[int]:
    """The tokens, in order, that the `own`-th token of a sequence sees of the step; `bits` is its mask."""
    return [i for i in range(own + 1) if bits >> i & 1] if bits else list(range(own + 1))


def check_mask(mask: U64, positions: I32, query_start_loc: I32) -> None:
    """Raises: ValueError, if the mask breaks a rule of this module. Shapes: as in `ops.plan.StepPlan`."""
    if mask.dtype != np.uint64 or mask.shape != positions.shape or not mask.flags.c_contiguous:
        found = f"{mask.dtype} {list(mask.shape)}"
        raise ValueError(f"a mask is uint64 [{len(positions)}], one number after the other, not {found}")
    bounds = query_start_loc.tolist()
    for b, (first, end) in enumerate(pairwise(bounds)):
        masks = mask[first:end].tolist()
        if not any(masks):
            continue
        if end - first > MAX_NODES:
            raise ValueError(f"sequence {b} has a tree and {end - first} tokens in this step; {MAX_NODES} are possible")
        _check_sequence(f"sequence {b}", masks, (positions[first:end] - positions[first]).tolist())


def _check_sequence(name: str, masks: list[int], depths: list[int]) -> None:
    seen: list[int] = []
    for i, (bits, depth) in enumerate(zip(masks, depths, strict=True)):
        own = bits or (2 << i) - 1
        if own.bit_length() != i + 1:
            last = own.bit_length() - 1
            raise ValueError(f"{name}: the last token that token {i} sees must be itself, not {last}")
        before = own ^ 1 << i
        if before != (seen[before.bit_length() - 1] if before else 0) or not own & 1:
            raise ValueError(f"{name}: token {i} sees {path(own, i)}, which is no path from the first token")
        if depth != own.bit_count() - 1:
            raise ValueError(f"{name}: token {i} sees {before.bit_count()} before it but is {depth} behind the first")
        seen.append(own)


def slots(positions: I32, query_start_loc: I32) -> I32:
    """Where each token is kept [T]: the position of its sequence's first token in this step, and on from there."""
    first = query_start_loc[:-1].repeat(np.diff(query_start_loc))
    return (positions[first] + np.arange(len(positions), dtype=np.int32) - first).astype(np.int32)
