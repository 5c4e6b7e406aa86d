"""Keys and values made again of the hidden states in pages (`model.restoring`): the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.backends.native.forward import NativeForward
from penstock.backends.program import Program
from penstock.core.cache_spec import HIDDEN
from penstock.core.matrix_format import parse_scheme
from penstock.core.model_spec import cache_groups
from penstock.core.panels import Panels
from penstock.model.builder import build
from penstock.model.emitter import Reading
from penstock.model.restoring import restoring
from penstock.ops.attention import ATTENTION_BACKENDS
from penstock.ops.native.abi import Act, Format
from penstock.ops.native.library import libraries, open_library
from penstock.ops.native.matrix import pack
from penstock.ops.plan import GroupPlan
from penstock.ops.ref import REF
from penstock.runner.restored import Restorer
from penstock.runner.storage import Storage
from tests.native.running import ISAS, each_isa, plan_of, pool, pytestmark_native
from tests.native.test_model import weights_as

SPECS = ["llama_mha", "llama_gqa", "llama_mqa", "llama_biased", "llama_rope3", "parallel", "experts", "post"]
BLOCK, TOKENS = 4, 19


def restored(name: str, isa: str, dtype: str, scheme: str, threads: int = 2) -> None:
    """Some blocks computed, and made again of their hidden states: those pages, checked. `isa` "ref": the reference."""
    spec, weights = weights_as("llama_mha" if name == "post" else name, dtype)
    if name == "post":  # layers read the residual itself
        layers = tuple(replace(layer, placement="post") for layer in spec.layers)
        spec = replace(spec, layers=layers)
    groups = cache_groups(spec, "float32", hidden=True)
    graph = build(spec, weights, groups, max_model_len=64, reading=Reading(hidden=True))
    storage = Storage(groups, [16], BLOCK, poison=True)
    planes, width = storage.planes[0], groups[0].pages_per_slab
    table = np.array([[7, 3, 9, 1, 12]], np.int32)
    more: dict[str, Any] = {"max_tokens": 32}

    def program(graph: Any, like: Any = None) -> Any:
        if isa == "ref":
            return Program(graph, REF, ATTENTION_BACKENDS.get("ref"))
        return NativeForward(graph, groups, pool(isa, threads), parse_scheme(scheme), like=like, **more)

    def run(forward: Any, storage: Storage) -> None:
        for start, end in ((0, 7), (7, TOKENS)):
            ids = np.arange(start, end, dtype=np.int32) + 3
            step = plan_of([0, end - start], [start], [GroupPlan(width, BLOCK, (table,))], ids)
            forward.run(step, storage.planes)

    whole, plain = program(graph), cache_groups(spec, "float32")
    run(whole, storage)
    other = Storage(plain, [16], BLOCK, poison=True)
    run(program(build(spec, weights, plain, max_model_len=64)), other)
    for key in ("k", "v"):
        np.testing.assert_array_equal(planes[key], other.planes[0][key], "the plane more changes nothing")
    was = {name: array.copy() for name, array in planes.items()}
    full = [(n, int(table[0, n]) * width) for n in range(TOKENS // BLOCK)]
    for _, page in full:
        for key in ("k", "v"):
            planes[key][page : page + width] = np.nan
    restorer = Restorer(program(restoring(graph, groups, storage.planes), whole), storage.planes, groups, BLOCK)
    restorer.restore(full[3:])
    restorer.restore(full[2::-1])
    for key in ("k", "v", HIDDEN):
        np.testing.assert_array_equal(planes[key], was[key])
    assert not np.isnan(planes["k"][full[0][1]]).any()


@pytest.mark.parametrize("name", SPECS)
def test_B14_the_reference_restores_the_same_bits(name: str) -> None:
    restored(name, "ref", "float32", "none")


@pytestmark_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPECS)
def test_B14_native_programs_restore_the_same_bits(name: str, dtype: str) -> None:
    for isa in ISAS:
        restored(name, isa, dtype, "none")


@each_isa
@pytest.mark.parametrize("scheme", ["int8-w8a8", "int4-w4a8:32"])
def test_rounded_weights_restore_the_same_bits(scheme: str, isa: str) -> None:
    """Rows are rounded before products: what is kept of them is what is rounded."""
    restored("llama_mha", isa, "float32", scheme)


@each_isa
@pytest.mark.parametrize("bits", [0, 4, 8])
def test_a_part_of_a_matrix_is_its_rows_in_its_memory(bits: int, isa: str) -> None:
    rng, library = np.random.default_rng(3), open_library(libraries()[isa])
    parts = [rng.standard_normal((n, 70)).astype(np.float32) for n in (128, 70, 30)]
    biases = [None, rng.standard_normal(70).astype(np.float32), None]
    panels = Panels("U4", 32, "F16", "NONE", 8) if bits == 4 else Panels("U8", 0, "F32", "NONE", 128) if bits else None
    how: Any = (Format.BLOCK, Act.I8) if bits else (Format.F32, Act.F32)
    whole = pack(library, parts, *how, panels=panels, biases=biases)
    part = whole.part(128, 100)
    assert np.shares_memory(part.data, whole.data)
    np.testing.assert_array_equal(part.values(library), whole.values(library)[128:])
    assert whole.bias is not None
    assert part.bias is not None
    np.testing.assert_array_equal(part.bias, whole.bias[128:])
    with pytest.raises(AssertionError, match="begins no panel"):
        whole.part(70, 10)
