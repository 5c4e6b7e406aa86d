"""Which model families there are, and the one way in: `open_model`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.base.registry import Registry
from penstock.core.model_spec import ModelSpec
from penstock.core.protocols import ModelFamily
from penstock.families.checkpoint import Checkpoint
from penstock.families.folder import open_folder, pickle_refusal, refuse_quantized
from penstock.families.llama2c import open_llama2c_file, open_llama2c_folder
from penstock.formats.files import quoted, unreadable
from penstock.formats.json_file import read_json_object

FAMILIES = Registry("model family")
"""`model_type` of config.json -> ModelFamily."""
ARCHITECTURES: dict[str, str] = {}
"""Entry of `architectures` in config.json -> name in FAMILIES."""


def _register(name: str, target: str, *architectures: str) -> None:
    FAMILIES.add(name, target)
    ARCHITECTURES.update(dict.fromkeys(architectures, name))


_register("llama", "penstock.families.llama:Llama", "LlamaForCausalLM")


def open_model(path: str | os.PathLike[str]) -> Checkpoint:
    """A Hugging Face folder, a folder with one llama2.c model, or a llama2.c .bin file. Reads headers, no weights.

    Raises ModelError (UnsupportedError if Penstock lacks something): one line that says what is wrong and where.
    """
    given = os.fspath(path)
    if not given:
        raise ModelError("no model was named; give the path of a folder")
    model = Path(given)
    if not os.path.exists(given):
        raise _absent(given)
    if not model.is_dir():
        return _open_file(model)
    names = _listing(model)
    if "config.json" in names:
        config = read_json_object(model / "config.json")
        return open_folder(model, names, config, find_family(config))
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        raise UnsupportedError(f"{quoted(model / gguf[0])} is a GGUF file, which this version does not read")
    if any(name.startswith("pytorch_model") for name in names):
        refusal = pickle_refusal(model, names)
        if refusal is not None:
            raise refusal
    return open_llama2c_folder(model, names)


def read_spec(path: str | os.PathLike[str]) -> ModelSpec:
    """What a model computes, for planning: also of a config.json alone, or a folder without its weights.

    Where weights are, they are checked as `open_model` does. Raises as `open_model`.
    """
    model = Path(path)
    folder = model if model.is_dir() else model.parent
    if model.is_dir():
        names = _listing(model)
        if "config.json" not in names or any(name.endswith(".safetensors") for name in names):
            return open_model(path).spec
        model = model / "config.json"
    elif model.suffix != ".json" or not model.exists():
        return open_model(path).spec
    else:
        names = _listing(folder) if model.name == "config.json" else []
    config = read_json_object(model)
    family = find_family(config)
    refuse_quantized(folder, names, config.pop("quantization_config", None))
    return family.spec(config)


def find_family(config: Mapping[str, Any]) -> ModelFamily:
    """The family that runs a parsed config.json, by its `architectures`, or by `model_type` where it has none.

    Raises UnsupportedError listing the known architectures if there is none.
    """
    model_type = config.get("model_type")
    architectures = config.get("architectures")
    if architectures is None and isinstance(model_type, str) and model_type in FAMILIES.names():
        return _family(model_type)
    if not isinstance(architectures, list) or not architectures:
        raise ModelError(f"config.json names no architecture; known ones: {_known()}")
    unknown = [name for name in architectures if not isinstance(name, str) or name not in ARCHITECTURES]
    if unknown:
        code = "; code that a model brings along (auto_map) is never run" if config.get("auto_map") else ""
        raise UnsupportedError(f"config.json names the architecture {quoted(unknown[0])}; known ones: {_known()}{code}")
    families = sorted({ARCHITECTURES[name] for name in architectures})
    if len(families) > 1 or model_type not in (None, families[0]):
        raise ModelError(
            f"config.json contradicts itself: model_type {quoted(model_type)}, architecture {quoted(architectures[0])}"
        )
    return _family(families[0])


def _family(name: str) -> ModelFamily:
    family: ModelFamily = FAMILIES.get(name)()
    return family


def _known() -> str:
    return ", ".join(sorted(ARCHITECTURES))


def _open_file(path: Path) -> Checkpoint:
    if path.suffix == ".bin":
        refusal = pickle_refusal(path.parent, [path.name]) if path.name.startswith("pytorch_model") else None
        if refusal is not None:
            raise refusal
        return open_llama2c_file(path, _listing(path.parent))
    if path.suffix == ".gguf":
        raise UnsupportedError(f"{quoted(path)} is a GGUF file, which this version does not read")
    raise ModelError(f"{quoted(path)} is a file; name the folder it is in, or a llama2.c .bin file")


def _absent(given: str) -> ModelError:
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", given):
        return ModelError(
            f"there is no folder {quoted(given)} here; models are read from local folders only in this version, "
            "so download it first and give its path"
        )
    return ModelError(f"there is no model at {quoted(given)}")


def _listing(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise unreadable(folder, error) from error
