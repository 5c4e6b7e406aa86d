"""What each of several ranks of one model keeps: whose keys and values are shared out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.core.cache_spec import CacheGroup, PlaneSpec
from penstock.core.kv_codec import KV_CODECS, scales_name
from penstock.core.machine import Machine
from penstock.core.model_spec import Attention, ModelSpec

MOST_RANKS = 64
UNIT = 64
"""Outputs of a product are shared out in runs of so many: a panel of the native kernels."""
LEAST_ROWS = 128
"""Of a product's outputs that a rank gets; smaller products run whole everywhere: an exchange costs more."""


def _heads(spec: ModelSpec) -> set[int]:
    return {layer.mixer.num_heads for layer in spec.layers if isinstance(layer.mixer, Attention)}


def possible_sizes(spec: ModelSpec) -> list[int]:
    """Numbers of ranks, up to `MOST_RANKS`, that share out the model's attention heads evenly, 1 among them; all for a
    model without any."""
    heads = _heads(spec)
    return [n for n in range(1, min([*heads, MOST_RANKS]) + 1) if all(h % n == 0 for h in heads)]


def check_ranks(config: EngineConfig, spec: ModelSpec) -> None:
    """Raises ConfigError, with the nearest that do, for a number of ranks that does not divide the model's heads."""
    size, heads = config.execution.tensor_parallel_size, _heads(spec)
    if size == 1 or all(n % size == 0 for n in heads):
        return
    fit = possible_sizes(spec)
    below, above = max(n for n in fit if n < size), next((n for n in fit if n > size), None)
    nearest = f"{below}" if above is None else f"{below} or {above}"
    counted = " and ".join(map(str, sorted(heads)))
    raise ConfigError(
        f"tensor_parallel_size: {size} ranks cannot share out {counted} attention heads evenly; use {nearest}",
        field="tensor_parallel_size",
    )


def rank_machine(config: EngineConfig, machine: Machine) -> Machine:
    """One rank's share of the machine: all ranks are on it."""
    size = config.execution.tensor_parallel_size * config.execution.data_parallel_size
    return msgspec.structs.replace(machine, available_bytes=machine.available_bytes // size)


def rank_bytes(config: EngineConfig, weight_bytes: int) -> int:
    """About what a rank holds of `weight_bytes`."""
    return -(-weight_bytes // config.execution.tensor_parallel_size)


def ranked_groups(
    config: EngineConfig, spec: ModelSpec, groups: Sequence[CacheGroup]
) -> tuple[tuple[CacheGroup, ...], str]:
    """The groups as each rank has them, and why: heads of keys and values are shared out where nothing but attention
    looks at them; else every rank keeps all."""
    size = config.execution.tensor_parallel_size
    if size == 1:
        return tuple(groups), ""
    made, split, whole = [], 0, 0
    for group in groups:
        heads = _shared_heads(config, spec, groups, group)
        if heads is None or (heads % size and size % heads):
            made.append(group)
            whole += len(group.layers)
            continue
        own = max(1, heads // size)
        planes = tuple(_of_heads(plane, heads, own) for plane in group.spec.planes)
        made.append(msgspec.structs.replace(group, spec=msgspec.structs.replace(group.spec, planes=planes)))
        split += len(group.layers)
    why = f"each rank keeps its own heads of {split} layers" if split else "each rank keeps all of them"
    if split and whole:
        why += f", and all of {whole}"
    return tuple(made), why


def _of_heads(plane: PlaneSpec, heads: int, own: int) -> PlaneSpec:
    assert plane.heads % heads == 0, "planes of keys and values, and of their scales"
    return plane._replace(heads=plane.heads // heads * own)


def _shared_heads(
    config: EngineConfig, spec: ModelSpec, groups: Sequence[CacheGroup], group: CacheGroup
) -> int | None:  # fmt: skip
    """How many heads of keys and values the layers of `group` have, if they can be shared out."""
    if config.cache.kv_selector != "none" or config.cache.kv_rotation != "none":
        return None
    if not group.spec.per_token or group.spec.lanes > 1 or group.spec.page_planes:
        return None
    if any(set(other.layers) & set(group.layers) for other in groups if other.index != group.index):
        return None
    mixers = [spec.layers[n].mixer for n in group.layers if n < len(spec.layers)]
    if len(mixers) != len(group.layers):
        return None
    counts = {mixer.num_kv_heads if type(mixer) is Attention else None for mixer in mixers}
    heads = counts.pop() if len(counts) == 1 else None
    names = {plane.name for plane in group.spec.planes}
    known = {"k", "v", *(scales_name(name, codec) for name in ("k", "v") for codec in KV_CODECS)}
    if heads is None or not {"k", "v"} <= names or names - known:
        return None
    return heads if all(plane.heads == heads for plane in group.spec.planes) else None
