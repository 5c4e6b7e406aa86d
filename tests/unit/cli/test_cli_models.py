"""`penstock pull`, `list`, `show` and `rm` as people type them, and what they read in 80 columns."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.models import age_text, size_text
from penstock.launch.aliases import ALIASES
from penstock.launch.bundled import bundled_model
from penstock.launch.store import ModelStore, NamedModel, StoredFile
from tests.command import penstock, process


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's; names are of this test only."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    nano = bundled_model("nano")
    assert nano is not None
    shutil.copytree(nano, tmp_path / "copy")
    return tmp_path / "copy"


def said(run: subprocess.CompletedProcess[str]) -> str:
    """Its output, none of whose lines is too wide."""
    assert (run.returncode, run.stderr) == (0, "")
    assert all(len(line) <= 80 for line in run.stdout.splitlines())
    return run.stdout


def test_a_folder_is_named_listed_shown_and_forgotten(copy: Path) -> None:
    assert "No model was pulled yet" in said(penstock("list"))
    assert said(penstock("pull", "copy", "--name", "mine")).startswith("mine is here (")
    lines = said(penstock("list")).splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "FORMAT", "MODIFIED", "USE"]
    assert lines[1].split()[0] == "mine"
    assert "0 s ago" in lines[1]
    shown = said(penstock("show", "mine"))
    for words in ("a folder or file of yours", "llama", "context", "tokens", "template    yes (", "config.json"):
        assert words in shown
    assert said(penstock("show", "nano")).count("file ") == 0
    assert penstock("rm", "mine").stdout == f"mine is no name any more; its files stay ({copy})\n"
    assert (copy / "config.json").is_file()


def test_names_that_can_be_pulled_are_listed_with_what_they_ask(copy: Path) -> None:
    listed = said(penstock("list", "--available"))
    for name, alias in ALIASES.items():
        (line,) = [line for line in listed.splitlines() if line.split()[0] == name]
        assert alias.licence in line
        assert ("--accept-terms" in line) == bool(alias.terms)
    shown = said(penstock("show", "qwen2.5-coder:0.5b"))
    assert "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32" in shown
    assert "not here: penstock pull qwen2.5-coder:0.5b" in shown
    assert "as the hub says when it is pulled" in said(penstock("show", "smollm2:135m"))
    assert "penstock pull gemma3:1b --accept-terms" in said(penstock("show", "gemma3:1b"))


def test_what_is_wrong_is_one_sentence(copy: Path) -> None:
    for args, words in (
        (("serve", "smolm2:135m"), "nearest are smollm2:135m"),
        (("run", "qwen3", "-p", "x"), "nearest are qwen3:"),
        (("show", "absent"), "there is no model 'absent'"),
        (("rm", "nano"), "nano comes with Penstock and stays"),
        (("rm", "absent"), "no model of the name 'absent' was pulled"),
        (("pull", "gemma3:1b"), "read them, then pull it with --accept-terms"),
        (("pull", "absent"), "'absent' is no name that can be pulled"),
        (("pull", "qwen3:0.6b", "--name", "x"), "--name: only folders and files of yours take a name"),
        (("pull", "copy", "--name", "../x"), "'../x' cannot be a name"),
    ):
        run = penstock(*args)
        assert run.returncode == 1
        assert words in run.stderr
        assert run.stderr.startswith("penstock: error: ")
        assert len(run.stderr.splitlines()) == 1


def test_a_pull_that_did_not_end_and_files_that_are_gone_are_said(copy: Path) -> None:
    store = ModelStore()
    store.save(NamedModel(name="half", path=str(copy), repo="org/half", commit="a" * 40))
    store.save(NamedModel(name="gone", path=str(copy), whole=True, files={"absent": StoredFile(3)}))
    lines = {line.split()[0]: line for line in said(penstock("list")).splitlines()}
    assert "not whole: pull it again" in lines["half"]
    assert "files are gone" in lines["gone"]
    (store.folder / "half.json").write_text("{")
    assert [record.name for record in store.all()] == ["gone"]
    (store.folder / "gone.json").chmod(0o666)
    assert store.all() == [], "what others can write is not trusted"


def facts(*args: str) -> Any:
    run = penstock(*args, "--json")
    assert (run.returncode, run.stderr) == (0, "")
    return json.loads(run.stdout)


LISTED = {"name", "size_bytes", "format", "pulled_s", "state", "source", "repo", "commit", "licence", "path"}
AVAILABLE = {"name", "size_bytes", "licence", "terms", "repo", "file", "commit", "sha256", "here"}
SHOWN = {
    "name", "here", "source", "repo", "commit", "path", "family", "num_params", "num_layers", "hidden_size",
    "vocab_size", "context_tokens", "format", "chat_template_chars", "takes_tools", "licence", "files",
}  # fmt: skip
GUIDE = Path(__file__).resolve().parents[3] / "docs/guides/models-by-name.md"


def test_programs_read_json_with_the_keys_that_are_written_down(copy: Path) -> None:
    assert facts("list") == {"models": [], "bundled": ["nano", "pico"]}
    penstock("pull", "copy", "--name", "mine")
    store = ModelStore()
    files = {"absent": StoredFile(3, "ab")}
    store.save(NamedModel(name="half", path=str(copy), repo="org/half", commit="a" * 40))
    store.save(NamedModel(name="gone", path=str(copy), whole=True, files=files))
    hold = store.hold(copy)
    try:
        found = {one["name"]: one for one in facts("list")["models"]}
    finally:
        hold.close()
    assert all(set(one) == LISTED for one in found.values())
    assert {name: one["state"] for name, one in found.items()} == {
        "mine": "in_use",
        "half": "in_use",
        "gone": "missing",
    }
    found = {one["name"]: one for one in facts("list")["models"]}
    assert {name: one["state"] for name, one in found.items()} == {
        "mine": "ready",
        "half": "partial",
        "gone": "missing",
    }
    mine = found["mine"]
    assert mine["size_bytes"] == sum(path.stat().st_size for path in copy.iterdir())
    assert abs(mine["pulled_s"] - time.time()) < 60
    assert (mine["source"], mine["repo"], mine["path"]) == ("local", None, str(copy))
    assert (found["half"]["source"], found["half"]["repo"], found["half"]["pulled_s"]) == ("hub", "org/half", None)
    shown = facts("show", "mine")
    assert set(shown) == SHOWN
    assert (shown["here"], shown["source"], shown["context_tokens"]) == (True, "local", 2048)
    assert {(one["name"], one["size_bytes"]) for one in shown["files"]} == {
        (path.name, path.stat().st_size) for path in copy.iterdir()
    }
    assert facts("show", "nano")["source"] == "bundled"
    offered = facts("list", "--available")["available"]
    assert [one["name"] for one in offered] == list(ALIASES)
    absent = facts("show", "qwen2.5-coder:0.5b")
    assert set(absent) == AVAILABLE
    assert absent in offered
    assert absent["here"] is False
    guide = GUIDE.read_text()
    for key in LISTED | AVAILABLE | SHOWN:
        assert f"`{key}`" in guide, key
    assert penstock("show", "absent", "--json").stdout == ""


def test_what_ollama_asks_is_not_asked_and_that_is_said(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(copy))
    assert (penstock("ps").stderr, penstock("list").stderr) == ("", "")
    assert "OLLAMA" not in penstock("stop", "x").stderr
    monkeypatch.setenv("OLLAMA_HOST", "http://127.0.0.1:1")
    for args, status in ((("ps",), 0), (("list",), 0), (("stop", "x"), 1)):
        run = penstock(*args)
        assert run.returncode == status
        assert "OLLAMA_HOST is not read: this is about this user on this machine" in run.stderr
        assert len(run.stderr.splitlines()) == 1
    assert json.loads(penstock("ps", "--json").stdout) == {"servers": []}


def test_the_doctor_says_what_models_by_name_take(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(copy / "hf"))
    store = ModelStore()
    penstock("pull", "copy", "--name", "mine")
    store.save(NamedModel(name="b", path="b", repo="o/b", commit="a" * 40, files={"x": StoredFile(2_000_000)}))
    (line,) = [line for line in process("doctor").stdout.splitlines() if line.startswith("Models by name:")]
    assert f"Models by name: 2, named in {store.folder}; pulled ones take 2 MB in {copy / 'hf' / 'hub'}" in line
    assert "that are free there (penstock pull --max-disk SIZE" in line


@pytest.mark.parametrize(("num_bytes", "text"), [
    (0, "0 B"), (999, "999 B"), (98_362_432, "98 MB"), (1_117_320_768, "1.1 GB"), (140e9, "140 GB"), (2.5e12, "2.5 TB"),
])  # fmt: skip
def test_sizes(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "60 min"), (3600, "1 h"), (100_000, "28 h"), (200_000, "2 days"),
])  # fmt: skip
def test_ages(seconds: float, text: str) -> None:
    assert age_text(1000.0, 1000.0 + seconds) == text
