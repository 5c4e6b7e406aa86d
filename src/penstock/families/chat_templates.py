"""The chat templates that lie with a model: one, or several under names.

Where they are looked for, and which of them wins: `PreTrainedTokenizerBase._from_pretrained` of transformers 5.23 for
folders (files beat entries of tokenizer_config.json); `gguf-py` of github.com/ggml-org/llama.cpp for GGUF files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from penstock.base.errors import ModelError
from penstock.formats.files import quoted, read_text
from penstock.formats.json_file import read_json_object

FOLDER = "additional_chat_templates"
_LIMIT_BYTES = 4 * 1024 * 1024
_MAX_NAMED = 64
_KEY = "tokenizer.chat_template"


class Templates(TypedDict):
    """As fields of `TokenizerFiles`."""

    chat_template: str | None
    named_templates: dict[str, str]


def chat_templates(folder: Path, names: list[str], config: Mapping[str, Any]) -> Templates:
    """Those of a folder whose listing is `names`; `config` is its tokenizer_config.json. Raises ModelError.

    `chat_template.json`, which processors of images have, counts where the tokenizer has none.
    """
    if "chat_template.jinja" in names:  # then nothing else counts but what lies in the folder of others
        found = {"default": read_text(folder / "chat_template.jinja", _LIMIT_BYTES)}
    elif config.get("chat_template") is None and "chat_template.json" in names:
        value = read_json_object(folder / "chat_template.json").get("chat_template")
        found = _read(value, "chat_template.json")
    else:
        found = _read(config.get("chat_template"), "tokenizer_config.json")
    if FOLDER in names and (folder / FOLDER).is_dir():
        others = sorted(path for path in (folder / FOLDER).iterdir() if path.suffix == ".jinja")
        if len(others) > _MAX_NAMED:
            raise ModelError(f"{quoted(folder)} has more than {_MAX_NAMED} {FOLDER}")
        found |= {path.stem: read_text(path, _LIMIT_BYTES) for path in others}
    return _fields(found)


def gguf_templates(path: Path, metadata: Mapping[str, object]) -> Templates:
    """Those of a GGUF file: `tokenizer.chat_template`, and `tokenizer.chat_template.NAME`. Raises ModelError."""
    found: dict[str, str] = {}
    for key, value in metadata.items():
        if key != _KEY and not key.startswith(_KEY + "."):
            continue
        if not isinstance(value, str) or len(value) > _LIMIT_BYTES:
            raise ModelError(f"{quoted(path)} gives a {quoted(key)} that is no text of reasonable length")
        found[key.removeprefix(_KEY + ".") if key != _KEY else "default"] = value
    return _fields(found)


def _fields(found: dict[str, str]) -> Templates:
    named = {name: text for name, text in found.items() if name != "default"}
    return Templates(chat_template=found.get("default"), named_templates=named)


def _read(value: object, where: str) -> dict[str, str]:
    """Source, or named ones as a list or an object."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    named: dict[object, object] = {}
    if isinstance(value, dict):
        named = dict(value)
    elif isinstance(value, list) and len(value) <= _MAX_NAMED and all(isinstance(entry, dict) for entry in value):
        named = {entry.get("name"): entry.get("template") for entry in value}
    found = {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}
    if not found or len(found) != len(named):
        raise ModelError(f"{where} gives a chat_template that is neither a string nor a list of named ones")
    return found
