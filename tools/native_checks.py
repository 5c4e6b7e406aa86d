"""The native library's own tests (`csrc/test`), under sanitizers and on processors that this machine is not.

    python tools/native_checks.py plain   as the library is built, on every instruction set that this processor has
    python tools/native_checks.py asan    the same with address and undefined-behaviour checks
    python tools/native_checks.py tsan    the same with data-race checks
    python tools/native_checks.py isa     under emulators of older processors: the base set on the oldest x86-64, AVX2
                                          where there is no AVX512; and no library takes a processor for what it is not
    python tools/native_checks.py arm     the libraries for aarch64 likewise, on emulated processors with as little as
                                          each needs

`--isas base,avx2` builds only those, `--compiler "python -m ziglang c++ -target aarch64-linux-gnu.2.28"` with another
compiler; isa and arm `--wheel dist/X.whl` take the libraries out of a wheel and run their self-tests alone. 0: all is
well; 1: something failed; 2: a tool is missing, and a sentence says which. Objects are kept in build/native-checks. An
emulator shows what instructions compute, not how fast they are, nor what a processor with a weaker order of memory
accesses than this one's does with the threads.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import platform
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "native-checks"
NOT_EMULATED = ",-pcid,-x2apic,-tsc-deadline,-invpcid"
"""Features of a Haswell that no program sees and no emulator has: it would say so for every thread."""
ARM_COMPILER = "aarch64-linux-gnu-g++"
ARM_TARGET = "aarch64-linux-gnu.2.28"
ARM_ROOT = os.environ.get("QEMU_LD_PREFIX", "/usr/aarch64-linux-gnu")
"""Where the C library for aarch64 lies."""
TIMEOUT_S = 1800
SANITIZERS = {
    "plain": "",
    "asan": "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all",
    "tsan": "-O1 -g -fno-omit-frame-pointer -fsanitize=thread",
}
# What makes a sanitizer's finding fatal, and its report readable.
ENVIRONMENT = {
    "ASAN_OPTIONS": "abort_on_error=0:detect_leaks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


class Missing(Exception):
    """A tool is not here; the sentence says which, and how to get it."""


@dataclass(frozen=True)
class Emulated:
    """A processor to emulate: the libraries it can run, and an instruction it must not have, in assembler."""

    model: str
    isas: tuple[str, ...]
    lacks: str = ""


# From the least on: the tests of a library run on the first that has it.
EMULATED = {
    # SSE3 and nothing later: what every x86-64 has, nearly.
    "isa": (Emulated("qemu64", ("base",), "vpabsd %ymm0, %ymm0"),
            Emulated("Haswell-noTSX", ("base", "avx2"), "vpord %zmm0, %zmm0, %zmm0")),
    # As numbers, for compilers do not take instructions of other processors: sdot and bfdot.
    "arm": (Emulated("cortex-a53", ("neon",), ".inst 0x4e809400"),
            Emulated("cortex-a76", ("neon", "neon-dotprod"), ".inst 0x6e40fc00"),
            Emulated("max", ("neon", "neon-dotprod", "neon-bf16"))),
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """How the package's build compiles: `setup.py` is the only place that knows."""

    compiler: list[str]
    flags: list[str]
    levels: dict[str, str]
    unguarded: str

    @property
    def name(self) -> str:
        """Of its folders: objects of two compilers do not mix."""
        return f"{zlib.crc32(shlex.join(self.compiler).encode()):08x}"

    def options(self, isa: str, source: Path, extra: str) -> list[str]:
        own = [] if source.name == self.unguarded else self.levels[isa].split()
        number = list(self.levels).index(isa)
        return [*self.compiler, *self.flags, f"-I{CSRC / 'include'}", f"-DPST_ISA_LEVEL={number}", *own, *extra.split()]


def recipe(machine: str, compiler: str = "") -> Recipe:
    """For this machine's processor family, or aarch64. `compiler`: by this one. Raises Missing without any."""
    # Read, not run: the call at the end of setup.py must not build anything.
    setuptools = importlib.import_module("setuptools")
    real = setuptools.setup
    setuptools.setup = lambda **_: None  # type: ignore[attr-defined]
    try:
        build: dict[str, Any] = runpy.run_path(str(ROOT / "setup.py"), run_name="recipe")
    finally:
        setuptools.setup = real  # type: ignore[attr-defined]
    own = machine == platform.machine()
    words = shlex.split(compiler or (build["find_compiler"]() or "" if own else shlex.join(cross_compiler())))
    if not words or shutil.which(words[0]) is None:
        what = f"the compiler {words[0]!r}" if words else "a C++17 compiler"
        raise Missing(f"{what} was not found: install one (Debian: apt install g++) or set CXX to name it")
    return Recipe(words, build["FLAGS"].split(), build["levels_of"](machine, " ".join(words)), build["UNGUARDED"])


def cross_compiler() -> list[str]:
    """A C++ compiler for aarch64. Raises Missing."""
    if shutil.which(ARM_COMPILER):
        return [ARM_COMPILER]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++", "-target", ARM_TARGET]
    raise Missing(f"{ARM_COMPILER} was not found: install it (Debian: apt install g++-aarch64-linux-gnu; pip: ziglang)")


