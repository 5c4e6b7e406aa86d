"""FP8 (E4M3): `x.weight` with `x.weight_scale_inv` of blocks, or with `x.weight_scale` of the matrix or of its outputs.

DeepSeek-V4 calls its scales `x.scale`, and has its experts in FP4 (`expert_dtype`): bytes of two codes with a power of
two for 32 inputs. NVIDIA's version has these in NVFP4 beside the rest in FP8 (`moe_quant_algo`), with the names of its
Model Optimizer.

Activations, which the originals round to 8 bits, too ("dynamic", or by a static `input_scale`), are computed as
Penstock computes them. Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.2; `FineGrainedFP8Config` and
`FbgemmFp8Config` of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.base.errors import ModelError
from penstock.core.matrix_format import MatrixFormat, Shared
from penstock.families.checkpoint import Codes
from penstock.families.quantization.method import ACTIVATIONS, Module
from penstock.families.quantization.scaled import MXFP4, NVFP4, Block, byte_matrix, fp4_matrix
from penstock.families.quantization.settings import Settings, is_spared
from penstock.formats.tensor_ref import TensorRef

_FIELDS = {
    "quant_method", "weight_block_size", "activation_scheme", "fmt", "scale_fmt", "modules_to_not_convert",
    "ignored_layers", "dequantize", "expert_dtype", "weight_per_tensor", "act_per_tensor",
}  # fmt: skip
_MIXED = {
    "quant_algo", "moe_quant_algo", "quantized_layers", "config_groups", "group_size", "ignore", "kv_cache_quant_algo",
    "producer",
}  # fmt: skip
"""Beside these, of experts that the Model Optimizer has stored another way."""
_EXPERTS = {"fp8": None, "fp4": MXFP4, "NVFP4": NVFP4}


@dataclass(frozen=True)
class Fp8:
    """A `Method`. `block`: what shares a scale, and `experts`: how routed experts are stored, if not so; both as far as
    the configuration tells."""

    method: str
    block: Block
    spared: tuple[str, ...] = ()
    marks: tuple[str, ...] = (".weight_scale_inv", ".weight_scale")
    parts: tuple[str, ...] = (".weight", ".weight_scale_inv", ".weight_scale")
    whole: str = ".weight"
    read_over: tuple[str, ...] = ACTIVATIONS
    lm_head: bool = False
    experts: MatrixFormat | None = None

    def matrix(self, module: Module) -> tuple[TensorRef, Codes]:
        """See `Method.matrix`."""
        if sum(module.get(mark) is not None for mark in self.marks) > 1:
            raise ModelError(
                f"{module.where} is beside weight_scale_inv and weight_scale, of one matrix: leave one out"
            )
        if self.experts is not None and module.need(".weight").dtype in ("I8", "U8"):
            return fp4_matrix(module, ".weight", module.subject, ".weight_scale_2" if self.experts == NVFP4 else "")
        return byte_matrix(module, ".weight", module.subject, [self.block] if self.block[1] else [])

    def expected(self, stored: str, shape: tuple[int, int]) -> MatrixFormat | None:
        """See `Method.expected`."""
        if is_spared(stored, self.spared):
            return None
        if self.experts is not None and ".experts." in stored:
            return self.experts
        return MatrixFormat("e4m3", 8, (Shared("float32", *self.block),))


def read(settings: Settings) -> Fp8:
    mixed = settings.given.get("moe_quant_algo") is not None
    settings.allow(_FIELDS | _MIXED if mixed else _FIELDS)
    settings.one_of("activation_scheme", ("dynamic", "static"))
    settings.one_of("fmt", ("e4m3", "float8_e4m3fn"))
    powers = settings.one_of("scale_fmt", ("float", "ue8m0")) == "ue8m0"
    experts = settings.one_of("expert_dtype", ("fp8", "fp4"))
    if mixed:
        settings.one_of("quant_algo", ("MIXED_PRECISION",))
        experts = settings.one_of("moe_quant_algo", ("NVFP4",))
    size = settings.given.get("weight_block_size")
    if size is not None and not (isinstance(size, list) and len(size) == 2 and all(_is_size(n) for n in size)):
        raise settings.refused(f"weight_block_size {size!s:.40}; two numbers are needed, rows and columns")
    block = (0, 0) if size is None else (size[0], size[1])
    method = Fp8("fp8", block, settings.names("modules_to_not_convert", "ignored_layers"), experts=_EXPERTS[experts])
    if not powers:
        return method
    # "ue8m0" says that scales are powers of two; only files that call them `scale` keep them as such.
    more = (".weight_scale_2",) if mixed else ()
    return replace(method, marks=(*method.marks, ".scale"), parts=(*method.parts, ".scale", *more))


def read_fbgemm(settings: Settings) -> Fp8:
    settings.allow({"quant_method", "activation_scale_ub", "modules_to_not_convert"})
    return Fp8("fbgemm_fp8", (1, 0), settings.names("modules_to_not_convert"))


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 31
