"""Adapters read: numbers of a PEFT folder, brought to the products of a model.

Sources: LoRA (Hu et al., arXiv 2106.09685); rank-stabilised scales (Kalajdzievski, 2312.03732); DoRA (Liu et al.,
2402.09353), whose norms of columns are worked out here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32, widen
from penstock.base.errors import ModelError, UnsupportedError
from penstock.base.hashing import digest
from penstock.core.adapter import UNIT_BYTES
from penstock.core.matrix_format import MatrixFormat
from penstock.core.model_spec import Attention, ModelSpec
from penstock.core.weight_map import Cut
from penstock.families.checkpoint import WeightRef
from penstock.families.quantization.gather import is_rows
from penstock.formats.files import quoted, read_exactly
from penstock.formats.peft import PeftFolder, PeftModule, read_peft
from penstock.formats.tensor_ref import TensorRef
from penstock.ops.adapter_units import UnitShape
from penstock.ops.adapters import LowRank
from penstock.ops.stored import StoredMatrix
from penstock.weights.coded_adapters import bias_of, check_coded, coded_part
from penstock.weights.load import rows_of

Array = npt.NDArray[Any]
_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_CHUNK = 256  # rows of a base weight whose norms are worked out at a time


class Site(NamedTuple):
    """A product of the model that is all or a part of a module: `rows` of what the module gives make it, of all
    `outputs`; it has `inputs`. `format`: of its weight, if that is codes."""

    weight: str
    rows: npt.NDArray[np.int64] | None
    outputs: int
    inputs: int
    format: MatrixFormat | None = None


Sites = Mapping[str, list[Site]]
"""Module, as the base's files name it -> the products that it is."""


class AdapterFacts(NamedTuple):
    """What is known of an adapter before it is in memory."""

    hash: bytes
    rank: int
    num_bytes: int
    modules: tuple[str, ...]
    num_units: int
    """At most, see `ops.adapter_units`; codes count as their bytes."""


def sites_of(weights: Mapping[str, WeightRef], products: Mapping[str, tuple[int, int]]) -> dict[str, list[Site]]:
    """`weights`: of a checkpoint; `products`: `model.adapted.adaptable`. Parts that are not rows are left out."""
    found: dict[str, list[Site]] = {}
    for name, (rows, cols) in products.items():
        ref = weights.get(name)
        if ref is None:
            continue
        module = ref.tensor.name.rpartition(".")[0]
        whole, chosen = ref.tensor.shape, None
        if ref.cut is not None:
            own = _rows(ref.cut)
            if own is None or len(own) != rows:
                continue
            whole = (whole[1], whole[0]) if _is_turned(ref.cut) else whole
            chosen = own
        outputs = whole[0] if len(whole) == 2 else rows
        found.setdefault(module, []).append(Site(name, chosen, outputs, cols, ref.stored))
    return found


_GGUF_NAMES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def model_sites(
    weights: Mapping[str, WeightRef], spec: ModelSpec, products: Mapping[str, tuple[int, int]]
) -> dict[str, list[Site]]:
    """`sites_of`; of a GGUF file, which has names of its own, under those that its layers have elsewhere, and where
    it has rows of queries and keys in another order, in that."""
    plain: dict[str, WeightRef] = {}
    turned: dict[str, npt.NDArray[np.int64]] = {}
    for name, ref in weights.items():
        words = name.split(".")
        own = _GGUF_NAMES.get(words[2]) if len(words) == 3 and words[0] == "layers" else None
        if own is not None and ref.tensor.name.startswith("blk.") and ref.cut is None:
            if words[2] in ("q", "k") and (heads := _turned_heads(spec, int(words[1]))) is not None:
                turned[name] = np.arange(ref.tensor.shape[0]).reshape(heads[words[2]], 2, -1).swapaxes(1, 2).reshape(-1)
            tensor = replace(ref.tensor, name=f"model.layers.{words[1]}.{own}.weight")
            ref = replace(ref, tensor=tensor)
        plain[name] = ref
    found = sites_of(plain, products)
    if not turned:
        return found
    return {
        m: [s._replace(rows=turned[s.weight]) if s.weight in turned else s for s in own] for m, own in found.items()
    }


def _turned_heads(spec: ModelSpec, layer: int) -> dict[str, int] | None:
    """Heads of a layer in whose GGUF file rotary pairs, halves of a head before, are neighbours. Other families than
    these have them so themselves."""
    mixer = spec.layers[layer].mixer
    if not isinstance(mixer, Attention) or mixer.rope is None or not mixer.rope.interleaved:
        return None
    return {"q": mixer.num_heads, "k": mixer.num_kv_heads} if spec.family in ("llama", "mixtral") else None


