"""bitsandbytes: 4 bits (NF4, FP4; absmax quantised again or not) and int8.

4 bits: `x.weight` of any type of storage, `x.weight.absmax`, `.quant_map`, and a small JSON object with the shape,
`x.weight.quant_state.bitsandbytes__nf4`. int8: `x.weight` with `x.SCB`. Source: `QuantState.as_dict` and `Linear8bitLt`
of github.com/bitsandbytes-foundation/bitsandbytes; `BitsAndBytesConfig` of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite, prod
from struct import unpack

from penstock.base.errors import ModelError
from penstock.core.matrix_format import MatrixFormat, Shared, plain
from penstock.families.checkpoint import Codes
from penstock.families.quantization.method import Module
from penstock.families.quantization.settings import Settings, is_spared
from penstock.formats.files import quoted
from penstock.formats.json_file import parse_json_object
from penstock.formats.tensor_ref import TensorRef

_KINDS = ("nf4", "fp4")
_STATES = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in _KINDS)
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_STORAGE = ("U8", "I8", "BF16", "F16", "F32")
_INT8 = MatrixFormat("int", 8, (Shared("float32", 1, 0),))
_NOTES = {
    "quant_method", "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "llm_int8_threshold",
    "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_blocksize",
}  # fmt: skip
# Only to plan for a checkpoint that is not there; a file brings its own. QLoRA, arXiv 2305.14314, appendix E, and the
# table of `dequantize_4bit`.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4_HALF = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
TABLES = {"nf4": _NF4, "fp4": (*_FP4_HALF, *(-x for x in _FP4_HALF))}


@dataclass(frozen=True)
class BitsAndBytes:
    """A `Method`. `kind`: nf4, fp4 or int8, as far as the configuration tells."""

    kind: str
    spared: tuple[str, ...] = ()
    method: str = "bitsandbytes"
    marks: tuple[str, ...] = (".weight.absmax", ".SCB")
    parts: tuple[str, ...] = (
        ".weight", ".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map", *_STATES,
        ".SCB", ".weight_format",
    )  # fmt: skip
    whole: str = ".weight"
    read_over: tuple[str, ...] = ()
    lm_head: bool = False

    def matrix(self, module: Module) -> tuple[TensorRef, Codes]:
        """See `Method.matrix`."""
        ref, module = module.need(".weight"), module.about(".weight")
        return self._int8(module, ref) if module.get(".SCB") is not None else self._table(module, ref)

    def _int8(self, module: Module, ref: TensorRef) -> tuple[TensorRef, Codes]:
        scb = module.need(".SCB")
        if ref.dtype != "I8" or len(ref.shape) != 2 or 0 in ref.shape:
            raise ModelError(f"{module.where} is {ref.dtype} of shape {quoted(ref.shape)}; an int8 matrix is needed")
        if scb.dtype != "F32" or scb.shape not in ((ref.shape[0],), (ref.shape[0], 1)):
            raise module.wrong(".SCB", f"float32 of shape {quoted(ref.shape[:1])}")
        if module.get(".weight_format") is not None and module.small(".weight_format").strip(b"\0"):
            raise ModelError(f"{module.where} has a weight_format other than row; save it by rows")
        return ref, Codes("bnb8", _INT8, {"scales": scb})

    def _table(self, module: Module, ref: TensorRef) -> tuple[TensorRef, Codes]:
        found = [part for part in _STATES if module.get(part) is not None]
        if len(found) != 1:
            raise ModelError(f"{module.where} has {len(found)} quant_state beside it; one, of nf4 or fp4, is needed")
        state = parse_json_object(module.small(found[0]), f"the quant_state of {module.where}")
        n, k = _shape(module, state.get("shape"))
        block = _block(module, state, "blocksize")
        blocks = -(-n * k // block)
        if ref.dtype not in _STORAGE or ref.nbytes != -(-n * k // 2):
            raise ModelError(
                f"{module.where} has {ref.nbytes} bytes of {ref.dtype}; two codes a byte of {n} x {k} are needed"
            )
        absmax, nested = module.need(".weight.absmax"), module.get(".weight.nested_absmax")
        parts = {"absmax": absmax, "table": module.need(".weight.quant_map")}
        numbers = {"block": float(block), "nested_block": 1.0, "nested_offset": 0.0}
        if absmax.shape != (blocks,) or absmax.dtype != ("F32" if nested is None else "U8"):
            kind = "float32" if nested is None else "bytes"
            raise module.wrong(".weight.absmax", f"{kind}, one for each of {blocks} blocks of {block},")
        if nested is not None:
            per, offset = _block(module, state, "nested_blocksize"), state.get("nested_offset")
            if nested.dtype != "F32" or nested.shape != (-(-blocks // per),):
                raise module.wrong(".weight.nested_absmax", f"float32, one for each {per} of {blocks} blocks,")
            if not isinstance(offset, (int, float)) or isinstance(offset, bool) or not abs(offset) < 1e30:
                raise ModelError(f"{module.where} has the nested_offset {quoted(offset)}; a number is needed")
            table = module.need(".weight.nested_quant_map")
            if table.dtype != "F32" or table.shape != (256,):
                raise module.wrong(".weight.nested_quant_map", "256 float32")
            parts |= {"nested_absmax": nested, "nested_table": table}
            numbers |= {"nested_block": float(per), "nested_offset": float(offset)}
        format = _format(_values(module), block) if k % block == 0 else plain("float32")
        return replace(ref, dtype="U8", shape=(n, k)), Codes("bnb4", format, parts, numbers)

    def expected(self, stored: str, shape: tuple[int, int]) -> MatrixFormat | None:
        """See `Method.expected`."""
        if is_spared(stored, self.spared) or (self.kind != "int8" and shape[1] % 64):
            return None
        return _INT8 if self.kind == "int8" else _format(TABLES[self.kind], 64)


def _format(table: tuple[float, ...], block: int) -> MatrixFormat:
    return MatrixFormat("table", 4, (Shared("float32", 1, block),), table=table)


def _values(module: Module) -> tuple[float, ...]:
    """The table of a file."""
    part = ".weight.quant_map"
    ref = module.need(part)
    if ref.dtype != "F32" or ref.shape != (16,):
        raise module.wrong(part, "16 float32")
    table = unpack("<16f", module.small(part))
    if not all(isfinite(x) and abs(x) < 1e30 for x in table):
        raise ModelError(f"{module.where} has a quant_map with NaN or infinity")
    return table


def _shape(module: Module, shape: object) -> tuple[int, int]:
    if not (isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 < n < 1 << 31 for n in shape)):
        raise ModelError(f"{module.where} has a quant_state of the shape {quoted(shape)}; that of a matrix is needed")
    assert prod(shape) < 1 << 62
    return shape[0], shape[1]


def _block(module: Module, state: dict[str, object], name: str) -> int:
    value = state.get(name)
    if type(value) is not int or value not in _BLOCKS:
        raise ModelError(f"{module.where} has the {name} {quoted(value)}; a power of two from 32 to 4096 is needed")
    return value


def read(settings: Settings) -> BitsAndBytes:
    settings.allow(_NOTES)
    eight = settings.flag("load_in_8bit", False) or settings.flag("_load_in_8bit", False)
    kind = "int8" if eight else settings.one_of("bnb_4bit_quant_type", ("fp4", "nf4"))
    return BitsAndBytes(kind, settings.names("llm_int8_skip_modules"))
