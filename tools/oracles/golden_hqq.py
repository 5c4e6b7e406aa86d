"""HQQ: layers as its library saves them for safetensors, decoded with float32 as the type of computation.

pip install torch==2.13.0 einops termcolor; pip install --no-deps hqq==0.2.8.post1 accelerate
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

sys.path.insert(0, str(Path(__file__).parent))
from common import Case, K, save, weight


def case(bits: int, axis: int, group: int = 32, stored: torch.dtype = torch.float16, as_float: bool = False) -> Case:
    linear = torch.nn.Linear(K, 16, bias=False)
    linear.weight.data = weight(16, seed=bits)
    config = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis, view_as_float=as_float)
    layer = HQQLinear(linear, config, compute_dtype=stored, device="cpu")
    state = layer.state_dict()
    exact = layer.meta | {"scale": layer.meta["scale"].float(), "zero": layer.meta["zero"].float()}
    values = Quantizer.dequantize(layer.W_q, exact | {"compute_dtype": torch.float32})
    plain = {k: v for k, v in config.items() if k in ("weight_quant_params", "scale_quant_params", "zero_quant_params")}
    told = {"quant_method": "hqq", "quant_config": plain | {"offload_meta": False}, "skip_modules": ["lm_head"]}
    return told, {f".{name}": x for name, x in state.items() if x is not None}, values


CASES = {f"{bits} bits": case(bits, 1) for bits in (8, 6, 5, 4, 3, 2, 1)} | {
    "4 bits bfloat16": case(4, 1, stored=torch.bfloat16), "4 bits axis 0": case(4, 0), "3 bits axis 0": case(3, 0),
    "4 bits as float": case(4, 1, as_float=True), "4 bits across rows": case(4, 1, group=128),
}  # fmt: skip
save("hqq", "hqq", CASES)
