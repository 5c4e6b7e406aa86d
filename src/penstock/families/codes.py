"""Hugging Face folders whose matrices are integer codes, GPTQ and AWQ: what config.json says, whose tensor is whose.

A matrix `x.weight` [N, K] is stored as `x.qweight` with `x.scales`, `x.qzeros` and, of GPTQ, `x.g_idx`; the rule is the
same for every family. Source: `qlinear_cuda.py` of github.com/AutoGPTQ/AutoGPTQ, `gemm.py` of github.com/casper-hansen/
AutoAWQ, and `GPTQConfig`, `AwqConfig` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.matrix_format import MatrixFormat, Shared, rounded_matrices
from penstock.core.model_spec import ModelSpec
from penstock.core.weight_map import Cut, Take, WeightMap
from penstock.families.checkpoint import LOADABLE_DTYPES, WORD_DTYPES, Codes, WeightRef
from penstock.formats.files import quoted, read_exactly
from penstock.formats.tensor_ref import TensorRef

_WHERE = "quantization_config of config.json"
_FIELDS = {
    "gptq": {"bits", "group_size", "desc_act", "sym", "checkpoint_format", "format", "lm_head", "dynamic",
             "is_marlin_format", "adapter", "rotation", "activation", "pack_dtype"},
    "awq": {"bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "checkpoint_format", "format",
            "modules_to_not_convert", "lm_head", "pack_dtype", "sym"},
}  # fmt: skip
"""Fields that say what is stored, and how."""
_NOTES = {
    "quant_method", "method", "meta", "gptaq", "foem", "hessian", "mock_quantization", "damp_percent",
    "damp_auto_increment", "true_sequential", "static_groups", "mse", "act_group_aware", "model_name_or_path",
    "model_file_base_name", "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "cache_block_outputs", "dataset", "tokenizer", "batch_size", "pad_token_id",
    "max_input_length", "use_exllama", "use_cuda_fp16", "disable_exllama", "exllama_config", "backend", "device",
    "parallel_packing", "hyb_act", "quantizer", "do_fuse", "fuse_max_seq_len", "modules_to_fuse",
    "export_compatible",
}  # fmt: skip
"""Fields about how the codes were found, or which kernels others use."""


@dataclass(frozen=True)
class CodesConfig:
    """What a `quantization_config` says of all matrices. `group`: inputs that share a scale, 0 for all of them.

    `by_shape`: some matrices have other bits or groups, told by their tensors. `spared`: parts of names of modules that
    are stored as they are; `lm_head`: the output matrix is not.
    """

    method: str
    bits: int
    group: int
    ordered: bool = False
    symmetric: bool = False
    first_zero: int = 0
    by_shape: bool = False
    lm_head: bool = False
    spared: tuple[str, ...] = ()

    def format(self, bits: int, group: int, scale: str = "float16") -> MatrixFormat:
        """Of codes that are read; a group of all inputs has no order."""
        zeros = () if self.symmetric else (Shared(f"uint{bits}", 1, group),)
        return MatrixFormat(
            "uint", bits, (Shared(scale, 1, group),), zeros, offset=1 << bits - 1 if self.symmetric else 0,
            ordered=self.ordered and group != 0,
        )  # fmt: skip


def read_codes_config(quantization: object) -> CodesConfig | None:
    """None for a method that is none of these. Raises UnsupportedError for a kind that is not read, by its field."""
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") not in ("gptq", "awq"):
        return None
    method = str(quantization["quant_method"])
    known = _FIELDS[method] | _NOTES
    unknown = [name for name, value in quantization.items() if value and name not in known]
    if unknown:
        raise _refused(method, f"{unknown[0]!s:.40}, a field that is not known")
    return _gptq(quantization) if method == "gptq" else _awq(quantization)


def _gptq(given: Mapping[str, Any]) -> CodesConfig:
    bits, group = _sizes("gptq", given, ("bits",), ("group_size",), (4, 8))
    kind = given.get("checkpoint_format") or given.get("format") or "gptq"
    if kind not in ("gptq", "gptq_v2"):
        raise _refused("gptq", f"checkpoint_format {kind!s:.40}; gptq and gptq_v2 are read: convert it to one of them")
    if given.get("is_marlin_format"):
        raise _refused("gptq", "is_marlin_format; gptq and gptq_v2 are read: convert it to one of them")
    for name in ("adapter", "rotation", "activation"):
        if given.get(name):
            raise _refused("gptq", f"{name}, which changes what the model computes")
    return CodesConfig(
        "gptq",
        bits,
        group,
        ordered=_flag("gptq", given, "desc_act", False),
        symmetric=_flag("gptq", given, "sym", True),
        first_zero=1 if kind == "gptq" else 0,
        by_shape=_overrides(given.get("dynamic")),
        lm_head=_flag("gptq", given, "lm_head", False),
    )


def _overrides(dynamic: object) -> bool:
    """Whether some matrices have other bits or groups. Its patterns are never run: they are a stranger's."""
    if not dynamic:
        return False
    if not isinstance(dynamic, Mapping):
        raise _refused("gptq", "a dynamic that is no object of patterns")
    changes = [v for pattern, v in dynamic.items() if not str(pattern).startswith("-:")]
    for change in changes:
        names = list(change) if isinstance(change, Mapping) else ["no object"]
        other = next((name for name in names if name not in ("bits", "group_size")), None)
        if other is not None:
            raise _refused("gptq", f"dynamic with {other!s:.40}; bits and group_size may differ between matrices")
    return bool(changes)


