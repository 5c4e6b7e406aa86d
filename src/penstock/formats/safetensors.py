"""Headers of safetensors files and of their shard index. Nothing in them is believed before it is checked.

A file is: u64 little-endian N, N bytes of JSON {name: {dtype, shape, data_offsets}}, then the data, densely packed.
Source: the format section of github.com/huggingface/safetensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.base.errors import ModelError
from penstock.formats.files import file_size, quoted, read_exactly
from penstock.formats.json_file import parse_json_object, read_json_object
from penstock.formats.tensor_ref import DTYPE_BITS, TensorRef

HEADER_LIMIT_BYTES = 100_000_000
INDEX_NAME = "model.safetensors.index.json"
_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_COUNT = 2**63


def read_safetensors(path: Path) -> dict[str, TensorRef]:
    """Name -> where its bytes are, for every tensor of one file, in the file's order of bytes.

    Raises ModelError unless the header is sound and its tensors cover the rest of the file exactly once.
    """
    size = file_size(path)
    if size < 8:
        raise ModelError(f"{quoted(path)} has {size} bytes, too few for a safetensors file")
    header_bytes = int.from_bytes(read_exactly(path, 0, 8), "little")
    if header_bytes > HEADER_LIMIT_BYTES:
        raise ModelError(
            f"{quoted(path)} claims a header of {header_bytes} bytes; at most {HEADER_LIMIT_BYTES} are allowed"
        )
    if header_bytes > size - 8:
        raise ModelError(f"{quoted(path)} claims a header of {header_bytes} bytes but has {size} in all: truncated?")
    raw = read_exactly(path, 8, header_bytes)
    if not raw.startswith(b"{"):
        raise ModelError(f"{quoted(path)} is not a safetensors file: its header does not begin with '{{'")
    header = parse_json_object(raw, f"the header of {quoted(path)}")
    _check_metadata(path, header.pop("__metadata__", {}))
    data_start = 8 + header_bytes
    refs = [_tensor(path, name, entry, data_start) for name, entry in header.items()]
    refs.sort(key=lambda ref: (ref.offset, ref.offset + ref.nbytes))
    _check_cover(path, refs, data_start, size)
    return {ref.name: ref for ref in refs}


def read_index(path: Path) -> dict[str, TensorRef]:
    """The tensors of all shards that a `model.safetensors.index.json` names; shards lie beside it.

    Raises ModelError if a shard is named by anything but a plain file name (a path could lead out of the folder; links
    are followed, download caches are made of them), is missing or unsound, or if index and shards disagree.
    """
    weight_map = read_json_object(path, HEADER_LIMIT_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{quoted(path)} has no weight_map from tensor names to files")
    for shard in weight_map.values():
        if not _is_plain_name(shard):
            raise ModelError(f"{quoted(path)} names {quoted(shard)} as a shard; a plain *.safetensors name is needed")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not _exists(path.parent / shard)]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(shards)} shards are missing from {quoted(path.parent)}, first {quoted(missing[0])}"
        )
    found: dict[str, TensorRef] = {}
    for shard in shards:
        for name, ref in read_safetensors(path.parent / shard).items():
            if weight_map.get(name) != shard:
                raise ModelError(f"{quoted(shard)} holds {quoted(name)}, which the index does not say of it")
            found[name] = ref
    for name, shard in weight_map.items():
        if name not in found:
            raise ModelError(f"{quoted(path)} says that {quoted(shard)} holds {quoted(name)}, but it does not")
    return found


def _check_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ModelError(f"__metadata__ of {quoted(path)} must map strings to strings")


def _tensor(path: Path, name: str, entry: object, data_start: int) -> TensorRef:
    where = f"tensor {quoted(name)} of {quoted(path)}"
    if not isinstance(entry, dict) or set(entry) != _FIELDS:
        raise ModelError(f"{where} must have exactly the fields dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ModelError(f"{where} has the unknown dtype {quoted(dtype)}")
    if not _is_counts(shape):
        raise ModelError(f"{where} has the shape {quoted(shape)}; a list of sizes of at least 0 is needed")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{where} has the data_offsets {quoted(offsets)}; [begin, end] is needed")
    begin, end = offsets
    bits = _num_elements(where, shape) * DTYPE_BITS[dtype]
    if bits != (end - begin) * 8:
        needed = -(-bits // 8)
        raise ModelError(f"{where} takes {end - begin} bytes, but {dtype} of shape {quoted(shape)} needs {needed}")
    return TensorRef(path, name, dtype, tuple(shape), data_start + begin, end - begin)


def _check_cover(path: Path, refs: list[TensorRef], data_start: int, size: int) -> None:
    at = data_start
    for ref in refs:
        where = f"tensor {quoted(ref.name)} of {quoted(path)}"
        if ref.offset + ref.nbytes > size:
            raise ModelError(f"{where} ends {ref.offset + ref.nbytes - size} bytes after the file: truncated?")
        if ref.offset < at:
            raise ModelError(f"{where} overlaps the tensor before it")
        if ref.offset > at:
            raise ModelError(f"{where} begins after a gap of {ref.offset - at} bytes that belong to no tensor")
        at += ref.nbytes
    if at != size:
        raise ModelError(f"{quoted(path)} has {size - at} bytes after its last tensor")


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < _MAX_COUNT for n in value)


def _num_elements(where: str, shape: list[int]) -> int:
    if 0 in shape:
        return 0
    count = 1
    for n in shape:
        count *= n
        if count >= _MAX_COUNT:  # stop here: a long list of large sizes would multiply for minutes
            raise ModelError(f"{where} has the shape {quoted(shape)}, more elements than any file holds")
    return count


def _is_plain_name(name: object) -> bool:
    if not isinstance(name, str) or not name.endswith(".safetensors"):
        return False
    return not any(c in "/\\:" or not c.isprintable() for c in name)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
