"""The two products that multi-head latent attention has besides attention itself, in absorbed form.

The key projection is moved to the query and the value projection behind the sum, so that attention runs over the cached
latents like one shared kv head. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.ops.ref.product import as_float32


def latent_query(q: F32, key: npt.NDArray[Any]) -> F32:
    """q [T, H, nope + rope], key [H, nope, C] of any type of floats -> [T, H, C + rope]."""
    nope = key.shape[1]
    absorbed = np.matmul(q[:, :, None, :nope], as_float32(key))[:, :, 0]
    return np.concatenate([absorbed, q[:, :, nope:]], axis=-1)


def latent_output(x: F32, value: npt.NDArray[Any]) -> F32:
    """x [T, H, C], value [H, W, C] of any type of floats -> [T, H, W]."""
    out: F32 = np.matmul(x[:, :, None, :], as_float32(value).transpose(0, 2, 1))[:, :, 0]
    return out