def command(words: list[str], what: str) -> None:
    """Run a compiler. Raises SystemExit with what it says if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise SystemExit(f"{what} does not compile")


def compile_all(how: Recipe, isa: str, kind: str, sources: list[Path], extra: str) -> list[str]:
    """Objects of the sources; those younger than their sources and all headers are taken as they are."""
    folder = BUILD / how.name / f"{kind}-{isa}"
    folder.mkdir(parents=True, exist_ok=True)
    shared = [*CSRC.rglob("*.h"), ROOT / "setup.py", Path(__file__)]
    newest = max(p.stat().st_mtime for p in shared)

    def one(source: Path) -> str:
        # Tests see the sources' headers. They are compiled with the flags of the sources: an inline function must not
        # exist twice in one program, once for each instruction set.
        options = [*how.options(isa, source, extra), f"-I{CSRC / 'src'}"]
        out = folder / f"{source.parent.name}-{source.stem}.o"
        if not out.exists() or out.stat().st_mtime < max(newest, source.stat().st_mtime):
            command([*options, "-c", str(source), "-o", str(out)], source.name)
        return str(out)

    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(one, sources))


def build_tests(how: Recipe, isa: str, kind: str) -> Path:
    """The test program of one instruction set."""
    extra = SANITIZERS[kind]
    sources = [*sorted((CSRC / "src").glob("*.cpp")), *sorted((CSRC / "test").glob("*.cpp"))]
    objects = compile_all(how, isa, kind, sources, extra)
    program = BUILD / how.name / f"{kind}-{isa}" / "tests"
    command([*how.compiler, *extra.split(), "-pthread", "-o", str(program), *objects], f"{program.name} for {isa}")
    return program


def build_libraries(how: Recipe, isas: list[str], *, whole: bool) -> list[Path]:
    """The libraries as the package has them; not `whole`: with nothing in them but the score."""
    sources = sorted((CSRC / "src").glob("*.cpp" if whole else how.unguarded))
    libraries = []
    for isa in isas:
        objects = compile_all(how, isa, "plain", sources, "")
        library = BUILD / ("whole" if whole else "scores") / f"penstock-{isa}.so"
        library.parent.mkdir(exist_ok=True)
        command([*how.compiler, "-shared", "-pthread", "-o", str(library), *objects], library.name)
        libraries.append(library)
    return libraries


def build_prober(how: Recipe) -> Path:
    source, out = CSRC / "test" / "probe" / "score.cpp", BUILD / f"score-{next(iter(how.levels))}"
    BUILD.mkdir(parents=True, exist_ok=True)
    command([*how.compiler, *how.flags, str(source), "-o", str(out), "-ldl"], source.name)
    return out


def scores(runner: list[str], prober: Path, libraries: list[Path]) -> dict[str, int]:
    """Instruction set -> pst_score() of its library. Raises SystemExit if asking one fails."""
    words = [*runner, str(prober), *map(str, libraries)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise SystemExit(f"asking the libraries for their scores ended with {ending(done.returncode)}")
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    return {Path(path).stem.removeprefix("penstock-"): int(score) for score, path in lines}


def ending(code: int) -> str:
    # An emulator reports the signal of its guest as 128 + the signal, or dies of it.
    number = -code if code < 0 else code - 128
    return signal.Signals(number).name if number in set(signal.Signals) else f"code {code}"


def run_tests(program: Path, title: str, runner: list[str], *, brief: bool) -> str:
    """A number that stands for all results; "" if a test failed."""
    print(f"==> {title}", flush=True)
    words = [*runner, str(program), *(["brief"] if brief else [])]
    env = os.environ | ENVIRONMENT
    done = subprocess.run(words, check=False, timeout=TIMEOUT_S, env=env, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        print(f"FAILED: {title}: {ending(done.returncode)}", flush=True)
    results = re.search(r"^results (\w+)$", done.stdout, re.MULTILINE)
    return results[1] if results and not done.returncode else ""


def steady(kind: str) -> list[str]:
    """What a program has to be started with. Race checks need memory where they expect it."""
    return [shutil.which("setarch") or "setarch", "-R"] if kind == "tsan" and shutil.which("setarch") else []


def check_here(how: Recipe, kind: str, isas: list[str]) -> bool:
    """The tests of each instruction set that this processor has."""
    if kind != "plain":
        test_compiler(how, kind)
    here = scores([], build_prober(how), build_libraries(how, isas, whole=False))
    good = True
    for isa in isas:
        if not here[isa]:
            print(f"==> {isa}: left out, this processor does not have it")
            continue
        program = build_tests(how, isa, kind)
        good &= bool(run_tests(program, f"{kind}: {isa}", steady(kind), brief=kind != "plain"))
    return good


def test_compiler(how: Recipe, kind: str) -> None:
    """Raises Missing if the compiler comes without this sanitizer."""
    BUILD.mkdir(parents=True, exist_ok=True)
    words = [*how.compiler, *SANITIZERS[kind].split(), "-x", "c++", "-", "-o", str(BUILD / f"has-{kind}")]
    done = subprocess.run(words, input="int main() {}", capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"{how.compiler[0]} comes without {kind}: install its sanitizer libraries, or set CXX")


def expect(condition: bool, sentence: str) -> bool:
    print(f"{'ok' if condition else 'FAILED'}: {sentence}", flush=True)
    return condition


def libraries_of(wheel: Path) -> list[Path]:
    """The libraries of a wheel, unpacked. Raises Missing if there are none."""
    folder = BUILD / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as file:
        for name in (n for n in file.namelist() if n.endswith(".so")):
            (folder / Path(name).name).write_bytes(file.read(name))
    if not (found := sorted(folder.iterdir())):
        raise Missing(f"{wheel.name} has no kernels: make one that has (make wheel)")
    return found


def check_emulated(how: Recipe, check: str, isas: list[str], wheel: Path | None) -> bool:
    """The libraries, or those of a wheel, on processors that have less than this one, or than the compiler's."""
    name = "qemu-x86_64" if check == "isa" else "qemu-aarch64"
    emulator = shutil.which(name)
    if emulator is None:
        raise Missing(f"{name} was not found: install it (Debian: apt install qemu-user)")
    prefix = [emulator]
    if check == "arm" and platform.machine() != "aarch64":
        if not any(Path(ARM_ROOT, "lib").glob("ld-linux-aarch64*")):
            raise Missing(f"no C library for aarch64 in {ARM_ROOT}: install it (Debian: apt install libc6-arm64-cross)")
        prefix += ["-L", ARM_ROOT]
    prober = build_prober(how)
    libraries = libraries_of(wheel) if wheel else build_libraries(how, isas, whole=True)
    good, results = True, dict[str, str]()
    for processor in EMULATED[check]:
        model = processor.model
        runner = [*prefix, "-cpu", model + NOT_EMULATED * model.startswith("Haswell")]
        found = {isa for isa, score in scores(runner, prober, libraries).items() if score > 0}
        wanted = {isa for isa in isas if isa in processor.isas}
        good &= expect(found == wanted, f"on {model} the usable libraries are {sorted(wanted)} (found {sorted(found)})")
        if processor.lacks:
            good &= emulator_forbids(how, runner, model, processor.lacks)
        for isa in sorted(wanted - set(results)) if wheel is None else ():
            results[isa] = run_tests(build_tests(how, isa, "plain"), f"{isa} on {model}", runner, brief=True)
    good &= all(results.values())
    if check == "arm" and wheel is None:
        alike = {isa: results[isa] for isa in isas if isa in ("neon", "neon-dotprod")} | results_of_avx2()
        good &= expect(len(set(alike.values())) <= 1, f"results are the same, bit for bit, with {' and '.join(alike)}")
    return good


