"""What a decode step begins with: where its tokens lie, and the rows of the embedding. Each is one launch, not a dozen:
of a small model's step these were a tenth.

Shape letters: N tokens, M blocks of a table, L layers of a group, V vocabulary, E components.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.backends.gpu.kernels.loads import LAUNCH, load, load_number, padded, store

_BLOCK = 1024


@triton.jit(do_not_specialize=("spare", "stride"))
def _places(
    ids, positions, table, stride, spare, wide_ids, wide, pages, offsets, N,
    L: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    at = load_number(positions + r)
    slab = load_number(table + r * stride + at // SIZE).to(tl.int64)
    i = tl.arange(0, BLOCK)
    store(pages + i * N + r, tl.where(slab >= 0, slab * L + i, spare.to(tl.int64)), mask=i < L)
    store(offsets + r, at % SIZE)
    store(wide + r, at)
    store(wide_ids + r, load_number(ids + r))


@triton.jit(do_not_specialize=("stride",))
def _embed(ids, weight, stride, out, V: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    row = load_number(ids + t).to(tl.int64)
    row = tl.where(row < V, row, 0)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    store(out + t * E + e, load(weight + row * stride + e, mask=e < E), mask=e < E)


def token_places(
    ids: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, block_size: int, num_layers: int, spare: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each token's keys and values go, of int32 ids [N], positions [N] and slabs [N, M]: pages [L, N], offsets
    [N], then ids and positions, all int64. The page `spare` where a token has no slab."""
    n = len(positions)
    wide_ids, wide, offsets = (torch.empty(n, dtype=torch.int64, device=positions.device) for _ in range(3))
    pages = torch.empty((num_layers, n), dtype=torch.int64, device=positions.device)
    _places[n,](ids, positions, table, table.stride(0), spare, wide_ids, wide, pages, offsets, n, L=num_layers,
                SIZE=block_size, BLOCK=padded(num_layers), num_warps=1, **LAUNCH)  # fmt: skip
    return pages, offsets, wide_ids, wide


def embed(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of `weight` [V, E] as float32 [N, E]; the first one for ids from V on, which are those of pictures.

    Shapes: ids [N], whole numbers. Components of a row lie side by side.
    """
    n, (v, e) = len(ids), weight.shape
    out = torch.empty((n, e), dtype=torch.float32, device=weight.device)
    if n:
        _embed[n, triton.cdiv(e, _BLOCK)](ids, weight, weight.stride(0), out, V=v, E=e, BLOCK=min(_BLOCK, padded(e)),
                                          num_warps=4, **LAUNCH)  # fmt: skip
    return out