def _is_turned(cut: Cut) -> bool:
    """Whether the file has [in, out] (GPT-2's Conv1D)."""
    return cut.axes == (1, 0) and not cut.view and len(cut.shape) == 2


def _rows(cut: Cut) -> npt.NDArray[np.int64] | None:
    if _is_turned(cut):
        takes = (*cut.take, *[(0, n) for n in cut.shape[len(cut.take) :]])
        inputs, outputs = takes
        if inputs != (0, cut.shape[0]) or isinstance(outputs, int):
            return None
        return np.arange(cut.shape[1])[slice(*outputs)]
    return rows_of(cut) if is_rows(cut) else None


def adapter_facts(
    folder: Path, sites: Sites, *, max_rank: int, max_bytes: int | None, codes: bool = True
) -> AdapterFacts:  # fmt: skip
    """Reads and checks all of a folder. `max_bytes`: that it may have; None: any number. `codes`: those of codes run.

    Raises: ModelError, UnsupportedError."""
    found = _checked(folder, sites, max_rank, max_bytes)
    if found.kind != "LORA" and not codes:
        raise UnsupportedError(f"{quoted(folder)}: deltas and sets of scales run on the CPU's own kernels and the "
                               "reference; use device cpu")  # fmt: skip
    for module in found.modules.values():
        for role, tensor in module.tensors.items():
            if role != "codes":
                _numbers(tensor)
    units = _num_units(found, sites)
    return AdapterFacts(content_hash(found), found.max_rank, found.num_bytes, tuple(found.modules), units)


