"""Kernels run here in Triton's interpreter, which has to be chosen before they are made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.gpu.kernels.interpreter import quicken

os.environ["TRITON_INTERPRET"] = "1"
quicken()

NUMPY_SAYS = [
    # What a device does without a word: infinities and NaNs are results.
    "ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning",
    # Triton 3.6 with a numpy before 2.4; with a later one its interpreter cannot run loops.
    "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for line in NUMPY_SAYS:
                item.add_marker(pytest.mark.filterwarnings(line))
