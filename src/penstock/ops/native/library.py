"""Finding and opening the library of this processor's best instruction set."""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from functools import cache
from pathlib import Path
from typing import Any

from penstock.base.errors import ConfigError
from penstock.ops.native.abi import ABI, SIGNATURES

FOLDER = Path(__file__).parent / "lib"
ISA_VARIABLE = "PENSTOCK_CPU_ISA"
log = logging.getLogger("penstock.ops")

_SENTENCE_BYTES = 300
_ELF_HEADER_BYTES = 64


def libraries() -> dict[str, Path]:
    """Instruction set -> file, of those that were built."""
    return {path.stem.removeprefix("penstock-"): path for path in sorted(FOLDER.glob("penstock-*.so"))}


@cache
def open_library(path: Path) -> Any:
    """The library with its functions' signatures. Raises OSError for one that is none, or of another build."""
    _check_whole(path)
    library = ctypes.CDLL(str(path))
    other_build = f"{path.name} belongs to another build of Penstock: install it again"
    for name, (result, arguments) in SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise OSError(other_build) from None
        function.restype, function.argtypes = result, arguments
    if library.pst_abi() != ABI:
        raise OSError(other_build)
    return library


def _check_whole(path: Path) -> None:
    """Raises OSError for a file that a full disk or a broken copy has cut short: loading one ends the process.

    The table of sections is the last thing in a library, and its header says where it lies.
    """
    with path.open("rb") as file:
        head = file.read(_ELF_HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
    if len(head) < _ELF_HEADER_BYTES or head[:4] != b"\x7fELF":
        raise OSError(f"{path.name} is not a library")
    (start,) = struct.unpack_from("<Q", head, 40)
    entry_bytes, num_entries = struct.unpack_from("<HH", head, 58)
    if start + entry_bytes * num_entries > size:
        raise OSError(f"{path.name} is cut short: install Penstock again")


def usable() -> dict[str, int]:
    """Instruction set -> score (the larger, the better), of the libraries that this processor can run.

    A file that is no library of this build is left out, and a warning says so.
    """
    scores = {}
    for name, path in libraries().items():
        try:
            score = open_library(path).pst_score()
        except OSError as problem:
            _warn(f"the native kernels for {name} are left out: {problem}")
            continue
        if score > 0:
            scores[name] = score
    return scores


@cache
def fault(path: Path) -> str:
    """What the library's self-test finds wrong, or "". Runs once per process, in some milliseconds."""
    sentence = ctypes.create_string_buffer(_SENTENCE_BYTES)
    failed = open_library(path).pst_self_test(sentence, _SENTENCE_BYTES)
    return sentence.value.decode(errors="replace") or "no reason given" if failed else ""


@cache
def best_library(isa: str = "") -> Any | None:
    """The library to use, or None if none was built or fits. `isa`: this one; else PENSTOCK_CPU_ISA says which.

    One that fails its self-test is not used: the next best is, and a warning says why.

    Raises: ConfigError for a name that is not among the usable ones, or whose library fails its self-test.
    """
    wanted = isa or os.environ.get(ISA_VARIABLE, "")
    scores, paths = usable(), libraries()
    if wanted:
        if wanted not in scores:
            found = ", ".join(scores) or "none"
            raise ConfigError(f"{ISA_VARIABLE}={wanted!r} is not usable here; usable: {found}")
        if why := fault(paths[wanted]):
            raise ConfigError(f"{ISA_VARIABLE}={wanted!r} is not usable here: its self-test failed: {why}")
        return open_library(paths[wanted])
    for name in sorted(scores, key=scores.__getitem__, reverse=True):
        if not (why := fault(paths[name])):
            return open_library(paths[name])
        _warn(f"the native kernels for {name} are left out: their self-test failed: {why}")
    return None


@cache
def _warn(sentence: str) -> None:
    """Cached, so said once per process: libraries are looked for more than once."""
    log.warning(sentence)
