"""HTTP/1.1 on a socket with limits: what a client may send before anybody has looked at it, and for how long.

A subclass of uvicorn's httptools protocol. Requests beyond a limit are answered here, in OpenAI's shape, and their
connection ends. Sources: RFC 9112, section 6.3 (conflicting lengths) and 9.6 (closing in two stages, so that the
answer is not lost to a reset); RFC 6585, section 5 (431).
"""

from __future__ import annotations

import asyncio
import http
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.server.errors import WireError
from penstock.server.transport.connections import Connections, possible
from penstock.server.transport.header_rules import wrong_header
from penstock.server.transport.http_1_0 import as_http_1_0

if TYPE_CHECKING:
    from penstock.config.server import ServerConfig

log = logging.getLogger("penstock.server")
_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_BODY_PIECE = 64 << 10
_BACKLOG = 64 << 10


@dataclass
class HttpLimits:
    """Units: bytes, seconds or counts as named. One object is shared by all connections of a server.

    `write_s`: how long a reader may leave more than the transport's high-water mark unread. `linger_s`: how long a
    refused connection may still send into the void. `pending_bytes`: bodies of all unfinished requests together.
    `upload_bytes`, `upload_s`: for POST /v1/files, whose body is written to disk as it comes.
    """

    header_bytes: int = 64 << 10
    headers: int = 128
    header_s: float = 10.0
    body_bytes: int = 16 << 20
    body_s: float = 60.0
    open: Connections = field(default_factory=lambda: Connections(2048))
    write_s: float = 60.0
    linger_s: float = 1.0
    pending_bytes: int = 256 << 20
    upload_bytes: int = 0
    upload_s: float = 3600.0
    pending_now: int = 0
    num_sent_away: int = 0
    """Connections that were refused and have not ended yet."""
    refused: dict[int, int] = field(default_factory=dict)
    """Refusals so far, by status."""

    @classmethod
    def of(cls, config: ServerConfig, max_connections: int) -> HttpLimits:
        most = possible(max_connections)
        if most < max_connections:
            log.warning("this process may open too few files for %d connections; %d are possible (ulimit -n)",
                        max_connections, most)  # fmt: skip
        return cls(
            header_bytes=config.max_header_bytes,
            header_s=config.header_timeout,
            body_bytes=config.max_body_bytes,
            body_s=config.body_timeout,
            open=Connections(most, config.max_connections_per_address),
            pending_bytes=max(256 << 20, 4 * config.max_body_bytes),
            # The form around the file takes some bytes too.
            upload_bytes=config.max_files_bytes + (1 << 20),
        )


