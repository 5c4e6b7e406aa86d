"""A model whose attention runs on the kernels, in the interpreter: tables, planes and places as a runner makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'penstock[gpu]'")

import torch

from penstock.backends.gpu.backend import TorchBackend
from tests import specs
from tests.paged import Paged

IDS = [3 + i * 7 % 50 for i in range(40)]


@pytest.mark.parametrize(
    ("name", "kv_dtype", "block_size"),
    [
        ("llama_gqa", "float32", 16), ("windowed", "float32", 32), ("latent", "float32", 16), ("scores", "float32", 16),
        ("llama_mqa", "int8", 16), ("layernorm", "bfloat16", 64),
    ],
)  # fmt: skip
def test_logits_are_those_of_the_reference(name: str, kv_dtype: str, block_size: int) -> None:
    """A prompt, one in chunks, tables with a page of unrelated slabs per layer, and single tokens in company."""
    spec, weights = specs.make(name)
    drivers = []
    for kernels in (False, True):
        driver = Paged(spec, weights, kv_dtype=kv_dtype, block_size=block_size, num_slabs=40)
        if kernels:
            driver.on(TorchBackend(torch.device("cpu"), kernels=True))
        driver.make_ragged("b")
        drivers.append(driver)
    for step in (
        {"a": (IDS, [len(IDS) - 1]), "b": (IDS[:21], [20])},
        {"a": ([5], [0]), "b": (IDS[21:24], [0, 2])},
        {"b": ([9], [0]), "c": (IDS[:3], [2])},
    ):
        want, got = (driver.run(step) for driver in drivers)
        for seq in step:
            size = float(np.abs(want[seq]).max())
            np.testing.assert_allclose(got[seq], want[seq], atol=(2e-3 if kv_dtype == "float32" else 3e-2) * size)
    program: Any = drivers[1].program
    counts = program.attention.counts
    assert counts["tokens"] > 0
    assert counts["rows"] > 0
    assert counts["torch"] == 0, "all by kernels"
