"""The part of a model with experts by task that one task needs (catalogue row C69).

Source: Kudugunta et al., Beyond Distillation: Task-level Mixture-of-Experts for Efficient Inference, arXiv 2110.03742,
section 3: with a router that looks at the task alone, a task's sub-network can be deployed by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from penstock.base.bf16 import F32
from penstock.base.errors import ModelError
from penstock.core.model_spec import Experts, Layer, ModelSpec, Router
from penstock.families.checkpoint import Checkpoint
from penstock.ops.ref.experts import of_task
from penstock.ops.ref.product import as_float32
from penstock.ops.stored import Weight
from penstock.weights.load import load_weights

_ROUTERS = ("router_tasks", "router_correction", "router_scale")


def load_task(
    source: Checkpoint, task: int, dtype: str = "float32", progress: Callable[[int, int], None] | None = None
) -> tuple[ModelSpec, dict[str, Weight]]:
    """The model of `task` alone, and its weights: of every layer with experts by task those that it chooses, with what
    they weigh. Nothing of the others is read. It computes what the whole model computes for the task, bit by bit.

    Raises: ModelError if there is no such task, or no layer has experts by task; else as `load_weights`.
    """
    whole = for_task(source.spec, task)
    routers = {
        name: as_float32(array)
        for name, array in load_weights(source, whole, dtype, skip=_no_routers(source)).items()
        if name.endswith(_ROUTERS) and isinstance(array, np.ndarray)
    }
    names, found = {name: name for name in source.weights}, {}
    for n, layer in enumerate(whole.layers):
        p = f"layers.{n}."
        if isinstance(layer.ffn, Experts) and layer.ffn.router.tasks:
            ids, scale = _chosen(layer.ffn, p, routers)
            found[p + "router_scale"] = scale[ids]
            names = {name: old for name, old in names.items() if not name.startswith((p + "experts.", p + "router"))}
            for i, expert in enumerate(ids):
                own = f"{p}experts.{expert}."
                names |= {f"{p}experts.{i}.{name[len(own) :]}": name for name in source.weights if name.startswith(own)}
    # What experts weigh is no tensor of the files: it comes in beside what is read.
    read, spec = (_alone(whole, scaled) for scaled in (False, True))
    part = {name: source.weights[old] for name, old in names.items()}
    return spec, load_weights(part, read, dtype, progress) | found


def for_task(spec: ModelSpec, task: int) -> ModelSpec:
    """The whole model, told the task. Raises as `load_task`."""
    sparse = [layer.ffn for layer in spec.layers if isinstance(layer.ffn, Experts) and layer.ffn.router.tasks]
    if not sparse:
        raise ModelError("the model has no layer whose experts a task chooses")
    if not 0 <= task < (few := min(f.router.tasks for f in sparse)):
        raise ModelError(f"there is no task {task}: the model has {few}, 0 to {few - 1}")
    return msgspec.structs.replace(spec, layers=tuple(_told(layer, task) for layer in spec.layers))


def _told(layer: Layer, task: int) -> Layer:
    f = layer.ffn
    if not isinstance(f, Experts) or not f.router.tasks:
        return layer
    return _with(layer, msgspec.structs.replace(f, router=msgspec.structs.replace(f.router, task=task)))


def _with(layer: Layer, f: Experts) -> Layer:
    return msgspec.structs.replace(layer, ffn=f)


def _alone(spec: ModelSpec, scaled: bool) -> ModelSpec:
    """With the chosen experts, which all tokens pass."""
    layers = []
    for layer in spec.layers:
        f = layer.ffn
        if isinstance(f, Experts) and f.router.tasks:
            router = Router(score="even", hash="all", scale_input=f.router.scale_input, expert_scale=scaled)
            layers.append(_with(layer, msgspec.structs.replace(f, num_experts=f.top_k, router=router)))
        else:
            layers.append(layer)
    return msgspec.structs.replace(spec, layers=tuple(layers))


def _no_routers(source: Checkpoint) -> list[str]:
    return [name for name in source.weights if not name.endswith(_ROUTERS)]


def _chosen(f: Experts, p: str, routers: dict[str, F32]) -> tuple[list[int], F32]:
    logits, correction, scale = (routers.get(p + name) for name in _ROUTERS)
    assert logits is not None, "tasks have rows of logits"
    ids, weighs = of_task(f, logits, correction, scale)
    return ids[0].tolist(), weighs
