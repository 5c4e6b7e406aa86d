"""NVIDIA's Model Optimizer: NVFP4 and FP8 of one matrix, by its own tensors.

pip install torch==2.13.0 requests omegaconf pulp scipy nvidia-ml-py; pip install --no-deps nvidia-modelopt==0.47.0
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

sys.path.insert(0, str(Path(__file__).parent))
from common import Case, save, weight


def nvfp4() -> Case:
    w = weight(16)
    made, scale, whole = NVFP4QTensor.quantize(w, 16)
    values = made.dequantize(dtype=torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})
    parts = {
        ".weight": made._quantized_data, ".weight_scale": scale, ".weight_scale_2": whole.float().reshape(()),
        ".input_scale": torch.tensor(0.01),
    }  # fmt: skip
    told = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", "model.layers.*.self_attn*"], "producer": {"name": "modelopt"}}  # fmt: skip
    return told, parts, values


def fp8() -> Case:
    made, scale = FP8QTensor.quantize(weight(16))
    values = made.dequantize(dtype=torch.float32, scale=scale)
    parts = {
        ".weight": made._quantized_data,
        ".weight_scale": scale.float().reshape(()),
        ".input_scale": torch.tensor(1.5),
    }
    return {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}, parts, values


def per_output() -> Case:
    w = weight(16)
    made, scale = FP8QTensor.quantize(w, axis=0)
    values = made.dequantize(dtype=torch.float32, scale=scale)
    parts = {".weight": made._quantized_data, ".weight_scale": scale.float().reshape(-1)}
    return (
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": ["lm_head"]},
        parts,
        values,
    )


def mxfp8() -> Case:
    made, scale = MXFP8QTensor.quantize(weight(16))
    values = made.dequantize(dtype=torch.float32, scale=scale)
    parts = {".weight": made._quantized_data, ".weight_scale": scale}
    return (
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32, "exclude_modules": ["lm_head"]},
        parts,
        values,
    )


save("modelopt", "nvidia-modelopt", {"nvfp4": nvfp4(), "fp8": fp8(), "fp8 of outputs": per_output(), "mxfp8": mxfp8()})
