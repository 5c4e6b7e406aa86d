"""What `--explain` says of kernels, before a weight is read; and the setting `batch_invariant`."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.backends.gpu.backend import TorchBackend
from penstock.backends.gpu.explain import kernel_decisions
from penstock.backends.gpu.fused import fuse_for_kernels
from penstock.base.errors import ConfigError
from penstock.config import SETTINGS, from_kwargs
from penstock.config.environment import from_environment
from penstock.core.held_weights import HeldWeights
from penstock.core.matrix_format import MatrixFormat, row_matrices
from penstock.launch.backend import choose_ops
from penstock.launch.build import plan_of
from penstock.model.fuse import check_order
from tests import specs
from tests.paged import Paged
from tests.stored import FORMATS

SPEC = specs.make("llama_gqa")[0]


def held_as(**formats: str) -> HeldWeights:
    """The model's matrices whose names end so, in these formats."""
    matrices = {name: FORMATS[formats[end]] for name in row_matrices(SPEC)
                if (end := name.rsplit(".", 1)[-1]) in formats}  # fmt: skip
    return HeldWeights(matrices=matrices)


def test_operations_are_listed_by_who_computes_them() -> None:
    layers = len(SPEC.layers)
    (said,) = kernel_decisions(SPEC, HeldWeights(), kernels=True, attention="Triton", why="because")
    assert (said.name, said.value) == ("kernels", "triton")
    assert said.why.startswith(f"because; attention {layers} by Triton; by Triton: add_rms_norm {2 * layers - 1}")
    assert f"rope_write {layers}, activate_gated {layers}; by torch: " in said.why
    assert f"linear {7 * layers + 1}" in said.why
    (said,) = kernel_decisions(SPEC, HeldWeights(), kernels=False, attention="torch", why="because")
    assert said.value == "torch"
    assert "by Triton" not in said.why
    assert f"write_kv {layers}" in said.why, "nothing is fused"


def test_stored_weights_are_listed_by_how_they_are_decoded() -> None:
    """By kernels, in parts and why, or when they are loaded."""
    layers, held = len(SPEC.layers), held_as(q="Q4_K", k="Q6_K", v="IQ4_NL", o="GPTQ act-order")
    grid = MatrixFormat("grid", 3, block=(256, 98), layout="IQ3_XXS")
    held = HeldWeights(matrices={**held.matrices, "layers.0.up": grid})
    first, second = kernel_decisions(SPEC, held, kernels=True, attention="Triton", why="because")
    assert f"products with codes {2 * layers}" in first.why
    assert second.value == f"{4 * layers + 1} matrices"
    assert second.why.split("; ") == [
        f"{layers} decoded in parts at every step (codes are indices into a table)",
        f"{layers} decoded in parts at every step (inputs are in an order of their own)",
        "1 decoded when they are loaded (IQ3_XXS blocks)", f"{layers} product_int4", f"{layers} product_int8",
    ]  # fmt: skip
    without = kernel_decisions(SPEC, held_as(q="Q4_K"), kernels=False, attention="torch", why="because")[1]
    assert without.why == f"{layers} decoded in parts at every step (no kernels here)"


@pytest.mark.parametrize("name", specs.ALL)
def test_fused_graphs_read_what_was_made(name: str) -> None:
    spec, weights = specs.make(name)
    graph: Any = Paged(spec, weights).graph
    fused = fuse_for_kernels(graph)
    check_order(fused)
    assert fused.nodes[fused.head :] != []
    assert [n.op for n in fused.nodes[fused.head :]] == [n.op for n in graph.nodes[graph.head :]]


def test_the_backend_explains_itself() -> None:
    plan = plan_of(from_kwargs(model="pico", device="cpu-torch", attention_backend="flex"))
    said = {d.name: d for d in plan.decisions}
    assert "by flex" in said["kernels"].why
    assert said["kernels"].value == "torch"


def test_batch_invariant_is_asked_for_by_vllm_s_name_too() -> None:
    for text, wanted in (("1", True), ("0", False)):
        values, origins = from_environment({"VLLM_BATCH_INVARIANT": text}, SETTINGS, SETTINGS)
        assert values["batch_invariant"] is wanted
        assert origins["batch_invariant"] == "VLLM_BATCH_INVARIANT"
    with pytest.raises(ConfigError, match="batch_invariant is set, and ops blas computes all rows at once"):
        choose_ops(from_kwargs(model="m", ops="blas", batch_invariant=True), SPEC)
    chosen = choose_ops(from_kwargs(model="m", device="cpu-torch", batch_invariant=True), SPEC)[0]
    assert TorchBackend.of(chosen, 1).invariant
