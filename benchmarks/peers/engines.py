"""Which engines there are, where each is looked for, and which of them share the machine at a time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.peers.workloads import HIGHEST_ID

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GGUF = {"q8_0": 8, "q6_k": 6, "q4_0": 4, "q4_k_m": 4, "iq4_xs": 4}
"""Formats of GGUF files `<model>-<format>.gguf` that several engines read as they are, and their bits."""
CODES = {"gptq4": 4, "gptq4-order": 4, "awq4": 4}
"""Checkpoints `<model>-<form>` of codes in groups of 128; `-order`: of GPTQ with desc_act, inputs in no order."""
BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4, "w4a16": 4} | GGUF | CODES
"""What a precision is compared with: others of as many bits."""
_COMPILED = 2 << 30


@dataclass(frozen=True)
class Engine:
    """`module`: what its interpreter must be able to import. `needs`: what it reads, from (model path, precision).

    `overhead_bytes` and `factor`: memory beside and per byte of weights, roughly, to keep groups within the machine.
    """

    name: str
    adapter: str
    precisions: tuple[str, ...]
    module: str = ""
    needs: str = "{model}"
    env: dict[str, str] = field(default_factory=dict)
    factor: float = 1.3
    overhead_bytes: int = 1 << 30


ENGINES = {
    e.name: e
    for e in (
        Engine("penstock", "penstock_.py", ("bf16", "int8", "int4", "fp32", *GGUF, *CODES), "penstock"),
        Engine("vllm", "vllm_.py", ("bf16", "int8", "w4a16", *CODES), "vllm", "{model}{-precision}",
               {"VLLM_CPU_KVCACHE_SPACE": "1"}, 1.5, _COMPILED),
        Engine("openvino", "openvino_.py", ("bf16", "int8", "int4", *GGUF), "openvino_genai", "{model}-ov-{precision}",
               {}, 1.6, _COMPILED),
        Engine("onnxruntime", "onnxruntime_.py", ("int4",), "onnxruntime_genai", "{model}-ort-{precision}",
               {}, 1.5, 6 * _COMPILED),
        Engine("llamacpp", "llamacpp.py", ("bf16", *GGUF), "", "{model}-{precision}.gguf", {}, 1.1),
        Engine("ik-server", "llamacpp.py", ("bf16", *GGUF), "", "{model}-{precision}.gguf", {}, 1.1),
        Engine("llama-lib", "ggml_.py", ("bf16", *GGUF), "llama_cpp", "{model}-{precision}.gguf", {}, 1.1),
        Engine("ik", "ggml_.py", ("bf16", *GGUF), "ik_llama_cpp", "{model}-{precision}.gguf", {}, 1.1),
        Engine("fake", "fake.py", ("bf16", "int8"), "", "", {}, 0.0, 1 << 20),
    )
}  # fmt: skip
SERVERS = {"llamacpp": "LLAMA_SERVER", "ik-server": "IK_LLAMA_SERVER"}
"""Engines that are asked over HTTP -> the variable that names their binary."""
ANCHORS = ("openvino:bf16", "llamacpp:bf16", "vllm:bf16", "penstock:bf16")
"""The first one that is there runs in every group, so that groups can be told apart from the machine's moods."""


@dataclass(frozen=True)
class Spec:
    """An engine at a precision: `llamacpp:q8_0`."""

    engine: str
    precision: str

    @classmethod
    def parse(cls, text: str) -> Spec:
        name, _, precision = text.strip().partition(":")
        if name not in ENGINES:
            raise ValueError(f"there is no engine {name!r}: {', '.join(ENGINES)}")
        known = ENGINES[name].precisions
        if precision not in known:
            raise ValueError(f"{name} is measured at {', '.join(known)}, not at {precision!r}")
        return cls(name, precision)

    def __str__(self) -> str:
        return f"{self.engine}:{self.precision}"

    @property
    def bits(self) -> int:
        return BITS[self.precision]


@dataclass(frozen=True)
class Place:
    """Where things are. `folder` holds `venv/<engine>`, `models/` and `logs/`."""

    folder: Path

    @property
    def models(self) -> Path:
        return self.folder / "models"

    def python(self, engine: str) -> Path:
        """The interpreter of an engine; ours runs Penstock and what needs nothing but Python."""
        return Path(sys.executable) if engine in ("penstock", "llamacpp", "ik-server", "fake") else (
            self.folder / "venv" / engine / "bin" / "python"
        )  # fmt: skip

    def llama_server(self, engine: str = "llamacpp") -> str | None:
        """The server's binary: of llama.cpp, or of ik_llama.cpp (`ik-server`)."""
        tree = "llama.cpp" if engine == "llamacpp" else "ik_llama.cpp"
        built = self.folder / tree / "build" / "bin" / "llama-server"
        given = os.environ.get(SERVERS[engine]) or (str(built) if built.exists() else None)
        return given or (shutil.which("llama-server") if engine == "llamacpp" else None)

    def model(self, name: str) -> Path:
        """A model by its name in `models/`, or by a path."""
        return self.models / name if (self.models / name).exists() or not Path(name).exists() else Path(name).resolve()


