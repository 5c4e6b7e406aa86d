"""multipart/form-data as it arrives: parts of any size in bounded memory. Source: RFC 7578, RFC 2046 5.1."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from penstock.base.errors import InputError

MAX_PARTS = 32
MAX_HEADER_BYTES = 8192
MAX_PREAMBLE_BYTES = 4096
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_PARAMETER = re.compile(r';\s*([A-Za-z0-9!#$%&\'*+.^_`|~-]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;\s"]*)\s*', re.DOTALL)


@dataclass(frozen=True)
class Part:
    """A part begins. `filename` is what the client calls it, unchecked; None for a plain field."""

    name: str
    filename: str | None = None


@dataclass(frozen=True)
class PartEnd:
    """The part that began last is complete."""


Event = Part | PartEnd | bytes


def boundary_of(content_type: str) -> bytes:
    """The boundary that a content-type header names. Raises InputError if it is no multipart form."""
    kind, _, _ = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise InputError("the body must be multipart/form-data", param="content-type")
    boundary = _parameters(content_type).get("boundary", "")
    if not _BOUNDARY.fullmatch(boundary):
        raise InputError("the content-type names no proper boundary", param="content-type")
    return boundary.encode("ascii")


def _parameters(value: str) -> dict[str, str]:
    out: dict[str, str] = {}
    rest = value[value.find(";") :] if ";" in value else ""
    for match in _PARAMETER.finditer(rest):
        text = match[2]
        if text.startswith('"'):
            text = re.sub(r"\\(.)", r"\1", text[1:-1], flags=re.DOTALL)
        out.setdefault(match[1].lower(), text)
    return out


class MultipartReader:
    """Feed it the body in pieces of any size; it gives parts, their bytes and their ends, in order.

    Holds at most one delimiter or one part's headers back. Raises InputError for what is not a multipart form.
    """

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        # The first delimiter has no line break before it: as if there were one.
        self._buffer = bytearray(b"\r\n")
        self._state = "preamble"
        self._preamble = 0
        self._parts = 0

    @property
    def ended(self) -> bool:
        return self._state == "end"

    def feed(self, data: bytes) -> list[Event]:
        """What these bytes complete. What comes after the last delimiter is ignored."""
        if self._state == "end":
            return []
        self._buffer += data
        events: list[Event] = []
        while self._advance(events):
            pass
        return events

    def close(self) -> None:
        """The body has ended. Raises InputError if the form has not."""
        if self._state != "end":
            raise InputError("the form is cut off: its last boundary is missing")

    def _advance(self, events: list[Event]) -> bool:
        """One step of the machine; False: more bytes are needed."""
        match self._state:
            case "preamble" | "data":
                return self._until_delimiter(events)
            case "delimiter":
                return self._after_delimiter()
            case "headers":
                return self._headers(events)
        return False

    def _until_delimiter(self, events: list[Event]) -> bool:
        found = self._buffer.find(self._delimiter)
        inside = self._state == "data"
        # A delimiter may be cut by the end of this piece: that much is kept for the next.
        size = found if found >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
        if size:
            if inside:
                events.append(bytes(self._buffer[:size]))
            else:
                self._preamble += size
                if self._preamble > MAX_PREAMBLE_BYTES:
                    raise InputError("the form does not begin with its boundary")
            del self._buffer[:size]
        if found < 0:
            return False
        del self._buffer[: len(self._delimiter)]
        if inside:
            events.append(PartEnd())
        self._state = "delimiter"
        return True

    def _after_delimiter(self) -> bool:
        while bytes(self._buffer[:1]) in (b" ", b"\t"):
            del self._buffer[:1]
        if len(self._buffer) < 2:
            return False
        mark = bytes(self._buffer[:2])
        del self._buffer[:2]
        if mark == b"--":
            self._state = "end"
            self._buffer.clear()
            return False
        if mark != b"\r\n":
            raise InputError("a boundary of the form is followed by something else than a line break")
        self._state = "headers"
        return True

    def _headers(self, events: list[Event]) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEADER_BYTES:
                raise InputError(f"a part's headers are longer than {MAX_HEADER_BYTES} bytes")
            return False
        if end > MAX_HEADER_BYTES:
            raise InputError(f"a part's headers are longer than {MAX_HEADER_BYTES} bytes")
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise InputError(f"the form has more than {MAX_PARTS} parts")
        events.append(_part(bytes(self._buffer[:end])))
        del self._buffer[: end + 4]
        self._state = "data"
        return True


def _part(headers: bytes) -> Part:
    for line in headers.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() != "content-disposition":
            continue
        if value.partition(";")[0].strip().lower() != "form-data":
            break
        given = _parameters(value)
        if "name" not in given:
            break
        filename = given.get("filename")
        extended = given.get("filename*", "")
        if extended.lower().startswith("utf-8''"):
            filename = unquote(extended[7:], errors="replace")
        elif filename is not None:
            filename = filename.replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")
        return Part(given["name"], filename)
    raise InputError("a part of the form has no name (content-disposition: form-data; name=...)")
