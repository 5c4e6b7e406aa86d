"""Blocks that other processes keep (`launch.block_server`): the threads, reports and checks of `BlockFiles`, other
bytes. Servers need not be trusted: a block is used only if it has the MAC of its name.

Of several servers each has the blocks whose names give it the highest hash (rendezvous hashing, Thaler and Ravishankar,
1998): one that goes or comes changes the place of its own share alone. While it is away, its share goes to who is next
in that order, and whoever reads asks in that order, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from penstock.base.hashing import digest
from penstock.core.block_codec import BlockCodec
from penstock.ops.plan import Planes
from penstock.runner.block_files import BlockFiles
from penstock.runner.block_peer import Address, BlockPeer, peer_of
from penstock.runner.block_wire import PeerError


class RemoteBlocks(BlockFiles):
    """`addresses`: of at least one server. `secret`: of the blocks; those of connections are the addresses'. All else
    as `BlockFiles`."""

    def __init__(
        self,
        addresses: Sequence[Address],
        secret: bytes,
        planes: Sequence[Planes],
        widths: Sequence[int],
        slots: Collection[int] = (),
        codec: BlockCodec | None = None,
    ) -> None:
        super().__init__(Path(), secret, planes, widths, slots, codec)
        self._peers = [peer_of(address) for address in addresses]
        self._bad: dict[str, BlockPeer] = {}

    def __str__(self) -> str:
        return "the server of blocks at " + ", ".join(str(peer.address) for peer in self._peers)

    def _remove(self, path: str) -> None:
        """Only what came and was not what had been written. What did not come may be good, and others may read it; and
        servers make room by themselves."""
        peer = self._bad.pop(path, None)
        if peer is not None:
            try:
                peer.drop(path)
            except PeerError:
                return  # said by the peer

    def _write(self, path: str, copy: bytearray) -> bool:
        for peer in self._in_order(path):
            try:
                return peer.put(path, copy)
            except PeerError:
                continue  # its share goes to the next
        self._paused_s = min(peer.next_s for peer in self._peers)
        return False

    def _read(self, path: str, into: bytearray) -> bool:
        reason = "gone"
        for peer in self._in_order(path):
            try:
                block = peer.get(path, len(into))
            except PeerError as error:
                if error.reason == "frame":
                    self._bad[path] = peer
                reason = error.reason if reason == "gone" else reason
                continue
            if block is not None:
                into[: len(block)] = block
                good = self._is_good(path, into, len(block))
                if not good:
                    self._bad[path] = peer
                return good
        return self._miss(reason)

    def _in_order(self, path: str) -> Iterator[BlockPeer]:
        """The one whose block it is, then whose it would be without that."""
        if len(self._peers) == 1:
            return iter(self._peers)
        ranked = sorted(self._peers, key=lambda p: digest(str(p.address).encode(), path.encode()), reverse=True)
        return iter(ranked)
