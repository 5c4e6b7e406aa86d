"""AutoRound: its packing as GPTQ and as AWQ, and its own reading of them.

pip install torch==2.13.0 transformers accelerate datasets py-cpuinfo; pip install --no-deps auto-round==0.16.1
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from auto_round.export.export_to_awq.utils import WQLinear_GEMM
from auto_round.utils.bit_packing import unpack_bitstream
from auto_round_extension.torch.qlinear_torch import QuantLinear as AsTheyAre
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as LessOne

sys.path.insert(0, str(Path(__file__).parent))
from common import Case, K, N, save, weight

GROUP = 32


def grid(w: torch.Tensor, bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    most = 2**bits - 1
    blocks = w.reshape(N, K // GROUP, GROUP)
    low, high = blocks.amin(2).clamp(max=0), blocks.amax(2).clamp(min=0)
    if symmetric:
        scales = (torch.maximum(high, -low) * 2 / most).half().float()
        return scales, torch.full_like(scales, (most + 1) // 2)
    scales = ((high - low) / most).half().float()
    return scales, torch.round(-low / scales).clamp(1, most)


def case(packing: str, bits: int, symmetric: bool) -> Case:
    w = weight(seed=bits)
    scales, zeros = grid(w, bits, symmetric)
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = w
    told = {"quant_method": "auto-round", "bits": bits, "group_size": GROUP, "sym": symmetric, "data_type": "int",
            "packing_format": packing, "autoround_version": "0.16.1", "iters": 200}  # fmt: skip
    if "awq" in packing:
        made = WQLinear_GEMM.from_linear(linear, bits, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    else:
        made = (LessOne if "auto_gptq" in packing else AsTheyAre)(bits, GROUP, K, N, False)
        made.device = torch.device("cpu")
        made.pack(linear, scales, zeros, device="cpu")
    names = ("qweight", "qzeros", "scales")
    parts = {f".{name}": getattr(made, name) for name in names}
    if "awq" in packing:
        from awq.utils.packing_utils import dequantize_gemm

        return told, parts, dequantize_gemm(*parts.values(), bits, GROUP).T
    # What a row of the identity gives is a row of the matrix: the library's own product.
    made.post_init()
    identity = torch.eye(K, dtype=torch.float16)
    values = made(identity).T
    codes = unpack_bitstream(parts[".qweight"], bits, dim=0)
    assert values.shape == (N, K)
    assert codes.shape == (K, N)
    return told, parts, values


CASES = {
    f"{packing.split(':')[-1]} {bits} bits {'symmetric' if symmetric else 'asymmetric'}": case(packing, bits, symmetric)
    for packing in ("auto_round:auto_gptq", "auto_round")
    for bits, symmetric in ((2, False), (3, True), (4, False), (5, False), (8, True))
}
CASES |= {"auto_awq 4 bits": case("auto_round:auto_awq", 4, False)}
save("auto_round", "auto-round", CASES)
