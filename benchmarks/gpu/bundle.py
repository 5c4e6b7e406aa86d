"""One folder with all that the benchmark needs on a machine that reaches no network: at most 64 MiB.

    python -m benchmarks.gpu.bundle gpu-bundle
    (there)  cd gpu-bundle && sh run.sh --minutes 8 --out results

In it: the source of Penstock without compiled kernels, the benchmark, the wheels of what Penstock requires, unpacked
(CPython 3.12 on Linux x86-64), and the commit. Not in it, because a machine with a GPU has them: torch, Triton, numpy.
Packages come from the index that pip is set up with.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 64 << 20
GLIBC = 39
"""Of the machine with the GPU at least 2.39 (Ubuntu 24.04): pip takes the names of all older ones, one by one."""
THERE = ("numpy",)
"""Required, and on every machine that has torch."""
NEEDLESS = ("hf-xet", "pygments")
"""What packages bring along for downloads and colours. `rich` imports the second one only to colour code."""
SOURCES = (".c", ".h", ".pyx", ".pxd", ".pxi", ".pyi")
RUN = """#!/bin/sh
# sh run.sh [OPTIONS OF benchmarks/gpu/run.py]
cd "$(dirname "$0")" || exit 1
PYTHONPATH="$PWD/src:$PWD:$PWD/packages" PYTHONUNBUFFERED=1 exec "${PYTHON:-python3}" -m benchmarks.gpu.run "$@"
"""


def wheels(folder: Path) -> list[Path]:
    """What `pyproject.toml` requires, and what that requires, as wheels for the machine with the GPU."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [line.split(";")[0].strip() for line in project["dependencies"]]
    wanted = [line for line in wanted if not line.startswith(THERE)]
    names = [*(f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)), "manylinux2014_x86_64"]
    platforms = [part for name in names for part in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--dest", str(folder), "--only-binary=:all:",
               "--python-version", "312", "--implementation", "cp", *platforms, "-c", str(ROOT / "constraints.txt"),
               *wanted]  # fmt: skip
    subprocess.run(command, check=True)
    needless = tuple(name.replace("-", "_") for name in (*NEEDLESS, *THERE))
    return sorted(p for p in folder.glob("*.whl") if not p.name.lower().startswith(tuple(f"{n}-" for n in needless)))


def copy_source(out: Path) -> None:
    left_out = shutil.ignore_patterns("__pycache__", "*.so", "bundled", "*.pyc")
    shutil.copytree(ROOT / "src" / "penstock", out / "src" / "penstock", ignore=left_out)
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        target = out / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for name in ("__init__.py", "specs.py", "gpu/__init__.py", "gpu/kernels/__init__.py", "gpu/kernels/naive.py"):
        if (ROOT / "tests" / name).exists():
            (out / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "tests" / name, out / "tests" / name)
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    (out / "COMMIT").write_text(asked.stdout.strip() + (" and changes\n" if changed.stdout.strip() else "\n"))
    (out / "run.sh").write_text(RUN)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def bundle(out: Path) -> int:
    """Bytes of the folder. Raises: SystemExit where it is there already, or too large."""
    if out.exists():
        raise SystemExit(f"{out} is there already: remove it, or name another folder")
    copy_source(out)
    with tempfile.TemporaryDirectory() as folder:
        for wheel in wheels(Path(folder)):
            with zipfile.ZipFile(wheel) as file:
                file.extractall(out / "packages")
            print(f"  {wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB packed")
    for path in sorted((out / "packages").rglob("*")):
        if path.suffix in SOURCES:
            path.unlink()  # of what is there compiled
        elif path.suffix == ".so" and shutil.which("strip") is not None:
            subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)  # of tables for debuggers
    num_bytes = size(out)
    print(f"{out}: {num_bytes / 2**20:.1f} MiB; source {size(out / 'src') / 2**20:.1f} MiB, "
          f"packages {size(out / 'packages') / 2**20:.1f} MiB")  # fmt: skip
    if num_bytes > LIMIT_BYTES:
        largest = sorted(((size(p), p.name) for p in (out / "packages").iterdir() if p.is_dir()), reverse=True)[:5]
        said = ", ".join(f"{name} {n / 2**20:.1f} MiB" for n, name in largest)
        raise SystemExit(f"{num_bytes / 2**20:.1f} MiB are more than {LIMIT_BYTES >> 20}; the largest: {said}")
    return num_bytes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--pack", action="store_true", help="also OUT.tar.gz")
    args = parser.parse_args()
    made = args.out.resolve()
    bundle(made)
    if args.pack:
        packed = Path(shutil.make_archive(str(made), "gztar", made.parent, made.name))
        print(f"{packed}: {packed.stat().st_size / 2**20:.1f} MiB")
