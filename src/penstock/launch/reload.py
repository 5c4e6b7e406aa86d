"""Whether other weights can follow those that run: of the same model, in the same formats, and there is memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from penstock.backends import BACKENDS
from penstock.base.cache import cache_folder
from penstock.base.errors import CapacityError, ModelError, UnsupportedError
from penstock.config import EngineConfig
from penstock.core.cache_spec import HIDDEN
from penstock.core.model_spec import ModelSpec
from penstock.core.weight_swap import WeightFacts
from penstock.families.checkpoint import Checkpoint, WeightRef
from penstock.families.registry import open_model
from penstock.families.stretch import stretched
from penstock.formats.files import quoted
from penstock.launch.backend import ON_CPU
from penstock.launch.kv_store import fingerprint
from penstock.ops.native.content_key import FileHashes
from penstock.plan.memory import gib
from penstock.plan.probe import free_memory
from penstock.plan.resolve import Plan


def why_not(config: EngineConfig) -> str | None:
    """Why weights cannot be swapped under these settings; None: they can."""
    run, cache = config.execution, config.cache
    if run.weight_memory_bytes is not None or run.packed_weights == "streamed":
        return "weights that are read while they are used (weight_memory_bytes, packed_weights streamed)"
    if run.expert_memory_bytes is not None:
        return "experts that come and go (expert_memory_bytes)"
    if run.device not in ON_CPU:
        return "weights on a GPU, whose graphs are bound to them,"
    if cache.kv_allocator == "layerkv":
        return "weights under layers of KV that come and go (kv_allocator layerkv)"
    if cache.kv_offload is not None and cache.kv_offload_format == HIDDEN:
        return "hidden states in a store, from which the model makes keys and values again,"
    return None


def same_model(config: EngineConfig, plan: Plan, now: Checkpoint, path: str) -> tuple[Checkpoint, ModelSpec]:
    """The model at `path`, with the tokenizer of the one that runs, and its spec as the files say it.

    Raises: UnsupportedError, ModelError naming what differs first, CapacityError.
    """
    problem = why_not(config)
    if problem is not None:
        raise UnsupportedError(f"{problem} cannot be swapped in a running engine; start it again with the others")
    found = open_model(path)
    checkpoint = replace(found, spec=stretched(found.spec, config.model), tokenizer=now.tokenizer)
    for what, model, own in _models(now, checkpoint):
        different = _different_weight(own, model) or _different_spec(own.spec, model.spec)
        if different:
            raise ModelError(f"{quoted(path)} holds other weights than of the model that runs: {what}{different}")
    available = free_memory().available_bytes
    if plan.weight_bytes > available:
        raise CapacityError(
            f"weights are swapped while the old ones serve, which takes {gib(plan.weight_bytes)} more, and "
            f"{gib(available)} of memory are free; make room, or start again with the others"
        )
    return checkpoint, found.spec


def facts_of(config: EngineConfig, plan: Plan, checkpoint: Checkpoint) -> WeightFacts:
    """Raises ModelError for a file that cannot be read."""
    paths = _paths(checkpoint)
    hashes = sorted(FileHashes(cache_folder("weights")).of(paths))
    machine = BACKENDS.get(config.execution.ops).why()
    content = hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]
    return WeightFacts(content, fingerprint(config, checkpoint, plan, machine))


def stamps(checkpoint: Checkpoint) -> list[tuple[int, ...]]:
    """What changes with the weight files. Raises ModelError if one is gone."""
    try:
        infos = [os.stat(path) for path in _paths(checkpoint)]
    except OSError as error:
        raise ModelError(f"{quoted(checkpoint.path)} changed while it was read: {error.strerror}") from None
    return [(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns) for info in infos]


def _paths(checkpoint: Checkpoint) -> list[Path]:
    models = [checkpoint, *checkpoint.heads]
    return sorted({t.path for model in models for ref in model.weights.values() for t in ref.tensors})


def _models(own: Checkpoint, other: Checkpoint) -> list[tuple[str, Checkpoint, Checkpoint]]:
    if len(own.heads) != len(other.heads):
        raise ModelError(
            f"{quoted(other.path)} has {len(other.heads)} heads that predict further tokens, and the model that runs "
            f"has {len(own.heads)}"
        )
    heads = [(f"head {k}: ", b, a) for k, (a, b) in enumerate(zip(own.heads, other.heads, strict=True))]
    return [("", other, own), *heads]


def _different_weight(own: Checkpoint, other: Checkpoint) -> str | None:
    """The first weight that is not of the same shape and type."""
    for name, ref in own.weights.items():
        there = other.weights.get(name)
        if there is None:
            return f"there is no {_called(own.weights, name)}"
        was, now = _kind(ref), _kind(there)
        if was != now:
            return f"{_called(own.weights, name)} is {now} there and {was} here"
    more = next((name for name in other.weights if name not in own.weights), None)
    return None if more is None else f"{_called(other.weights, more)} is not in the model that runs"


def _called(weights: Mapping[str, WeightRef], name: str) -> str:
    return f"{weights[name].tensor.name} ({name})"


def _kind(ref: WeightRef) -> str:
    shape = " x ".join(map(str, ref.tensor.shape)) or "a number"
    return f"{shape} of {ref.tensor.dtype}" + ("" if ref.stored is None else f" stored as {ref.stored}")


def _different_spec(own: Any, other: Any, path: str = "") -> str | None:
    """The first field of two descriptions that differs."""
    if own == other:
        return None
    if isinstance(own, msgspec.Struct) and type(own) is type(other):
        for field in own.__struct_fields__:
            name = f"{path}.{field}" if path else field
            if found := _different_spec(getattr(own, field), getattr(other, field), name):
                return found
    if isinstance(own, tuple) and isinstance(other, tuple) and len(own) == len(other):
        for k, (one, two) in enumerate(zip(own, other, strict=True)):
            if found := _different_spec(one, two, f"{path}.{k}"):
                return found
    return f"{path} is {_short(other)} there and {_short(own)} here"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
