"""Names of the blocks of sequences, made as far as somebody asks (`store_index.names_after`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.kv.store_index import names_after, root_name

if TYPE_CHECKING:
    from penstock.core.sequence import Sequence


class Names(list[bytes]):
    """Of the blocks of one sequence. `paths`: where those are, or would be, in a store, as far as somebody asked."""

    __slots__ = ("paths",)

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []


class BlockNames:
    """`secret`: whoever has it makes the same names; `fingerprint`: as `root_name`; `block_size`: tokens."""

    def __init__(self, secret: bytes, fingerprint: str, block_size: int) -> None:
        self.secret, self.fingerprint, self.block_size = secret, fingerprint, block_size

    def of(self, seq: Sequence, end: int) -> Names:
        """Of the first `end` blocks of `seq`, at least. Mutates: seq.names, which these are."""
        known, size = seq.names, self.block_size
        if not isinstance(known, Names):
            known = seq.names = Names()
        if len(known) < end:
            last = known[-1] if known else self.root(seq.request.namespace, seq.request.taint)
            tokens = seq.token_ids[len(known) * size : end * size].tobytes()
            known += names_after(self.secret, last, tokens, 4 * size)
        return known

    def root(self, namespace: bytes, taint: str) -> bytes:
        """What the first block of a text of this namespace follows."""
        return root_name(self.secret, self.fingerprint, root_of(namespace, taint))


def root_of(namespace: bytes, taint: str) -> bytes:
    """Under which texts of this namespace are named."""
    return namespace + b"\0" + taint.encode()