class _Refused(Exception):
    """Stops the parser; the reason is kept by the protocol."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Its phases: nothing of a message yet, its header, its body; then the next message."""

    def __init__(self, *args: Any, limits: HttpLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._phase = "idle"
        self._num_begun = 0
        self._header_bytes = 0
        self._num_headers = 0
        self._body_bytes = 0
        self._held_bytes = 0
        self._open: deque[Any] = deque()
        """Cycles of this connection whose answer is not complete, oldest first."""
        self._own: Any = None
        """The cycle of the message that is being received, once its header is there."""
        self._backlog = bytearray()
        self._feeding = False
        self._deaf = False
        """Nothing more is read of what the client sends."""
        self._sent_away = False
        self._idle_bytes = 0
        """Received of a body without any of its content: chunks' extensions, trailers."""
        self._refusal: bytes | None = None
        """Goes out when all earlier requests have been answered."""
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # -- the connection ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        room = self._limits.open
        if not room.enter(self, self.client):
            self._limits.num_sent_away += 1
            self._sent_away = True
            self._refuse(WireError(503, "too many connections; try again later", code="too_many_connections",
                                   retry_after_s=1.0))  # fmt: skip
            if self._limits.num_sent_away > 64:
                self.transport.close()  # no courtesy to a flood
            return
        self._arm(self._limits.header_s, self._header_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._limits.open.leave(self)
        self._limits.num_sent_away -= self._sent_away
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._deaf = True
        self._backlog.clear()
        self._let_go()
        for cycle in self._open:  # uvicorn tells the last one only
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        self.pipeline.clear()  # these are never answered

    def give_way(self) -> bool:
        """Close a connection that waits for a request, for another that wants to come in."""
        if self.transport.get_write_buffer_size():
            return False  # its last answer has not been read
        self._deaf = True
        self.transport.close()
        return True

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._deaf:
            return
        if self.pipeline or self._feeding:
            self._hold_back(data)
            return
        if self._phase == "idle" and self._timer is None:
            self._arm(self._limits.header_s, self._header_late)
        self._feed(data)

    def _hold_back(self, data: bytes) -> None:
        """Bytes behind a request that waits for its turn. A little is read on, so that a disconnect is noticed."""
        self._backlog += data
        if len(self._backlog) > _BACKLOG:
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()

    def _feed(self, data: bytes) -> None:
        view = memoryview(data)
        self._feeding = True
        try:
            while view and not self._deaf:
                view = view[self._feed_piece(view) :]
                if self.pipeline and view:
                    self._hold_back(bytes(view))
                    break
        finally:
            self._feeding = False

    def _feed_piece(self, view: memoryview) -> int:
        """Parse the next bytes; returns how many. In a header, no more than it may still have."""
        limits, in_header, begun = self._limits, self._phase != "body", self._num_begun
        received = self._body_bytes
        size = max(1, limits.header_bytes - self._header_bytes) if in_header else _BODY_PIECE
        piece = view[:size]
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            # Nothing is spoken here but HTTP/1.1: the request is answered as if it had not asked.
            self._last_words()
            return len(view)
        except httptools.HttpParserError:
            if not self._deaf:
                self._refuse(WireError(400, "this is not an HTTP request"))
            return len(view)
        if self._phase == "header":
            # Exact for a message that began at the start of a piece; one that began inside it gets that piece free.
            fresh = self._num_begun - begun
            self._header_bytes = 0 if fresh > 1 or (fresh and not in_header) else self._header_bytes + len(piece)
            if self._header_bytes >= limits.header_bytes:
                self._refuse(WireError(431, f"the header has more than {limits.header_bytes} bytes"))
        elif self._phase == "body":
            self._idle_bytes = 0 if in_header or self._body_bytes > received else self._idle_bytes + len(piece)
            if self._idle_bytes >= limits.header_bytes:
                self._refuse(WireError(431, f"the body has {limits.header_bytes} bytes or more between its contents"))
        if self.pipeline:
            self.flow.resume_reading()  # uvicorn has paused it: nobody would notice a disconnect
        return len(piece)

    # -- messages ------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase, self._own = "header", None
        self._num_begun += 1
        self._header_bytes = self._num_headers = self._body_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > self._limits.headers:
            self._stop(WireError(431, f"the request has more than {self._limits.headers} header fields"))
        if self._phase == "body":
            return  # a trailer: nobody asked for one, and as a header it would have come too late to be checked
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._disarm()
        error = wrong_header(self.parser.get_http_version(), self.url, self.headers)
        length = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if error is None and int(length) > self._body_limit:
            error = self._too_large()
        if error is not None:
            self._stop(error)
        self._limits.open.works(self)
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            as_http_1_0(self.cycle)  # its task has not begun
        self._phase, self._own = "body", self.cycle
        self._open.append(self.cycle)
        self._arm(self._body_s, self._body_late)

    @property
    def _uploads(self) -> bool:
        return self.url.split(b"?")[0].endswith(b"/v1/files") and self.parser.get_method() == b"POST"

    @property
    def _body_limit(self) -> int:
        limits = self._limits
        return max(limits.body_bytes, limits.upload_bytes) if self._uploads else limits.body_bytes

    @property
    def _body_s(self) -> float:
        limits = self._limits
        return max(limits.body_s, limits.upload_s) if self._uploads else limits.body_s

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._body_limit:
            self._stop(self._too_large())
        if not (self.cycle.response_complete or self._uploads):
            self._held_bytes += len(body)
            self._limits.pending_now += len(body)
            if self._limits.pending_now > self._limits.pending_bytes:
                self._stop(WireError(503, "too many large requests at once; try again later", code="overloaded",
                                     retry_after_s=1.0))  # fmt: skip
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._disarm()
        self._phase, self._own, self._header_bytes = "idle", None, 0
        self.scope["state"]["received_s"] = time.perf_counter()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._open.popleft()
        if not self._open:
            self._let_go()
        super().on_response_complete()
        if not self._open and self._phase != "body":
            self._limits.open.rests(self)
        if not self._open and self._refusal is not None:
            self._say_last(self._refusal)
        elif self._backlog and not (self.pipeline or self._deaf or self._feeding):
            data = bytes(self._backlog)
            self._backlog.clear()
            self.data_received(data)

    def _let_go(self) -> None:
        self._limits.pending_now -= self._held_bytes
        self._held_bytes = 0

    # -- refusals ------------------------------------------------------------------------------------------------

    def _too_large(self) -> WireError:
        return WireError(413, f"the body has more than {self._body_limit} bytes", code="request_too_large")

    def _stop(self, error: WireError) -> None:
        """Refuse from within the parser."""
        self._refuse(error)
        raise _Refused

    def _refuse(self, error: WireError) -> None:
        """Answer what is being received with `error`, after everything that came before it, and end the connection."""
        self._deaf = True
        self._disarm()
        own, self._own = self._own, None
        if own is not None and own.response_started:
            if not own.response_complete:
                self.transport.close()
            else:
                self._linger()
            return
        if own is not None:
            own.disconnected = True  # whoever waits for its body hears that nobody is there
            own.message_event.set()
            self._open.remove(own)
            if self.pipeline:
                self.pipeline.popleft()  # it was the last in the line
        self._limits.refused[error.status] = self._limits.refused.get(error.status, 0) + 1
        answer = self._raw(error)
        if self._open:
            self._refusal = answer
            self.flow.resume_reading()
        else:
            self._say_last(answer)

    def _raw(self, error: WireError) -> bytes:
        in_message = self._phase != "idle"
        given = dict(self.headers).get(b"x-request-id", b"") if in_message and self.headers else b""
        request_id = given if _ID.fullmatch(given) else b"req-" + secrets.token_hex(12).encode()
        path = self.url.decode("latin-1") if in_message else ""
        body = msgspec.json.encode(error.body(path))
        lines = [b"HTTP/1.1 %d %s" % (error.status, http.HTTPStatus(error.status).phrase.encode())]
        lines += [b"%s: %s" % (k.encode(), v.encode()) for k, v in error.headers().items()]
        lines += [b"%s: %s" % pair for pair in self.server_state.default_headers]
        lines += [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
        lines += [b"x-request-id: " + request_id, b"", b""]
        head = b"\r\n".join(lines)
        is_head = in_message and self.parser is not None and self.parser.get_method() == b"HEAD"
        return head if is_head else head + body

    def _say_last(self, answer: bytes) -> None:
        self._refusal = None
        if not self.transport.is_closing():
            self.transport.write(answer)
            self._linger()

    def _linger(self) -> None:
        """Close, but not before the client can have read what was said: unread bytes of its own would reset it."""
        self._deaf = True
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.resume_reading()
            self._arm(self._limits.linger_s, self.transport.abort)
        else:
            self.transport.close()

    def _last_words(self) -> None:
        """No further request on this connection."""
        self._deaf = True
        self._disarm()
        if self.cycle is not None:
            self.cycle.keep_alive = False

    # -- time ----------------------------------------------------------------------------------------------------

    def _arm(self, seconds: float, late: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _header_late(self) -> None:
        self._timer = None
        if self._phase == "idle" and self._num_begun == 0:
            self.transport.close()  # it said nothing; nothing is owed
            return
        self._refuse(WireError(408, f"the header was not there after {self._limits.header_s:g} s"))

    def _body_late(self) -> None:
        self._timer = None
        if self.flow.read_paused or self.pipeline:
            self._arm(self._body_s, self._body_late)  # it is we who do not read
            return
        self._refuse(WireError(408, f"the body was not there after {self._body_s:g} s"))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.write_s, self._reader_late)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _reader_late(self) -> None:
        self._write_timer = None
        log.warning("a client left its answer unread for %g s; its connection is closed", self._limits.write_s)
        self.transport.abort()
