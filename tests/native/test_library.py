"""Which native library is taken, and what is said about those that are not."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools import native_checks

from penstock.base.errors import ConfigError
from penstock.ops.native import library as lib
from penstock.ops.native.abi import ABI, SIGNATURES
from tests.native.running import ISAS, each_isa

COMPILER = next((c for c in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if c and shutil.which(c)), "")


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was found out and said before is found out and said again; other tests keep what they have."""
    monkeypatch.delenv(lib.ISA_VARIABLE, raising=False)
    yield
    for cached in (lib.best_library, lib.fault, lib._warn):
        cached.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for cached in (lib.best_library, lib.fault, lib._warn):
        cached.cache_clear()
    monkeypatch.setattr(lib, "FOLDER", tmp_path)
    return tmp_path


def build(folder: Path, name: str, score: int, fault: str = "", *, abi: int = ABI, without: str = "") -> Path:
    """A library with all entries, of which some do something."""
    if not COMPILER:
        pytest.skip("no C++17 compiler, so no libraries either")
    own = {
        "pst_abi": f"int pst_abi(void) {{ return {abi}; }}",
        "pst_isa_name": f'const char *pst_isa_name(void) {{ return "{name}"; }}',
        "pst_score": f"int pst_score(void) {{ return {score}; }}",
        "pst_self_test": "int pst_self_test(char *message, int size) {"
        f' __builtin_snprintf(message, size, "%s", "{fault}"); return {int(bool(fault))}; }}',
    }
    lines = [own.get(entry, f"void {entry}(void) {{}}") for entry in SIGNATURES if entry != without]
    source, out = folder / f"{name}.c", folder / f"penstock-{name}.so"
    source.write_text("\n".join(lines))
    command = [COMPILER, "-x", "c", "-fno-builtin", "-fPIC", "-shared", str(source), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return out


def name_of(library: object) -> str:
    return str(library.pst_isa_name().decode())  # type: ignore[attr-defined]


def test_the_largest_score_is_taken(folder: Path) -> None:
    build(folder, "one", 1)
    build(folder, "three", 3)
    build(folder, "two", 2)
    build(folder, "none", 0)
    assert lib.usable() == {"one": 1, "two": 2, "three": 3}
    assert name_of(lib.best_library()) == "three"
    assert name_of(lib.best_library("one")) == "one"


def test_one_that_fails_its_self_test_is_passed_over(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(folder, "good", 1)
    build(folder, "bad", 2, "product of 8-bit weights: 3, not 4")
    build(folder, "worse", 3, "exp: 1, not 2")
    with caplog.at_level(logging.WARNING, "penstock"):
        assert name_of(lib.best_library()) == "good"
        lib.best_library.cache_clear()
        assert name_of(lib.best_library()) == "good"
    assert caplog.messages == [
        "the native kernels for worse are left out: their self-test failed: exp: 1, not 2",
        "the native kernels for bad are left out: their self-test failed: product of 8-bit weights: 3, not 4",
    ], "each is said once"


def test_none_is_taken_if_all_fail(folder: Path) -> None:
    assert lib.best_library() is None
    build(folder, "bad", 2, "no")
    lib.best_library.cache_clear()
    assert lib.best_library() is None


def test_a_library_asked_for_by_name_has_to_be_well(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(folder, "good", 1)
    build(folder, "bad", 2, "norm: 3, not 4")
    build(folder, "elsewhere", 0)
    with pytest.raises(ConfigError, match="'bad' is not usable here: its self-test failed: norm: 3, not 4"):
        lib.best_library("bad")
    monkeypatch.setenv(lib.ISA_VARIABLE, "bad")
    with pytest.raises(ConfigError, match=r"PENSTOCK_CPU_ISA='bad'.*self-test"):
        lib.best_library()
    monkeypatch.setenv(lib.ISA_VARIABLE, "elsewhere")
    with pytest.raises(ConfigError, match="usable: bad, good"):
        lib.best_library()
    monkeypatch.setenv(lib.ISA_VARIABLE, "good")
    assert name_of(lib.best_library()) == "good"


def test_files_that_are_no_libraries_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(folder, "good", 1)
    whole = build(folder, "cut", 2).read_bytes()
    (folder / "penstock-cut.so").write_bytes(whole[: len(whole) // 3])
    (folder / "penstock-last.so").write_bytes(whole[:-1])
    (folder / "penstock-empty.so").write_bytes(b"")
    (folder / "penstock-text.so").write_text("not a library\n")
    (folder / "penstock-gone.so").symlink_to(folder / "nothing")
    (folder / "penstock-folder.so").mkdir()
    build(folder, "old", 5, abi=ABI + 1)
    build(folder, "older", 6, without="pst_self_test")
    with caplog.at_level(logging.WARNING, "penstock"):
        assert lib.usable() == {"good": 1}
        assert name_of(lib.best_library()) == "good"
    said = "\n".join(caplog.messages)
    for name in ("cut", "last", "empty", "text", "gone", "folder", "old", "older"):
        assert said.count(f"the native kernels for {name} are left out") == 1
    assert said.count("belongs to another build of Penstock") == 2


@each_isa
def test_the_built_libraries_pass(isa: str) -> None:
    library = lib.open_library(lib.libraries()[isa])
    sentence = ctypes.create_string_buffer(300)
    assert library.pst_self_test(sentence, 300) == 0, sentence.value.decode()
    assert lib.fault(lib.libraries()[isa]) == ""
    assert library.pst_isa_name().decode() == isa


@pytest.mark.skipif(not COMPILER, reason="no C++17 compiler")
def test_where_there_is_a_compiler_there_are_kernels() -> None:
    """Without this, a build that fails would only make everything slow, and these tests skip."""
    assert "base" in ISAS


@pytest.mark.skipif(not ISAS, reason="no native library was built: no C++17 compiler")
def test_the_best_of_this_processor_is_taken() -> None:
    lib.best_library.cache_clear()
    assert name_of(lib.best_library()) == ISAS[-1]


@pytest.mark.skipif(not ISAS, reason="no native library was built: no C++17 compiler")
def test_a_wrong_name_in_the_environment_says_what_there_is() -> None:
    code = "from penstock.ops.native.library import best_library; best_library()"
    env = os.environ | {lib.ISA_VARIABLE: "avx9000"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"PENSTOCK_CPU_ISA='avx9000' is not usable here; usable: {', '.join(sorted(ISAS))}" in done.stderr


@pytest.mark.parametrize(("model", "wanted"), [("qemu64", {"base"}), ("Haswell-noTSX", {"base", "avx2"})])
def test_a_lesser_processor_opens_every_library_and_can_run_what_it_is_told(
    model: str, wanted: set[str], tmp_path: Path
) -> None:
    """All are opened to be asked for their scores: one that computes anything meanwhile ends the process there."""
    emulator, libraries = shutil.which("qemu-x86_64"), lib.libraries()
    if emulator is None or not COMPILER or "avx2" not in libraries:
        pytest.skip("no qemu-x86_64, no C++17 compiler, or no kernels for x86-64")
    source, program = native_checks.CSRC / "test" / "probe" / "score.cpp", tmp_path / "score"
    subprocess.run([COMPILER, "-std=c++17", str(source), "-o", str(program), "-ldl"], check=True, capture_output=True)
    runner = [emulator, "-cpu", model + native_checks.NOT_EMULATED * (model != "qemu64")]
    found = native_checks.scores(runner, program, list(libraries.values()))
    assert {isa for isa, score in found.items() if score > 0} == wanted


def test_the_probe_ends_with_what_a_self_test_says(folder: Path, tmp_path: Path) -> None:
    good, bad = build(folder, "good", 1), build(folder, "bad", 2, fault="a sum is wrong")
    program = tmp_path / "score"
    source = native_checks.CSRC / "test" / "probe" / "score.cpp"
    subprocess.run([COMPILER, "-std=c++17", str(source), "-o", str(program), "-ldl"], check=True, capture_output=True)
    assert native_checks.scores([], program, [good]) == {"good": 1}
    done = subprocess.run([str(program), str(bad)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"{bad}: its self-test failed: a sum is wrong\n")
