"""AWQ by AutoAWQ: the packing of its GEMM version, and its decoding in plain torch.

pip install torch==2.13.0 transformers accelerate datasets; pip install --no-deps autoawq==0.2.9
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm

sys.path.insert(0, str(Path(__file__).parent))
from common import Case, K, N, save, weight


def case(group: int) -> Case:
    w, size = weight(), K if group == -1 else group
    blocks = w.reshape(N, K // size, size)
    low, high = blocks.amin(2).clamp(max=0), blocks.amax(2).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = torch.round(-low / scales).clamp(0, 15)
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = w
    made = WQLinear_GEMM.from_linear(linear, 4, size, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    values = dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, size).T
    parts = {f".{name}": getattr(made, name) for name in ("qweight", "qzeros", "scales")}
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}, parts, values


save("awq", "autoawq", {"groups of 32": case(32), "whole rows": case(-1)})
