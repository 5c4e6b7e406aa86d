"""The form reader: the same parts however the body is cut; never anything but InputError."""

from __future__ import annotations

import contextlib

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.base.errors import InputError
from penstock.server.transport.multipart import MultipartReader, Part, PartEnd, boundary_of

BOUNDARY = b"b-0"
NAMES = st.text(st.characters(codec="utf-8", exclude_characters='"\\\r\n'), min_size=1, max_size=8)
# Bytes that look like pieces of delimiters are what could go wrong.
DATA = st.lists(st.sampled_from([b"\r", b"\n", b"-", b"--", b"b-", b"\r\n--b-", b"\r\n--", b"x", b"\0"])).map(b"".join)


def body_of(parts: list[tuple[str, bytes]]) -> bytes:
    out = b"".join(
        b"--" + BOUNDARY + b'\r\nContent-Disposition: form-data; name="' + name.encode() + b'"\r\nX: y\r\n\r\n' + data
        + b"\r\n" for name, data in parts
    )  # fmt: skip
    return out + b"--" + BOUNDARY + b"--\r\n"


def read(pieces: list[bytes]) -> list[tuple[str, bytes]]:
    reader = MultipartReader(BOUNDARY)
    out: list[tuple[str, bytes]] = []
    name, data = "", b""
    for piece in pieces:
        for event in reader.feed(piece):
            if isinstance(event, Part):
                name, data = event.name, b""
            elif isinstance(event, PartEnd):
                out.append((name, data))
            else:
                data += event
    reader.close()
    return out


@given(st.lists(st.tuples(NAMES, DATA), min_size=1, max_size=3))
@example([("a", b"\r\n--b-")])
@example([("a", b"")])
def test_every_split_gives_the_same_parts(parts: list[tuple[str, bytes]]) -> None:
    body = body_of(parts)
    assert read([body[i : i + 1] for i in range(len(body))]) == parts
    for cut in range(len(body) + 1):
        assert read([body[:cut], body[cut:]]) == parts


@given(st.lists(st.one_of(DATA, st.binary(max_size=20)), max_size=5))
def test_garbage_is_an_input_error_or_nothing(pieces: list[bytes]) -> None:
    reader = MultipartReader(BOUNDARY)
    with contextlib.suppress(InputError):
        for piece in pieces:
            reader.feed(piece)
        reader.close()


@given(st.text(max_size=60))
def test_content_types_are_read_or_refused(text: str) -> None:
    for kind in (text, "multipart/form-data; boundary=" + text):
        with contextlib.suppress(InputError):
            assert 0 < len(boundary_of(kind)) <= 70


def test_memory_is_bounded_while_a_part_goes_by() -> None:
    reader = MultipartReader(BOUNDARY)
    reader.feed(body_of([("a", b"")])[: -len("\r\n--b-0--\r\n")])
    for _ in range(100):
        reader.feed(b"\r\n--b-" * 1000)
        assert len(reader._buffer) < 20
