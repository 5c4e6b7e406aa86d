"""compressed-tensors: integers in words, int8, FP8, NVFP4, MXFP4 and MXFP8, several of them in one checkpoint.

How a matrix is stored is seen by its tensors, so that the patterns of `targets` and `ignore`, a stranger's, are never
run; bits, groups and blocks must be among those that `config_groups` names. What `input_activations` asks for is not
done: activations are computed as Penstock computes them. Source: github.com/vllm-project/compressed-tensors 0.20.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from penstock.base.errors import ModelError
from penstock.core.matrix_format import MatrixFormat, Shared
from penstock.families.checkpoint import Codes
from penstock.families.quantization.method import ACTIVATIONS, Module, whole_groups
from penstock.families.quantization.scaled import MXFP4, NVFP4, byte_matrix, fp4_matrix
from penstock.families.quantization.settings import Settings, is_spared
from penstock.formats.files import quoted
from penstock.formats.tensor_ref import TensorRef
from penstock.formats.words import num_words

_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense",
)  # fmt: skip
_BYTES = ("int-quantized", "naive-quantized")
"""Integers that are a byte each, not packed."""
_FIELDS = {
    "quant_method", "format", "config_groups", "ignore", "quantization_status", "kv_cache_scheme", "sparsity_config",
    "global_compression_ratio", "version", "transform_config", "quantization_version", "run_compressed", "dequantize",
    "use_optimized_inference",
}  # fmt: skip
_WEIGHTS = {
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder", "scale_dtype",
    "zp_dtype", "observer", "observer_kwargs",
}  # fmt: skip
_BITS = (2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class ConfigGroup:
    """One of `config_groups`. `format`: what a matrix of it becomes, its scales in bfloat16; `packed`: in words."""

    targets: tuple[str, ...]
    format: MatrixFormat
    packed: bool


@dataclass(frozen=True)
class CompressedTensors:
    """A `Method`."""

    schemes: tuple[ConfigGroup, ...]
    where: str
    spared: tuple[str, ...] = ()
    lm_head: bool = True
    method: str = "compressed-tensors"
    marks: tuple[str, ...] = (".weight_packed", ".weight_scale")
    parts: tuple[str, ...] = (
        ".weight", ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx",
        ".weight_global_scale",
    )  # fmt: skip
    whole: str = ".weight"
    read_over: tuple[str, ...] = ACTIVATIONS

    def matrix(self, module: Module) -> tuple[TensorRef, Codes]:
        """See `Method.matrix`."""
        packed = module.get(".weight_packed")
        if packed is None:
            blocks = [(s.format.scales[0].rows, s.format.scales[0].columns) for s in self.schemes]
            return byte_matrix(
                module, ".weight", ".weight_scale", [b for b in dict.fromkeys(blocks) if b[1]], ".weight_zero_point"
            )
        if module.get(".weight") is not None:
            raise ModelError(f"{module.where} is beside weight_packed and weight, two of one matrix: leave one out")
        module = module.about(".weight_packed")
        if packed.dtype == "U8":
            return fp4_matrix(module, ".weight_packed", ".weight_scale", ".weight_global_scale", divides=True)
        return self._words(module, packed)

    def _words(self, module: Module, words: TensorRef) -> tuple[TensorRef, Codes]:
        if words.dtype != "I32" or len(words.shape) != 2 or 0 in words.shape:
            raise ModelError(
                f"{module.where} is {words.dtype} of shape {quoted(words.shape)}; int32 words of a matrix are needed"
            )
        n, width = words.shape
        k = self._inputs(module, n)
        found = [
            (s.format.bits, dense)
            for s in self.schemes
            for dense in (True, False)
            if s.packed and (k is None or num_words(k, s.format.bits, dense) == width)
        ]
        if not found:
            known = sorted({s.format.bits for s in self.schemes if s.packed})
            raise ModelError(
                f"{module.where} has rows of {width} words, but {k} inputs (weight_shape) take another number at the "
                f"{', '.join(map(str, known)) or 'none'} bits that {self.where} names"
            )
        bits, dense = found[0]
        k = width * 32 // bits if k is None else k
        scales = module.need(".weight_scale")
        group, shared = self._group(module, scales.shape, n, k)
        dtype = module.scale_dtype(".weight_scale")
        parts, zeros = {"scales": scales}, module.get(".weight_zero_point")
        if zeros is not None:
            unpacked = zeros.dtype == "I8" and zeros.shape == scales.shape
            wanted = (num_words(n, bits, dense), k // group if group else 1)
            if not shared.rows or not (unpacked or (zeros.dtype == "I32" and zeros.shape == wanted)):
                raise module.wrong(".weight_zero_point", f"int32 words of shape {quoted(wanted)}")
            parts["zeros"] = zeros
        order = module.get(".weight_g_idx")
        if order is not None:
            if order.dtype != "I32" or order.shape != (k,):
                raise module.wrong(".weight_g_idx", f"int32 of shape {quoted((k,))}")
            parts["order"] = order
        symmetric = zeros is None
        zero_dtype = "int8" if zeros is not None and zeros.dtype == "I8" else f"uint{bits}"
        format = MatrixFormat(
            "uint", bits, (replace_dtype(shared, dtype),), () if symmetric else (replace_dtype(shared, zero_dtype),),
            offset=1 << bits - 1 if symmetric else 0,
            ordered=order is not None and bool(group) and any(s.format.ordered for s in self.schemes),
        )  # fmt: skip
        return replace(words, shape=(n, k)), Codes("packed", format, parts, {"dense": float(dense)})

    def _inputs(self, module: Module, n: int) -> int | None:
        """K as `weight_shape` says, None if there is none."""
        ref = module.get(".weight_shape")
        if ref is None:
            return None
        if ref.dtype not in ("I64", "I32") or ref.shape != (2,):
            raise module.wrong(".weight_shape", "two integers")
        raw = module.small(".weight_shape")
        sizes = [int.from_bytes(raw[i : i + len(raw) // 2], "little", signed=True) for i in (0, len(raw) // 2)]
        if sizes[0] != n or not 0 < sizes[1] < 1 << 31:
            raise ModelError(f"{module.where} has {n} rows, but its weight_shape says {sizes[0]} x {sizes[1]}")
        return sizes[1]

    def _group(self, module: Module, scales: tuple[int, ...], n: int, k: int) -> tuple[int, Shared]:
        """Inputs that share a scale (0: all), and what does."""
        if scales in ((1,), ()) and n > 1:
            return 0, Shared("float32", 0, 0)
        if scales in ((n, 1), (n,)):
            return 0, Shared("float32", 1, 0)
        for group in dict.fromkeys(s.format.group for s in self.schemes if s.packed and s.format.group):
            if k % group == 0 and scales == (n, k // group):
                return group, Shared("float32", 1, group)
        groups = ", ".join(str(s.format.group or "all") for s in self.schemes if s.packed)
        raise module.wrong(".weight_scale", f"one for each group of {groups} inputs of a matrix of {n} x {k}")

    def expected(self, stored: str, shape: tuple[int, int]) -> MatrixFormat | None:
        """See `Method.expected`."""
        if is_spared(stored, self.spared):
            return None
        named = (s for s in self.schemes if is_spared(stored, s.targets))
        scheme = next(named, None) or next((s for s in self.schemes if "Linear" in s.targets), None)
        if scheme is None:
            return None
        format = scheme.format
        if scheme.packed and whole_groups(stored, shape[1], format.group) != format.group:  # one group of all inputs
            (scale,) = format.scales
            zeros = tuple(replace_dtype(Shared("", 1, 0), zero.dtype) for zero in format.zeros)
            format = MatrixFormat(
                format.code, format.bits, (Shared(scale.dtype, 1, 0),), zeros, offset=format.offset
            )  # fmt: skip
        return format


def replace_dtype(shared: Shared, dtype: str) -> Shared:
    return Shared(dtype, shared.rows, shared.columns)


def read(settings: Settings) -> CompressedTensors:
    settings.allow(_FIELDS)
    settings.one_of("format", _FORMATS)
    sparsity = settings.given.get("sparsity_config")
    if sparsity and settings.inner(sparsity, "sparsity_config").given.get("format", "dense") != "dense":
        raise settings.refused("sparsity_config, of weights of which only some are stored; save them dense")
    if settings.given.get("transform_config"):
        raise settings.refused("transform_config, which changes what the model computes")
    groups = settings.inner(settings.given.get("config_groups") or {}, "config_groups").given
    schemes = tuple(
        scheme for name, given in groups.items() if (scheme := _scheme(settings, f"group {name!s:.40}", given))
    )
    return CompressedTensors(schemes, settings.where, settings.names("ignore"))


def _scheme(settings: Settings, name: str, given: object) -> ConfigGroup | None:
    """None for a group whose weights stay as they were."""
    group = settings.inner(given, name)
    group.allow({"targets", "weights", "input_activations", "output_activations", "format"})
    group.one_of("format", (None, *_FORMATS))
    if group.given.get("weights") is None:
        return None
    weights = group.inner(group.given["weights"], "weights")
    weights.allow(_WEIGHTS)
    kind = weights.one_of("type", ("int", "float"))
    bits = weights.bits(_BITS if kind == "int" else (4, 8), "num_bits")
    strategy = weights.get("strategy")
    size = weights.get("group_size")
    columns = 0 if size is None else weights.group("group_size")
    if strategy not in (None, "tensor", "channel", "group", "block", "tensor_group"):
        raise weights.refused(f"strategy {strategy!s:.40}; tensor, channel, group, block and tensor_group are read")
    tensor = strategy == "tensor" or (strategy is None and size is None)
    shared = Shared("bfloat16", 0, 0) if tensor else Shared("bfloat16", 1, columns)
    if strategy == "block":
        shared = Shared("bfloat16", *_block(weights))
    packed = kind == "int" and (group.get("format") or settings.get("format")) not in _BYTES
    if kind == "float":
        if bits == 4:
            format = NVFP4 if columns == 16 else MXFP4
            if columns not in (16, 32):
                raise weights.refused(f"group_size {size!s:.40}; FP4 has groups of 16 or 32")
        else:
            format = MatrixFormat("e4m3", 8, (replace_dtype(shared, "e8m0") if columns == 32 else shared,))
    else:
        symmetric = weights.flag("symmetric", True)
        zeros = () if symmetric else (replace_dtype(shared, f"uint{bits}" if packed else "int8"),)
        ordered = weights.get("actorder") in ("group", "dynamic") and bool(columns)
        format = MatrixFormat(
            "uint" if packed else "int", bits, (shared,), zeros,
            offset=1 << bits - 1 if packed and symmetric else 0, ordered=ordered,
        )  # fmt: skip
    return ConfigGroup(group.names("targets"), format, packed)


def _block(weights: Settings) -> tuple[int, int]:
    value: Any = weights.get("block_structure")
    if isinstance(value, str):
        value = [int(n) if n.isdecimal() and len(n) < 10 else 0 for n in value.split("x")]
    if not (isinstance(value, list) and len(value) == 2 and all(type(n) is int and 0 < n < 1 << 31 for n in value)):
        raise weights.refused(f"block_structure {value!s:.40}; two numbers are needed, rows and columns")
    return value[0], value[1]
