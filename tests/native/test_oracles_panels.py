"""Matrices as other libraries store them, in native panels: what they hold is what the files say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.backends.native.schemes import packing
from penstock.core.matrix_format import NONE
from penstock.core.panels import panels_of
from penstock.ops.native.library import libraries, open_library
from penstock.ops.native.matrix import pack
from penstock.ops.stored import StoredMatrix
from tests.codes import kept
from tests.native.running import each_isa, pytestmark_native
from tests.quantised import LOGICAL, write
from tests.unit.weights.test_oracles import ACROSS, CASES

pytestmark = pytestmark_native
VALUES = {
    "compressed-tensors: fp8 of blocks": "groups of 24 inputs",
}  # fmt: skip
"""What no panels hold, and why."""


@each_isa
@pytest.mark.parametrize("case", sorted(set(CASES) - ACROSS))
def test_panels_hold_what_a_library_has_stored(tmp_path: Path, case: str, isa: str) -> None:
    m = kept(write(tmp_path / "m", CASES[case]))[LOGICAL]
    assert isinstance(m, StoredMatrix)
    assert (panels_of(m.format, m.shape[1]) is None) == (case in VALUES)
    if case in VALUES:
        return
    how = packing(NONE, m, isa)
    assert how.as_stored
    found = pack(open_library(libraries()[isa]), [m], how.format, how.act, panels=how.panels, as_stored=how.as_stored)
    got, want = found.values(open_library(libraries()[isa]))[: len(m.values())], m.values()
    if found.order is not None:
        want = want[:, found.order]
    # Two libraries divide where panels multiply; HQQ's values are two roundings, fused operations one.
    exact = not case.startswith(("compressed-tensors: nvfp4", "bitsandbytes: int8", "hqq"))
    np.testing.assert_allclose(got, want, rtol=0 if exact else 3e-7, atol=0 if exact else 1e-8)
