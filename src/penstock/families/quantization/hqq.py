"""HQQ as its library and transformers save it in safetensors: `x.W_q` with scales, zero points and a few small tensors
that say how it is packed. Bits and groups are read from these, matrix by matrix.

Source: `HQQLinear.state_dict` of github.com/mobiusml/hqq; `HqqConfig` of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.matrix_format import MatrixFormat, Shared, plain
from penstock.families.checkpoint import Codes
from penstock.families.quantization.method import Module
from penstock.families.quantization.settings import Settings, is_spared
from penstock.formats.files import quoted
from penstock.formats.tensor_ref import TensorRef

_PACKING = {
    8: "8bit_u8", 6: "8bit_u8", 5: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8",
}  # fmt: skip
PER_UNIT = {8: 1, 6: 1, 5: 1, 4: 2, 3: 10, 2: 4, 1: 8}
"""Bits -> codes in a byte (3 bits: in a word)."""
_INTEGERS = {"I32": 4, "I64": 8, "U8": 1}
_NOTES = (
    ".unpack_view_dtype", ".view_as_float", ".compute_dtype", ".offload_meta", ".encoded_state_dict",
    ".stores_quant_config", ".channel_wise", ".optimize", ".round_zero", ".quant_scale", ".quant_zero",
)  # fmt: skip


@dataclass(frozen=True)
class Hqq:
    """A `Method`. `usual`: how a matrix is stored as far as the configuration tells."""

    usual: MatrixFormat | None
    spared: tuple[str, ...] = ()
    method: str = "hqq"
    marks: tuple[str, ...] = (".W_q",)
    parts: tuple[str, ...] = (
        ".W_q", ".scale", ".zero", ".nbits", ".group_size", ".axis", ".shape", ".packing", *_NOTES
    )  # fmt: skip
    whole: str = ".weight"
    read_over: tuple[str, ...] = ()
    lm_head: bool = False

    def matrix(self, module: Module) -> tuple[TensorRef, Codes]:
        """See `Method.matrix`."""
        ref = module.need(".W_q")
        for part in (".quant_scale", ".quant_zero"):
            if module.get(part) is not None and module.small(part).strip(b"\0"):
                raise UnsupportedError(
                    f"{module.where} has scales or zero points that are quantised; HQQ's plain are read"
                )
        bits, axis = _integer(module, ".nbits"), _integer(module, ".axis")
        n, k = _sizes(module)
        if bits not in _PACKING or axis not in (0, 1):
            raise UnsupportedError(f"{module.where} has {bits} bits along axis {axis}; 8, 6, 5, 4, 3, 2 and 1 are read")
        packing = module.small(".packing").decode("ascii", "replace")
        if packing != _PACKING[bits]:
            raise UnsupportedError(f"{module.where} is packed as {quoted(packing)}; {_PACKING[bits]} is read")
        group = _integer(module, ".group_size") if module.get(".group_size") is not None else (k if axis else n)
        if not group > 0 or n * k % group:
            raise ModelError(f"{module.where} has {n} x {k} numbers, which are no whole groups of {group}")
        groups = n * k // group
        tall, wide = (groups, group) if axis else (group, groups)
        num_bytes = -(-tall // PER_UNIT[bits]) * wide * (4 if bits == 3 else 1)
        if ref.nbytes != num_bytes or (bits != 3 and tall % PER_UNIT[bits]):
            raise ModelError(
                f"{module.where} has {ref.nbytes} bytes; {num_bytes} are needed for {n} x {k} in groups of {group}"
            )
        scale, zero = module.need(".scale"), module.need(".zero")
        dtype = module.scale_dtype(".scale")
        for part, found in ((".scale", scale), (".zero", zero)):
            if found.dtype != scale.dtype or prod(found.shape) != groups:
                raise module.wrong(part, f"{dtype}, one for each of {groups} groups,")
        shared = (Shared(dtype, 1, 0 if group == k else group),)
        runs = axis == 1 and k % group == 0
        format = MatrixFormat("uint", bits, shared, shared) if runs else plain("float32")
        numbers = {
            "bits": float(bits), "axis": float(axis), "wide": float(wide), "bfloat16": float(dtype == "bfloat16"),
        }  # fmt: skip
        whole = replace(ref, dtype="U8", shape=(n, k))
        return whole, Codes("hqq", format, {"scales": scale, "zeros": zero}, numbers)

    def expected(self, stored: str, shape: tuple[int, int]) -> MatrixFormat | None:
        """See `Method.expected`."""
        if self.usual is None or is_spared(stored, self.spared) or shape[1] % (self.usual.group or 1):
            return None
        return self.usual


def _integer(module: Module, part: str) -> int:
    ref = module.need(part)
    if ref.dtype not in _INTEGERS or prod(ref.shape) != 1:
        raise module.wrong(part, "one integer")
    return int.from_bytes(module.small(part), "little", signed=True)


def _sizes(module: Module) -> tuple[int, int]:
    ref = module.need(".shape")
    if ref.dtype not in ("I64", "I32") or ref.shape != (2,):
        raise module.wrong(".shape", "two integers")
    raw = module.small(".shape")
    n, k = (int.from_bytes(raw[i : i + len(raw) // 2], "little", signed=True) for i in (0, len(raw) // 2))
    if not (0 < n < 1 << 31 and 0 < k < 1 << 31):
        raise ModelError(f"{module.where} has the shape {n} x {k}; that of a matrix is needed")
    return n, k


def read(settings: Settings) -> Hqq:
    settings.allow({"quant_method", "quant_config", "skip_modules"})
    config = settings.inner(settings.given.get("quant_config") or {}, "quant_config")
    for name in ("scale_quant_params", "zero_quant_params"):
        if config.given.get(name):
            raise settings.refused(f"{name}; scales and zero points that are not quantised are read")
    spared, weights = settings.names("skip_modules"), config.given.get("weight_quant_params")
    if not weights:  # each kind of module has its own, which a plan does without
        return Hqq(None, spared)
    own = config.inner(weights, "weight_quant_params")
    bits = own.bits(tuple(_PACKING), "nbits")
    shared = (Shared("float16", 1, own.group("group_size") if own.get("group_size") is not None else 0),)
    runs = own.one_of("axis", (0, 1)) == 1
    return Hqq(MatrixFormat("uint", bits, shared, shared) if runs else None, spared)
