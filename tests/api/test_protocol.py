"""Our HTTP protocol class on real sockets: what is too big, too slow or contradictory is refused and cut off."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from penstock.config.server import ServerConfig
from penstock.server.transport.connections import Connections
from penstock.server.transport.http_server import loop_factory, uvicorn_config
from penstock.server.transport.protocol import HttpLimits

BODY = 40_000


class Echo:
    """Answers with the length of the body; /wait answers once `release` is set; /slow streams for ever."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}
        self.config = ServerConfig(
            max_header_bytes=2048, header_timeout=0.4, max_body_bytes=BODY, body_timeout=0.4, max_connections=1000
        )
        self.release = asyncio.Event()
        self.left = threading.Event()
        self.num_sent = 0
        self.seen: list[Any] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, True
        self.seen.append(scope["headers"])
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        if scope["path"] == "/wait":
            gone = asyncio.ensure_future(receive())
            free = asyncio.ensure_future(self.release.wait())
            await asyncio.wait({gone, free}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self.left.set()
            gone.cancel()
            free.cancel()
        start: Message = {"type": "http.response.start", "status": 200, "headers": []}
        if scope["path"] == "/pieces":
            await send(start)
            for piece in (b"data: a\n\n", b"", b"data: b\n\n"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return
        if scope["path"] != "/slow":
            body = str(size).encode()
            start["headers"] = [(b"content-length", str(len(body)).encode())]
            await send(start)
            await send({"type": "http.response.body", "body": body})
            return
        await send(start)
        while True:
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            self.num_sent += 1
            if (await asyncio.wait({asyncio.ensure_future(receive())}, timeout=0))[0]:
                self.left.set()
                return


@pytest.fixture
def echo() -> Iterator[Echo]:
    app = Echo()
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    limits = app.parts["http"] = HttpLimits.of(app.config, app.config.max_connections)
    config = uvicorn_config(app, limits)
    limits.headers, limits.linger_s, limits.write_s = 20, 0.3, 0.4
    server = uvicorn.Server(config)
    app.parts |= {"address": listening.getsockname(), "server": server}
    up = threading.Event()

    async def main() -> None:
        app.parts["loop"] = asyncio.get_running_loop()
        task = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0.001)
        up.set()
        await task

    def run() -> None:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(main())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    up.wait()
    yield app
    app.parts["loop"].call_soon_threadsafe(app.release.set)
    server.should_exit = server.force_exit = True
    thread.join(30.0)  # once in a long while uvloop doesn't come back from closing hundreds of connections
    assert limits.pending_now == 0, "bytes of bodies that are gone are still counted"


def connect(echo: Echo) -> socket.socket:
    sock = socket.create_connection(echo.parts["address"], timeout=5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def read_all(sock: socket.socket) -> bytes:
    """Until the server closes; fails (by timeout) if it does not."""
    out = b""
    while data := sock.recv(65536):
        out += data
    return out


def talk(echo: Echo, *pieces: bytes) -> bytes:
    with connect(echo) as sock:
        for piece in pieces:
            sock.sendall(piece)
        return read_all(sock)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def refusal(answer: bytes) -> int:
    """The status of an answer that must be one whole error object."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "connection: close" in lines
    assert any(line.startswith("x-request-id: ") for line in lines)
    assert answer.count(b"HTTP/1.1") == 1
    return int(lines[0].split()[1])


@pytest.mark.parametrize("more", [b"", b"Connection: keep-alive\r\n", b"Connection: close\r\n", b"Host: a\r\n"])
def test_a_client_of_http_1_0_gets_no_chunks(echo: Echo, more: bytes) -> None:
    head, _, body = talk(echo, b"GET /pieces HTTP/1.0\r\n" + more + b"\r\n").partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert not any(line.startswith((b"transfer-encoding", b"content-length")) for line in lines)
    assert b"connection: close" in lines, "its end is the end of the connection, whatever was asked for"
    assert body == b"data: a\n\ndata: b\n\n"


def test_answers_of_known_length_and_without_a_body_in_http_1_0(echo: Echo) -> None:
    expects = b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nConnection: keep-alive\r\nContent-Length: 3\r\n\r\nabc"
    answer = talk(echo, expects)  # RFC 9110, section 10.1.1: an expectation in HTTP/1.0 is ignored
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n3")
    assert b"content-length: 1\r\n" in answer
    assert b"connection: close" in answer
    head, _, body = talk(echo, b"HEAD /pieces HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body == b""


def test_a_client_of_http_1_1_gets_chunks_and_keeps_its_connection(echo: Echo) -> None:
    with connect(echo) as sock:
        for _ in range(2):
            sock.sendall(b"GET /pieces HTTP/1.1\r\nHost: a\r\n\r\n")
            got = b""
            while not got.endswith(b"0\r\n\r\n"):
                got += sock.recv(65536)
            assert b"transfer-encoding: chunked" in got
            assert b"9\r\ndata: a\n\n\r\n" in got


POST = b"POST / HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (431, b"GET / HTTP/1.1\r\nX: " + b"a" * (1 << 20)),  # row 5; no end of the line ever comes
        (431, b"GET /" + b"a" * 4096 + b" HTTP/1.1\r\n\r\n"),
        (431, b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: 1\r\n" % i for i in range(10_000)) + b"\r\n"),
        (431, b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: 1\r\n" % i for i in range(21)) + b"\r\n"),
        (413, POST + b"Content-Length: 34603008\r\n\r\n" + b"x" * 100_000),  # row 2
        (413, POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1000\r\n" + b"x" * 4096 + b"\r\n"
         + b"ffff\r\n" + b"x" * 65535),
        (413, POST + b"Content-Length: 99999999999999999999\r\n\r\n"),
        (415, POST + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"),  # row 4
        (415, POST + b"Content-Encoding: zstd\r\nTransfer-Encoding: chunked\r\n\r\n"),
        (400, POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"),
        (400, POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc"),
        (400, POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        (400, POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n"),
        (400, POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
        (400, POST + b"Content-Length: -1\r\n\r\n"),
        (400, POST + b"Content-Length: +3\r\n\r\nabc"),
        (400, POST + b"Host: b\r\nContent-Length: 0\r\n\r\n"),
        (400, b"GET / HTTP/1.1\r\nBad Name: 1\r\n\r\n"),
        (400, b"GET / HTTP/1.1\r\nX: 1\r\n folded\r\n\r\n"),
        (400, b"GET / HTTP/1.1\r\nHost: a\nX: 1\r\n\r\n"),
        (400, b"GET / HTTP/1.1\nHost: a\n\n"),
        (400, b"GET / HTTP/1.1\r\nHost : a\r\n\r\n"),
        (400, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n"),
        (400, b"GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n"),
        (400, b"GET http://a@b/ HTTP/1.1\r\nHost: a\r\n\r\n"),
        (400, b"GET http://a:1/ HTTP/1.1\r\nHost: a\r\n\r\n"),
        (400, b"GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n"),
        (400, b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        (505, b"GET /\r\n\r\n"),
        (505, b"GET / HTTP/2.0\r\nHost: a\r\n\r\n"),
        (400, POST + b"Content-Length: 3, 3\r\n\r\nabc"),
        (400, POST + b"Content-Length:\r\n\r\nabc"),
        (400, POST + b"Content-Length: 1_0\r\n\r\n"),
        (400, POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n"),
        (400, POST + b"Transfer-Encoding: chunked\r\n\r\n1\nx\r\n0\r\n\r\n"),
        (431, POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"x" * 100_000),  # a trailer without end
        (431, POST + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"x" * 100_000),  # an extension without end
        (431, POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: 1\r\n" * 30 + b"\r\n"),
        *(
            (400, POST + b"%b: %b\r\n%b: %b\r\nContent-Length: 0\r\n\r\n" % (name, one, name.lower(), two))
            for name in (b"Authorization", b"X-Api-Key", b"Content-Type", b"X-Request-Id", b"Origin", b"Sec-Fetch-Site")
            for one, two in ((b"a", b"b"), (b"a", b"a"))
        ),
        (400, b"\x16\x03\x01\x02\x00\x01\x00"),  # somebody speaks TLS
        (400, b"hello\r\n\r\n"),
    ],
)  # fmt: skip
def test_limits_and_contradictions(echo: Echo, status: int, request_: bytes) -> None:
    began = time.monotonic()
    got = refusal(talk(echo, request_))
    # How two lengths are refused is the parser's or ours: both are right.
    assert got == status or ((status, got) == (413, 400) and b"9999" in request_)
    assert time.monotonic() - began < 1.5


def test_unknown_transfer_codings_are_not_guessed(echo: Echo) -> None:
    assert refusal(talk(echo, POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n")) in (400, 501)


def test_an_endless_chunked_body_is_cut_at_the_cap(echo: Echo) -> None:
    """Row 2: it may send for as long as it likes; no more than the cap is kept, and the connection ends."""
    with connect(echo) as sock:
        sock.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(20_000):
                sock.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
                time.sleep(0.001)
        except OSError:
            pass
        else:
            pytest.fail("it was never cut off")
    assert echo.parts["http"].refused == {413: 1}
    assert echo.left.wait(2), "the application waits for a body that will not come"


@pytest.mark.parametrize("request_", [b"GET / HT", b"GET / HTTP/1.1\r\nHost: a\r\n", b"\r\n"])
def test_a_header_has_a_deadline(echo: Echo, request_: bytes) -> None:
    began = time.monotonic()
    answer = talk(echo, request_)
    took = time.monotonic() - began
    assert 0.3 < took < 2
    assert answer == b"" if request_ == b"\r\n" else refusal(answer) == 408


def test_a_body_has_a_deadline_however_it_trickles(echo: Echo) -> None:
    began = time.monotonic()
    with connect(echo) as sock:
        sock.sendall(POST + b"X-Request-Id: mine\r\nContent-Length: 1000\r\n\r\n")
        sock.settimeout(0.05)
        answer = b""
        while time.monotonic() - began < 3:
            try:
                answer += (data := sock.recv(4096))
                if not data:
                    break
            except TimeoutError:
                sock.send(b"x")
    assert refusal(answer) == 408
    assert b"x-request-id: mine\r\n" in answer
    assert 0.3 < time.monotonic() - began < 2


def test_pipelined_requests_are_answered_in_order(echo: Echo) -> None:
    ask = b"".join(POST + b"Content-Length: %d\r\n\r\n" % n + b"y" * n for n in (1, 22, 333))
    with connect(echo) as sock:
        sock.sendall(ask)
        got = b""
        while not got.endswith(b"333"):
            got += sock.recv(4096)
    order = [int(part.rpartition(b"\r\n\r\n")[2]) for part in got.split(b"HTTP/1.1 200 OK")[1:]]
    assert order == [1, 22, 333]


def test_a_bad_request_behind_good_ones_comes_after_their_answers(echo: Echo) -> None:
    with connect(echo) as sock:
        sock.sendall(
            b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n" + POST + b"Content-Length: 1\r\n\r\nx" + b"nonsense\r\n\r\n"
        )
        time.sleep(0.05)
        echo.parts["loop"].call_soon_threadsafe(echo.release.set)
        got = read_all(sock)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"200", b"200", b"400"]


def test_a_pipelining_client_that_leaves_is_noticed(echo: Echo) -> None:
    with connect(echo) as sock:
        sock.sendall(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(0.1)
    assert echo.left.wait(2)


def test_keep_alive_goes_on_after_ordinary_answers(echo: Echo) -> None:
    host, port = echo.parts["address"]
    with httpx.Client(base_url=f"http://{host}:{port}") as client:
        for n in (0, 10, BODY):
            assert client.post("/", content=b"z" * n).text == str(n)
        assert client.post("/", content=iter([b"z" * 100] * 5)).text == "500"
    assert echo.parts["http"].refused == {}


def test_expect_continue_is_refused_before_the_body_is_sent(echo: Echo) -> None:
    assert refusal(talk(echo, POST + b"Expect: 100-continue\r\nContent-Length: 50000\r\n\r\n")) == 413
    with connect(echo) as sock:
        sock.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 100")
        sock.sendall(b"abcde")
        assert sock.recv(4096).endswith(b"5")


def test_upgrades_are_answered_as_plain_requests(echo: Echo) -> None:
    answer = talk(echo, b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n\x81\x05hello")
    assert answer.startswith(b"HTTP/1.1 200")


def test_too_many_connections_are_told_so(echo: Echo) -> None:
    """Those that are being answered are not closed for others, whoever they are of."""
    room: Connections = echo.parts["http"].open
    room.most, room.most_of_one = 3, 3
    held = [connect(echo) for _ in range(3)]
    for sock in held:
        sock.sendall(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n")
    until(lambda: len(room) == 3 and not room.num_waiting)
    answer = talk(echo, b"")
    assert refusal(answer) == 503
    assert b"retry-after: 1\r\n" in answer
    assert (room.num_refused, room.num_given_way) == (1, 0)
    echo.parts["loop"].call_soon_threadsafe(echo.release.set)
    for sock in held:
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
    assert talk(echo, b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert room.num_given_way == 1, "one that has its answer makes room"
    for sock in held:
        sock.close()
    until(lambda: not len(room))


@pytest.mark.parametrize("kind", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\r\n", b"POST"])
@pytest.mark.parametrize("most_of_one", [40, 30])
def test_connections_that_only_wait_keep_nobody_out(echo: Echo, kind: bytes, most_of_one: int) -> None:
    """Thousands of silent ones, or some that have had an answer: the oldest of them go, and everybody is answered."""
    limits = echo.parts["http"]
    limits.header_s, room = 30.0, limits.open
    room.most, room.most_of_one = 40, most_of_one
    held = []
    with connect(echo) as busy:
        busy.sendall(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n")
        until(lambda: len(room) == 1 and not room.num_waiting)
        for number in range(200):
            held.append(connect(echo))
            held[-1].sendall(kind)
            if number % 20 == 0:
                ask = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
                assert talk(echo, ask).startswith(b"HTTP/1.1 200")
        assert len(room) <= most_of_one
        assert room.num_refused == 0
        assert room.num_given_way > 100
        echo.parts["loop"].call_soon_threadsafe(echo.release.set)
        assert busy.recv(4096).startswith(b"HTTP/1.1 200"), "what was being answered is not disturbed"
    for sock in held:
        sock.close()
    until(lambda: not len(room))


def test_an_answer_that_is_not_read_yet_is_not_cut_off_for_others(echo: Echo) -> None:
    room: Connections = echo.parts["http"].open
    room.most = room.most_of_one = 2
    with connect(echo) as slow, connect(echo) as other:
        for sock in (slow, other):
            sock.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        protocol = next(iter(room.all))
        written = threading.Event()

        def fill() -> None:
            protocol.transport.write(b"x" * (16 << 20))  # type: ignore[attr-defined]
            written.set()

        echo.parts["loop"].call_soon_threadsafe(fill)
        assert written.wait(5)
        assert talk(echo, b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 200")
        assert protocol in room.all


def test_a_trailer_is_no_header(echo: Echo) -> None:
    with connect(echo) as sock:
        sock.sendall(
            POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nAuthorization: Bearer k\r\n"
            b"X-Request-Id: late\r\nHost: b\r\n\r\n" + POST + b"Content-Length: 1\r\nConnection: close\r\n\r\nx"
        )
        assert read_all(sock).count(b"HTTP/1.1 200") == 2
    first, second = echo.seen
    assert {name for name, _ in first} == {b"host", b"transfer-encoding"}
    assert {name for name, _ in second} == {b"host", b"content-length", b"connection"}


@pytest.mark.parametrize("request_", [
    b"GET http://A/x HTTP/1.1\r\nHost: a\r\n", b"GET HTTPS://a:1/x?http://b HTTP/1.1\r\nHost: a:1\r\n",
    b"GET / HTTP/1.0\r\n", b"GET /http://b/ HTTP/1.1\r\nHost: a\r\n", b"OPTIONS * HTTP/1.1\r\nHost: a\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX_Api_Key: 1\r\nx-other: 1\r\nX-Other: 2\r\n",
])  # fmt: skip
def test_what_is_unusual_but_clear_is_answered(echo: Echo, request_: bytes) -> None:
    assert talk(echo, request_ + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_500_slow_clients_disturb_nobody(echo: Echo) -> None:
    """Row 6: bodies and headers that trickle. All are cut off at the deadline; a healthy client does not notice."""
    slow = []
    for i in range(500):
        sock = connect(echo)
        sock.sendall(b"GET / HTTP/1.1\r\nHo" if i % 2 else POST + b"Content-Length: 1000\r\n\r\nx")
        slow.append(sock)
    host, port = echo.parts["address"]
    took = []
    with httpx.Client(base_url=f"http://{host}:{port}") as client:
        for _ in range(30):
            began = time.monotonic()
            assert client.post("/", content=b"abc").text == "3"
            took.append(time.monotonic() - began)
            for sock in slow[::25]:
                try:
                    sock.send(b"x")
                except OSError:
                    continue
    assert sorted(took)[15] < 0.1, "the median of the healthy client"
    for sock in slow:
        with sock:
            try:
                answer = read_all(sock)
            except ConnectionResetError:
                continue
            assert refusal(answer) == 408


def test_a_client_that_does_not_read_is_cut_off(echo: Echo) -> None:
    """Row 7: what is written for it stays bounded, and its connection does not stay for ever."""
    with connect(echo) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        sock.recv(1)
        time.sleep(0.3)
        stalled = echo.num_sent
        assert echo.left.wait(3)
    assert stalled * 65536 < 16 << 20


def test_bodies_of_all_clients_together_are_bounded(echo: Echo) -> None:
    limits = echo.parts["http"]
    limits.pending_bytes = 50_000
    held = []
    for _ in range(2):  # each of them is within its own cap
        sock = connect(echo)
        sock.sendall(POST + b"Content-Length: 30000\r\n\r\n" + b"x" * 29_000)
        held.append(sock)
    answers = [read_all(sock) for sock in held]
    assert sorted(refusal(answer) for answer in answers) == [408, 503]
    for sock in held:
        sock.close()
