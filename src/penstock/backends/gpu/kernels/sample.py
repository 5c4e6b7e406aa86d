"""From logits to tokens on the device: the numbers of `Sampler` and `truncate`, bit for bit.

Weights are whole numbers, and what leads to them is float64 with every step rounded once: launches forbid the compiler
to fuse a product with a sum. Sums of whole numbers are exact in any order, so rows are cut among programs freely. What
survives top-k and top-p is found without sorting: by bisection over the logits and, of equal ones, by ids in order.

Source: as in `ops.draw_weights`; Salmon et al., SC 2011 (Philox4x32-10).
Shape letters: R rows, V vocabulary, C cuts of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.backends.gpu.kernels.loads import EXACT, load_number, padded, store
from penstock.ops.draw_weights import EVEN, LOWEST, ODD, UNIT_BITS

SICK = -1
"""The choice of a row whose logits hold a NaN or an infinity that is no exclusion."""
_CUT, _BLOCK = 4096, 1024

_E0, _E1, _E2, _E3, _E4 = (tl.constexpr(c) for c in EVEN)
_O0, _O1, _O2, _O3 = (tl.constexpr(c) for c in ODD)
_FLOOR, _BITS = tl.constexpr(LOWEST), tl.constexpr(UNIT_BITS)
_WHOLE, _WHOLE_BITS = tl.constexpr(1.5 * 2.0**52), tl.constexpr(0x4338000000000000)


@triton.jit
def _ordered(x):
    """Float32 as int64 that compare as the floats do; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _units(logits, peak, scale):
    """What a token weighs, in units: every step is one operation of float64."""
    y = (logits.to(tl.float64) - peak) * scale
    y = tl.minimum(tl.maximum(y, _FLOOR), 0.0)  # above 0 in rows without a peak only, which draw nothing
    # A sum that ends at 2^0 holds the whole number, to the nearest, in its low bits.
    turned = y + _WHOLE
    y = y - (turned - _WHOLE)
    square = y * y
    p = (((square * _E4 + _E3) * square + _E2) * square + _E1) * square + _E0
    odd = ((square * _O3 + _O2) * square + _O1) * square + _O0
    p = (p + odd * y) * y + 1.0
    whole = p.to(tl.int64, bitcast=True) + ((turned.to(tl.int64, bitcast=True) - _WHOLE_BITS + _BITS) << 52)
    return (whole.to(tl.float64, bitcast=True) + _WHOLE).to(tl.int64, bitcast=True) - _WHOLE_BITS


@triton.jit
def _peaks(logits, stride, peaks, ids, V: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr, CUTS: tl.constexpr):
    """Of each cut the largest logit and its lowest id; a NaN if there is one."""
    r, cut = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    sick = tl.zeros([BLOCK], tl.int32)
    for base in range(cut * CUT, (cut + 1) * CUT, BLOCK):
        v = base + tl.arange(0, BLOCK)
        x = load_number(logits + r * stride + v, mask=v < V, other=float("-inf"))
        sick = sick | (x != x).to(tl.int32)
        better = x > best
        best = tl.where(better, x, best)
        where = tl.where(better, v, where)
    top = tl.max(best, 0)
    lowest = tl.min(tl.where(best == top, where, 2147483647), 0)
    top = tl.where(tl.max(sick, 0) > 0, float("nan"), top)
    store(peaks + r * CUTS + cut, top)
    store(ids + r * CUTS + cut, lowest)


