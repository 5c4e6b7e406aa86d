"""The text parts of checkpoints that also see, against transformers, which is asked without images."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.parity import check, save
from tests.models.vision_cases import CASES, make, restored


@pytest.mark.parametrize("case", CASES)
def test_text_parts_equal_transformers(case: str, tmp_path: Path) -> None:
    model = make(case)
    save(model, tmp_path)
    if case == "kimi_k25":
        restored(tmp_path)
    found = check(tmp_path, model, count_params=False)
    assert found.spec.family == case.split("-")[0]
