"""Compile every GPU kernel for targets that are not here, and check what it needs.

    python tools/gpu_kernels.py                  # all, a table, and benchmarks/results/gpu-kernels.json
    python tools/gpu_kernels.py --only rms_norm --target sm_90 --no-store

The launchers run as they would on a device, on tensors without numbers; what they would launch is compiled, with the
options and the specialisation they ask for, and assembled by the assembler that comes with Triton. Nothing is run. The
figures are the assembler's: registers of a thread, bytes of shared memory of a block, bytes spilled.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu-kernels.json"
TARGETS: dict[str, tuple[str, int | str, int, int]] = {
    "sm_80": ("cuda", 80, 32, 163 << 10), "sm_90": ("cuda", 90, 32, 227 << 10), "sm_100": ("cuda", 100, 32, 227 << 10),
    "gfx942": ("hip", "gfx942", 64, 64 << 10),
}  # fmt: skip
"""Backend, architecture, threads of a warp, and the bytes of shared memory that a block may have."""
MAX_REGISTERS = {"cuda": 255, "hip": 512}


class Device:
    """What Triton asks of a driver before it compiles. There is none to load a kernel."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def compiled(cases: dict[str, Any], target: str) -> list[dict[str, Any]]:
    """What each kernel that the cases launch needs on a target."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    backend, arch, warp, _ = TARGETS[target]
    triton.runtime.driver.set_active(Device(GPUTarget(backend, arch, warp)))
    run: Any = JITFunction.run
    rows: list[dict[str, Any]] = []
    case = ""

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        self.device_caches.clear()
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        rows.append({"case": case, "kernel": self.__name__.lstrip("_"), "target": target, **needs(kernel, backend)})
        return kernel

    JITFunction.run = record
    try:
        for case, made in cases.items():  # noqa: B007 (`record` reads it)
            made.make("meta")()
    finally:
        JITFunction.run = run
    return rows


def needs(kernel: Any, backend: str) -> dict[str, Any]:
    """Registers, shared memory, spills and warps of a compiled kernel."""
    found = {"shared_bytes": kernel.metadata.shared, "warps": kernel.metadata.num_warps}
    if backend == "hip":
        text = kernel.asm["amdgcn"]

        def number(name: str) -> int:
            return int(re.findall(rf"\.{name}:\s+(\d+)", text)[-1])

        # Scalar registers spill into lanes of vector registers; what leaves those is in the private segment.
        spilled = number("private_segment_fixed_size")
        return found | {"registers": number("vgpr_count"), "spilled_bytes": spilled, "fused_float64": fused(text)}
    text = kernel.asm["ptx"]
    (arch,) = re.findall(r"^\.target (\w+)", text, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(text)
        command = [assembler(arch), "-v", f"--gpu-name={arch}", str(source), "-o", str(Path(folder) / "kernel.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    return found | {"registers": int(registers), "spilled_bytes": sum(map(int, spills)), "fused_float64": fused(text)}


def assembler(arch: str) -> str:
    """The one that Triton would use."""
    from triton.backends.nvidia.compiler import get_ptxas

    (number,) = re.findall(r"\d+", arch)
    return str(get_ptxas(int(number)).path)


def fused(text: str) -> int:
    """How many operations of float64 are a product and a sum at once. The sampler's kernels must have none."""
    return len(re.findall(r"fma\.rn\.f64|v_(?:pk_)?fmac?_f64", text))


def problems(row: dict[str, Any]) -> list[str]:
    """What breaks the budget of a target, as ends of sentences."""
    backend, _, _, shared = TARGETS[row["target"]]
    most = MAX_REGISTERS[backend]
    out = []
    if row["spilled_bytes"]:
        out.append(f"spills {row['spilled_bytes']} bytes")
    if row["shared_bytes"] > shared:
        out.append(f"wants {row['shared_bytes']} bytes of shared memory; a block has {shared}")
    if row["registers"] > most:
        out.append(f"wants {row['registers']} registers; a thread has {most}")
    if row["kernel"] == "weigh" and row["fused_float64"]:
        out.append(f"fuses {row['fused_float64']} steps that must be rounded one by one")
    return out


def table(rows: list[dict[str, Any]], targets: list[str]) -> str:
    """Registers / KiB of shared memory by case and target, as Markdown."""
    lines = ["| case | kernel | " + " | ".join(targets) + " |", "| --- | --- |" + " --- |" * len(targets)]
    # Of a kernel that a case launches in two forms, the one that needs more.
    by = {(r["case"], r["kernel"], r["target"]): r for r in sorted(rows, key=lambda r: r["registers"])}
    for case, kernel in dict.fromkeys((r["case"], r["kernel"]) for r in rows):
        cells = []
        for target in targets:
            row = by.get((case, kernel, target))
            spilled = f", {row['spilled_bytes']} B spilled" if row and row["spilled_bytes"] else ""
            cells.append(f"{row['registers']} / {row['shared_bytes'] / 1024:.3g}{spilled}" if row else "-")
        lines.append(f"| {case} | `{kernel}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="a case, by a part of its name; may be repeated")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--no-store", action="store_true", help="print the table only")
    options = parser.parse_args(arguments)
    os.environ.pop("TRITON_INTERPRET", None)
    try:
        import torch
        import triton

        from penstock.backends.gpu.kernels.cases import CASES
    except ImportError as error:
        print(f"{error}: install torch and Triton, `pip install 'penstock[gpu]'`", file=sys.stderr)
        return 2
    cases = {name: case for name, case in CASES.items() if not options.only or any(o in name for o in options.only)}
    targets = options.target or list(TARGETS)
    rows = [row for target in targets for row in compiled(cases, target)]
    print(table(rows, targets))
    bad = [f"{row['case']} on {row['target']}: {row['kernel']} {what}" for row in rows for what in problems(row)]
    print("\n".join(bad) or f"{len(rows)} compiled kernels within their budgets", file=sys.stderr)
    if not (options.no_store or options.only or options.target):
        about = {"triton": triton.__version__, "torch": torch.__version__, "run": False}
        RESULTS.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
