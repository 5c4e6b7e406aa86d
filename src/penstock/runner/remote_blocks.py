"""Blocks that another process keeps (`launch.block_server`): the threads, reports and checks of `BlockFiles`, other
bytes. The server need not be trusted: a block is used only if it has the MAC of its name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from penstock.core.block_codec import BlockCodec
from penstock.ops.plan import Planes
from penstock.runner.block_files import BlockFiles
from penstock.runner.block_peer import Address, peer_of
from penstock.runner.block_wire import PeerError


class RemoteBlocks(BlockFiles):
    """`secret`: of the blocks; that of the connection is the address's. All else as `BlockFiles`."""

    def __init__(
        self,
        address: Address,
        secret: bytes,
        planes: Sequence[Planes],
        widths: Sequence[int],
        slots: Collection[int] = (),
        codec: BlockCodec | None = None,
    ) -> None:
        super().__init__(Path(), secret, planes, widths, slots, codec)
        self._peer = peer_of(address)
        self._bad: set[str] = set()

    def __str__(self) -> str:
        return f"the server of blocks at {self._peer.address}"

    def _remove(self, path: str) -> None:
        """Only what came and was not what had been written. What did not come may be good, and others may read it; and
        the server makes room by itself."""
        if path in self._bad:
            self._bad.discard(path)
            try:
                self._peer.drop(path)
            except PeerError:
                return  # said by the peer

    def _write(self, path: str, copy: bytearray) -> bool:
        try:
            return self._peer.put(path, copy)
        except PeerError:
            self._paused_s = self._peer.next_s
            return False

    def _read(self, path: str, into: bytearray) -> bool:
        try:
            block = self._peer.get(path, len(into))
        except PeerError as error:
            if error.reason == "frame":
                self._bad.add(path)
            return self._miss(error.reason)
        if block is None:
            return self._miss("gone")
        into[: len(block)] = block
        good = self._is_good(path, into, len(block))
        if not good:
            self._bad.add(path)
        return good
