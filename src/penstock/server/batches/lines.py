"""The lines of a batch file: read one after the other, checked one by one, remembered as 8 bytes each."""

from __future__ import annotations

import codecs
import io
import json
import os
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.base.hashing import digest
from penstock.server.batches import disk

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages",
             "/v1/decisions", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/classify",
             "/pooling")  # fmt: skip
MAX_CUSTOM_ID = 512
_READ_BYTES = 1 << 18
_PREFIX = "batch_req_"


@dataclass(frozen=True)
class LineError:
    code: str
    message: str


@dataclass(frozen=True)
class BatchLine:
    """One line of the input. `number` counts from 1; `key` says which line it is, over restarts and changed files.

    Either `error` is set, or `url` and `body` are what to send.
    """

    number: int
    key: int
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    error: LineError | None = None

    @property
    def result_id(self) -> str:
        return f"{_PREFIX}{self.key:016x}"


def key_of(*parts: bytes) -> int:
    return int.from_bytes(digest(*parts, size=8), "big") or 1  # 0 is an empty place of IdSet


class IdSet:
    """A set of 64-bit numbers in about 12 to 24 bytes each, where Python's own takes 70."""

    def __init__(self) -> None:
        self._places = array("Q", bytes(8 * 1024))
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: int) -> bool:
        return self._places[self._find(key)] == key

    def add(self, key: int) -> bool:
        """Whether it was not there yet. Mutates."""
        place = self._find(key)
        if self._places[place] == key:
            return False
        self._places[place] = key
        self._size += 1
        if 3 * self._size > 2 * len(self._places):
            self._grow()
        return True

    def _find(self, key: int) -> int:
        places, mask = self._places, len(self._places) - 1
        place = key & mask
        while places[place] not in (0, key):
            place = (place + 1) & mask
        return place

    def _grow(self) -> None:
        old, self._places = self._places, array("Q", bytes(16 * len(self._places)))
        for key in old:
            if key:
                self._places[self._find(key)] = key


