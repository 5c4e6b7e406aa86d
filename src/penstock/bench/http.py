"""A small HTTP/1.1 client for measuring: keep-alive, TLS, bodies as they arrive, each piece with its time."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from penstock.base.errors import ConfigError

OnBody = Callable[[bytes, float], None]
"""(piece of a body, seconds on `time.perf_counter` when it arrived)."""

_READ_BYTES = 1 << 16
_MAX_KEPT = 64 << 20


class CallError(Exception):
    """A request that got no whole answer. `kind`: connect, timeout, closed or protocol."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class HttpClient:
    """Talks to one server. A connection is used again as soon as its answer has been read.

    `headers` go with every request. `verify`: check the server's certificate. Raises ConfigError for a bad address.
    """

    def __init__(
        self, base_url: str, headers: dict[str, str] | None = None, *, timeout_s: float = 6 * 3600, verify: bool = True
    ) -> None:
        try:
            url = urlsplit(base_url)
            port = url.port
        except ValueError as error:
            raise ConfigError(f"base_url: {base_url!r} is no address: {error}", field="base_url") from None
        if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
            raise ConfigError(f"base_url: {base_url!r} is not like http://HOST:PORT", field="base_url")
        self._host = url.hostname
        self._port = port or (443 if url.scheme == "https" else 80)
        self._prefix = url.path.rstrip("/")
        self._timeout_s = timeout_s
        self._tls: ssl.SSLContext | None = None
        if url.scheme == "https":
            self._tls = ssl.create_default_context()
            if not verify:
                self._tls.check_hostname = False
                self._tls.verify_mode = ssl.CERT_NONE
        extra = "".join(f"{k}: {v}\r\n" for k, v in (headers or {}).items())
        if any(c in v for v in (headers or {}).values() for c in "\r\n"):
            raise ConfigError("a header must not have line breaks", field="header")
        self._head = f"Host: {url.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n{extra}"
        self._idle: deque[_Connection] = deque()
        self._closed: deque[_Connection] = deque(maxlen=256)  # not all of them may be gone yet
        self.num_connects = 0

    async def call(self, method: str, path: str, body: bytes = b"", on_body: OnBody | None = None) -> Reply:
        """The answer. Without `on_body` its body is kept; with it, a body of status 200 goes there instead.

        A connection that turns out to be closed before a byte was read is replaced once. Raises CallError.
        """
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        data = head.encode("latin-1") + body
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    connection, is_new = await self._take()
                    try:
                        reply = await connection.exchange(data, on_body)
                    except CallError:
                        self._drop(connection)
                        if is_new or connection.got_bytes:
                            raise
                        continue  # the server had closed it while it was idle
                    except BaseException:
                        self._drop(connection)
                        raise
                    if connection.is_reusable:
                        self._idle.append(connection)
                    else:
                        self._drop(connection)
                    return reply
        except TimeoutError:
            raise CallError("timeout", f"no whole answer within {self._timeout_s:g} s") from None

    async def _take(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof():
                return connection, False
            self._drop(connection)
        try:
            self.num_connects += 1
            name = self._host if self._tls else None
            reader, writer = await asyncio.open_connection(
                self._host, self._port, ssl=self._tls, server_hostname=name, limit=1 << 20
            )
        except OSError as error:
            raise CallError(
                "connect", f"cannot connect to {self._host}:{self._port}: {error.strerror or error}"
            ) from None
        return _Connection(reader, writer), True

    def _drop(self, connection: _Connection) -> None:
        connection.writer.close()
        self._closed.append(connection)

    async def close(self) -> None:
        """Close idle connections; what is in flight is not waited for."""
        while self._idle:
            self._drop(self._idle.pop())
        for connection in self._closed:
            with contextlib.suppress(OSError):
                await connection.writer.wait_closed()
        self._closed.clear()


class _Connection:
    """One socket; also the parser's callbacks."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.is_reusable = False
        self.got_bytes = False
        self._reply = Reply()
        self._body: list[bytes] = []
        self._kept = 0
        self._whole = False
        self._on_body: OnBody | None = None
        self._now_s = 0.0
        self._parser: Any = None

    async def exchange(self, data: bytes, on_body: OnBody | None) -> Reply:
        """Raises CallError (`got_bytes` says whether the answer had begun)."""
        self._reply, self._body, self._kept, self._on_body = Reply(), [], 0, on_body
        self._whole = self.got_bytes = self.is_reusable = False
        self._parser = httptools.HttpResponseParser(self)
        try:
            self.writer.write(data)
            await self.writer.drain()
            while not self._whole:
                piece = await self.reader.read(_READ_BYTES)
                self._now_s = time.perf_counter()
                if not piece:
                    self._end_of_stream()
                    break
                self.got_bytes = True
                self._parser.feed_data(piece)
        except OSError as error:
            raise CallError("closed", f"the connection broke: {error.strerror or error}") from None
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, CallError):
                raise cause from None
            raise CallError("protocol", f"not HTTP: {error}") from None
        self._reply.body = b"".join(self._body)
        return self._reply

    def _end_of_stream(self) -> None:
        # A body without a length ends with its connection; anything else that ends so was cut off.
        headers = self._reply.headers
        unbounded = "content-length" not in headers and "chunked" not in headers.get("transfer-encoding", "")
        if not (self._reply.status and unbounded):
            raise CallError("closed", "the connection was closed in the middle of the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._on_body is not None and self._reply.status == 200:
            self._on_body(data, self._now_s)
        elif self._kept < _MAX_KEPT:
            self._kept += len(data)
            self._body.append(data)

    def on_message_complete(self) -> None:
        if self._reply.status >= 200:  # 100 Continue is no answer
            self._whole = True
            self.is_reusable = self._parser.should_keep_alive()


class EventReader:
    """Server-sent events out of pieces of any size. Gives the data of each; comments and names are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        out: list[bytes] = []
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                out.append(b"\n".join(self._data))
                self._data = []
        return out
