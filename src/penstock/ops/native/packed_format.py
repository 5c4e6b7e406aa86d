"""What a file of packed matrices looks like, and whether one can be trusted.

A file is: 56 bytes of head (magic, version of this format, of the ABI, bytes of the index, SHA-256 of all this and of
the index), the index (JSON), then the arrays, each from a multiple of 4,096 bytes on, with zeros between. Nothing of an
index is believed: offsets and sizes have to be exactly those that the library needs for its matrices, one after the
other to the file's end, so no pointer can lead out of it.

**Is the content right?** Every load checks it, matrix by matrix: the sum of each page of 4,096 bytes (as 512 words of
64 bits, modulo 2^64), and a SHA-256 over these sums. That finds flipped bits, zeroed or stale sectors, pages in another
order; what it does not find are words that change places inside one page, and changes that somebody makes on purpose:
the folder is the user's, who can change the model as well. It is chosen for its price. On one core (Zen 5, 64 MB, numpy
2) page sums pass 25 GB/s, zlib's CRC-32 5.7, SHA-256 1.8, BLAKE2b 1.0, and a plain copy 8: checking costs less than
reading, so there is no reason to trust a time stamp instead.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from math import isfinite
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.core.panels import Panels
from penstock.ops.native.abi import ABI, PANEL, Act, Code, Format, Scale, Zero
from penstock.ops.native.direct_file import PAGE, U8, UnsoundError
from penstock.ops.native.matrix import Packed, described

MAGIC = b"PSTPACK\n"
VERSION = 4
MAX_INDEX_BYTES = 64 << 20
_HEAD = struct.Struct("<8sIIQ32s")
_COUNTED = _HEAD.size - 32
_ENTRY_BYTES = 1500  # of an index, beside the name and a factor for each part of it
_MOST = 2**31 - 1
_MOST_STACKED = 1 << 16
_FLOAT_ACTS = {Format.F32: (Act.F32,), Format.F16: (Act.F32,), Format.BF16: (Act.F32, Act.BF16)}
_TABLE_CODES = {"T4", "F4"}
_TABLE_SIZE = 16
_MOST_OFFSET = 255
_MOST_FLOAT = float(np.finfo(np.float32).max)
Span = tuple[int, int]
"""Offset in the file and number of bytes."""


class PackedEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One matrix or stack: what `ops.native.matrix.Packed` takes, with spans in place of arrays. `digest`: of the pages
    of its arrays, in hex."""

    name: str
    format: int
    act: int
    rows: int
    cols: int
    pair: bool
    panels: Panels | None
    data: Span
    bias: Span | None
    order: Span | None
    digest: str
    count: int = 1
    factors: tuple[float, ...] = ()

    @property
    def span(self) -> Span:
        """Its arrays and the zeros between and behind them: whole pages."""
        spans = [span for span in (self.data, self.bias, self.order) if span is not None]
        return self.data[0], sum(page_up(num_bytes) for _, num_bytes in spans)


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`file_bytes` counts all."""

    key: str
    file_bytes: int
    matrices: list[PackedEntry]


def num_panels(rows: int, pair: bool) -> int:
    """A pair has half a panel of each part in every panel."""
    return -(-(rows // 2) // (PANEL // 2)) if pair else -(-rows // PANEL)


def array_sizes(
    library: Any, format: int, rows: int, cols: int, pair: bool, panels: Panels | None, num: int = 1,
    factors: Sequence[float] = (),
) -> tuple[int, ...]:  # fmt: skip
    """Bytes of the data, and of the bias and the order, if there are any; of `num` matrices. Raises UnsoundError."""
    if not 0 < num <= _MOST_STACKED or len(factors) not in (0, num if panels is not None else 0):
        raise UnsoundError(f"has a stack of {num} matrices with {len(factors)} factors")
    if not all(isfinite(x) and abs(x) <= _MOST_FLOAT for x in factors):
        raise UnsoundError("has a stack with a factor that is no number")
    if not 0 < rows <= _MOST or not 0 < cols <= _MOST or (pair and rows % 2):
        raise UnsoundError(f"has a {'pair' if pair else 'matrix'} of {rows} x {cols}")
    if format not in Format.__members__.values() or (panels is None) == (format == Format.BLOCK):
        raise UnsoundError(f"has a matrix of format {format}, which does not exist")
    if panels is not None:
        _check_panels(panels)
    data = library.pst_panel_bytes(described(format, Act.F32, rows, cols, pair, panels))
    if data <= 0:
        raise UnsoundError(f"has a matrix of {cols} columns as {panels}, which no format has")
    count = num_panels(rows, pair)
    return num * count * data, num * count * PANEL * 4, num * cols * 4


def _check_panels(p: Panels) -> None:
    """Raises UnsoundError for names that no enum has, and numbers that nobody writes."""
    has_table = p.code in _TABLE_CODES
    numbers = (p.factor, *p.table)
    if (
        p.code not in Code.__members__
        or p.scale not in Scale.__members__
        or p.zero not in Zero.__members__
        or not 0 <= p.group <= _MOST
        or not 0 <= p.offset <= _MOST_OFFSET
        or len(p.table) != (_TABLE_SIZE if has_table else 0)
        or p.has_factor
        or not all(isfinite(x) and abs(x) <= _MOST_FLOAT for x in numbers)
        or (p.code == "T4" and not all(x == int(x) and -128 <= x <= 127 for x in p.table))
    ):
        raise UnsoundError(f"has a matrix as {p}, which no format has")


def page_up(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def page_sums(pages: U8) -> bytes:
    """The sum of each of these whole pages: 8 bytes for each."""
    sums: npt.NDArray[np.uint64] = np.add.reduce(pages.view("<u8").reshape(-1, PAGE // 8), axis=1)
    return sums.tobytes()


class PageSums:
    """A digest of bytes that come in parts; every part but the last of an array is a multiple of PAGE long."""

    def __init__(self) -> None:
        self._hash = sha256()

    def add(self, part: U8) -> None:
        """The part, filled up with zeros to a whole page."""
        whole = len(part) // PAGE * PAGE
        self._pages(part[:whole])
        if whole < len(part):
            last = np.zeros(PAGE, np.uint8)
            last[: len(part) - whole] = part[whole:]
            self._pages(last)

    def _pages(self, pages: U8) -> None:
        self.summed(page_sums(pages))

    def summed(self, sums: bytes) -> None:
        """As `add` of pages that have these `page_sums`."""
        self._hash.update(sums)

    def hex(self) -> str:
        return self._hash.hexdigest()


def _arrays(m: Packed) -> list[U8 | None]:
    """Data, bias and order as bytes."""
    parts: list[npt.NDArray[Any] | None] = [m.data, m.bias, m.order]
    return [None if a is None else np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in parts]


def _check_arrays(library: Any, m: Packed, arrays: list[U8 | None]) -> None:
    wanted = array_sizes(
        library, m.struct.format, m.num_rows, m.num_cols, bool(m.struct.pair), m.panels, m.count, m.factors
    )
    sizes = [0 if a is None else a.nbytes for a in arrays]
    if sizes[0] != wanted[0] or any(size not in (0, most) for size, most in zip(sizes, wanted, strict=True)):
        raise ValueError(f"a matrix with arrays of {sizes} bytes where its format has {list(wanted)}")


def digest_of(library: Any, m: Packed, arrays: list[U8 | None]) -> str:
    """Of what `_arrays` gives. Raises ValueError for arrays that do not fit the matrix's format."""
    _check_arrays(library, m, arrays)
    sums = PageSums()
    for array in arrays:
        if array is not None:
            sums.add(array)
    return sums.hex()


