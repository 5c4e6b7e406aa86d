"""`--device`: what it takes, what is refused and how, and what a GPU's memory does to a plan (a stub of one)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.backends import BACKENDS
from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.core.machine import Machine
from penstock.launch.backend import choose_ops, device_of, machine_of, traits_of
from penstock.launch.names import check_names
from tests import specs

GIB = 1 << 30
SPEC = specs.make("llama_gqa")[0]


def config(**settings: Any) -> Any:
    return from_kwargs(model="m", **settings)


@pytest.mark.parametrize("device", ["banana", "cuda:", "cuda:x", "gpu", "cuda0"])
def test_a_device_that_there_is_not_is_said(device: str) -> None:
    with pytest.raises(ConfigError, match="none of auto, cpu, cuda, cuda:N, cpu-torch"):
        check_names(config(device=device))


def test_the_device_chooses_the_backend() -> None:
    assert choose_ops(config(device="cpu-torch"), SPEC)[0].execution.ops == "torch"
    assert choose_ops(config(device="cpu"), SPEC)[0].execution.ops in ("native", "ref")
    assert choose_ops(config(), SPEC)[0].execution.ops in ("native", "ref")
    assert traits_of(config(device="cpu-torch")).batch_invariant
    assert device_of(config(device="cpu-torch"), 2).name == "cpu-ref"


def test_what_does_not_fit_together_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="ops: native runs on the CPU, and device is cpu-torch; use ops auto"):
        choose_ops(config(device="cpu-torch", ops="native"), SPEC)
    with pytest.raises(ConfigError, match="rounds activations, and torch only weights"):
        choose_ops(config(device="cpu-torch", quantization="int8-w8a8"), SPEC)
    with pytest.raises(ConfigError, match="use device cpu"):
        choose_ops(config(device="cpu-torch", kv_allocator="virtual"), SPEC)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="torch kernels cannot run this: torch"):
        choose_ops(config(device="cuda"), SPEC)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="there is no GPU 3, only 1 of them"):
        choose_ops(config(device="cuda:3"), SPEC)


def test_memory_is_planned_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(num_cores=2, memory_bytes=8 * GIB, available_bytes=7 * GIB, arch="x86_64")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    assert machine_of(config(device="cuda", ops="torch", enforce_eager=True), machine, SPEC).available_bytes == 70 * GIB
    assert machine_of(config(device="cuda", ops="torch"), machine, SPEC).num_cores == 2
    assert machine_of(config(device="cpu-torch", ops="torch"), machine, SPEC) == machine
    assert all(BACKENDS.get(name).memory(config(ops=name), SPEC) is None for name in BACKENDS)
