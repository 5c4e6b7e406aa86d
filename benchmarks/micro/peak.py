"""The most that one thread's registers can do: a loop of nothing but a format's multiply-add."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

FUSED = ("vfmadd231ps", "ymm", 12, 16), ("vfmadd231ps", "zmm", 24, 32)
BYTES = ("vpdpbusd", "zmm", 24, 128)
INSTRUCTIONS = {
    "avx2": dict.fromkeys(("f32", "f16", "bf16xf32", "bf16"), FUSED[0]),
    "avx512": dict.fromkeys(("f32", "f16", "bf16xf32", "bf16"), FUSED[1]),
    "avx512bf16": {
        "f32": FUSED[1], "f16": FUSED[1], "bf16xf32": FUSED[1], "bf16": ("vdpbf16ps", "zmm", 24, 64),
        "i8": BYTES, "i4": BYTES,
    },
}  # fmt: skip
"""Instruction, registers, sums kept at once (enough to hide its latency), operations of one instruction. Bytes without
vpdpbusd take several instructions, which have no peak of one loop."""
TURNS = 40000


def register_peak(isa: str, fmt: str) -> Callable[[], float] | None:
    """Measures operations per second, best of 8 short loops; None where nothing is known or no compiler is there."""
    if fmt not in INSTRUCTIONS.get(isa, {}):
        return None
    name, kind, sums, operations = INSTRUCTIONS[isa][fmt]
    first, second = (30, 31) if kind == "zmm" else (14, 15)
    body = "".join(f"{name} %%{kind}{first},%%{kind}{second},%%{kind}{i};" for i in range(sums))
    # Registers begin as zeros: what they held before could be slow to multiply.
    used = [*range(sums), first, second]
    clear = "".join(f"vxorps %%{kind}{i},%%{kind}{i},%%{kind}{i};" for i in used)
    lost = ",".join(f'"xmm{i}"' for i in used)
    source = (
        f'extern "C" void loop(long n) {{ asm volatile("{clear}1:{body}dec %0;jnz 1b;vzeroupper" '
        f': "+r"(n) :: "cc",{lost}); }}'
    )
    flags = "-mavx2" if kind == "ymm" else "-mavx512f -mavx512dq -mavx512bf16 -mavx512vnni"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "peak.so"
        command = [*compiler, "-O1", *flags.split(), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
        try:
            subprocess.run(command, input=source, text=True, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        loop = ctypes.CDLL(str(library)).loop
    loop.argtypes, loop.restype = [ctypes.c_long], None

    def measure() -> float:
        best = float("inf")
        for _ in range(8):
            begin = time.thread_time()
            loop(TURNS)
            best = min(best, time.thread_time() - begin)
        return TURNS * sums * operations / best

    return measure
