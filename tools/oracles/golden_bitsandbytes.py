"""bitsandbytes: NF4, FP4 and int8 as its layers save them.

pip install torch==2.13.0; pip install --no-deps bitsandbytes==0.50.2
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from bitsandbytes import functional as bnb

sys.path.insert(0, str(Path(__file__).parent))
from common import Case, K, save, weight


def four(kind: str, nested: bool, block: int, storage: torch.dtype, n: int = 16, k: int = K) -> Case:
    w = weight(n, k)
    packed, state = bnb.quantize_4bit(
        w, blocksize=block, compress_statistics=nested, quant_type=kind, quant_storage=storage
    )
    values = bnb.dequantize_4bit(packed, state)
    assert values.dtype == torch.float32
    parts = {".weight": packed} | {f".weight.{name}": x for name, x in state.as_dict(packed=True).items()}
    told = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": nested, "bnb_4bit_quant_storage": str(storage)[6:],
            "bnb_4bit_compute_dtype": "float32", "llm_int8_threshold": 6.0}  # fmt: skip
    return told, parts, values


def eight() -> Case:
    w = weight(16).half()
    codes, most, _ = bnb.int8_vectorwise_quant(w)
    values = bnb.int8_vectorwise_dequant(codes, most)
    parts = {".weight": codes, ".SCB": most, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, parts, values


CASES = {
    "nf4": four("nf4", False, 64, torch.uint8), "nf4 nested": four("nf4", True, 64, torch.uint8),
    "fp4": four("fp4", False, 64, torch.uint8), "fp4 nested in bfloat16": four("fp4", True, 64, torch.bfloat16),
    "nf4 nested, blocks of 128": four("nf4", True, 128, torch.uint8, 8, 256),
    "nf4 across rows": four("nf4", False, 64, torch.uint8, 16, 40), "int8": eight(),
}  # fmt: skip
save("bitsandbytes", "bitsandbytes", CASES)
