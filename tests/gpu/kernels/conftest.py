"""Kernels run here in Triton's interpreter, which has to be chosen before they are made."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
