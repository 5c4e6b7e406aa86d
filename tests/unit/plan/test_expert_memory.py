"""Memory of mixtures whose experts stay on the disk."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.backends import BACKENDS
from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.core.machine import Machine
from penstock.core.model_spec import ModelSpec, weight_shapes
from penstock.plan.resolve import Plan, resolve
from tests import specs

MACHINE = Machine(num_cores=2, memory_bytes=1 << 34, available_bytes=1 << 34)


def plan(spec: ModelSpec, ops: str = "native", **settings: Any) -> Plan:
    config = from_kwargs(model="(test)", ops=ops, dtype="float32", num_gpu_blocks_override=64, **settings)
    return resolve(config, spec, MACHINE, traits=BACKENDS.traits(ops))


def test_what_stays_on_the_disk_takes_no_memory() -> None:
    spec = specs.make("experts")[0]
    spec = msgspec.structs.replace(spec, layers=spec.layers * 100)
    whole = plan(spec).weight_bytes
    with pytest.raises(ConfigError) as refused:
        plan(spec, expert_memory_bytes=1)
    least = int(str(refused.value).split()[-1])
    less = plan(spec, expert_memory_bytes=least)
    shapes = weight_shapes(spec)
    experts = sum(4 * shape[0] * shape[1] for name, shape in shapes.items() if ".experts." in name and len(shape) == 2)
    assert whole - less.weight_bytes == experts - least > 0
    decision = next(d for d in less.decisions if d.name == "expert_memory_bytes")
    assert decision.value == least
    assert "read from the disk when a router chooses them" in decision.why
    assert plan(spec, expert_memory_bytes=1 << 30).weight_bytes == whole


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("experts", {"expert_memory_bytes": 4096}, "less than the experts of one layer.*give at least"),
        (
            "experts",
            {"expert_memory_bytes": 1 << 30, "ops": "ref"},
            "only native kernels fetch experts; use ops native",
        ),
        ("llama_gqa", {"expert_memory_bytes": 1 << 30}, "this model has no experts; leave it out"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_change(name: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"expert_memory_bytes: .*{says}"):
        plan(specs.make(name)[0], **settings)
