"""Builds the native kernels: one library per instruction set, all from the same sources.

What a compiler cannot do is left out, and without a C++17 compiler the package works on its reference operations, which
are slow; it says so. The build never looks at the machine it runs on: which library fits is decided at run time.

By hand, beside an editable install: `python setup.py build_ext --inplace`; PENSTOCK_BUILD_ISAS=base,avx2 builds only
those. For another processor family: CXX names a compiler for it and PENSTOCK_BUILD_MACHINE the family, as in

    PENSTOCK_BUILD_MACHINE=aarch64 CXX=aarch64-linux-gnu-g++ python setup.py build_ext
    PENSTOCK_BUILD_MACHINE=aarch64 CXX="python -m ziglang c++ -target aarch64-linux-gnu.2.28" python setup.py build_ext
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SOURCE = ROOT / "csrc" / "src"
PACKAGE = Path("penstock", "ops", "native", "lib")
AVX512 = "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd"
LEVELS = {
    "base": "",
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": AVX512,
    "avx512bf16": f"{AVX512} -mavx512bf16 -mavx512vnni",
}
# Contraction off: what is fused is written so. No fast-math: NaN and infinity are told to people by name.
FLAGS = "-std=c++17 -O3 -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math -ffp-contract=off -Wall -Wextra"
UNGUARDED = "score.cpp"  # has to run everywhere: never compiled with an instruction set's flags


class BuildNative(build_ext):
    """`penstock/ops/native/lib/penstock-LEVEL.so`."""

    def run(self) -> None:
        compiler = find_compiler()
        if compiler is None:
            skip("no C++17 compiler was found (set CXX to name one)")
            return
        beside_sources = self.inplace or getattr(self, "editable_mode", False)
        target = (ROOT / "src" if beside_sources else Path(self.build_lib)) / PACKAGE
        target.mkdir(parents=True, exist_ok=True)
        objects = Path(self.build_temp) / "native"
        levels = levels_of(os.environ.get("PENSTOCK_BUILD_MACHINE") or platform.machine(), compiler)
        only = os.environ.get("PENSTOCK_BUILD_ISAS", ",".join(levels)).split(",")
        built = [
            name
            for number, name in enumerate(levels)
            if name in only and build(compiler, objects, target, name, number, levels[name])
        ]
        if not built:
            skip(f"{compiler} could not build them")

    def get_outputs(self) -> list[str]:
        return [str(p) for p in (Path(self.build_lib) / PACKAGE).glob("*.so")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


def levels_of(machine: str, compiler: str = "") -> dict[str, str]:
    """Name of each library for a processor family, and its flags."""
    if machine in ("aarch64", "arm64"):
        # gcc brings a feature's intrinsics with -march alone, zig knows features with -mcpu alone. gcc 12 moves loads
        # so far ahead that the products of bytes have 5,000 instructions for the stack; without, 49.
        plain, of = ("", "-mcpu=generic") if "zig" in compiler else ("-fno-schedule-insns", "-march=armv8.2-a")
        features = {"neon": "", "neon-dotprod": f"{of}+dotprod", "neon-bf16": f"{of}+dotprod+i8mm+bf16"}
        return {name: f"{plain} {flags}" for name, flags in features.items()}
    return LEVELS if machine in ("x86_64", "AMD64") else {"base": ""}


def find_compiler() -> str | None:
    for name in [os.environ.get("CXX"), "c++", "g++", "clang++"]:
        if name and shutil.which(shlex.split(name)[0]):
            return name
    return None


def build(compiler: str, objects: Path, target: Path, level: str, number: int, flags: str) -> bool:
    """False, with a word why, if the compiler does not know the instruction set."""
    folder = objects / level
    folder.mkdir(parents=True, exist_ok=True)
    common = [*shlex.split(compiler), *FLAGS.split(), f"-I{ROOT / 'csrc' / 'include'}", f"-DPST_ISA_LEVEL={number}"]
    headers = max(p.stat().st_mtime for p in [*SOURCE.glob("*.h"), *(ROOT / "csrc" / "include").glob("*.h")])

    def compile_one(source: Path) -> str:
        out = folder / (source.stem + ".o")
        if out.exists() and out.stat().st_mtime > max(headers, source.stat().st_mtime, Path(__file__).stat().st_mtime):
            return ""
        own = [] if source.name == UNGUARDED else flags.split()
        done = subprocess.run([*common, *own, "-c", str(source), "-o", str(out)], capture_output=True, text=True)
        return "" if done.returncode == 0 else done.stderr or f"{compiler} failed"

    sources = sorted(SOURCE.glob("*.cpp"))
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(usable) as pool:
        problems = [p for p in pool.map(compile_one, sources) if p]
    if problems:
        print(problems[0], file=sys.stderr)
        print(f"penstock: the kernels for {level} are left out: {compiler} cannot compile them", file=sys.stderr)
        return False
    library = target / f"penstock-{level}.so"
    fresh = library.with_suffix(".new")  # a running process has the old one mapped
    parts = [str(folder / (source.stem + ".o")) for source in sources]
    command = [*shlex.split(compiler), "-shared", "-pthread", "-o", str(fresh), *parts]
    linked = subprocess.run(command, capture_output=True, text=True)
    if linked.returncode:
        print(linked.stderr, file=sys.stderr)
        return False
    fresh.replace(library)
    return True


def skip(why: str) -> None:
    print(f"penstock: native kernels were not built: {why}; it will run on its slow reference kernels", file=sys.stderr)


setup(ext_modules=[Extension("penstock.ops.native.lib.none", [])], cmdclass={"build_ext": BuildNative})
