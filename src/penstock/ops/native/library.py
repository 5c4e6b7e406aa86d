"""Finding and opening the library of this processor's best instruction set."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

from penstock.base.errors import ConfigError
from penstock.ops.native.abi import ABI, SIGNATURES

FOLDER = Path(__file__).parent / "lib"
ISA_VARIABLE = "PENSTOCK_CPU_ISA"


def libraries() -> dict[str, Path]:
    """Instruction set -> file, of those that were built."""
    return {path.stem.removeprefix("penstock-"): path for path in sorted(FOLDER.glob("penstock-*.so"))}


@cache
def open_library(path: Path) -> Any:
    """The library with its functions' signatures. Raises OSError for one that is none, or of another build."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.pst_abi() != ABI:
        raise OSError(f"{path.name} belongs to another build of Penstock: install it again")
    return library


def usable() -> dict[str, int]:
    """Instruction set -> score (the larger, the better), of the libraries that this processor can run."""
    scores = {}
    for name, path in libraries().items():
        score = open_library(path).pst_score()
        if score > 0:
            scores[name] = score
    return scores


@cache
def best_library(isa: str = "") -> Any | None:
    """The library to use, or None if none was built or fits. `isa`: this one; else PENSTOCK_CPU_ISA says which.

    Raises: ConfigError for a name that is not among the usable ones.
    """
    wanted = isa or os.environ.get(ISA_VARIABLE, "")
    scores = usable()
    if wanted:
        if wanted not in scores:
            found = ", ".join(scores) or "none"
            raise ConfigError(f"{ISA_VARIABLE}={wanted!r} is not usable here; usable: {found}")
        return open_library(libraries()[wanted])
    return open_library(libraries()[max(scores, key=scores.__getitem__)]) if scores else None
