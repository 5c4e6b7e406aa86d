"""The libraries for aarch64: which there are, that they compile, and what is known of such a processor.

What they compute is for `make test-arm`, under an emulator.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.native.schemes import packing
from penstock.core.matrix_format import NONE
from penstock.ops.native.abi import Act
from penstock.plan.native_device import native_device
from tools import native_checks
