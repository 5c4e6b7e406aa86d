"""The libraries for aarch64: which there are, that their own code compiles, and what is known of such processors.

What they compute is for `make test-arm`: a minute's compiling, and an emulator.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from tools import native_checks

from penstock.backends.native.schemes import packing
from penstock.core.matrix_format import NONE
from penstock.ops.native.abi import Act
from penstock.plan.native_device import native_device

ISAS = ("neon", "neon-dotprod", "neon-bf16")
# What has code for ARM, but for the largest: registers, products, rounding, and the score.
SOURCES = ("attention_gather", "gemm_float", "peak", "program", "score")


def recipe() -> native_checks.Recipe:
    try:
        return native_checks.recipe("aarch64")
    except native_checks.Missing as why:
        pytest.skip(str(why))


@pytest.mark.parametrize("isa", ISAS)
def test_code_for_arm_compiles(isa: str, tmp_path: Path) -> None:
    how = recipe()
    assert tuple(how.levels) == ISAS
    for name in SOURCES:
        source = native_checks.CSRC / "src" / f"{name}.cpp"
        words = [*how.options(isa, source, "-O0 -Werror"), "-c", str(source), "-o", str(tmp_path / f"{name}.o")]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_plans_know_the_libraries() -> None:
    """None counts as unknown, and bfloat16 rows are for those that multiply them."""
    rates = {isa: native_device(isa, 4).flops_per_s for isa in ("base", *ISAS)}
    assert rates["base"]["float32"] < rates["neon"]["float32"] < rates["neon-dotprod"]["float32"]
    assert rates["neon-bf16"]["bfloat16"] > rates["neon-bf16"]["float32"]
    assert "no ARM processor was measured" in native_device("neon", 4).sources["flops_per_s"]
    halves = np.zeros((1, 64), np.uint16)
    rows = {isa: packing(NONE, halves, isa).act for isa in ISAS}
    assert rows == {"neon": Act.F32, "neon-dotprod": Act.F32, "neon-bf16": Act.BF16}
