"""Long JSON answers that are never one object, nor one string: they are sent in pieces, as their reader takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.server.transport.slices import Work

NUL = b"\0"
GAP: Any = msgspec.Raw(NUL)
"""Stands for a part that has been written already. No JSON holds this byte, so it cannot be mistaken."""
PIECE_BYTES = 64 << 10
LISTED = 20_000

_encoder = msgspec.json.Encoder()


class Pieces:
    """An answer as JSON: `value` with `parts`, in their order, where it has a `GAP` (or another Raw with a `NUL`).

    A part that is there several times is kept once.
    """

    def __init__(self, value: Any, parts: Sequence[bytes | bytearray] = ()) -> None:
        ends = _encoder.encode(value).split(NUL)
        assert len(ends) == len(parts) + 1, "every gap needs its part"
        self._all: list[bytes | bytearray] = [ends[0]]
        for part, end in zip(parts, ends[1:], strict=True):
            self._all += [part, end]

    def __len__(self) -> int:
        """Bytes of the whole."""
        return sum(map(len, self._all))

    def __iter__(self) -> Iterator[bytes]:
        """The whole, in pieces of about `PIECE_BYTES`."""
        waiting: list[bytes] = []
        size = 0
        for part in self._all:
            for at in range(0, len(part), PIECE_BYTES):
                piece = bytes(part[at : at + PIECE_BYTES])
                waiting.append(piece)
                size += len(piece)
                if size >= PIECE_BYTES:
                    yield b"".join(waiting)
                    waiting, size = [], 0
        if waiting:
            yield b"".join(waiting)


async def written(values: Sequence[Any], work: Work) -> bytearray:
    """A long list as JSON, in slices."""
    out = bytearray(b"[")
    for at in range(0, len(values), LISTED):
        await work.pause()
        out += (b"," if at else b"") + _encoder.encode(values[at : at + LISTED])[1:-1]
    out += b"]"
    return out


class PiecesResponse(Response):
    """Waits for its reader between pieces."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(None, headers={"content-length": str(len(pieces))}, media_type="application/json")
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
