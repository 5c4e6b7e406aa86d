"""What each of several ranks of one model keeps: whose keys and values are shared out, by heads or by tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.core.cache_spec import CacheGroup, PlaneSpec
from penstock.core.kv_codec import KV_CODECS, scales_name
from penstock.core.machine import Machine
from penstock.core.model_spec import Attention, Latent, ModelSpec

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
    size = config.execution.tensor_parallel_size
    return msgspec.structs.replace(machine, available_bytes=machine.available_bytes // size)


def rank_bytes(config: EngineConfig, weight_bytes: int) -> int:
    """About what a rank holds of `weight_bytes`."""
    return -(-weight_bytes // config.execution.tensor_parallel_size)


def ranked_groups(
    config: EngineConfig, spec: ModelSpec, groups: Sequence[CacheGroup]
) -> tuple[tuple[CacheGroup, ...], str]:
    """The groups as each rank has them, and why: heads of keys and values are shared out where nothing but attention
    looks at them, or their tokens (`context_parallel_size`); else every rank keeps all.

    Raises: ConfigError if tokens shall be shared out and nothing can be, or blocks have no parts for all ranks.
    """
    size = config.execution.tensor_parallel_size
    if size == 1:
        return tuple(groups), ""
    if config.execution.context_parallel_size > 1:
        return _by_tokens(config, spec, groups)
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


def _by_tokens(
    config: EngineConfig, spec: ModelSpec, groups: Sequence[CacheGroup]
) -> tuple[tuple[CacheGroup, ...], str]:
    """`ranked_groups` where each rank keeps some tokens of all heads."""
    size, block_size = config.execution.context_parallel_size, config.cache.block_size
    made = tuple(
        msgspec.structs.replace(group, spec=msgspec.structs.replace(group.spec, ranks=size))
        if _is_only_attended(spec, groups, group, size) else group
        for group in groups
    )  # fmt: skip
    split, whole = (sum(len(g.layers) for g in made if (g.spec.ranks > 1) is shared) for shared in (True, False))
    if not split:
        raise ConfigError(
            "context_parallel_size: nothing that this model keeps can be shared out by tokens (states, formats with "
            "blocks or newest tokens apart, and what chooses tokens need them all); leave it away",
            field="context_parallel_size",
        )
    if block_size % size:
        below = block_size // size * size
        fit = f"{below} or {below + size}" if below else f"{size}"
        raise ConfigError(
            f"block_size: {block_size} tokens cannot be shared out evenly over {size} ranks; use {fit}",
            field="block_size",
        )
    why = f"each rank keeps 1 of {size} tokens of {split} layers"
    return made, why + (f", and all of {whole}" if whole else "")


def shares_tokens(spec: ModelSpec, groups: Sequence[CacheGroup], size: int) -> bool:
    """Whether `size` ranks could share out the tokens of anything that the model keeps."""
    return any(_is_only_attended(spec, groups, group, size) for group in groups)


def _is_only_attended(spec: ModelSpec, groups: Sequence[CacheGroup], group: CacheGroup, size: int) -> bool:
    """Whether plain attention alone reads what the layers of `group` keep, token by token."""
    if not group.spec.per_token or group.spec.lanes > 1 or group.spec.page_planes:
        return False
    if any(set(other.layers) & set(group.layers) for other in groups if other.index != group.index):
        return False
    if any(n >= len(spec.layers) for n in group.layers):
        return False
    own = ("k", "v", "latent", "k_rope")
    known = {*own, *(scales_name(name, codec) for name in own for codec in KV_CODECS)}
    return {plane.name for plane in group.spec.planes} <= known and all(
        type(mixer) is Attention
        or (type(mixer) is Latent and mixer.indexer is None and not mixer.reads_choice and mixer.num_heads % size == 0)
        for mixer in (spec.layers[n].mixer for n in group.layers)
    )


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
