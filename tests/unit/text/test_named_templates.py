"""Several chat templates of one model: found and chosen as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from penstock.base.errors import InputError, ModelError
from penstock.families.chat_templates import chat_templates, gguf_templates
from penstock.families.folder import read_tokenizer_files
from penstock.text.template import choose_template
from tests.unit.text.text_vocabularies import gpt2_path

TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
LISTED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": "rag", "template": "R"}]
FOLDERS: dict[str, tuple[Any, dict[str, str]]] = {
    "one": ("D", {}),
    "list": (LISTED, {}),
    "list without tools": (LISTED[:1], {}),
    "only for tools": (LISTED[1:], {}),
    "file": (None, {"chat_template.jinja": "F"}),
    "file beats list": (LISTED, {"chat_template.jinja": "F"}),
    "file and others": (
        LISTED,
        {"chat_template.jinja": "F", "additional_chat_templates/tool_use.jinja": "FT",
         "additional_chat_templates/rag.jinja": "FR", "additional_chat_templates/notes.txt": "N"},
    ),
    "default among others": (
        None, {"chat_template.jinja": "F", "additional_chat_templates/default.jinja": "G"}
    ),
    "none": (None, {}),
}  # fmt: skip


def folder(path: Path, config: Any, files: dict[str, str]) -> Path:
    (path / "tokenizer.json").write_bytes(gpt2_path().read_bytes())
    more = {} if config is None else {"chat_template": config}
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **more}))
    for name, text in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    return path


@pytest.mark.parametrize("name", FOLDERS)
def test_the_choice_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    folder(tmp_path, *FOLDERS[name])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = read_tokenizer_files(tmp_path, sorted(entry.name for entry in tmp_path.iterdir()))
    for tools in (None, TOOLS):
        for requested in (None, "rag", "tool_use", "default"):
            try:
                expected = theirs.get_chat_template(requested, tools=tools)
            except ValueError:
                expected = None
            if expected == requested and requested is not None:
                continue  # a name nobody has is a template there
            try:
                found = choose_template(
                    ours.chat_template, requested, trusted=False, named=ours.named_templates, tools=tools is not None
                )
            except InputError:
                found = None
            if requested == "default" and found is None:
                continue  # ours needs no name
            assert found == expected, (tools, requested)


def test_what_the_choice_says() -> None:
    named = {"tool_use": "T", "rag": "R"}
    with pytest.raises(InputError, match=r"rag, tool_use only; name one of them as chat_template"):
        choose_template(None, None, trusted=False, named=named)
    assert choose_template(None, None, trusted=False, named=named, tools=True) == "T"
    assert choose_template("D", "rag", trusted=False, named=named, tools=True) == "R", "a name is no program"
    with pytest.raises(InputError, match="leave chat_template out"):
        choose_template("D", "{{ x }}", trusted=False, named=named)
    assert choose_template("D", "{{ x }}", trusted=True, named=named, tools=True) == "{{ x }}"
    assert choose_template("D", "", trusted=False, named=named) == "D"


def test_the_template_of_a_processor(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "P"}))
    names = ["chat_template.json"]
    assert chat_templates(tmp_path, names, {})["chat_template"] == "P"
    assert chat_templates(tmp_path, names, {"chat_template": "D"})["chat_template"] == "D"
    several = {"chat_template": {"default": "P", "tool_use": "T"}}
    (tmp_path / "chat_template.json").write_text(json.dumps(several))
    assert chat_templates(tmp_path, names, {}) == {"chat_template": "P", "named_templates": {"tool_use": "T"}}
    for bad in ("3", '{"chat_template": 3}', '{"chat_template": [{"name": "default"}]}', "{"):
        (tmp_path / "chat_template.json").write_text(bad)
        with pytest.raises(ModelError, match=r"chat_template\.json"):
            chat_templates(tmp_path, names, {})


def test_templates_of_a_gguf_file(tmp_path: Path) -> None:
    data = {
        "tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T", "tokenizer.chat_template.rag": "R",
        "tokenizer.chat_templates": ["tool_use", "rag"], "tokenizer.ggml.model": "gpt2",
    }  # fmt: skip
    found = gguf_templates(tmp_path, data)
    assert found == {"chat_template": "D", "named_templates": {"tool_use": "T", "rag": "R"}}
    for bad in (3, None, ["D"], "x" * (5 << 20)):
        with pytest.raises(ModelError, match="tool_use"):
            gguf_templates(tmp_path, {"tokenizer.chat_template.tool_use": bad})