@triton.jit(do_not_specialize=("rows",))
def _greedy(peaks, ids, found, rows, CUTS: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    peak = load_number(peaks + r * CUTS + c, mask=c < CUTS, other=float("-inf"))
    own = load_number(ids + r * CUTS + c, mask=c < CUTS, other=2147483647)
    top = tl.max(tl.where(peak == peak, peak, float("inf")), 0)
    token = tl.min(tl.where(peak == top, own, 2147483647), 0)
    fit = tl.abs(top) < float("inf")
    store(found + r, tl.where(fit, token, 0))
    peak = tl.where(fit, top, float("nan")).to(tl.float64)
    store(found + rows + r, peak.to(tl.int64, bitcast=True))


@triton.jit
def _peak_of(peaks, r, CUTS: tl.constexpr, BLOCK: tl.constexpr):
    """A row's largest logit, and whether it is a number."""
    c = tl.arange(0, BLOCK)
    peak = load_number(peaks + r * CUTS + c, mask=c < CUTS, other=float("-inf"))
    top = tl.max(tl.where(peak == peak, peak, float("inf")), 0)
    return top, tl.abs(top) < float("inf")


@triton.jit
def _weigh(
    logits, stride, peaks, scales, least, units, sums, V: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr,
    CUTS: tl.constexpr, CUTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Units of every token, 0 where it is below the row's least number of units, and their sum over each cut."""
    r, cut = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, healthy = _peak_of(peaks, r, CUTS, CUTS_BLOCK)
    peak = tl.where(healthy, peak, 0.0).to(tl.float64)
    scale, floor = load_number(scales + r), load_number(least + r)
    total = tl.zeros([BLOCK], tl.int64)
    for base in range(cut * CUT, (cut + 1) * CUT, BLOCK):
        v = base + tl.arange(0, BLOCK)
        x = load_number(logits + r * stride + v, mask=v < V, other=float("-inf"))
        x = tl.where(x == x, x, 0.0)
        u = tl.where(v < V, _units(x, peak, scale), 0)
        u = tl.where(u.to(tl.float64) >= floor, u, 0)
        store(units + r * V + v, u, mask=v < V)
        total += u
    store(sums + r * CUTS + cut, tl.sum(total, 0))


@triton.jit
def _rank_above(logits, units, r, stride, least, MASS: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens (or units) of a row have a key of at least `least`."""
    total = tl.zeros([BLOCK], tl.int64)
    for base in range(0, V, BLOCK):
        v = base + tl.arange(0, BLOCK)
        key = _ordered(load_number(logits + r * stride + v, mask=v < V, other=float("-inf")))
        above = (v < V) & (key >= least)
        if MASS:
            total += load_number(units + r * V + v, mask=above, other=0)
        else:
            total += above.to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def _bound(logits, units, r, stride, need, MASS: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """(key, id) of the last token of the shortest prefix, in order of rank, that counts `need`; there is one."""
    low, high, above = need * 0 - 2147483648, need * 0 + 2147483648, need * 0
    while high - low > 1:
        middle = (low + high) >> 1
        found = _rank_above(logits, units, r, stride, middle, MASS, V, BLOCK)
        above = tl.where(found < need, found, above)
        high = tl.where(found < need, middle, high)
        low = tl.where(found < need, low, middle)
    # Of equal logits, which weigh the same, as many as are still needed, from the lowest id on.
    last, base = need * 0 - 1, 0
    while (base < V) & (above < need):
        v = base + tl.arange(0, BLOCK)
        key = _ordered(load_number(logits + r * stride + v, mask=v < V, other=float("-inf")))
        tie = (v < V) & (key == low)
        if MASS:
            each = load_number(units + r * V + v, mask=tie, other=0)
        else:
            each = tie.to(tl.int64)
        needed = tie & (above + tl.cumsum(each, 0) - each < need)
        last = tl.maximum(last, tl.max(tl.where(needed, v, -1), 0).to(tl.int64))
        above += tl.sum(each, 0)
        base += BLOCK
    return low, last


@triton.jit
def _mass(logits, units, r, stride, least, last_id, V: tl.constexpr, BLOCK: tl.constexpr):
    """The units of the tokens that rank above `least`, or stand on it with an id of at most `last_id`."""
    total = tl.zeros([BLOCK], tl.int64)
    for base in range(0, V, BLOCK):
        v = base + tl.arange(0, BLOCK)
        key = _ordered(load_number(logits + r * stride + v, mask=v < V, other=float("-inf")))
        inside = (v < V) & ((key > least) | ((key == least) & (v <= last_id)))
        total += load_number(units + r * V + v, mask=inside, other=0)
    return tl.sum(total, 0)


@triton.jit
def _limits(
    logits, stride, peaks, units, top_k, top_p, keys, ids, V: tl.constexpr, BLOCK: tl.constexpr, CUTS: tl.constexpr,
    CUTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """The last token that a row keeps by its rank: its key and its id."""
    r = tl.program_id(0).to(tl.int64)
    _, healthy = _peak_of(peaks, r, CUTS, CUTS_BLOCK)
    k = load_number(top_k + r).to(tl.int64)
    share = load_number(top_p + r)
    key, last = k * 0 - 2147483648, k * 0 + V - 1
    if healthy & (k > 0) & (k < V):
        key, last = _bound(logits, units, r, stride, k, False, V, BLOCK)
    if healthy & (share < 1.0):
        total = _mass(logits, units, r, stride, key, last, V, BLOCK)
        product = share * total.to(tl.float64)
        target = product.to(tl.int64)
        target += (target.to(tl.float64) < product).to(tl.int64)
        if target <= total:
            key, last = _bound(logits, units, r, stride, target, True, V, BLOCK)
    store(keys + r, key)
    store(ids + r, last)


@triton.jit
def _keep(
    logits, stride, units, keys, ids, sums, V: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr, CUTS: tl.constexpr
):
    """No units for what ranks behind a row's last token, and the sums of what is left."""
    r, cut = tl.program_id(0).to(tl.int64), tl.program_id(1)
    least, last = load_number(keys + r), load_number(ids + r)
    total = tl.zeros([BLOCK], tl.int64)
    for base in range(cut * CUT, (cut + 1) * CUT, BLOCK):
        v = base + tl.arange(0, BLOCK)
        key = _ordered(load_number(logits + r * stride + v, mask=v < V, other=float("-inf")))
        u = load_number(units + r * V + v, mask=v < V, other=0)
        u = tl.where((key > least) | ((key == least) & (v <= last)), u, 0)
        store(units + r * V + v, u, mask=v < V)
        total += u
    store(sums + r * CUTS + cut, tl.sum(total, 0))


@triton.jit
def _draw(
    units, sums, peaks, seeds, samples, positions, tokens, V: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr,
    CUTS: tl.constexpr, CUTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """The first token whose running sum exceeds u times the whole: `base.rng.uniform` gives u."""
    r = tl.program_id(0).to(tl.int64)
    _, healthy = _peak_of(peaks, r, CUTS, CUTS_BLOCK)
    position, sample = load_number(positions + r).to(tl.int64), load_number(samples + r).to(tl.int64)
    zero = (position * 0).to(tl.uint32)
    a, b, _, _ = tl.philox(load_number(seeds + r), position.to(tl.uint32), sample.to(tl.uint32), zero,
                           (position >> 32).to(tl.uint32))  # fmt: skip
    bits = (a >> 5).to(tl.uint64) * 67108864 + (b >> 6).to(tl.uint64)
    c = tl.arange(0, CUTS_BLOCK)
    own = load_number(sums + r * CUTS + c, mask=c < CUTS, other=0)
    total = tl.sum(own, 0).to(tl.uint64)
    # bits * total >> 53, of a product of 116 bits.
    target = ((tl.umulhi(bits, total) << 11) | ((bits * total) >> 53)).to(tl.int64)
    running = tl.cumsum(own, 0)
    cut = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), CUTS - 1)
    before = tl.sum(tl.where(c < cut, own, 0), 0)
    token = cut * CUT
    for base in range(0, CUT, BLOCK):
        v = cut * CUT + base + tl.arange(0, BLOCK)
        u = load_number(units + r * V + v, mask=v < V, other=0)
        token += tl.sum((before + tl.cumsum(u, 0) <= target).to(tl.int32), 0)
        before += tl.sum(u, 0)
    store(tokens + r, tl.where(healthy, token, -1))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The id of each row's largest logit, the lowest of equals, and what it is: int64 [2, R], the second line the bits
    of float64. A sick row has id 0, and a NaN. Shapes: logits float32 [R, V]."""
    rows = len(logits)
    found = torch.empty((2, rows), dtype=torch.int64, device=logits.device)
    if rows:
        peaks, ids, cuts, block = _row_peaks(logits)
        _greedy[rows,](peaks, ids, found, rows, CUTS=cuts, BLOCK=block, num_warps=1, **EXACT)
    return found


def draw(
    logits: torch.Tensor, scales: torch.Tensor, seeds: torch.Tensor, sample_indices: torch.Tensor,
    positions: torch.Tensor, *, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, truncated: bool,
) -> torch.Tensor:  # fmt: skip
    """The token that `Sampler` draws for each row, or SICK: int32 [R].

    Shapes: logits float32 [R, V], of at most 2^21 - 1 tokens; scales float64 [R] (`scale_of` each temperature); seeds,
    positions int64 [R]; sample_indices int32 [R]; min_p, top_p float64 [R]; top_k int32 [R], 0 for all. `truncated`:
    whether a row has a top_k or a top_p that leaves something out; if not, two launches are saved.
    """
    rows, v = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    if not rows:
        return tokens
    peaks, _, cuts, block = _row_peaks(logits)
    units = torch.empty((rows, v), dtype=torch.int64, device=device)
    sums = torch.empty((rows, cuts), dtype=torch.int64, device=device)
    size = {"V": v, "CUT": _CUT, "BLOCK": _BLOCK, "CUTS": cuts}
    least = min_p.clamp(max=1.0) * float(1 << UNIT_BITS)
    _weigh[rows, cuts](logits, logits.stride(0), peaks, scales, least, units, sums, **size, CUTS_BLOCK=block,
                       num_warps=4, **EXACT)  # fmt: skip
    if truncated:
        keys, ids = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
        _limits[rows,](logits, logits.stride(0), peaks, units, top_k, top_p, keys, ids, V=v, BLOCK=2 * _BLOCK,
                       CUTS=cuts, CUTS_BLOCK=block, num_warps=8, **EXACT)  # fmt: skip
        _keep[rows, cuts](logits, logits.stride(0), units, keys, ids, sums, **size, num_warps=4, **EXACT)
    _draw[rows,](units, sums, peaks, seeds, sample_indices, positions, tokens, **size, CUTS_BLOCK=block, num_warps=4,
                 **EXACT)  # fmt: skip
    return tokens


def _row_peaks(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Peaks and their ids [R, C], C, and the power of two that holds C."""
    rows, v = logits.shape
    cuts = triton.cdiv(v, _CUT)
    peaks = torch.empty((rows, cuts), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, cuts), dtype=torch.int32, device=logits.device)
    _peaks[rows, cuts](logits, logits.stride(0), peaks, ids, V=v, CUT=_CUT, BLOCK=_BLOCK, CUTS=cuts, num_warps=4,
                       **EXACT)  # fmt: skip
    return peaks, ids, cuts, padded(cuts)
