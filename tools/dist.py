"""What goes to users: wheels and the source distribution, what they must hold, and what an installation costs.

    python tools/dist.py build              into dist/: the source distribution, a wheel with kernels for Linux with
                                             glibc 2.28 or newer, and one without kernels for every other system
    python tools/dist.py check dist/*       what each of them holds; 1 and a line for each fault if it is not right
    python tools/dist.py try dist/X.whl     install it into an empty folder, without a compiler or this repository,
                                             and serve: sizes and times. `--root ROOT`: under an emulator, with the
                                             Python of the system for another processor family that lies unpacked there

The wheels are built from the source distribution, so it builds. Both are built in an environment of their own
(build/wheel-tools), from the package index.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
TOOLS = ROOT / "build" / "wheel-tools"
REQUIRES = ("setuptools==84.2.1", "ziglang==0.15.2")
"""setuptools builds; zig links, as it knows every glibc's symbols, and compiles where there is no GCC."""
SOURCES = ("src", "csrc", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
GLIBC = (2, 28)
"""Debian 10, RHEL 8, Ubuntu 20.04, and all that is newer: PEP 600's manylinux_2_28."""
NEWEST = {"GLIBC": GLIBC, "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""Versions of symbols that such systems have: those of glibc 2.28 and GCC 8."""
SYSTEM = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libstdc++.so.6", "libgcc_s.so.1"}
STARTS = 1
"""Functions that run as a library is opened: that of `score.cpp`, which every processor can run."""
LOADERS = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
MOST_BYTES = 40 * 2**20
NO_KERNELS = "none"
START_LIMIT_S = 60.0
MACHINES = {"x86_64": 62, "aarch64": 183}
"""ELF's numbers of processor families (e_machine)."""
FIRST_QUESTION = {"model": "nano", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16}


class WheelError(Exception):
    """The sentence says what to change."""


# -- build -----------------------------------------------------------------------------------------------------------


def build(machine: str) -> list[Path]:
    """The source distribution and both wheels. Raises: WheelError."""
    python = tools()
    DIST.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name, "tree")
        copy_sources(tree)
        sdist = backend(python, tree, "build_sdist")
        with tarfile.open(sdist) as archive:
            archive.extractall(name, filter="data")
        unpacked = Path(name, sdist.name.removesuffix(".tar.gz"))
        pure = backend(python, unpacked, "build_wheel", PENSTOCK_BUILD_ISAS=NO_KERNELS)
        shutil.rmtree(unpacked / "build")
        full = backend(
            python,
            unpacked,
            "build_wheel",
            f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}",
            PENSTOCK_BUILD_MACHINE=machine,
            **compilers(python, machine),
        )
    return [sdist, pure, full]


def copy_sources(tree: Path) -> None:
    """What a source distribution is made of, without what is built."""
    tree.mkdir()
    leave = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    for part in SOURCES:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, tree / part, ignore=leave)
        else:
            shutil.copy2(ROOT / part, tree / part)


def tools() -> Path:
    """The interpreter of the environment that builds. It is made again when REQUIRES changes."""
    python, stamp = TOOLS / "bin" / "python", TOOLS / "requires.json"
    if not stamp.exists() or json.loads(stamp.read_text()) != list(REQUIRES):
        print(f"==> {', '.join(REQUIRES)} into {TOOLS.relative_to(ROOT)}", flush=True)
        venv.create(TOOLS, clear=True, with_pip=True)
        run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIRES])
        stamp.write_text(json.dumps(REQUIRES))
    return python


def compilers(python: Path, machine: str) -> dict[str, str]:
    """What compiles and links for a processor family, for `setup.py`. The kernels are measured as GCC compiles them."""
    zig = f"{python} -m ziglang c++ -target {machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    gcc = os.environ.get("CXX") or ("g++" if machine == platform.machine() else f"{machine}-linux-gnu-g++")
    if shutil.which(gcc) is None:
        print(f"==> there is no {gcc}: zig compiles", flush=True)
        return {"CXX": zig, "LDFLAGS": "-s"}
    # As a C compiler zig leaves its own C++ library out; GCC's are linked to, as every system has them.
    names = [run([gcc, f"-print-file-name={name}"]).strip() for name in ("libstdc++.so", "libgcc_s.so.1")]
    linker = zig.replace(" c++ ", " cc ")
    return {"CXX": gcc, "PENSTOCK_BUILD_LINKER": linker, "LDFLAGS": f"-s {' '.join(names)}"}