def read_lines(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """(number, line) of every line that is not blank; None for one longer than `max_bytes`, whose rest is skipped.

    Lines come as UTF-8 without a byte order mark, whichever of Unicode's encodings the file has.
    """
    with _opened(path) as readline:
        number = 0
        while line := readline(max_bytes + 2):
            number += 1
            if len(line.rstrip(b"\r\n")) > max_bytes:
                while line and not line.endswith(b"\n"):
                    line = readline(_READ_BYTES)
                yield number, None
                continue
            # Joined files have marks inside.
            line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, line


@contextmanager
def _opened(path: Path) -> Iterator[Callable[[int], bytes]]:
    """A `readline(size)` of the file's lines in UTF-8."""
    with path.open("rb", buffering=_READ_BYTES) as file:
        encoding = json.detect_encoding(file.read(4))
        file.seek(0)
        if encoding.startswith("utf-8"):
            yield file.readline
            return
        # What cannot be decoded becomes \\x.., which JSON does not have: an error of its line.
        with io.TextIOWrapper(file, encoding, "backslashreplace", newline="\n") as text:
            yield lambda size: text.readline(size).encode()


class LineReader:
    """Lines of one batch, checked. `endpoint`: the only one allowed; None allows all that batches know.

    `max_bytes`: of one line. A line that names no model gets `model`.
    """

    def __init__(self, path: Path, endpoint: str | None, max_bytes: int, model: str | None = None) -> None:
        self._path, self._endpoint, self._max_bytes, self._model = path, endpoint, max_bytes, model
        self._seen = IdSet()

    def __iter__(self) -> Iterator[BatchLine]:
        for number, raw in read_lines(self._path, self._max_bytes):
            yield self._check(number, raw)

    def _check(self, number: int, raw: bytes | None) -> BatchLine:
        if raw is None:
            return self._bad(number, b"", f"the line is longer than {self._max_bytes} bytes", code="line_too_long")
        try:
            fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            return self._bad(number, raw, f"the line is not a JSON object: {error}", code="invalid_json_line")
        custom_id = _text(fields, "custom_id")
        if custom_id is None or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
            return self._bad(
                number, raw, f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters", code="invalid_custom_id"
            )
        key = key_of(b"id", custom_id.encode("utf-8", "surrogatepass"))
        if not self._seen.add(key):
            return self._bad(
                number, raw, "another line before has the same custom_id", custom_id, code="duplicate_custom_id"
            )
        method, url = _text(fields, "method"), _text(fields, "url")
        if method not in ("POST", None) or (method is None and "method" in fields):
            return self._bad(number, raw, "method must be POST", custom_id, key)
        allowed = ENDPOINTS if self._endpoint is None else (self._endpoint,)
        if url not in allowed:
            return self._bad(number, raw, f"url must be {' or '.join(allowed)}", custom_id, key, code="invalid_url")
        try:
            body = msgspec.json.decode(fields.get("body", b"null"), type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, RecursionError) as error:
            return self._bad(number, raw, f"body must be a JSON object: {error}", custom_id, key)
        if bytes(body.get("stream", b"false")).strip() not in (b"false", b"null"):
            return self._bad(number, raw, "stream is not possible in a batch", custom_id, key)
        if self._model is not None:
            body.setdefault("model", msgspec.Raw(msgspec.json.encode(self._model)))
        assert url is not None
        return BatchLine(number, key, custom_id, url, msgspec.json.encode(body))

    @staticmethod
    def _bad(
        number: int, raw: bytes, message: str, custom_id: str | None = None, key: int | None = None,
        code: str = "invalid_request",
    ) -> BatchLine:  # fmt: skip
        if key is None:
            key = key_of(b"line", str(number).encode(), raw)
        return BatchLine(number, key, custom_id, error=LineError(code, f"line {number}: {message}"))


def _text(fields: dict[str, msgspec.Raw], name: str) -> str | None:
    try:
        return msgspec.json.decode(fields[name], type=str)
    except (KeyError, msgspec.MsgspecError):
        return None


class _Told(msgspec.Struct):
    """What a result line says that a resumed run needs to know."""

    id: str = ""
    custom_id: str | None = None
    error: dict[str, msgspec.Raw] | None = None


class Results:
    """Where answers go: appended line by line, to one file or to two. What they hold already is done.

    A line that a crash or a full disk cut off is removed, so its request counts as not done. `append` writes at the
    end of an open file, all or nothing. Lines may be added from several threads at once.
    """

    def __init__(self, good: Path, bad: Path, append: Callable[[int, bytes], None] = disk.append) -> None:
        self._paths = (good, bad)
        self._append = append
        self._done = IdSet()
        self._files: dict[Path, int] = {}
        self._sizes: dict[Path, int] = {}
        self._writing, self._marking = threading.Lock(), threading.Lock()
        self.completed = 0
        self.failed = 0

    def open(self) -> None:
        """Read what is there. Raises OSError; nothing is open then."""
        try:
            for path in dict.fromkeys(self._paths):
                number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
                self._files[path] = number
                self._sizes[path] = self._read(path)
                os.ftruncate(number, self._sizes[path])
        except OSError:
            self._close_all()
            raise

    def _read(self, path: Path) -> int:
        whole = 0
        with path.open("rb", buffering=_READ_BYTES) as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                try:
                    told = msgspec.json.decode(line, type=_Told)
                except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
                    continue  # somebody else's line: it stays, and says nothing
                if self._done.add(_key_told(told)):
                    self._count(told.error is None)
        return whole

    def _count(self, good: bool) -> None:
        self.completed += good
        self.failed += not good

    def has(self, line: BatchLine) -> bool:
        with self._marking:
            return line.key in self._done

    def add(self, line: BatchLine, response: dict[str, object] | None, error: LineError | None) -> None:
        """Write one answer; from here on it is done. Raises what `append` does (nothing half is left behind then)."""
        told = {"id": line.result_id, "custom_id": line.custom_id, "response": response, "error": None}
        if error is not None:
            told["error"] = {"code": error.code, "message": error.message}
        data = msgspec.json.encode(told) + b"\n"
        path = self._paths[0 if error is None else 1]
        with self._writing:
            number = self._files[path]
            if os.fstat(number).st_size != self._sizes[path]:
                os.ftruncate(number, self._sizes[path])  # of a write that failed, and so did taking it back
            self._append(number, data)
            self._sizes[path] += len(data)
        with self._marking:
            self._done.add(line.key)
            self._count(error is None)

    def sync(self) -> None:
        """All of it is on the disk. Raises OSError."""
        for number in self._files.values():
            os.fsync(number)

    def close(self) -> None:
        """Raises OSError; it is closed then all the same."""
        try:
            self.sync()
        finally:
            self._close_all()

    def _close_all(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


def _key_told(told: _Told) -> int:
    digits = told.id.removeprefix(_PREFIX)
    if told.id.startswith(_PREFIX) and len(digits) == 16:
        try:
            return int(digits, 16)
        except ValueError:
            pass
    return key_of(b"id", (told.custom_id or "").encode("utf-8", "surrogatepass"))
