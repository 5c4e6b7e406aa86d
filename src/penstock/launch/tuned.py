"""What settings were tuned for: the setting `tuned_for`. Elsewhere they are refused: they were not tried there.

A machine is its processor and the cores that this process may use; a model its shape and what its files begin and end
with, so that it may lie anywhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from penstock.base.errors import ConfigError
from penstock.base.hashing import digest
from penstock.base.version import __version__
from penstock.core.machine import Machine
from penstock.core.model_spec import ModelSpec

_END_BYTES = 1 << 16
_FILES = (".safetensors", ".gguf", ".bin", ".pth", ".pt")


def machine_name(machine: Machine) -> str:
    return f"{_processor()}, {machine.num_cores} cores"


def _processor() -> str:
    """As the kernel calls it; the architecture where it says nothing."""
    wanted = {"model name": "", "cpu family": "", "model": ""}
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        text = ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in wanted:
            wanted[name.strip()] = value.strip()
    found = wanted["model name"] or "unknown processor"
    return f"{found} ({wanted['cpu family']}.{wanted['model']})" if wanted["model"] else found


def model_mark(path: Path, spec: ModelSpec) -> str:
    """16 hex digits. Reads 128 KiB of every file of weights, at most. Raises OSError."""
    files = sorted(p for p in path.iterdir() if p.suffix in _FILES) if path.is_dir() else [path]
    parts = [msgspec.json.encode(spec, order="sorted")]
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            parts += [b"%d" % size, stream.read(_END_BYTES)]
            stream.seek(max(0, size - _END_BYTES))
            parts.append(stream.read(_END_BYTES))
    return digest(*parts, size=8).hex()


def tuned_for(path: Path, spec: ModelSpec, machine: Machine) -> dict[str, str]:
    """What a tuned file says of where it was made."""
    return {"machine": machine_name(machine), "version": __version__, "model": model_mark(path, spec)}


def check_tuned(given: str, path: Path, spec: ModelSpec, machine: Machine) -> None:
    """Raises ConfigError if settings were tuned for another machine, version or model."""
    try:
        said: Any = json.loads(given)
    except ValueError:
        said = None
    here = tuned_for(path, spec, machine)
    if not isinstance(said, dict) or set(said) != set(here):
        raise ConfigError(
            f"tuned_for: must be an object with {', '.join(here)}, as penstock tune writes it; or leave it away",
            field="tuned_for",
        )
    for name, value in here.items():
        if said[name] != value:
            raise ConfigError(
                f"tuned_for: these settings were tuned for {name} {said[name]!s:.80}, and this is {value}; run "
                "penstock tune here, or leave tuned_for away to use them untried",
                field="tuned_for",
            )
