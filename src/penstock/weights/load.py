"""The only place that reads weights: mapped, kept as codes or decoded if they are coded, checked for NaN and infinity,
converted if another dtype is wanted."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import narrow, widen
from penstock.base.errors import ModelError
from penstock.base.hashing import digest
from penstock.core.held_weights import HeldWeights
from penstock.core.model_spec import Experts, ModelSpec
from penstock.core.weight_map import Cut
from penstock.families.checkpoint import (
    LOADABLE_DTYPES,
    WHOLE_DTYPES,
    Checkpoint,
    WeightRef,
    check_weights,
    stored_shapes,
)
from penstock.formats.files import file_size, quoted, unreadable
from penstock.formats.tensor_ref import TensorRef, stored_bytes
from penstock.ops.ref.product import as_float32, take_rows
from penstock.ops.stored import StoredMatrix, Weight
from penstock.weights.decode import decoded
from penstock.weights.stored import STORED_FORMATS

Array = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]
_CHUNK = 1 << 20  # elements looked at or converted at a time; bounds what is needed beside the result
_FINGERPRINT_ROWS = 64
_NUMPY: dict[str, npt.DTypeLike] = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
_ELEMENTS: dict[str, npt.DTypeLike] = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": np.int8, "I32": "<u4",
}  # fmt: skip
# All exponent bits set means NaN or infinity. With the sign bit gone such patterns are the largest integers.
_BITS: dict[str, tuple[npt.DTypeLike, int, int]] = {
    "float32": ("<u4", 0x7FFFFFFF, 0x7F800000),
    "float16": ("<u2", 0x7FFF, 0x7C00),
    "bfloat16": ("<u2", 0x7FFF, 0x7F80),
}


def load_weights(
    source: Checkpoint | Mapping[str, WeightRef],
    spec: ModelSpec,
    held: HeldWeights | str,
    progress: Callable[[int, int], None] | None = None,
    skip: Collection[str] = (),
) -> dict[str, Weight]:
    """Logical name -> weight of the shape `stored_shapes(spec)` says.

    `held`: how the plan holds weights, or the one type that all have. A matrix of codes that is held as it is stored,
    or that a scheme is going to round, is a `StoredMatrix`; everything else is a read-only array of its type (bfloat16:
    bits as uint16), of the plan's dtype where a scheme is going to round it. What is stored in that type is a view of
    the mapped file, and so are codes, so the files must stay as they are while weights are in use.
    `progress` is called with (bytes of files done, bytes in all). Weights named in `skip` are zeros of the right shape
    that take no memory, or codes that nobody has looked at: their numbers are somewhere else already.
    Raises ModelError, before a byte is read, if weights are missing, misshapen or of a dtype that cannot be read;
    while reading, if one holds NaN or infinity, or a value too large for its type. ValueError for an unknown type.
    """
    held = HeldWeights(held) if isinstance(held, str) else held
    dtype = held.dtype
    if dtype not in _NUMPY:
        raise ValueError(f"weights can be loaded as {', '.join(_NUMPY)}, not as {dtype!r}")
    refs = source.weights if isinstance(source, Checkpoint) else source
    check_weights(refs, spec)
    shapes = stored_shapes(spec)
    coded = {name for name, ref in refs.items() if ref.stored is not None and name not in held.beside}
    kept = {name for name in coded if not held.of(name).is_plain}
    wanted = {name: _narrowed(refs[name]) for name in shapes if name not in skip}
    paths = {tensor.path for ref in [*wanted.values(), *(refs[n] for n in kept)] for tensor in ref.tensors}
    files = {path: _map(path) for path in sorted(paths)}
    total = sum(_num_bytes(ref, shapes[name]) for name, ref in wanted.items())
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    out: dict[str, Weight] = {}
    for name, shape in shapes.items():
        format = held.of(name)
        own = format.code if format.is_plain else dtype
        if name in kept:
            out[name] = codes = _codes(files, refs[name], shape, dtype)
            if name in wanted:
                _check_codes(codes, refs[name].tensor)
                advance(_num_bytes(refs[name], shape))
        elif name in wanted:
            whole = refs[name].codes is None and refs[name].tensor.dtype in WHOLE_DTYPES
            out[name] = (_whole if whole else _load)(files, wanted[name], shape, own, advance)
            if name.endswith(".router_table"):
                _check_listed(np.asarray(out[name]), spec, name, refs[name].tensor)
        else:
            out[name] = np.broadcast_to(np.zeros((), _NUMPY[own]), shape)
    return out


def read_weight(ref: WeightRef, shape: tuple[int, ...]) -> Array:
    """One weight as float32, decoded if it is coded. Raises: ModelError as `load_weights`."""
    ref = _narrowed(ref)
    return _load({path: _map(path) for path in {t.path for t in ref.tensors}}, ref, shape, "float32", lambda _: None)


def read_codes(ref: WeightRef, shape: tuple[int, ...]) -> StoredMatrix:
    """One matrix of codes (`ref.stored`) over its mapped files. Raises: ModelError."""
    return _codes({path: _map(path) for path in {t.path for t in ref.tensors}}, ref, shape, "float32")


def release_pages(weights: Mapping[str, Weight]) -> None:
    """Give back the pages of mapped weights that were only looked at: checked, or packed into something else.

    Whoever reads them again finds them in the system's cache. A table of embeddings that is looked up row by row would
    count as this process's memory as a whole otherwise.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    arrays = [a for w in weights.values() for a in (w.arrays if isinstance(w, StoredMatrix) else (w,))]
    mapped = {id(found): found for found in map(_mapping_of, arrays) if found is not None}
    for mapping in mapped.values():
        mapping.madvise(mmap.MADV_DONTNEED)


