"""Numbers in memory and in registers: the one place where kernels load, narrow and multiply them.

Kernels compute in float32. Triton's interpreter keeps bfloat16 as its bits in uint16 arrays and computes with the bits
(3.6 to 3.9: sums and products of them are silently wrong), and not every target has e4m3. So 16-bit floats are widened
as they are loaded, and are narrowed again only inside `dot`; compilers fold the pair of conversions, and tensor cores
get their 16-bit operands. A test keeps `tl.load`, `tl.store` and `tl.dot` out of every other file.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LAUNCH: dict[str, Any] = {"enable_fp_fusion": True}
"""What every launch says and no kernel decides by itself: products and sums may become one operation."""
EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""For kernels whose steps are rounded one by one."""

_OVERLAPS = 90
"""NVIDIA's architectures from here on start a kernel before the one in front of it has ended."""

_OPERANDS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def operands_of(dtype: torch.dtype, otherwise: torch.dtype = torch.bfloat16) -> str:
    """The name that `dot` has for operands of a type; codes are multiplied as `otherwise`."""
    return _OPERANDS.get(dtype) or _OPERANDS[otherwise]


def overlap() -> dict[str, Any]:
    """What a launch says whose kernel calls `wait_for_others`: it may start while the kernel before it runs."""
    target = _target()
    if target is None or target.backend != "cuda" or target.arch < _OVERLAPS:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


def has_ptx() -> bool:
    """Whether what runs the kernels understands instructions of NVIDIA's."""
    target = _target()
    return target is not None and target.backend == "cuda"


def is_arch(arch: int) -> bool:
    """Whether kernels are compiled for this architecture of NVIDIA's, or interpreted."""
    target = _target()
    return INTERPRETED.value or (target is not None and target.backend == "cuda" and target.arch == arch)


def _target() -> Any:
    """What kernels are compiled for; None where they are interpreted, or nothing is there to run them."""
    if INTERPRETED.value:
        return None
    try:
        return triton.runtime.driver.active.get_current_target()
    except RuntimeError:
        return None


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """e4m3 as its bytes, which `load(..., e4m3=True)` reads; any other tensor as it is."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def padded(n: int, least: int = 16) -> int:
    """The power of two that holds n, at least `least`: tiles have no other sizes, and products none below 16."""
    return int(max(least, triton.next_power_of_2(n)))


@triton.jit
def wait_for_others(EARLY: tl.constexpr):
    """Lets the next kernel start, and waits until all before have ended. Whatever is no constant of the model is read
    and written behind it, by every program of the kernel: then those before have ended whenever a kernel has."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def fetch(at):
    """Lines of memory into the cache that multiprocessors share, by NVIDIA's instruction; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load(at, mask=None, other=0.0, e4m3: tl.constexpr = False):
    """Floats or codes as float32. `e4m3`: what lies there are bytes of that type."""
    if mask is None:
        x = tl.load(at)
    elif at.dtype.element_ty.is_int():
        x = tl.load(at, mask=mask, other=0)
    else:
        x = tl.load(at, mask=mask, other=other)
    if e4m3:
        x = from_e4m3(x)
    return x.to(tl.float32)


@triton.jit
def load_number(at, mask=None, other=0):
    """Whole numbers, float32 and float64 as they are."""
    tl.static_assert(at.dtype.element_ty.is_int() or at.dtype.element_ty.primitive_bitwidth >= 32)
    if mask is None:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=mask, other=other)
    return x


@triton.jit
def store(at, x, mask=None):
    """Float32 in the type that lies there: 16-bit floats are rounded to the nearest, ties to even."""
    if at.dtype.element_ty == tl.bfloat16:
        x = rounded_to_bf16(x).to(tl.bfloat16)
    else:
        x = x.to(at.dtype.element_ty)
    tl.store(at, x, mask=mask)


@triton.jit
def rounded_to_bf16(x):
    """Float32 with the low half zero, as bfloat16 has it; a NaN stays one."""
    bits = x.to(tl.uint32, bitcast=True)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, even.to(tl.float32, bitcast=True), x)


@triton.jit
def from_e4m3(code):
    """Bytes of e4m3 (1, 4 and 3 bits, bias 7, no infinities) as float32, through float16, whose bias is 8 more."""
    bits = code.to(tl.int32)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    x = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), x)


@triton.jit
def to_e4m3(x):
    """Float32 as bytes of e4m3: the nearest, ties to even, at most 448 in size; a NaN stays one."""
    size = tl.minimum(tl.abs(x), 448.0)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    steps = rounded(size * ((130 - exponent) << 23).to(tl.float32, bitcast=True))
    code = ((exponent + 6) << 3) + steps.to(tl.int32)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def rounded(x):
    """The nearest whole number, ties to even, of float32 below 2^22 in size."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def narrowed(x, operands: tl.constexpr):
    """Float32 as an operand of `dot`. The interpreter gets the same values in float32."""
    if operands == "float16":
        x = x.to(tl.float16)
        if INTERPRETED:
            x = x.to(tl.float32)
    elif operands == "bfloat16":
        if INTERPRETED:
            x = rounded_to_bf16(x)
        else:
            x = x.to(tl.bfloat16)
    return x


@triton.jit
def dot(a, b, acc, operands: tl.constexpr):
    """acc + a b, added in float32. Shapes: a [M, K], b [K, N], acc [M, N], all float32."""
    return tl.dot(narrowed(a, operands), narrowed(b, operands), acc, input_precision="ieee")
