"""Counter-based random numbers: a draw is a pure function of (seed, sample index, position, draw id).

Preemption, chunking, batch company and replay can therefore never change a sampled token.
Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011 (Philox4x32-10).
"""

from __future__ import annotations

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32. All words are unsigned 32-bit integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, sample_index: int, position: int, draw: int = 0) -> float:
    """A float in [0, 1) with 53 random bits. `seed` may be any integer; its low 64 bits count."""
    key = (seed & _MASK, (seed >> 32) & _MASK)
    a, b, _, _ = philox4x32((position & _MASK, sample_index & _MASK, draw & _MASK, (position >> 32) & _MASK), key)
    return ((a >> 5) * 67108864.0 + (b >> 6)) / 9007199254740992.0


def derive_seed(seed: int, index: int) -> int:
    """A 63-bit seed for the `index`-th request that brought none, from the engine's own seed."""
    a, b, _, _ = philox4x32((index & _MASK, (index >> 32) & _MASK, 0x5EED, 0), (seed & _MASK, (seed >> 32) & _MASK))
    return ((a << 32) | b) >> 1