def _awq(given: Mapping[str, Any]) -> CodesConfig:
    bits, group = _sizes("awq", given, ("bits", "w_bit"), ("group_size", "q_group_size"), (4,))
    kinds = (given.get(name) for name in ("version", "checkpoint_format", "format"))
    version = str(next((kind for kind in kinds if kind), "gemm")).lower()
    if version != "gemm":
        raise _refused("awq", f"version {version:.40}; the packing of gemm is read: save it with that version")
    if not _flag("awq", given, "zero_point", True):
        raise _refused("awq", "zero_point false; codes with zero points are read")
    spared = given.get("modules_to_not_convert") or []
    if not isinstance(spared, list) or not all(isinstance(name, str) and name for name in spared):
        raise _refused("awq", "modules_to_not_convert that is no list of names")
    return CodesConfig("awq", bits, group, lm_head=_flag("awq", given, "lm_head", False), spared=tuple(spared))


def _sizes(
    method: str, given: Mapping[str, Any], bits: tuple[str, ...], group: tuple[str, ...], known: tuple[int, ...]
) -> tuple[int, int]:
    if given.get("pack_dtype") not in (None, "int32"):
        raise _refused(method, f"pack_dtype {given['pack_dtype']!s:.40}; codes in int32 words are read")
    found = [next((given[n] for n in names if given.get(n) is not None), None) for names in (bits, group)]
    if type(found[0]) is not int or found[0] not in known:
        raise _refused(method, f"bits {found[0]!s:.40}; codes of {' and '.join(map(str, known))} bits are read")
    if type(found[1]) is not int or not (found[1] == -1 or 0 < found[1] < 1 << 31):
        raise _refused(method, f"group_size {found[1]!s:.40}; a number of inputs is needed, or -1 for all of them")
    return found[0], max(found[1], 0)


def _flag(method: str, given: Mapping[str, Any], name: str, default: bool) -> bool:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise _refused(method, f"{name} {value!s:.40}; true or false is needed")
    return default if value is None else value


def _refused(method: str, what: str) -> UnsupportedError:
    text = what if what.isprintable() else quoted(what)
    return UnsupportedError(f"the weights are quantised with the method {quoted(method)}, and {_WHERE} says {text}")


# --- tensors

_PARTS = ("scales", "qzeros", "g_idx")


def gather_codes(
    tensors: Mapping[str, TensorRef], config: CodesConfig
) -> tuple[dict[str, TensorRef], dict[str, Codes]]:
    """Tensors with each matrix of codes as one, called `x.weight`, of a type of WORD_DTYPES and the shape [N, K]; and
    what belongs to these, by that name.

    Raises ModelError for tensors that do not go together; nothing of them is read.
    """
    out, codes = dict(tensors), {}
    for name, words in tensors.items():
        stem = name.removesuffix(".qweight")
        if stem == name or stem + ".weight" in tensors:
            continue
        del out[name]
        parts = {part: out.pop(f"{stem}.{part}") for part in _PARTS if f"{stem}.{part}" in out}
        out[stem + ".weight"], codes[stem + ".weight"] = _matrix(words, parts, config)
    return out, codes