def default_place() -> Place:
    return Place(Path(os.environ.get("PENSTOCK_PEERS", "~/.cache/penstock-peers")).expanduser())


@cache
def _can_import(python: Path, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], env=environment(), capture_output=True, check=False).returncode == 0


def environment() -> dict[str, str]:
    """Of every engine: this Penstock can be imported, nothing is looked for on the network."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def problem(spec: Spec, model: str, place: Place) -> str | None:
    """A sentence why this cannot be measured here, or None."""
    engine, python = ENGINES[spec.engine], place.python(spec.engine)
    if not python.exists():
        return f"{spec}: not installed (there is no {python}); see benchmarks/peers/README.md"
    if engine.module and not _can_import(python, engine.module):
        return f"{spec}: {python} cannot import {engine.module}"
    if spec.engine in SERVERS and place.llama_server(spec.engine) is None:
        return f"{spec}: there is no llama-server; build it, or name it with {SERVERS[spec.engine]}"
    needed = needed_path(spec, model, place)
    if needed is not None and not needed.exists():
        return f"{spec}: {needed} is missing; make it with benchmarks.peers.make_models or .convert"
    return None


def needed_path(spec: Spec, model: str, place: Place) -> Path | None:
    pattern = ENGINES[spec.engine].needs
    if not pattern:
        return None
    if spec.precision in GGUF | CODES:
        pattern = "{model}-{precision}" + ".gguf" * (spec.precision in GGUF)
    suffix = "" if spec.precision == "bf16" else f"-{spec.precision}"
    text = pattern.replace("{-precision}", suffix).replace("{precision}", spec.precision)
    return Path(text.replace("{model}", str(place.model(model))))


def resident_bytes(spec: Spec, model: str, place: Place) -> int:
    """Memory of an engine while it is loaded, roughly: from the sizes of the files that it reads."""
    engine, path = ENGINES[spec.engine], needed_path(spec, model, place)
    size = 0
    if path is not None and path.exists():
        files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
        size = sum(file.stat().st_size for file in files)
    return int(engine.factor * size) + engine.overhead_bytes


def highest_id(model: str, place: Place) -> int:
    """Ids of prompts are below this: the usual bound, or the vocabulary if it is smaller (test models)."""
    try:
        vocab = int(json.loads((place.model(model) / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError):
        return HIGHEST_ID
    return min(HIGHEST_ID, vocab)


def options_of(spec: Spec, place: Place, given: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What an adapter is told besides: what the user gave for the engine, then for this precision."""
    own: dict[str, Any] = {}
    if spec.engine in SERVERS:
        own = {"server": place.llama_server(spec.engine), "is_ik": spec.engine == "ik-server"}
    return own | given.get(spec.engine, {}) | given.get(str(spec), {})


def make_groups(
    specs: Sequence[Spec], *, anchor: Spec | None, sizes: dict[Spec, int], memory_bytes: int, most: int = 4
) -> list[list[Spec]]:
    """Groups of at most `most` that fit into memory together: one number of bits each, Penstock at that number and the
    anchor in all of them. A peer that does not fit beside the anchor goes without it.
    """
    groups: list[list[Spec]] = []
    for bits in sorted({s.bits for s in specs}, reverse=True):
        ours = [s for s in specs if s.bits == bits and s.engine == "penstock"]
        peers = [s for s in specs if s.bits == bits and s not in ours and s != anchor]
        always = list(dict.fromkeys([*([anchor] if anchor is not None else []), *ours]))
        if not peers and any(s.bits == bits for s in always):
            peers = [always.pop()]  # nobody to compare with but the anchor
        current: list[Spec] = []
        for peer in peers:
            if current and not _fits([*always, *current, peer], sizes, memory_bytes, most):
                groups.append([*always, *current])
                current = []
            current.append(peer)
        if current:
            groups.append([*always, *current])
    whole = [g for g in groups if not any(set(g) < set(other) for other in groups)]
    return [g if _fits(g, sizes, memory_bytes, len(g)) else [s for s in g if s != anchor] or g for g in whole]


def _fits(group: list[Spec], sizes: dict[Spec, int], memory_bytes: int, most: int) -> bool:
    return len(group) <= most and sum(sizes[s] for s in group) <= memory_bytes