def backend(python: Path, tree: Path, hook: str, platform_tag: str = "", **environment: str) -> Path:
    """What setuptools makes of a tree, moved to dist/."""
    settings = {"--build-option": ["--plat-name", platform_tag]} if platform_tag else {}
    code = f"from setuptools import build_meta as b; print(b.{hook}({str(DIST)!r}, {settings!r}))"
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(TOOLS / "cache"), "ZIG_LOCAL_CACHE_DIR": str(TOOLS / "cache")}
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or str(int((ROOT / "CHANGELOG.md").stat().st_mtime))
    done = run(
        [str(python), "-c", code], cwd=tree, env=os.environ | caches | {"SOURCE_DATE_EPOCH": epoch} | environment
    )
    made = DIST / done.splitlines()[-1]
    print(f"==> {made.relative_to(ROOT)}: {made.stat().st_size:,} bytes", flush=True)
    return made


def run(command: list[str], **options: Any) -> str:
    """Standard output. Raises: WheelError with the end of what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise WheelError(f"{' '.join(command)[:200]} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


# -- check -----------------------------------------------------------------------------------------------------------


def check(path: Path) -> list[str]:
    """What is wrong with a wheel or a source distribution, a sentence each."""
    if path.suffix != ".whl":
        return check_sdist(path)
    wheel = re.fullmatch(r"penstock-([^-]+)-([^-]+)-([^-]+)-([^-]+)\.whl", path.name)
    if wheel is None:
        return [f"{path.name} is no name of a wheel of ours"]
    version, python, abi, system = wheel.groups()
    with zipfile.ZipFile(path) as file:
        names = set(file.namelist())
        faults = missing(names, package_files(), "")
        record = f"penstock-{version}.dist-info"
        if "penstock = penstock.cli.main:main" not in read(file, f"{record}/entry_points.txt"):
            faults.append("it brings no command penstock")
        faults += missing(names, {f"{record}/licenses/LICENSE"}, "")
        if stray := [n for n in names if not n.startswith(("penstock/", f"{record}/"))]:
            faults.append(f"it puts files beside the package: {', '.join(stray)}")
        libraries = sorted(n for n in names if n.endswith(".so"))
        wanted = libraries_of(system)
        if set(libraries) != wanted:
            faults.append(f"its kernels are {libraries}, and should be {sorted(wanted)}")
        for library in libraries:
            faults += [f"{library}: {fault}" for fault in portability(file.read(library))]
    if (python, abi) != ("py3", "none"):
        faults.append(f"it is for {python}-{abi} only: its kernels need no certain Python, so py3-none")
    if path.stat().st_size > MOST_BYTES:
        faults.append(f"it has {path.stat().st_size:,} bytes; {MOST_BYTES:,} are allowed")
    return faults


def check_sdist(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {f"src/{name}" for name in package_files()}
    wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".h")}
    faults = missing(names, wanted | set(SOURCES) - {"src", "csrc"}, "")
    return faults + [f"{name} was built, and is no source" for name in names if name.endswith((".so", ".o", ".pyc"))]


def package_files() -> set[str]:
    """What the package consists of in this repository, without what is built."""
    package = ROOT / "src" / "penstock"
    files = (p for p in package.rglob("*") if p.is_file() and p.suffix not in (".pyc", ".so", ".new"))
    return {str(p.relative_to(package.parent)) for p in files}


def missing(names: set[str], wanted: set[str], why: str) -> list[str]:
    return [f"{name} is not in it{why}" for name in sorted(wanted - names)]


def read(file: zipfile.ZipFile, name: str) -> str:
    return file.read(name).decode() if name in file.namelist() else ""


def libraries_of(system: str) -> set[str]:
    """The kernel libraries that a wheel with this platform tag has to bring: `setup.py` knows them."""
    if system == "any":
        return set()
    machine = system.partition("_2_28_")[2] or platform.machine()
    return {f"penstock/ops/native/lib/penstock-{level}.so" for level in levels_of(machine)}


def levels_of(machine: str) -> list[str]:
    """The instruction sets that `setup.py` builds for a machine. It is read, not run."""
    import setuptools

    real, setuptools.setup = setuptools.setup, lambda **_: None  # type: ignore[assignment]
    try:
        return list(runpy.run_path(str(ROOT / "setup.py"), run_name="recipe")["levels_of"](machine))
    finally:
        setuptools.setup = real


def portability(content: bytes) -> list[str]:
    """What a library needs that a system with glibc 2.28, or a lesser processor, has not. Raises: WheelError."""
    if shutil.which("readelf") is None:
        raise WheelError("readelf was not found: install binutils (Debian: apt install binutils)")
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(content)
        file.flush()
        said = run(["readelf", "-W", "-d", "-V", file.name])
        symbols = run(["readelf", "-W", "--dyn-syms", file.name])
        sections = run(["readelf", "-W", "-S", file.name])
    needed = set(re.findall(r"\(NEEDED\).*\[(.+?)\]", said))
    faults = [f"it needs {name}, which not every Linux has" for name in sorted(needed - SYSTEM - LOADERS)]
    for kind, version in re.findall(r"Name: ([A-Z]+)_([\d.]+)", said):
        if tuple(map(int, version.split("."))) > NEWEST.get(kind, ()):
            faults.append(f"it needs {kind}_{version}; {'.'.join(map(str, NEWEST.get(kind, ()))) or 'none'} is allowed")
    # A symbol without a version is in none of the libraries that it was linked with.
    nowhere = re.findall(r"\bGLOBAL\s+DEFAULT\s+UND (\w+)$", symbols, re.MULTILINE)
    starts = sum(int(n, 16) // 8 for n in re.findall(r"\bINIT_ARRAY +[0-9a-f]+ [0-9a-f]+ ([0-9a-f]+)", sections))
    if starts > STARTS:
        faults.append(f"{starts} functions run as it is opened, on whatever processor; {STARTS} is allowed")
    return sorted({*faults, *(f"{name} is in no library that it names" for name in nowhere)})


# -- try -------------------------------------------------------------------------------------------------------------


def attempt(wheel: Path, python: str) -> dict[str, float | str]:
    """What a newcomer gets. Units: bytes and seconds, as the names say. Raises: WheelError if it does not serve."""
    with zipfile.ZipFile(wheel) as file:
        unpacked = sum(item.file_size for item in file.infolist())
    found: dict[str, float | str] = {"wheel_bytes": wheel.stat().st_size, "unpacked_bytes": unpacked}
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        began = time.perf_counter()
        run([python, "-m", "venv", str(home / "venv")], cwd=home)
        found["venv_s"] = time.perf_counter() - began
        bin_ = home / "venv" / "bin"
        bare = {"HOME": name, "PATH": str(bin_), "LANG": "C.UTF-8"}
        # The index and its certificates are the machine's own affair; a compiler and this repository are not there.
        index = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_")) or k.lower().endswith("_proxy")}
        install = [str(bin_ / "python"), "-m", "pip", "install", "--quiet", "--no-cache-dir", "--only-binary=:all:"]
        began_install = time.perf_counter()
        run([*install, str(wheel.resolve())], cwd=home, env=bare | index)
        found["install_s"] = time.perf_counter() - began_install
        found["environment_bytes"] = sum(p.stat().st_size for p in home.rglob("*") if p.is_file())
        command = str(bin_ / "penstock")
        for title, words in {
            "version": [command, "--version"],
            "help": [command, "--help"],
            "import": [str(bin_ / "python"), "-c", "import penstock"],
        }.items():
            run(words, cwd=home, env=bare)
            found[f"{title}_s"] = min(seconds(words, cwd=home, env=bare) for _ in range(5))
        for title in ("first", "second"):
            with serving(command, home, bare) as (url, process, started):
                found[f"{title}_start_s"] = time.perf_counter() - started
                found["answer"] = ask(url)
                found[f"{title}_answer_s"] = time.perf_counter() - started
                found["resident_bytes"] = resident_bytes(process.pid)
                found["total_s"] = found.get("total_s") or time.perf_counter() - began
        code = (
            "from penstock.ops.native.library import best_library as b; l = b(); print(l and l.pst_isa_name().decode())"
        )
        found["kernels"] = run([str(bin_ / "python"), "-c", code], cwd=home, env=bare).strip()
    return found


def emulated(root: Path, folder: Path) -> str:
    """A command that is the Python of a system for another processor family. Raises: WheelError."""
    python = next(iter(sorted((root / "usr" / "bin").glob("python3.[0-9]*[0-9]"))), None)
    if python is None:
        raise WheelError(f"there is no usr/bin/python3.N in {root}: unpack a system with Python there")
    machine = next((m for m, number in MACHINES.items() if python.read_bytes()[18] == number), "")
    emulator = shutil.which(f"qemu-{machine}")
    if emulator is None:
        raise WheelError(f"qemu-{machine or 'MACHINE'} was not found: install it (Debian: apt install qemu-user)")
    command = folder / "python3"
    # By the name that it was started with, a Python knows its environment, and starts others like itself.
    words = shlex.join(["-L", str(root), str(python)])
    command.write_text(f'#!/bin/sh\nexec {emulator} -0 "$0" {words} "$@"\n')
    command.chmod(0o755)
    return str(command)


def seconds(command: list[str], **options: Any) -> float:
    began = time.perf_counter()
    run(command, **options)
    return time.perf_counter() - began


@contextmanager
def serving(command: str, home: Path, env: dict[str, str]) -> Iterator[tuple[str, subprocess.Popen[str], float]]:
    """A server of the bundled model on a free port: where, its process, and when it was started."""
    began = time.perf_counter()
    words = [command, "serve", "--port", "0"]
    with (home / "log").open("w") as log:
        process = subprocess.Popen(words, cwd=home, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        where = re.search(r" on (http://\S+)", said)
        if where is None:
            raise WheelError(f"{' '.join(words)} said {said!r}\n{(home / 'log').read_text()[-4000:]}")
        yield where[1], process, began
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def ask(url: str) -> str:
    body = json.dumps(FIRST_QUESTION).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=START_LIMIT_S) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and all below it; a page that several of them have counts once in all."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    rollups = (Path(f"/proc/{member}/smaps_rollup").read_text() for member in family)
    return sum(1024 * int(found[1]) for text in rollups if (found := re.search(r"^Pss:\s+(\d+)", text, re.M)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="make the source distribution and the wheels")
    building.add_argument("--machine", default=platform.machine(), help="processor family (default: this one's)")
    commands.add_parser("check", help="what they hold").add_argument("files", nargs="+", type=Path)
    trying = commands.add_parser("try", help="install and serve")
    trying.add_argument("wheel", type=Path)
    trying.add_argument("--python", default=sys.executable, help="interpreter of the new environment")
    trying.add_argument("--root", type=Path, help="system with Python for another processor family, to emulate")
    options = parser.parse_args(argv)
    try:
        if options.command == "try":
            with tempfile.TemporaryDirectory() as name:
                python = emulated(options.root.resolve(), Path(name)) if options.root else options.python
                print(json.dumps(attempt(options.wheel, python), indent=1, ensure_ascii=False))
            return 0
        if options.command == "build":
            made = build(options.machine)
            # By the setuptools that has built them: this interpreter's may be too old to read setup.py.
            return subprocess.run([tools(), __file__, "check", *made], check=False).returncode
        faults = [f"{file.name}: {fault}" for file in options.files for fault in check(file)]
    except WheelError as problem:
        print(problem, file=sys.stderr)
        return 2
    print("\n".join(faults) or f"{len(options.files)} files hold what they must", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