def results_of_avx2() -> dict[str, str]:
    """Of the same tests with AVX2; nothing on a machine that has not got it."""
    here = recipe(platform.machine())
    isas = [isa for isa in here.levels if isa == "avx2"]
    if not any(scores([], build_prober(here), build_libraries(here, isas, whole=False)).values()):
        return {}
    return {"avx2": run_tests(build_tests(here, "avx2", "plain"), "avx2, on this machine", [], brief=True)}


def emulator_forbids(how: Recipe, runner: list[str], title: str, instruction: str) -> bool:
    """That an emulated processor ends a program with an instruction it does not have; else the rest proves nothing."""
    out = BUILD / "forbidden"
    # In assembler: of intrinsics, a compiler may make something else.
    text = f'int main() {{ __asm__ volatile("{instruction}"); }}'
    subprocess.run([*how.compiler, "-x", "c++", "-", "-o", str(out)], input=text, text=True, check=True)
    done = subprocess.run([*runner, str(out)], capture_output=True, check=False, timeout=TIMEOUT_S)
    return expect(ending(done.returncode) == "SIGILL", f"{title} refuses {instruction} ({ending(done.returncode)})")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("check", choices=[*SANITIZERS, *EMULATED])
    parser.add_argument("--isas", default="", help="instruction sets, separated by commas (default: all)")
    parser.add_argument("--compiler", default="", help="compiler and its first words (default: what is found)")
    parser.add_argument("--wheel", type=Path, help="isa, arm: the libraries of this wheel, by their self-tests")
    options = parser.parse_args()
    if options.wheel and options.check not in EMULATED:
        parser.error(f"--wheel is for {' and '.join(EMULATED)}: leave it out")
    try:
        how = recipe("aarch64" if options.check == "arm" else platform.machine(), options.compiler)
        isas = options.isas.split(",") if options.isas else list(how.levels)
        if unknown := [isa for isa in isas if isa not in how.levels]:
            raise Missing(f"there is no instruction set {unknown[0]!r} here; there are {', '.join(how.levels)}")
        if options.check == "isa" and "avx2" not in how.levels:
            raise Missing("emulated processors are for x86-64 machines")
        if options.check in EMULATED:
            good = check_emulated(how, options.check, isas, options.wheel)
        else:
            good = check_here(how, options.check, isas)
    except Missing as problem:
        print(problem, file=sys.stderr)
        return 2
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