def _num_units(found: PeftFolder, sites: Sites) -> int:
    if found.kind != "LORA":
        return -(-found.num_bytes // UNIT_BYTES)
    total = 0
    for name, module in found.modules.items():
        roles = module.tensors
        rank = roles["a"].shape[0] if "a" in roles else 0
        types = {roles[role].dtype for role in ("a", "b") if role in roles}
        wide = "magnitude" in roles or len(types) != 1 or types == {"F32"}
        for site in module_sites(sites, name):
            shape = UnitShape.of(
                site.outputs if site.rows is None else len(site.rows), site.inputs, rank, 4 if wide else 2,
                gain="magnitude" in roles, shift=bool({"magnitude", "bias", "b_bias"} & set(roles)),
            )  # fmt: skip
            total += shape.num_units
    return total


def content_hash(found: PeftFolder) -> bytes:
    """Of all that decides what an adapter does: tensors, types, factors. Not of its name or path."""
    parts: list[bytes] = [] if found.kind == "LORA" else [f"{found.kind} {found.bits} {found.group}".encode()]
    for name, module in sorted(found.modules.items()):
        parts.append(msgspec.msgpack.encode((name, module.factor)))
        for role, t in sorted(module.tensors.items()):
            parts += [f"{role} {t.dtype} {t.shape}".encode(), read_exactly(t.path, t.offset, t.nbytes)]
    return digest(b"adapter", *parts)


def load_adapter(
    folder: Path, sites: Sites, base: Callable[[str], F32], *, hash: bytes, max_rank: int, max_bytes: int | None,
    codes: Callable[[str], StoredMatrix | None] | None = None,
) -> dict[str, LowRank]:  # fmt: skip
    """Weight -> what the adapter does to its product. `base(name)`: a weight of the model as float32, asked for by DoRA
    and biases; None from it for a bias that is none is an error of the folder. `codes(name)`: a weight as codes, which
    scale sets ask for.

    Raises: ModelError if the folder is not what `hash` says any more, and as `adapter_facts`.
    """
    found = _checked(folder, sites, max_rank, max_bytes)
    if content_hash(found) != hash:
        raise ModelError(f"{quoted(folder)} has changed since it was loaded; load it again, under a name of its own")
    out: dict[str, LowRank] = {}
    for name, module in found.modules.items():
        if found.kind != "LORA":
            for site in module_sites(sites, name):
                out[site.weight] = coded_part(found, module, site, base, codes)
            continue
        numbers = {role: _numbers(t) for role, t in module.tensors.items()}
        for site in module_sites(sites, name):
            out[site.weight] = _part(module, numbers, site, base, f"module {quoted(name)} of {quoted(folder)}")
    return out


def module_sites(sites: Sites, module: str) -> list[Site]:
    """By the whole path, or by one that ends in the other: checkpoints differ in what stands in front."""
    if module in sites:
        return sites[module]
    near = [own for own in sites if own.endswith("." + module) or module.endswith("." + own)]
    return sites[near[0]] if len(near) == 1 else []


def _checked(folder: Path, sites: Sites, max_rank: int, max_bytes: int | None) -> PeftFolder:
    found = read_peft(folder)
    if found.max_rank > max_rank:
        raise ModelError(f"{quoted(folder)} has rank {found.max_rank}; max_lora_rank is {max_rank}: raise it")
    if max_bytes is not None and found.num_bytes > max_bytes:
        raise ModelError(f"{quoted(folder)} has {found.num_bytes} bytes; lora_memory allows {max_bytes}: raise it")
    for name, module in found.modules.items():
        own = module_sites(sites, name)
        if not own:
            raise UnsupportedError(
                f"{quoted(folder)} adapts {quoted(name)}, which is no product of a layer of this model: embeddings, "
                f"output heads, norms and experts are not adapted{_other_base(found)}"
            )
        for site in own if found.kind != "LORA" else ():
            check_coded(found, name, module, site, _other_base(found))
        if found.kind == "LORA":
            _check_shapes(found, name, module, own[0])
    return found


def _other_base(found: PeftFolder) -> str:
    return f" (it says that it was made for {quoted(found.base)})" if found.base else ""


def _check_shapes(found: PeftFolder, name: str, module: PeftModule, site: Site) -> None:
    for role, t in module.tensors.items():
        if t.dtype not in _TYPES:
            raise UnsupportedError(f"tensor {quoted(t.name)} is {t.dtype}; F32, F16 and BF16 are read")
        wanted = {"a": (t.shape[0], site.inputs), "b": (site.outputs, t.shape[-1])}.get(role, (site.outputs,))
        shape = t.shape if role in ("a", "b") else t.shape[-1:]
        if shape != wanted or len(t.shape) > 2:
            raise ModelError(
                f"tensor {quoted(t.name)} has the shape {list(t.shape)}, and this model's {name} needs {list(wanted)}: "
                f"the adapter was made for another base{_other_base(found)}"
            )


def _numbers(t: TensorRef) -> Array:
    """As they are stored. Raises: ModelError for NaN and infinity."""
    out = np.frombuffer(read_exactly(t.path, t.offset, t.nbytes), _TYPES[t.dtype]).reshape(t.shape)
    if not np.isfinite(_wide(out)).all():
        raise ModelError(f"tensor {quoted(t.name)} of {quoted(t.path)} holds NaN or infinity")
    return out


def _wide(x: Array) -> F32:
    return widen(x) if x.dtype == np.uint16 else x.astype(np.float32)


def _part(
    module: PeftModule, numbers: Mapping[str, Array], site: Site, base: Callable[[str], F32], where: str
) -> LowRank:
    def own(x: Array) -> Array:
        return x if site.rows is None else x[site.rows]

    a = numbers.get("a", np.zeros((0, site.inputs), np.float32))
    b = own(numbers["b"]) if "b" in numbers else np.zeros((len(own(np.empty(site.outputs))), 0), np.float32)
    if a.dtype != b.dtype:
        a, b = _wide(a), _wide(b)
    gain: F32 | None = None
    shift: F32 | None = None
    bias = bias_of(base, site.weight) if {"magnitude", "bias"} & set(numbers) else None
    if "bias" in numbers:
        if bias is None:
            raise ModelError(f"{where} brings a bias, and the model has none there")
        shift = _wide(own(numbers["bias"])) - bias
    if "magnitude" in numbers:
        a, b = _wide(a), _wide(b)
        gain = _wide(own(numbers["magnitude"].reshape(-1))) / _norms(base(site.weight), a, b, module.factor)
        if not np.isfinite(gain).all():
            raise ModelError(f"{where} has outputs whose weights, with the adapter, are all zero: DoRA divides by them")
        b = b * gain[:, None]
        if bias is not None:  # what is scaled is the product, not its bias
            rest = bias * (1 - gain)
            shift = rest if shift is None else shift + rest
    if "b_bias" in numbers:
        more = np.float32(module.factor) * _wide(own(numbers["b_bias"]))
        more = more if gain is None else more * gain
        shift = more if shift is None else shift + more
    return LowRank(np.ascontiguousarray(a), np.ascontiguousarray(b), module.factor, gain, shift)


def _norms(weight: F32, a: F32, b: F32, factor: float) -> F32:
    """Of each output's weights with the adapter, [N]."""
    out = np.empty(len(weight), np.float32)
    for lo in range(0, len(weight), _CHUNK):
        rows = weight[lo : lo + _CHUNK] + np.float32(factor) * (b[lo : lo + _CHUNK] @ a)
        out[lo : lo + _CHUNK] = np.linalg.norm(rows, axis=1)
    return out
