"""Which layers each stage of a pipeline has, and what its ranks keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from math import prod

import msgspec

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.core.cache_spec import CacheGroup
from penstock.core.model_spec import ModelSpec, weight_shapes


def layer_weights(spec: ModelSpec) -> list[int]:
    """Numbers in the weights of each layer."""
    found: Counter[int] = Counter()
    for name, shape in weight_shapes(spec).items():
        if name.startswith("layers."):
            found[int(name.split(".")[1])] += prod(shape)
    return [found[n] for n in range(len(spec.layers))]


def cut_places(spec: ModelSpec) -> list[int]:
    """Layers that may be the first of a stage, the model's first aside. Those that share keys and values stay together,
    and models that give no tokens are not cut."""
    if not spec.has_head or spec.pooler is not None:
        return []
    tied = [(layer.kv_from, n) for n, layer in enumerate(spec.layers) if layer.kv_from is not None]
    return [c for c in range(1, len(spec.layers)) if not any(first < c <= last for first, last in tied)]


def stage_starts(config: EngineConfig, spec: ModelSpec) -> tuple[int, ...]:
    """[stages + 1]: the first layer of each stage, and how many layers there are; nothing with one stage.

    Stages have as equal weights as whole layers allow; layers that share keys and values stay together.

    Raises: ConfigError for more stages than there are places to cut.
    """
    size, weights = config.execution.pipeline_parallel_size, layer_weights(spec)
    if size == 1:
        return ()
    if not spec.has_head or spec.pooler is not None:
        raise ConfigError(
            "pipeline_parallel_size: models that give no tokens are not cut into stages; use 1",
            field="pipeline_parallel_size",
        )
    places = cut_places(spec)
    if len(places) < size - 1:
        shared = any(layer.kv_from is not None for layer in spec.layers)
        why = "whose layers share keys and values" if shared else f"of {len(weights)} layers"
        raise ConfigError(
            f"pipeline_parallel_size: a model {why} falls into {len(places) + 1} stages at most, not {size}; use at "
            f"most {len(places) + 1}",
            field="pipeline_parallel_size",
        )
    return even_cuts(weights, places, size)


def even_cuts(weights: Sequence[int], places: Sequence[int], size: int) -> tuple[int, ...]:
    """[size + 1]: where to cut so that the heaviest of `size` runs of layers is as light as can be; `places`: where one
    may."""
    before = [0, *accumulate(weights)]
    ends = [*places, len(weights)]
    best: dict[int, tuple[int, tuple[int, ...]]]
    best = {end: (before[end], (0, end)) for end in ends}  # of one run that ends there
    for _ in range(size - 1):
        more: dict[int, tuple[int, tuple[int, ...]]] = {}
        for end in ends:
            found = [
                (max(heaviest, before[end] - before[start]), (*cuts, end))
                for start, (heaviest, cuts) in best.items() if start < end
            ]  # fmt: skip
            if found:
                more[end] = min(found)
        best = more
    return best[len(weights)][1]


def stage_groups(groups: Sequence[CacheGroup], layers: Collection[int]) -> tuple[CacheGroup, ...]:
    """The groups with those of their layers that a stage has; there may be none."""
    return tuple(msgspec.structs.replace(g, layers=tuple(n for n in g.layers if n in layers)) for g in groups)


def widest_groups(groups: Sequence[CacheGroup], starts: Sequence[int]) -> tuple[CacheGroup, ...]:
    """The groups, each as the stage has it that keeps most of it: memory that suffices for every stage."""
    if not starts:
        return tuple(groups)
    stages = [stage_groups(groups, range(*run)) for run in pairwise(starts)]
    return tuple(max(own, key=lambda group: len(group.layers)) for own in zip(*stages, strict=True))


def stage_share(spec: ModelSpec, starts: Sequence[int]) -> float:
    """The part of the model's weights that the heaviest stage has. What is beside the layers counts for each."""
    if not starts:
        return 1.0
    weights, total = layer_weights(spec), sum(prod(shape) for shape in weight_shapes(spec).values())
    return min(1.0, (max(sum(weights[a:b]) for a, b in pairwise(starts)) + total - sum(weights)) / total)


def stages_said(starts: Sequence[int]) -> str:
    """For people: the layers of each stage."""
    runs = [f"{a}" if b - a == 1 else f"{a} to {b - 1}" for a, b in pairwise(starts)]
    return f"layers {', '.join(runs)}" if runs else ""
