"""Adapter folders as PEFT writes them: adapter_config.json and the header of adapter_model.safetensors; and folders of
scale sets and deltas, which have the same two files (docs/concepts/adapters.md).

Source: github.com/huggingface/peft, `LoraConfig` and `save_pretrained`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.base.errors import ModelError, UnsupportedError
from penstock.formats.files import quoted
from penstock.formats.json_file import read_json_object
from penstock.formats.safetensors import read_safetensors
from penstock.formats.tensor_ref import TensorRef

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
CONFIG_LIMIT_BYTES = 1 << 20
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_PREFIX = "base_model.model."
_ENDS = {
    ".lora_A.weight": "a", ".lora_B.weight": "b", ".lora_B.bias": "b_bias", ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude", ".base_layer.bias": "bias", ".bias": "bias",
}  # fmt: skip
_STARTS_OVER = {True, False, "gaussian", "orthogonal", "eva"}
"""Values of `init_lora_weights` that leave the base as it is."""
_NO_PLACE = {
    "modules_to_save": "whole modules beside the low-rank parts; save an adapter without them, or merge it",
    "layer_replication": "layers that stand several times; merge it into a model",
    "target_parameters": "parameters of experts, which are not products of their own here",
    "trainable_token_indices": "rows of the embedding, which every request shares",
    "alora_invocation_tokens": "an adapter that begins in the middle of a prompt",
    "megatron_config": "a model of Megatron's, whose names differ",
}
_PATTERN = re.compile(r"[\w.-]+\Z")
_MAX_PATTERN = 300


SCALES, DELTA = "PEQA", "DELTA"
BITS, DELTA_GROUPS = (1, 2, 4, 8), (0, 32, 64, 128)
"""Of the codes of a delta, and inputs that share a scale there; 0: all of a row."""
_CODED_ROLES = {SCALES: ("scales",), DELTA: ("codes", "scales", "bias")}


class PeftModule(NamedTuple):
    """One adapted module: its tensors by role (a, b, b_bias, magnitude, bias; scales; codes, scales, bias), and what A
    and B are multiplied by."""

    tensors: dict[str, TensorRef]
    factor: float


class PeftFolder(NamedTuple):
    """`modules` by their path in the base model; `base` is what the adapter says it was made for."""

    path: Path
    base: str
    max_rank: int
    modules: dict[str, PeftModule]
    kind: str = "LORA"
    bits: int = 0
    group: int = 0
    """Of a delta."""

    @property
    def num_bytes(self) -> int:
        """In memory, where codes of one bit take two."""
        tensors = [item for module in self.modules.values() for item in module.tensors.items()]
        return sum(t.nbytes * (2 if role == "codes" and self.bits == 1 else 1) for role, t in tensors)


def read_peft(path: Path) -> PeftFolder:
    """What a folder holds, its numbers unread. Raises: ModelError, UnsupportedError, in one sentence."""
    if not path.is_dir():
        raise ModelError(f"{quoted(path)} is no folder; an adapter is one with {CONFIG_NAME} and {WEIGHTS_NAME}")
    config = read_json_object(path / CONFIG_NAME, CONFIG_LIMIT_BYTES)
    kind = config.get("peft_type")
    if kind not in _CODED_ROLES:
        _check_kind(path, config)
    weights = path / WEIGHTS_NAME
    if not weights.exists():
        pickled = next((name for name in _PICKLES if (path / name).exists()), None)
        if pickled is not None:
            raise ModelError(
                f"{quoted(path)} has its weights in {pickled}, a pickle, which can run any code and is not read: "
                f"save it as {WEIGHTS_NAME}"
            )
        raise ModelError(f"{quoted(path)} has no {WEIGHTS_NAME}")
    if kind in _CODED_ROLES:
        return _read_coded(path, config, kind, read_safetensors(weights))
    found: dict[str, dict[str, TensorRef]] = {}
    for name, tensor in read_safetensors(weights).items():
        module, role = _role(path, name)
        found.setdefault(module, {})[role] = tensor
    modules = {name: _module(path, config, name, tensors) for name, tensors in sorted(found.items())}
    if not any("a" in m.tensors for m in modules.values()):
        raise ModelError(f"{quoted(weights)} has no low-rank pair: no tensor is called ...lora_A.weight")
    _check_targets(path, config.get("target_modules"), modules)
    ranks = [m.tensors["a"].shape[0] for m in modules.values() if "a" in m.tensors]
    return PeftFolder(path, str(config.get("base_model_name_or_path") or ""), max(ranks), modules)


def _read_coded(path: Path, config: dict[str, Any], kind: str, tensors: Mapping[str, TensorRef]) -> PeftFolder:
    found: dict[str, dict[str, TensorRef]] = {}
    for name, tensor in tensors.items():
        module, _, role = name.removeprefix(_PREFIX).rpartition(".")
        if role not in _CODED_ROLES[kind]:
            roles = ", ".join(_CODED_ROLES[kind])
            raise UnsupportedError(f"{quoted(path)} has the tensor {quoted(name)}; those of a {kind} end in {roles}")
        found.setdefault(module, {})[role] = tensor
    for name, own in found.items():
        if "scales" not in own or ("codes" in own) != (kind == DELTA):
            raise ModelError(f"module {quoted(name)} of {quoted(path)} has one of codes and scales without the other")
    modules = {name: PeftModule(own, 1.0) for name, own in sorted(found.items())}
    if not modules:
        raise ModelError(f"{quoted(path / WEIGHTS_NAME)} is empty")
    _check_targets(path, config.get("target_modules"), modules)
    bits, group = (config.get("bits"), config.get("group_size")) if kind == DELTA else (0, 0)
    if kind == DELTA and (bits not in BITS or group not in DELTA_GROUPS or isinstance(bits, bool)):
        raise ModelError(
            f"{quoted(path)} has bits {quoted(bits)} and group_size {quoted(group)}; bits are one of "
            f"{', '.join(map(str, BITS))}, groups one of {', '.join(map(str, DELTA_GROUPS))}"
        )
    base = str(config.get("base_model_name_or_path") or "")
    return PeftFolder(path, base, 0, modules, kind, int(bits or 0), int(group or 0))


def _check_kind(path: Path, config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(
            f"{quoted(path)} is an adapter of kind {quoted(kind)}; LORA, PEQA and DELTA are what can be served"
        )
    for name, what in _NO_PLACE.items():
        if config.get(name):
            raise UnsupportedError(f"{quoted(path)} has {name}: {what}")
    init = config.get("init_lora_weights", True)
    if not isinstance(init, bool | str) or init not in _STARTS_OVER:
        raise UnsupportedError(
            f"{quoted(path)} begins from weights that {quoted(init)} has changed, which this base has not: save it "
            "converted to a plain LoRA (path_initial_model_for_weight_conversion)"
        )
    if config.get("use_qalora") or config.get("use_bdlora"):
        raise UnsupportedError(f"{quoted(path)} uses QA-LoRA or block-diagonal LoRA; plain LoRA and DoRA can be served")
    if config.get("bias", "none") not in ("none", "all", "lora_only"):
        raise ModelError(f"{quoted(path)} has bias {quoted(config['bias'])}; none, all or lora_only is needed")


def _role(path: Path, name: str) -> tuple[str, str]:
    if "lora_embedding" in name:
        raise UnsupportedError(
            f"{quoted(path)} adapts an embedding ({quoted(name)}): a table of rows is no product, and every request "
            "shares it; leave embeddings out of target_modules"
        )
    for end, role in _ENDS.items():
        if name.startswith(_PREFIX) and name.endswith(end):
            return name[len(_PREFIX) : -len(end)], role
    raise UnsupportedError(f"{quoted(path)} has the tensor {quoted(name)}, which belongs to no low-rank pair")


def _module(path: Path, config: dict[str, Any], name: str, tensors: dict[str, TensorRef]) -> PeftModule:
    a, b = tensors.get("a"), tensors.get("b")
    where = f"module {quoted(name)} of {quoted(path)}"
    if (a is None) != (b is None):
        raise ModelError(f"{where} has one of lora_A and lora_B without the other")
    if a is None or b is None:
        if "bias" not in tensors or len(tensors) > 1:
            raise ModelError(f"{where} has tensors of a low-rank pair, and no pair")
        return PeftModule(tensors, 1.0)
    rank = _number(path, "r", _of(config, "rank_pattern", "r", name))
    alpha = _number(path, "lora_alpha", _of(config, "alpha_pattern", "lora_alpha", name))
    if rank != int(rank) or rank < 1:
        raise ModelError(f"{where} has the rank {rank:g}; a whole number from 1 on is needed")
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise UnsupportedError(f"{where} is no product of a matrix: lora_A has the shape {list(a.shape)}")
    if a.shape[0] != rank or b.shape[1] != rank:
        raise ModelError(
            f"{where} has lora_A of {a.shape[0]} rows and lora_B of {b.shape[1]} columns; {CONFIG_NAME} says rank "
            f"{rank:g}"
        )
    if bool(config.get("use_dora")) != ("magnitude" in tensors):
        raise ModelError(f"{where}: use_dora is {bool(config.get('use_dora'))}, and a magnitude vector says otherwise")
    return PeftModule(tensors, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _number(path: Path, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"{CONFIG_NAME} of {quoted(path)} has {name} {quoted(value)}; a number is needed")
    return float(value)


def _of(config: dict[str, Any], patterns: str, default: str, module: str) -> object:
    """PEFT's rule: the first pattern that is the end of the module's path, else what holds for all."""
    given = config.get(patterns) or {}
    if not isinstance(given, dict):
        raise ModelError(f"{patterns} is {quoted(given)}; names and numbers are needed")
    for pattern, value in given.items():
        if ends_like(module, pattern):
            return value
    return config.get(default)


def ends_like(module: str, pattern: str) -> bool:
    """Whether a module's path, or what follows a dot in it, is `pattern` (a name, or a regular expression)."""
    if _PATTERN.match(pattern):
        return module == pattern or module.endswith("." + pattern) or _matches(rf"(.*\.)?({pattern})", module)
    return _matches(rf"(.*\.)?({pattern})", module)


