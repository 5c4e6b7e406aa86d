"""What `tools/dist.py` lets through: the parts of a release that take seconds. `make wheel` builds it all."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from penstock import __version__
from tests.native.test_library import COMPILER
from tests.unit.house.test_docs import load

ROOT = Path(__file__).resolve().parents[3]
MANYLINUX = "manylinux_2_28_x86_64"
dist = load("dist")


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for systems without kernels, built from a copy of what a source distribution holds."""
    folder = tmp_path_factory.mktemp("build")
    tree = folder / "tree"
    dist.copy_sources(tree)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    environment = os.environ | {"PENSTOCK_BUILD_ISAS": "none"}
    subprocess.run([sys.executable, "-c", code], cwd=tree, env=environment, check=True, capture_output=True)
    return folder / f"penstock-{__version__}-py3-none-any.whl"


def changed(path: Path, folder: Path, *, name: str = "", without: str = "", more: str = "") -> Path:
    """A wheel with another name, without the files that have `without` in their name, or with one more."""
    out = folder / (name or path.name)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for item in old.namelist():
            if not without or without not in item:
                new.writestr(item, old.read(item))
        if more:
            new.writestr(more, b"")
    return out


def test_the_wheel_without_kernels_holds_the_package(pure: Path) -> None:
    assert dist.check(pure) == []
    with zipfile.ZipFile(pure) as file:
        names = file.namelist()
        assert not [n for n in names if n.endswith(".so")]
        assert "penstock/bundled/nano/config.json" in names
        metadata = file.read(f"penstock-{__version__}.dist-info/METADATA").decode()
    assert f"Version: {__version__}\n" in metadata
    assert "Requires-Dist: uvloop" in metadata  # not on Windows, where there is none
    assert 'sys_platform != "win32"' in metadata


def test_what_is_missing_or_stray_is_named(pure: Path, tmp_path: Path) -> None:
    assert dist.check(changed(pure, tmp_path, without="bundled/nano/config.json")) == [
        "penstock/bundled/nano/config.json is not in it"
    ]
    assert dist.check(changed(pure, tmp_path, without="entry_points")) == ["it brings no command penstock"]
    assert dist.check(changed(pure, tmp_path, more="tests/x.py")) == ["it puts files beside the package: tests/x.py"]
    assert "so py3-none" in dist.check(changed(pure, tmp_path, name=f"penstock-{__version__}-cp311-cp311-any.whl"))[0]


def test_a_wheel_for_linux_must_bring_every_kernel_library(pure: Path, tmp_path: Path) -> None:
    """Which ones, `setup.py` says: one that a compiler could not make is a fault here, not a line in a log."""
    path = changed(pure, tmp_path, name=f"penstock-{__version__}-py3-none-{MANYLINUX}.whl")
    (fault,) = dist.check(path)
    assert fault.startswith("its kernels are []")
    for level in ("base", "avx2", "avx512", "avx512bf16"):
        assert f"lib/penstock-{level}.so" in fault


@pytest.mark.skipif(not (COMPILER and shutil.which("readelf")), reason="no C++ compiler with binutils")
def test_a_library_that_an_older_system_cannot_load_is_refused(tmp_path: Path) -> None:
    def built(text: str, *options: str) -> bytes:
        out = tmp_path / "x.so"
        command = [COMPILER, "-x", "c++", "-", "-shared", "-fPIC", "-O1", "-o", str(out), *options]
        subprocess.run(command, input=text, text=True, check=True, capture_output=True)
        return out.read_bytes()

    assert dist.portability(built('extern "C" int f(int x) { return x + 1; }')) == []
    assert dist.portability(built("int g(); int f() { return g(); }")) == ["_Z1gv is in no library that it names"]
    faults = dist.portability(built("int x;", "-Wl,--no-as-needed", "-l:libutil.so.1"))
    assert faults == ["it needs libutil.so.1, which not every Linux has"]
    # The compiler's own start is the one that is allowed.
    (fault,) = dist.portability(built("int f() { static int x; return ++x; }\nint y = f();"))
    assert fault.startswith("2 functions run as it is opened")
    library, version = platform.libc_ver()
    if library == "glibc" and tuple(map(int, version.split("."))) >= (2, 34):
        text = "#include <pthread.h>\nint f() { return pthread_join(pthread_self(), nullptr); }"
        assert dist.portability(built(text)) == ["it needs GLIBC_2.34; 2.28 is allowed"]
