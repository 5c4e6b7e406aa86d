"""Memory of a mixture whose experts do not all stay in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.core.backend import BackendTraits
from penstock.core.events import Decision
from penstock.core.held_weights import HeldWeights
from penstock.core.model_spec import ModelSpec, weight_shapes
from penstock.plan.memory import gib

_PAGE = 4096


def expert_sizes(spec: ModelSpec, held: HeldWeights) -> tuple[int, int]:
    """Bytes of all experts, and the least that expert_memory_bytes takes; (0, 0) for a model without any."""
    layers: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    total = 0
    for name, shape in weight_shapes(spec).items():
        layer, found, rest = name.partition(".experts.")
        if found and len(shape) == 2:
            num_bytes = held.matrix_bytes(name, (shape[0], shape[1]))
            total += num_bytes
            layers[layer][rest.split(".")[0]] += -(-num_bytes // _PAGE) * _PAGE + _PAGE
    if not layers:
        return 0, 0
    return total, max(max(experts.values()) for experts in layers.values()) * max(map(len, layers.values()))


def experts_in_memory(
    config: EngineConfig, spec: ModelSpec, held: HeldWeights, traits: BackendTraits
) -> Iterator[tuple[int, Decision]]:
    """Bytes of weights that stay on the disk, and why, where expert_memory_bytes says so; else nothing.

    Raises ConfigError, with what to change, for models and backends that have no such thing, and for a layer whose
    experts do not fit: one step may need them all.
    """
    given = config.execution.expert_memory_bytes
    if given is None:
        return
    if not traits.quantizes:
        raise ConfigError(
            "expert_memory_bytes: only native kernels fetch experts; use ops native, or leave it out",
            field="expert_memory_bytes",
        )
    total, least = expert_sizes(spec, held)
    if not total:
        raise ConfigError("expert_memory_bytes: this model has no experts; leave it out", field="expert_memory_bytes")
    if given < least:
        raise ConfigError(
            f"expert_memory_bytes: {gib(given)} are less than the experts of one layer, all of which a step may need; "
            f"give at least {least}",
            field="expert_memory_bytes",
        )
    if given >= total:
        why = f"all experts take {gib(total)}, so none is put out once it is there"
    else:
        why = f"of {gib(total)} that all experts take; the others are read from the disk when a router chooses them"
    yield max(0, total - given), Decision("expert_memory_bytes", given, why)