def _matrix(words: TensorRef, parts: Mapping[str, TensorRef], config: CodesConfig) -> tuple[TensorRef, Codes]:
    where = f"tensor {quoted(words.name)} of {quoted(words.path)}"
    scales, zeros, order = parts.get("scales"), parts.get("qzeros"), parts.get("g_idx")
    if scales is None or zeros is None:
        raise ModelError(f"{where} has no {'scales' if scales is None else 'qzeros'} beside it")
    if words.dtype != "I32" or len(words.shape) != 2 or 0 in words.shape or len(scales.shape) != 2:
        raise ModelError(f"{where} is {words.dtype} of shape {quoted(words.shape)}; int32 words of a matrix are needed")
    if config.method == "awq":
        bits, n, k = config.bits, words.shape[1] * 32 // config.bits, words.shape[0]
    else:
        bits = config.bits
        if config.by_shape and order is not None and order.shape[:1] != (words.shape[0] * 32 // bits,):
            bits = next((b for b in WORD_DTYPES if order.shape == (words.shape[0] * 32 // b,)), bits)
        n, k = words.shape[1], words.shape[0] * 32 // bits
    group = config.group
    if config.by_shape:
        group = k // scales.shape[0] if 1 < scales.shape[0] <= k else 0
    group = _whole(where, k, group)
    num_groups = k // group if group else 1
    wanted = {"scales": (num_groups, n), "qzeros": (num_groups, -(-n * bits // 32)), "g_idx": (k,)}
    for part, ref in parts.items():
        if ref.shape != wanted[part] or (part != "scales" and ref.dtype != "I32"):
            raise ModelError(
                f"{where} stands for a matrix of {n} x {k} in groups of {group or k}, but its {part} is {ref.dtype} of "
                f"shape {quoted(ref.shape)}; {wanted[part]} is needed"
            )
    if scales.dtype not in LOADABLE_DTYPES:
        raise ModelError(f"{where} has scales of type {scales.dtype}; {', '.join(LOADABLE_DTYPES)} are read")
    format = config.format(bits, group, LOADABLE_DTYPES[scales.dtype])
    if order is None and format.ordered:
        raise ModelError(f"{where} has no g_idx beside it, though {_WHERE} says desc_act")
    whole = replace(words, dtype=WORD_DTYPES[bits], shape=(n, k))
    found = {"scales": scales, "zeros": zeros} | ({} if order is None else {"order": order})
    return whole, Codes(config.method, format, found, {"first_zero": config.first_zero})


def _whole(where: str, inputs: int, group: int) -> int:
    """The group of a matrix with so many inputs, 0 for all of them. Raises ModelError unless it divides them."""
    if group and inputs % group:
        raise ModelError(f"{where} has {inputs} inputs (in_features), which are no multiple of the group_size {group}")
    return 0 if group == inputs else group


def drop_empty_biases(
    tensors: Mapping[str, TensorRef], codes: Mapping[str, Codes], wanted: set[str]
) -> dict[str, TensorRef]:
    """Without biases of zeros that the model has not: early tools wrote one beside every matrix of codes."""
    out = dict(tensors)
    for name in codes:
        bias = name.removesuffix("weight") + "bias"
        ref = out.get(bias)
        if ref is None or bias in wanted or ref.shape != tensors[name].shape[:1]:
            continue
        if not read_exactly(ref.path, ref.offset, ref.nbytes).strip(b"\0"):
            del out[bias]
    return out


def codes_ref(tensor: TensorRef, cut: Cut | None, codes: Codes) -> WeightRef:
    """The place of a weight in a matrix of codes. Always [N, K], though the model may keep it the other way round.

    Raises UnsupportedError for a part that is not a choice of rows.
    """
    if cut is not None and not cut.view and cut.axes == (1, 0) and len(cut.shape) == 2:
        rows, columns = cut.shape
        whole: tuple[Take, ...] = ((0, rows), (0, columns))
        row, column = (*cut.take, *whole[len(cut.take) :])
        cut = Cut(cut.name, (columns, rows), (column, row))
    if cut is not None and not is_rows(cut):
        raise UnsupportedError(f"tensor {quoted(tensor.name)} is stored as codes; a weight is no run of its outputs")
    return WeightRef(tensor, cut, codes=codes)


def is_rows(cut: Cut) -> bool:
    """Whether the part has whole rows of a matrix, in whatever order."""
    view = cut.view or cut.shape
    kept = len(view) - sum(isinstance(take, int) for take in cut.take)
    inputs = cut.take[len(view) - 1] if len(cut.take) == len(view) else (0, view[-1])
    return (
        len(cut.shape) == 2
        and view[-1] == cut.shape[1]
        and inputs == (0, view[-1])
        and (not cut.axes or cut.axes[-1] == kept - 1)
    )


def expected_codes(config: CodesConfig, spec: ModelSpec, places: WeightMap) -> dict[str, MatrixFormat]:
    """What a checkpoint that is not here stores as codes, as far as its config.json tells: for planning.

    Raises ModelError as `gather_codes` for inputs that fall into no whole groups.
    """
    out: dict[str, MatrixFormat] = {}
    for name, (_, k) in rounded_matrices(spec).items():  # what chooses experts is left alone by others, too
        place = places[name]
        stored = place.name if isinstance(place, Cut) else place
        if (name.startswith("layers.") or config.lm_head) and not any(part in stored for part in config.spared):
            out[name] = config.format(config.bits, _whole(stored, k, config.group))
    return out
