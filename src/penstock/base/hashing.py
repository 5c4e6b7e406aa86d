"""Hashes used as identities of content. None of them is Python's salted `hash`."""

from __future__ import annotations

from hashlib import blake2b


def digest(*parts: bytes, key: bytes = b"", size: int = 16) -> bytes:
    """BLAKE2b over length-prefixed parts, so that no two different lists of parts collide by concatenation."""
    h = blake2b(digest_size=size, key=key)
    for part in parts:
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)
    return h.digest()
