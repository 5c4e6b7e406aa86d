"""Decode graphs whose attention runs on the kernels: launches of the interpreter are recorded, tables are read anew."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'penstock[gpu]'")

import torch

from penstock.backends.gpu.backend import TorchBackend
from penstock.model.forward import StepLimits
from tests import specs
from tests.paged import Paged

IDS = [3 + i * 7 % 50 for i in range(40)]


@pytest.mark.parametrize(
    ("name", "kv_dtype", "block_size"),
    [("llama_gqa", "float32", 16), ("llama_mqa", "int8", 16), ("latent", "float32", 16)],
)
def test_replayed_logits_are_those_of_the_reference(name: str, kv_dtype: str, block_size: int) -> None:
    """Rows that come and go, whose contexts have other lengths than any that was captured."""
    spec, weights = specs.make(name)
    plain, fast = (
        Paged(spec, weights, kv_dtype=kv_dtype, block_size=block_size, num_slabs=12, max_model_len=32) for _ in range(2)
    )
    backend = TorchBackend(torch.device("cpu"), kernels=True, graphs=(1, 2))
    backend.warming.always = name == "llama_gqa"
    fast.on(backend)
    fast.planes = tuple(fast.planes)  # type: ignore[assignment]
    fast.program.warm(fast.planes, StepLimits(fast.groups, block_size, 2, 2, True), lambda done, total: None)
    attention: Any = fast.program.attention
    assert attention.counts["tokens"] > 0
    assert attention.counts["torch"] == 0
    prompts = {"a": (IDS[:18], [17]), "b": (IDS[:2], [1])}
    for driver in (plain, fast):
        driver.run(prompts)
    for step in ({"b": ([9], [0])}, {"b": ([7], [0]), "a": ([4], [0])}, {"a": ([5], [0])}):
        want, got = plain.run(step), fast.run(step)
        for seq in step:
            size = float(np.abs(want[seq]).max())
            np.testing.assert_allclose(got[seq], want[seq], atol=(2e-3 if kv_dtype == "float32" else 3e-2) * size)
    assert fast.program.graphs.counts == {2: 1, 1: 2, "eager": 1}


COMPILES = textwrap.dedent("""
    import logging
    import triton, triton.language as tl
    from triton.backends.compiler import GPUTarget
    from penstock.backends.gpu.warm import CompilationWatch

    class MockDriver:
        '''Names a GPU that is not there: kernels are compiled for it, and never launched.'''
        def get_current_target(self): return GPUTarget("cuda", 90, 32)
        def get_current_device(self): return 0
        def get_current_stream(self, device): return 0

    triton.runtime.driver.set_active(MockDriver())

    @triton.jit
    def doubled(at, n, BLOCK: tl.constexpr):
        x = tl.arange(0, BLOCK)
        tl.store(at + x, tl.load(at + x, mask=x < n) * 2, mask=x < n)

    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
    watch = CompilationWatch()
    assert watch.begin()
    heard = []
    for block in (16, 16, 32):
        doubled.warmup(triton.runtime.jit.MockTensor("float32"), 7, BLOCK=block, grid=(1,))
        heard.append((watch.num, watch.num_late))
        watch.ready = True
    print(heard)
""")


def test_Triton_tells_the_watch_of_what_it_compiles(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiler itself, for a GPU that is not there; a kernel that is known is no news."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    script = tmp_path / "compiles.py"
    script.write_text(COMPILES)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[(1, 0), (1, 0), (2, 1)]", done.stderr
    assert "ERROR a kernel was compiled after the rank was ready" in done.stderr
    assert "doubled[num_warps=4" in done.stderr
    assert "BLOCK=32, before any step" in done.stderr
