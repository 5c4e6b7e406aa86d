"""GPTQ by GPTQModel: its packing and its decoding in plain torch.

pip install torch==2.13.0 transformers threadpoolctl device-smi logbar tokenicer pypcre defuser dill pillow datasets
pip install --no-deps gptqmodel==7.7.0   (or its source archive on PYTHONPATH: only Python code is used)
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization.config import FORMAT
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from gptqmodel.version import __version__

sys.path.insert(0, str(Path(__file__).parent))
from common import Case, K, N, save, weight


def case(bits: int, version: int, symmetric: bool, ordered: bool, group: int = 32, seed: int = 0) -> Case:
    w, most = weight(seed=seed), 2**bits - 1
    size = K if group == -1 else group
    g_idx = torch.arange(K, dtype=torch.int32) // size
    if ordered:
        g_idx = g_idx[torch.randperm(K)]
    blocks = [w[:, g_idx == g] for g in range(K // size)]
    low = torch.stack([b.min(1).values.clamp(max=0) for b in blocks], 1)
    high = torch.stack([b.max(1).values.clamp(min=0) for b in blocks], 1)
    if symmetric:
        scales = torch.maximum(high, -low) * 2 / most
        zeros = torch.full_like(scales, (most + 1) // 2)
    else:
        scales = (high - low) / most
        zeros = torch.round(-low / scales).clamp(1, most)
    scales = scales.half().float()
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = w
    made = TorchLinear(
        bits=bits, group_size=group, sym=symmetric, desc_act=ordered, in_features=K, out_features=N,
        format=FORMAT.GPTQ_V2,
    )  # fmt: skip
    made.pack_original(linear, scales, zeros, g_idx)
    super(TorchLinear, made).post_init()  # its own would compile
    values = made.dequantize_weight().T
    if version == 1:
        config = SimpleNamespace(bits=bits, pack_dtype=torch.int32)
        convert_gptq_v2_to_v1_format_module(made, config)
    parts = {f".{name}": getattr(made, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    told = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered, "sym": symmetric,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip
    return told, parts, values


CASES = {
    f"{bits} bits {name}": case(bits, *how, seed=bits)
    for bits in (2, 3, 4, 8)
    for name, how in {
        "symmetric": (1, True, False), "act-order": (1, False, True), "version 2": (2, False, False),
    }.items()
    if how[0] == 1 or bits in (3, 4)
} | {"3 bits whole rows": case(3, 1, True, False, group=-1)}  # fmt: skip
save("gptq", "gptqmodel", CASES, __version__)