def _mapping_of(array: Array) -> mmap.mmap | None:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) else None


def fingerprint(weights: Mapping[str, Weight]) -> str:
    """What tells a model from others of its shape: 16 hex digits, of some rows of the embedding and the final norm.

    The same for weights loaded as bfloat16 and as float32, and for codes and their values.
    """
    table = weights["embed"]
    num_rows = table.shape[0]
    parts = [take_rows(table, np.arange(0, num_rows, max(1, num_rows // _FINGERPRINT_ROWS)))]
    for name in ("final_norm", "final_norm.bias"):
        if name in weights:
            vector = weights[name]
            assert isinstance(vector, np.ndarray), "vectors are never codes"
            parts.append(as_float32(vector))
    return digest(*(narrow(part).astype("<u2").tobytes() for part in parts), size=8).hex()


def _narrowed(ref: WeightRef) -> WeightRef:
    """The same weight cut from fewer stored rows: one expert of a stack is read, and decoded, without the others."""
    cut, tensor, scales = ref.cut, ref.tensor, ref.scales
    if ref.codes is not None or cut is None or cut.view or not cut.take or not isinstance(cut.take[0], int):
        return ref
    if scales is not None and scales.shape[:1] != tensor.shape[:1]:  # rows do not have their scales to themselves
        return ref
    index = cut.take[0]
    inner = msgspec.structs.replace(cut, shape=cut.shape[1:], take=cut.take[1:])
    return WeightRef(tensor.row(index), inner, None if scales is None else scales.row(index))


def _num_bytes(ref: WeightRef, shape: tuple[int, ...]) -> int:
    """Bytes that are looked at for a weight of this shape: of blocks all, of codes and of numbers the part itself."""
    if ref.codes is not None:
        return ref.tensor.nbytes * prod(shape) // max(1, prod(ref.tensor.shape))
    return ref.tensor.nbytes if _is_coded(ref) else stored_bytes(ref.tensor.dtype, prod(shape))


def _is_coded(ref: WeightRef) -> bool:
    return ref.tensor.dtype not in LOADABLE_DTYPES


def _map(path: Path) -> U8:
    if file_size(path) == 0:
        raise ModelError(f"{quoted(path)} is empty")
    try:
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def _load(
    files: Mapping[Path, U8], ref: WeightRef, shape: tuple[int, ...], dtype: str, advance: Callable[[int], None]
) -> Array:
    if ref.codes is not None:
        codes = _codes(files, ref, shape, dtype)
        _check_codes(codes, ref.tensor)
        out = dense(codes, dtype, ref.tensor)
        advance(_num_bytes(ref, shape))
    elif _is_coded(ref):
        whole = _decoded(files, ref, dtype, advance)
        out = whole if ref.cut is None else np.ascontiguousarray(apply_cut(whole, ref.cut))
    else:
        out = _plain(files, ref, dtype, advance)
    out = out.reshape(shape)
    out.flags.writeable = False
    return out


def _whole(
    files: Mapping[Path, U8], ref: WeightRef, shape: tuple[int, ...], dtype: str, advance: Callable[[int], None]
) -> Array:
    """Whole numbers, as float32 whatever `dtype` is: 16 bits would round them."""
    kind = f"<i{WHOLE_DTYPES[ref.tensor.dtype]}"
    out = _bytes(files, ref.tensor).view(kind).astype(np.float32).reshape(shape)
    advance(ref.tensor.nbytes)
    out.flags.writeable = False
    return out


def _check_listed(table: Array, spec: ModelSpec, name: str, tensor: TensorRef) -> None:
    """Raises ModelError unless every token of the vocabulary has experts of the layer, none of them twice."""
    ffn = spec.layers[int(name.split(".")[1])].ffn
    assert isinstance(ffn, Experts), "who has a table chooses experts"
    own = np.sort(as_float32(table), axis=-1)
    good = (own >= 0) & (own < ffn.num_experts) & (own == np.floor(own))
    good[:, 1:] &= own[:, 1:] > own[:, :-1]
    if not good.all():
        token = int(np.argmin(good.all(axis=-1)))
        raise ModelError(
            f"tensor {quoted(tensor.name)} of {quoted(tensor.path)} does not list {ffn.top_k} different experts of "
            f"{ffn.num_experts} for token {token}"
        )


def _codes(files: Mapping[Path, U8], ref: WeightRef, shape: tuple[int, ...], dtype: str) -> StoredMatrix:
    """A matrix over its mapped tensors. Nothing of them is looked at."""
    codes = ref.codes
    assert codes is not None
    arrays = {name: _array(files, tensor).reshape(tensor.shape) for name, tensor in codes.parts.items()}
    arrays["codes"] = _array(files, ref.tensor)
    chosen = None if ref.cut is None else rows_of(ref.cut)
    n, k = shape
    return STORED_FORMATS.get(codes.layout)(codes, arrays, (n, k), np.dtype(_NUMPY[dtype]), chosen)


def _array(files: Mapping[Path, U8], tensor: TensorRef) -> Array:
    """Flat, of its type as far as numpy has it."""
    return _bytes(files, tensor).view(_ELEMENTS.get(tensor.dtype, np.uint8))


def _check_codes(codes: StoredMatrix, tensor: TensorRef) -> None:
    fault = codes.fault()
    if fault is not None:
        raise ModelError(f"tensor {quoted(tensor.name)} of {quoted(tensor.path)} {fault}")


def dense(codes: StoredMatrix, dtype: str, tensor: TensorRef | None = None) -> Array:
    """What codes stand for in `dtype`, decoded in parts of about _CHUNK elements.

    Raises ModelError for values too large for it, if `tensor` says whose they are.
    """
    n, k = codes.shape
    out = np.empty((n, k), _NUMPY[dtype])
    step = max(1, _CHUNK // k)
    for first in range(0, n, step):
        part = codes.values(first, first + step)
        found = _convert(part, "float32", dtype) if tensor is None else _converted(part, "float32", dtype, tensor)
        out[first : first + step] = found
    return out


def _bytes(files: Mapping[Path, U8], tensor: TensorRef) -> U8:
    raw = files[tensor.path][tensor.offset : tensor.offset + tensor.nbytes]
    if len(raw) != tensor.nbytes:
        raise ModelError(f"{quoted(tensor.path)} has become shorter since its header was read")
    return raw


def _plain(files: Mapping[Path, U8], ref: WeightRef, dtype: str, advance: Callable[[int], None]) -> Array:
    """Numbers as they are: a view of the file if `dtype` is their type."""
    tensor = ref.tensor
    stored = LOADABLE_DTYPES[tensor.dtype]
    values = _bytes(files, tensor).view(_NUMPY[stored])
    if ref.cut is not None:
        # A copy only if the part does not lie together.
        values = np.ascontiguousarray(apply_cut(values.reshape(tensor.shape), ref.cut)).reshape(-1)
    in_place = stored == dtype and values.flags.aligned
    out = values if in_place else np.empty(values.shape, _NUMPY[dtype])
    for start in range(0, len(values), _CHUNK):
        part = values[start : start + _CHUNK]
        _check_finite(part, stored, tensor)
        if not in_place:
            out[start : start + _CHUNK] = _converted(part, stored, dtype, tensor)
        advance(part.nbytes)
    return out


def _decoded(files: Mapping[Path, U8], ref: WeightRef, dtype: str, advance: Callable[[int], None]) -> Array:
    """The whole stored tensor in `dtype`; beside it, only parts of about _CHUNK elements exist at a time."""
    tensor, scales = ref.tensor, ref.scales
    out = np.empty(prod(tensor.shape), _NUMPY[dtype])
    apart = None if scales is None else (scales, _bytes(files, scales))
    start = 0
    with np.errstate(all="ignore"):  # what comes of hostile scales is refused by name
        for part in decoded(tensor, _bytes(files, tensor), apart, _CHUNK):
            _check_finite(part, "float32", tensor)
            out[start : start + len(part)] = _converted(part, "float32", dtype, tensor)
            start += len(part)
            advance(stored_bytes(tensor.dtype, len(part)))
    assert start == len(out), "a decoder gives every element"
    return out.reshape(tensor.shape)


def _check_finite(part: Array, dtype: str, tensor: TensorRef) -> None:
    if not _all_finite(part, dtype):
        raise ModelError(f"tensor {quoted(tensor.name)} of {quoted(tensor.path)} holds NaN or infinity")


def _converted(part: Array, stored: str, dtype: str, tensor: TensorRef) -> Array:
    out = _convert(part, stored, dtype)
    if out is not part and not _all_finite(out, dtype):
        raise ModelError(
            f"tensor {quoted(tensor.name)} of {quoted(tensor.path)} holds values too large for {dtype}; "
            "load it as float32"
        )
    return out


def apply_cut(stored: Array, cut: Cut) -> Array:
    """The part of a stored tensor (of shape `cut.shape`) that `cut` names, as a view of it."""
    view = stored.reshape(cut.view) if cut.view else stored
    part: Array = view[tuple(take if isinstance(take, int) else slice(*take) for take in cut.take)]
    return part.transpose(cut.axes) if cut.axes else part


def rows_of(cut: Cut) -> npt.NDArray[np.int64]:
    """Which rows of a stored matrix a part is (`families.quantization.gather.is_rows`), in its order."""
    view, take, start = (cut.view or cut.shape)[:-1], cut.take, 0
    while len(view) > 1 and take and isinstance(first := take[0], int):  # one of a stack: its rows alone
        start += first * prod(view[1:])
        view, take = view[1:], take[1:]
    inner = Cut(cut.name, view, take[: len(view)], axes=cut.axes[:-1])
    rows: npt.NDArray[np.int64] = apply_cut(np.arange(prod(view)).reshape(view), inner).reshape(-1)
    return rows + start


def _all_finite(part: Array, dtype: str) -> bool:
    unsigned, magnitude, first_bad = _BITS[dtype]
    bits = part.view(unsigned)
    return bool(np.bitwise_and(bits, bits.dtype.type(magnitude)).max(initial=0) < first_bad)


def _convert(part: Array, stored: str, dtype: str) -> Array:
    if stored == dtype:
        return part
    wide = widen(part) if stored == "bfloat16" else part
    if dtype == "bfloat16":
        return narrow(wide)
    with np.errstate(over="ignore"):  # an overflow is reported by name, not as a warning
        return wide.astype(_NUMPY[dtype])