def index_room(names: Sequence[str]) -> int:
    """Bytes that are set aside in front of the arrays of matrices of these names, whatever else their index says."""
    return page_up(_HEAD.size + sum(_ENTRY_BYTES + 4 * len(name.encode()) for name in names))


class Growing:
    """A file whose matrices come one after the other: its `parts`, and then its `head`, which lies in front of them.

    `room`: bytes for the head, of `index_room`.
    """

    def __init__(self, library: Any, key: str, room: int) -> None:
        self._library, self._key, self._room, self._at = library, key, room, room
        self._entries: list[PackedEntry] = []

    def parts(self, matrices: Iterable[tuple[str, Packed]]) -> Iterator[memoryview | bytes]:
        """Of the file, in order, the place of the head first. Raises ValueError for a matrix whose arrays do not fit
        its format."""
        yield bytes(self._room)
        for name, m in matrices:
            arrays = _arrays(m)
            digest, spans = digest_of(self._library, m, arrays), list[Span | None]()
            for array in arrays:
                spans.append(None if array is None else (self._at, array.nbytes))
                if array is not None:
                    yield array.data
                    yield bytes(page_up(array.nbytes) - array.nbytes)
                    self._at += page_up(array.nbytes)
            data, bias, order = spans
            assert data is not None
            s = m.struct
            shape = (s.format, s.act, s.rows, s.cols, bool(s.pair), m.panels)
            self._entries.append(PackedEntry(name, *shape, data, bias, order, digest, m.count, m.factors))

    def head(self) -> bytes:
        """Filled up with blanks, so that the arrays begin behind it."""
        index = msgspec.json.encode(Index(self._key, self._at, self._entries))
        assert _HEAD.size + len(index) <= self._room, "an entry has its bytes"
        index = index.ljust(self._room - _HEAD.size)
        return sealed(index) + index


def sealed(index: bytes, version: int = VERSION, abi: int = ABI) -> bytes:
    """The head of a file with this index."""
    counted = _HEAD.pack(MAGIC, version, abi, len(index), b"")[:_COUNTED]
    return counted + sha256(counted + index).digest()