def _matches(pattern: str, module: str) -> bool:
    # Repetitions of groups that repeat can take for ever.
    if len(pattern) > _MAX_PATTERN or re.search(r"\)\??[*+{]", pattern.replace("(.*\\.)?", "")):
        raise UnsupportedError(f"the pattern {quoted(pattern)} repeats a group; name the modules instead")
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error as error:
        raise ModelError(f"the pattern {quoted(pattern)} is no regular expression: {error}") from error


def _check_targets(path: Path, targets: object, modules: dict[str, PeftModule]) -> None:
    """Raises ModelError for a target that has no weights, or weights of no target."""
    paired = [name for name, module in modules.items() if {"a", "scales"} & set(module.tensors)]
    if isinstance(targets, str):
        strange = [] if targets == "all-linear" else [name for name in paired if not _matches(targets, name)]
        if strange:
            raise ModelError(f"{quoted(path)} has weights for {quoted(strange[0])}, which target_modules does not name")
        return
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise ModelError(f"{CONFIG_NAME} of {quoted(path)} has no target_modules: names, a pattern or all-linear")
    for target in targets:
        if not any(name == target or name.endswith("." + target) for name in paired):
            raise ModelError(f"{quoted(path)} names the target {quoted(target)}, and has no weights for it")
    for name in paired:
        if not any(name == target or name.endswith("." + target) for target in targets):
            raise ModelError(f"{quoted(path)} has weights for {quoted(name)}, which target_modules does not name")
