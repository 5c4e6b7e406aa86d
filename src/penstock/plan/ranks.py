"""What each of several ranks of one model keeps: of weights, of experts, of keys and values, by heads or by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.core.cache_spec import CacheGroup, PlaneSpec
from penstock.core.held_weights import HeldWeights
from penstock.core.kv_codec import KV_CODECS, scales_name
from penstock.core.machine import Machine
from penstock.core.model_spec import Attention, Experts, Latent, ModelSpec, weight_shapes

MOST_RANKS = 64
UNIT = 64
"""Outputs of a product are shared out in runs of so many: a panel of the native kernels."""
LEAST_ROWS = 128
"""Of a product's outputs that a rank gets; smaller products run whole everywhere: an exchange costs more."""


Ranges = tuple[tuple[int, int], ...]
"""Columns, or experts, of each rank: first, last + 1."""


def even_ranges(width: int, size: int, unit: int) -> Ranges:
    """`width` columns for `size` ranks, in runs of `unit`; the last run may be short."""
    units = -(-width // unit)
    ends = [min(width, units * r // size * unit) for r in range(size + 1)]
    return tuple(pairwise(ends))


def output_ranges(rows: int, size: int, unit: int = UNIT, least: int = LEAST_ROWS) -> Ranges:
    """The outputs of a product that each of `size` ranks has; nothing if there are too few, and each has all."""
    return even_ranges(rows, size, unit) if rows >= max(least * size, unit * (size - 1) + 1) else ()


def expert_ranges(num_experts: int, size: int) -> Ranges:
    """The experts of each of `size` ranks, where they have whole ones; two ranks differ by one at most."""
    return tuple(pairwise(num_experts * r // size for r in range(size + 1)))


def _experts(spec: ModelSpec) -> list[Experts]:
    return [layer.ffn for layer in spec.layers if isinstance(layer.ffn, Experts)]


def _heads(spec: ModelSpec) -> set[int]:
    return {layer.mixer.num_heads for layer in spec.layers if isinstance(layer.mixer, Attention)}


def possible_sizes(spec: ModelSpec) -> list[int]:
    """Numbers of ranks, up to `MOST_RANKS`, that share out the model's attention heads evenly, 1 among them; all for a
    model without any."""
    heads = _heads(spec)
    return [n for n in range(1, min([*heads, MOST_RANKS]) + 1) if all(h % n == 0 for h in heads)]


def check_ranks(config: EngineConfig, spec: ModelSpec) -> None:
    """Raises ConfigError, with the nearest that do, for a number of ranks that does not divide the model's heads, and
    for experts that cannot be shared out whole."""
    check_hosts(config)
    size, heads = config.execution.tensor_parallel_size, _heads(spec)
    if config.execution.enable_expert_parallel:
        _check_experts(size, spec)
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


def _check_experts(size: int, spec: ModelSpec) -> None:
    least, why = min((f.num_experts for f in _experts(spec)), default=0), None
    if not least:
        why = "this model has no experts; leave it away"
    elif size == 1:
        why = "experts are shared out over ranks, and there is one; give tensor_parallel_size, or leave it away"
    elif least < size:
        why = f"there are {least} experts in a layer for {size} ranks; use {least} at most, or leave it away"
    if why is not None:
        raise ConfigError(f"enable_expert_parallel: {why}", field="enable_expert_parallel")


def ranks_of_host(host: int, ranks: int, hosts: int) -> range:
    """Each host has as many, in order."""
    each = ranks // hosts
    return range(host * each, (host + 1) * each)


def ranks_here(config: EngineConfig) -> int:
    """Ranks that share this host with each other."""
    return max(1, config.execution.num_ranks // config.execution.nnodes)


def check_hosts(config: EngineConfig) -> None:
    """Raises ConfigError for ranks that several hosts cannot have, or do not have yet."""
    run = config.execution
    size, hosts = run.tensor_parallel_size, run.nnodes
    if run.node_rank and run.node_rank >= hosts:
        raise ConfigError(
            f"node_rank: {run.node_rank} is none of 0 ... {hosts - 1} (nnodes {hosts}); give nnodes on every host",
            field="node_rank",
        )
    if hosts == 1:
        return
    if size % hosts:
        fit = [n for n in range(1, size + 1) if size % n == 0]
        above = [n for n in fit if n > hosts]
        nearest = " or ".join(map(str, [max(n for n in fit if n < hosts), *above[:1]]))
        raise ConfigError(
            f"nnodes: {hosts} hosts cannot have equally many of {size} ranks; use {nearest}, or another "
            "tensor_parallel_size",
            field="nnodes",
        )
    if run.node_rank:
        raise ConfigError(
            f"node_rank: the engine is on the host with node_rank 0; this one runs penstock serve MODEL --headless "
            f"--node-rank {run.node_rank}",
            field="node_rank",
        )
    if run.pipeline_parallel_size > 1:
        raise ConfigError(
            "pipeline_parallel_size: stages pass rows on in the memory of one host; leave it away, or nnodes",
            field="pipeline_parallel_size",
        )
    given = {
        "enable_lora": config.lora.enable_lora, "plugin": run.plugin is not None,
        "speculative_config": config.speculation is not None and config.speculation.model is not None,
    }  # fmt: skip
    for name in (name for name, is_given in given.items() if is_given):
        raise ConfigError(
            f"{name}: it names files that ranks on other hosts would not have; leave it away, or nnodes", field=name
        )


def rank_machine(config: EngineConfig, machine: Machine) -> Machine:
    """One rank's share of the machine; other hosts are taken to be like this one."""
    size = ranks_here(config) * config.execution.replicas_here
    return msgspec.structs.replace(machine, available_bytes=machine.available_bytes // size)


def rank_bytes(
    spec: ModelSpec, held: HeldWeights, num_bytes: int, size: int, *, whole_experts: bool = False
) -> int:  # fmt: skip
    """About what a rank holds of `num_bytes` of a model's weights, the one with most: of experts what is theirs, of all
    else an even part."""
    if size == 1:
        return num_bytes
    experts, own = expert_bytes(spec, held, size, whole_experts=whole_experts)
    total = max(1, held.num_bytes(spec))
    return -(-num_bytes * (total - experts + size * own) // (size * total))


def expert_bytes(spec: ModelSpec, held: HeldWeights, size: int, *, whole_experts: bool) -> tuple[int, int]:
    """Bytes of the matrices of all experts, and of those that the rank with most has of `size` ranks."""
    total, own = 0, [0] * size
    layers = {f"layers.{n}": layer.ffn for n, layer in enumerate(spec.layers) if isinstance(layer.ffn, Experts)}
    known: dict[tuple[object, tuple[int, ...]], tuple[int, list[int]]] = {}
    for name, shape in weight_shapes(spec).items():
        layer, found, rest = name.partition(".experts.")
        if not found or len(shape) != 2:
            continue
        key = held.matrices.get(name), shape
        if key not in known:
            rows, cols = shape
            parts = [last - first for first, last in output_ranges(rows, size)] or [rows] * size
            known[key] = held.matrix_bytes(name, (rows, cols)), [held.matrix_bytes(name, (n, cols)) for n in parts]
        num_bytes, each = known[key]
        total += num_bytes
        if whole_experts:
            ranges, expert = expert_ranges(layers[layer].num_experts, size), int(rest.split(".")[0])
            own[next(r for r, (_, last) in enumerate(ranges) if expert < last)] += num_bytes
        else:
            own = [have + more for have, more in zip(own, each, strict=True)]
    return total, max(own)


def whose_experts(config: EngineConfig, spec: ModelSpec) -> str:
    """For people: what ranks have of experts; empty if there are none."""
    size, layers = config.execution.tensor_parallel_size, _experts(spec)
    if not layers:
        return ""
    if config.execution.enable_expert_parallel:
        counts = [last - first for f in layers for first, last in expert_ranges(f.num_experts, size)]
        least, most = min(counts), max(counts)
        return f"each rank has {most} whole experts of a layer" if least == most else (
            f"each rank has {least} to {most} whole experts of a layer"
        )  # fmt: skip
    split = any(
        output_ranges(f.expert.width, size) or output_ranges(f.expert_size(spec.hidden_size), size) for f in layers
    )
    return "each rank has some outputs of every expert" if split else "each rank has all of its small experts"


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
    if (hosts := config.execution.nnodes) > 1:
        why += f"; {ranks_here(config)} on each of {hosts} hosts"
    return tuple(made), why


def _by_tokens(
    config: EngineConfig, spec: ModelSpec, groups: Sequence[CacheGroup]
) -> tuple[tuple[CacheGroup, ...], str]:
    """`ranked_groups` where each rank keeps some tokens of all heads."""
    size, block_size = config.execution.context_parallel_size, config.cache.block_size
    whole_blocks = config.execution.context_parallel_placement == "home"
    if whole_blocks:
        _check_whole(spec, groups, size)
    made = tuple(
        msgspec.structs.replace(group, spec=msgspec.structs.replace(group.spec, ranks=size, whole=whole_blocks))
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
    if whole_blocks:
        return made, f"each rank keeps whole blocks of {split} layers" + (f", and all of {whole}" if whole else "")
    why = f"each rank keeps 1 of {size} tokens of {split} layers"
    return made, why + (f", and all of {whole}" if whole else "")


def _check_whole(spec: ModelSpec, groups: Sequence[CacheGroup], size: int) -> None:
    """Raises ConfigError unless each block can lie on a rank of its own."""
    why = None
    tokens = [group for group in groups if group.spec.per_token]
    if any(group.spec.kind == "window" for group in tokens):
        why = "layers of this model forget what lies before a window, block by block"
    elif any(isinstance(layer.mixer, Attention) and layer.mixer.alibi is not None for layer in spec.layers):
        why = "this model's scores go by how far keys are apart, and blocks of a rank lie anywhere"
    elif any(not _is_only_attended(spec, groups, group, size) for group in tokens):
        why = "some layers of this model need all tokens"
    if why is not None:
        raise ConfigError(
            f"context_parallel_placement: {why}; use round", field="context_parallel_placement"
        )  # fmt: skip


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
