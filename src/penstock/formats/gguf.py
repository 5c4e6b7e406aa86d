"""Header of GGUF files: typed metadata and where the tensors lie. Nothing in it is believed before it is checked.

A file is: "GGUF", u32 version, u64 number of tensors, u64 number of metadata entries, the entries (key, u32 type,
value), the tensors (name, u32 number of dimensions, u64 sizes with the fastest first, u32 type, u64 offset), zeros up
to a multiple of the alignment, the data. Strings are a u64 length and UTF-8. Versions 2 and 3 differ in nothing but the
permission of big-endian files. Source: docs/gguf.md of github.com/ggml-org/ggml.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from penstock.base.errors import ModelError, UnsupportedError
from penstock.formats.files import decode, file_size, quoted, unreadable
from penstock.formats.tensor_ref import BLOCKS, TensorRef, stored_bytes

MAGIC = b"GGUF"
HEADER_LIMIT_BYTES = 128 << 20
"""What a header may take: real ones have up to about 20 MB, nearly all of it vocabulary."""
_MAX_ENTRIES = 1 << 16
_MAX_TENSORS = 1 << 17
_BUFFER_BYTES = 1 << 20
_LENGTH = struct.Struct("<Q")
_MAX_ELEMENTS = 1 << 22  # over all arrays: each becomes a Python object
_MAX_KEY_BYTES = 65535
_MAX_NAME_BYTES = 256
_MAX_DIMS = 4
_MAX_COUNT = 2**63
_DEFAULT_ALIGNMENT = 32
_ALIGNMENTS = tuple(1 << n for n in range(3, 17))
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Gguf:
    """`metadata`: key -> int, float, bool, str, or a list of one of them. `tensors`: shapes are row-major (the slowest
    axis first, the reverse of the file's own order); types that ggml has are named whether or not they can be read."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorRef]
    alignment: int


def read_gguf(path: Path) -> Gguf:
    """The header of one file. No tensor data.

    Raises UnsupportedError for other versions, big-endian files and types unknown to ggml; ModelError unless every
    count, length and offset fits the file, keys and tensor names are unique, and no two tensors overlap.
    """
    size = file_size(path)
    try:
        with path.open("rb") as file:
            return _read(path, _Reader(file, path, size), size)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def part_names(name: str) -> list[str]:
    """The names of all parts of the split model that `name` belongs to, in order; [name] if it is whole.

    Raises ModelError if its number is out of range.
    """
    match = _SPLIT.fullmatch(name)
    if match is None:
        return [name]
    stem, number, count = match[1], int(match[2]), int(match[3])
    if not 1 <= number <= count:
        raise ModelError(f"{quoted(name)} calls itself part {number} of {count}")
    return [f"{stem}-{n:05}-of-{match[3]}.gguf" for n in range(1, count + 1)]


def split_paths(path: Path) -> list[Path]:
    """Every file of the split model that `path` is a part of, in order; [path] if it is whole.

    Raises ModelError if its number is out of range, or if other parts are missing.
    """
    parts = [path.with_name(name) for name in part_names(path.name)]
    missing = [part.name for part in parts if not os.path.exists(part)] if len(parts) > 1 else []
    if missing:
        raise ModelError(
            f"{len(missing)} of the {len(parts)} parts of {quoted(path)} are missing, first {quoted(missing[0])}"
        )
    return parts


def is_first_part(name: str) -> bool:
    """Whether a file name is that of a whole model or of the first part of a split one."""
    match = _SPLIT.fullmatch(name)
    return match is None or int(match[2]) == 1


class _Reader:
    """Little-endian values in sequence; no read goes beyond the file or HEADER_LIMIT_BYTES."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self._file = file
        self._where = f"the header of {quoted(path)}"
        self._limit = min(size, HEADER_LIMIT_BYTES)
        self._elements = 0
        self.at = 0

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self._limit - self.at:
            raise ModelError(
                f"{self._where} asks for {num_bytes} bytes at byte {self.at}, but at most {self._limit - self.at} are "
                "left for it: truncated?"
            )
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise ModelError(f"{self._where} ends after {self.at + len(data)} bytes")
        self.at += num_bytes
        return data

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, what: str, limit: int, least_bytes: int) -> int:
        """A u64 of at most `limit`, whose items take at least `least_bytes` each."""
        count: int = self.number("Q")
        if count > limit or count * least_bytes > self._limit - self.at:
            raise ModelError(f"{self._where} claims {count} {what}, more than it can hold")
        return count

    def text(self, what: str, limit: int = HEADER_LIMIT_BYTES) -> str:
        length: int = self.number("Q")
        if length > limit:
            raise ModelError(f"{self._where} has {what} of {length} bytes; at most {limit} are allowed")
        return decode(self.take(length), f"{what} in {self._where}")

    def value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.text(f"the value of {quoted(key)}")
        if kind == _ARRAY:
            return self._array(key)
        return self._scalars(key, kind, 1)[0]

    def _array(self, key: str) -> list[Any]:
        kind: int = self.number("I")
        if kind == _ARRAY:
            raise ModelError(f"{self._where} gives {quoted(key)} as an array of arrays, which no model needs")
        width = 8 if kind == _STRING else struct.calcsize(_SCALARS.get(kind, "B"))
        count = self.count(f"elements of {quoted(key)}", _MAX_ELEMENTS - self._elements, width)
        self._elements += count
        if kind == _STRING:
            return self._texts(f"an element of {quoted(key)}", count)
        return self._scalars(key, kind, count)

    def _texts(self, what: str, count: int) -> list[str]:
        """A vocabulary is hundreds of thousands: what is plainly right comes out of a buffer, all else from `text`."""
        texts: list[str] = []
        while len(texts) < count:
            buffer, at = self._file.read(min(_BUFFER_BYTES, self._limit - self.at)), 0
            try:
                while len(texts) < count:
                    end = at + 8 + _LENGTH.unpack_from(buffer, at)[0]
                    if end > len(buffer):
                        break
                    texts.append(str(buffer[at + 8 : end], "utf-8"))
                    at = end
            except (struct.error, UnicodeDecodeError):
                pass  # the buffer's end, or what `text` refuses
            self.at += at
            self._file.seek(self.at)
            if len(texts) < count:
                texts.append(self.text(what))
        return texts

    def _scalars(self, key: str, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise ModelError(f"{self._where} gives {quoted(key)} a value of the unknown type {kind}")
        code = f"<{count}{_SCALARS[kind]}"
        values = list(struct.unpack(code, self.take(struct.calcsize(code))))
        if kind != _BOOL:
            return values
        if not all(value in (0, 1) for value in values):
            raise ModelError(f"{self._where} gives {quoted(key)} a truth value that is neither 0 nor 1")
        return [bool(value) for value in values]


def _read(path: Path, reader: _Reader, size: int) -> Gguf:
    if size < 24 or reader.take(4) != MAGIC:
        raise ModelError(f"{quoted(path)} is not a GGUF file")
    version = reader.number("I")
    if version & 0xFFFF == 0 and version:
        raise UnsupportedError(f"{quoted(path)} is a big-endian GGUF file; only little-endian ones are read")
    if version not in (2, 3):
        raise UnsupportedError(f"{quoted(path)} is a GGUF file of version {version}; versions 2 and 3 are read")
    num_tensors = reader.count("tensors", _MAX_TENSORS, 24)
    num_entries = reader.count("metadata entries", _MAX_ENTRIES, 13)
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = reader.text("a key", _MAX_KEY_BYTES)
        if key in metadata:
            raise ModelError(f"{quoted(path)} gives the key {quoted(key)} twice")
        metadata[key] = reader.value(key, reader.number("I"))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment not in _ALIGNMENTS:
        raise ModelError(
            f"{quoted(path)} has the alignment {quoted(alignment, 40)}; a power of two from 8 on is needed"
        )
    tensors: dict[str, TensorRef] = {}
    for _ in range(num_tensors):
        ref = _tensor(path, reader, alignment)
        if ref.name in tensors:
            raise ModelError(f"{quoted(path)} has two tensors called {quoted(ref.name)}")
        tensors[ref.name] = ref
    start = -(-reader.at // alignment) * alignment
    placed = {name: _moved(ref, start) for name, ref in tensors.items()}
    _check_places(path, list(placed.values()), size)
    return Gguf(path, version, metadata, placed, alignment)


def _tensor(path: Path, reader: _Reader, alignment: int) -> TensorRef:
    """One entry; its offset still counts from the start of the data."""
    name = reader.text("a tensor name", _MAX_NAME_BYTES)
    where = f"tensor {quoted(name)} of {quoted(path)}"
    num_dims = reader.number("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ModelError(f"{where} has {num_dims} dimensions; 1 to {_MAX_DIMS} are possible")
    shape = tuple(reversed([reader.number("Q") for _ in range(num_dims)]))
    count = 1
    for n in shape:
        count *= n
    if not 0 < count < _MAX_COUNT or max(shape) >= _MAX_COUNT:
        raise ModelError(f"{where} has the shape {quoted(shape)}, which no tensor can have")
    kind = reader.number("I")
    if kind not in _TYPES:
        raise UnsupportedError(
            f"{where} is stored as ggml's type {kind}, which Penstock does not know; quantise the model again to a "
            "type that llama.cpp has, such as Q4_K"
        )
    dtype = _TYPES[kind]
    if dtype in BLOCKS and shape[-1] % BLOCKS[dtype][0]:
        raise ModelError(f"{where} has rows of {shape[-1]} elements, but {dtype} codes {BLOCKS[dtype][0]} together")
    offset = reader.number("Q")
    if offset % alignment:
        raise ModelError(f"{where} begins at byte {offset} of the data, which is not a multiple of {alignment}")
    return TensorRef(path, name, dtype, shape, offset, stored_bytes(dtype, count))


def _moved(ref: TensorRef, start: int) -> TensorRef:
    return TensorRef(ref.path, ref.name, ref.dtype, ref.shape, start + ref.offset, ref.nbytes)


def _check_places(path: Path, refs: list[TensorRef], size: int) -> None:
    end = 0
    for ref in sorted(refs, key=lambda ref: ref.offset):
        where = f"tensor {quoted(ref.name)} of {quoted(path)}"
        if ref.offset + ref.nbytes > size:
            raise ModelError(f"{where} ends {ref.offset + ref.nbytes - size} bytes after the file: truncated?")
        if ref.offset < end:
            raise ModelError(f"{where} overlaps the tensor before it")
        end = ref.offset + ref.nbytes