def decoded(library: Any, head: bytes, read: Any, key: str, file_bytes: int) -> tuple[Index, int]:
    """The index of a file that begins with `head`, checked, and where its arrays begin.

    `read(offset, num_bytes)` gives bytes of the file. Raises UnsoundError.
    """
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        raise UnsoundError("is no file of packed weights")
    _, version, abi, index_bytes, seal = _HEAD.unpack(head[: _HEAD.size])
    if (version, abi) != (VERSION, ABI):
        raise UnsoundError(f"was written by another version of Penstock (format {version}, ABI {abi})")
    if index_bytes > min(MAX_INDEX_BYTES, file_bytes - _HEAD.size):
        raise UnsoundError(f"claims an index of {index_bytes} bytes")
    raw = read(_HEAD.size, index_bytes)
    if sha256(head[:_COUNTED] + raw).digest() != seal:
        raise UnsoundError("has a damaged index")
    try:
        index = msgspec.json.decode(raw, type=Index)
    except msgspec.MsgspecError as error:
        raise UnsoundError(f"has an index that cannot be read ({error})") from None
    if index.key != key:
        raise UnsoundError("is that of another key")
    if index.file_bytes != file_bytes:
        raise UnsoundError(f"has {file_bytes} bytes where {index.file_bytes} were written")
    start = max(PAGE, page_up(_HEAD.size + index_bytes))
    if start > file_bytes:
        raise UnsoundError("ends inside its index")
    _check_entries(library, index, start)
    return index, start


def _check_entries(library: Any, index: Index, start: int) -> None:
    at, names = start, set()
    for e in index.matrices:
        if e.name in names:
            raise UnsoundError(f"names {e.name!r} twice")
        names.add(e.name)
        sizes = array_sizes(library, e.format, e.rows, e.cols, e.pair, e.panels, e.count, e.factors)
        if e.act not in _FLOAT_ACTS.get(Format(e.format), tuple(Act)):
            raise UnsoundError(f"has rows of kind {e.act} with matrices of format {e.format}")
        for span, needed, is_needed in zip((e.data, e.bias, e.order), sizes, (True, False, False), strict=True):
            if span is None and not is_needed:
                continue
            if span != (at, needed):
                raise UnsoundError(f"keeps {e.name!r} where it cannot be")
            at += page_up(needed)
    if at != index.file_bytes:
        raise UnsoundError(f"has {index.file_bytes - at} bytes that belong to no matrix")


class Checked:
    """Bytes from the first array of a checked index on, in order, compared with what the index says of them."""

    def __init__(self, index: Index) -> None:
        self._left = [(entry.span[1] // PAGE, entry) for entry in reversed(index.matrices)]
        self._sums = PageSums()

    def add(self, sums: bytes) -> None:
        """The `page_sums` of the next pages. Raises UnsoundError as soon as a matrix is not what it was."""
        while sums:
            num_sums, entry = self._left.pop()
            own, sums = sums[: 8 * num_sums], sums[8 * num_sums :]
            self._sums.summed(own)
            if len(own) < 8 * num_sums:
                self._left.append((num_sums - len(own) // 8, entry))
                return
            check_digest(entry, self._sums)
            self._sums = PageSums()


def check_digest(entry: PackedEntry, sums: PageSums) -> None:
    """Raises UnsoundError unless these are the sums of what was written."""
    if sums.hex() != entry.digest:
        raise UnsoundError("has damaged content")


def check_order(entry: PackedEntry, inputs: npt.NDArray[np.int32] | None) -> None:
    """Raises UnsoundError for inputs in an order that is none."""
    if inputs is not None and not 0 <= int(inputs.min()) <= int(inputs.max()) < entry.cols:
        raise UnsoundError(f"has inputs of {entry.name!r} in an order that is none")


def matrix_of(entry: PackedEntry, arrays: U8) -> Packed:
    """The matrix over `arrays`, the bytes of its `span`; nothing is copied, or looked at."""
    first = entry.data[0]

    def bytes_of(span: Span | None) -> U8 | None:
        return None if span is None else arrays[span[0] - first : span[0] - first + span[1]]

    data, bias, order = bytes_of(entry.data), bytes_of(entry.bias), bytes_of(entry.order)
    assert data is not None
    return Packed(
        Format(entry.format), Act(entry.act), entry.rows, entry.cols, entry.pair, data,
        None if bias is None else bias.view(np.float32), panels=entry.panels,
        order=None if order is None else order.view(np.int32), count=entry.count, factors=entry.factors,
    )  # fmt: skip


def matrices_of(index: Index, arrays: U8, start: int) -> dict[str, Packed]:
    """The matrices of a checked index over `arrays`, the bytes of its file from `start` on; no copy.

    Raises UnsoundError for inputs in an order that is none.
    """
    found = {}
    for entry in index.matrices:
        first, num_bytes = entry.span
        found[entry.name] = m = matrix_of(entry, arrays[first - start : first - start + num_bytes])
        check_order(entry, m.order)
    return found
