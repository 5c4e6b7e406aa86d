"""Models by their ids, over real sockets: see `mock_hub`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

from penstock.base.errors import ConfigError, UnsupportedError
from penstock.families.registry import open_model
from penstock.launch import transfer
from penstock.launch.aliases import HubModel
from penstock.launch.hub import local_path
from penstock.launch.listing import parse_id
from penstock.weights.load import load_weights
from tests.unit.families.test_families import TINY, tiny_tensors, write_folder
from tests.unit.families.test_gguf import model_metadata, split, write_model
from tests.unit.formats.test_formats import refusal
from tests.unit.launch.mock_hub import COMMIT, OLD, TOKEN, MockHub, running


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MockHub]:
    """The hub of this test; the library's settings, which it reads when it is imported, point there."""
    with running() as server:
        point_at(server, tmp_path, monkeypatch)
        yield server


def point_at(server: MockHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "penstock"))
    monkeypatch.setattr(transfer, "SPARE_BYTES", 0)
    monkeypatch.setattr(transfer, "_WAIT_S", 0.001)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tiny(server: MockHub, tmp_path: Path) -> Path:
    """The folder that `org/tiny` has on the hub, with much in it that nobody needs."""
    folder = write_folder(tmp_path / "upstream")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (folder / "original").mkdir()
    for name in ("README.md", "pytorch_model.bin", "tf_model.h5", "consolidated.safetensors", "original/params.json",
                 "original/model.safetensors", "model.onnx", "run.py", "training_args.pt"):  # fmt: skip
        (folder / name).write_bytes(b"x" * 1000)
    server.repos["org/tiny"] = {COMMIT: folder}
    return folder


NEEDED = {"config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"}


def test_a_model_is_downloaded_once_and_only_what_is_needed(server: MockHub, tiny: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = local_path("org/tiny", progress=lambda done, total: seen.append((done, total)))
    assert {p.name for p in path.iterdir()} == set(server.log) == NEEDED
    assert len(server.log) == len(NEEDED)
    assert path.is_relative_to(tmp_path / "cache")
    total = sum((tiny / name).stat().st_size for name in NEEDED)
    assert seen[-1] == (total, total)
    checkpoint = open_model(path)
    assert checkpoint.spec.eos_token_ids == (2, 3)
    loaded = load_weights(checkpoint, checkpoint.spec, "float32")
    np.testing.assert_array_equal(loaded["final_norm"], tiny_tensors(TINY)["model.norm.weight"])
    assert local_path("org/tiny") == path
    assert len(server.log) == len(NEEDED), "the second time nothing is sent"


def test_without_a_network_the_cache_is_used(
    server: MockHub, tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = local_path("org/tiny")
    caplog.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local_path("org/tiny") == path
    assert caplog.messages == []
    refusal(lambda: local_path("org/other"), "'org/other' is not in the cache", "HF_HUB_OFFLINE is set")
    refusal(lambda: local_path("org/tiny", "v1"), "is not in the cache")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    server.broken = True
    monkeypatch.setattr("huggingface_hub.utils._http._DEFAULT_RETRY_ON_STATUS_CODES", (), raising=False)
    assert local_path("org/tiny") == path
    assert "using org/tiny from the cache" in caplog.text
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert local_path("org/tiny") == path
    refusal(lambda: local_path("org/other"), "cannot be reached")


def test_an_interrupted_download_is_completed_or_named(
    server: MockHub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = local_path("org/tiny", weights=False)
    assert {p.name for p in path.iterdir()} == NEEDED - {"model.safetensors"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refusal(lambda: open_model(local_path("org/tiny")), "no model.safetensors")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    open_model(local_path("org/tiny"))
    assert server.log.count("config.json") == 1


def test_revisions(server: MockHub, tiny: Path, tmp_path: Path) -> None:
    other = write_folder(tmp_path / "older", TINY | {"rms_norm_eps": 0.5})
    server.repos["org/tiny"][OLD] = other
    for given, revision in (("org/tiny@v1", None), ("org/tiny", "v1"), ("org/tiny@v1", "v1"), ("org/tiny", OLD)):
        path = local_path(given, revision)
        assert path.name == OLD
        assert open_model(path).spec.layers[0].norm.eps == 0.5
    assert local_path("org/tiny").name == COMMIT
    refusal(lambda: local_path("org/tiny@v2"), "'org/tiny' has no revision 'v2'")
    with pytest.raises(ConfigError, match="'main' contradicts 'org/tiny@v1'"):
        local_path("org/tiny@v1", "main")
    with pytest.raises(ConfigError, match="is no id"):
        local_path(str(tiny), "main")


def test_shards_are_those_that_the_index_names(server: MockHub, tiny: Path) -> None:
    from safetensors.numpy import save_file

    tensors = tiny_tensors(TINY)
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        save_file({k: v for k, v in tensors.items() if weight_map[k] == shard}, tiny / shard)
    (tiny / "model.safetensors").unlink()
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    path = local_path("org/tiny")
    shards = {"model-0.safetensors", "model-1.safetensors", "model.safetensors.index.json"}
    assert set(server.log) == (NEEDED - {"model.safetensors"}) | shards
    open_model(path)
    shutil.rmtree(constants.HF_HUB_CACHE)
    (tiny / "model-1.safetensors").unlink()
    refusal(lambda: local_path("org/tiny"), "lacks 1 of its 2 shards", "'model-1.safetensors'")


def test_what_cannot_run_is_refused_before_its_weights_come(server: MockHub, tiny: Path) -> None:
    (tiny / "config.json").write_text(json.dumps(TINY | {"architectures": ["Unheard"]}))
    refusal(lambda: local_path("org/tiny"), "'Unheard'", kind=UnsupportedError)
    assert "model.safetensors" not in server.log
    for name in ("model.safetensors", "consolidated.safetensors", "original/model.safetensors"):
        (tiny / name).unlink()
    refusal(lambda: local_path("org/tiny"), "'pytorch_model.bin'", "convert it", kind=UnsupportedError)
    for name in ("pytorch_model.bin", "training_args.pt"):
        (tiny / name).unlink()
    refusal(lambda: local_path("org/tiny"), "neither a config.json with safetensors nor a GGUF file")


def test_gguf_files(server: MockHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ggufs"
    (folder / "big").mkdir(parents=True)
    write_model(folder / "m-Q8_0.gguf", model_metadata(), kind="Q8_0")
    server.repos["org/m-GGUF"] = {COMMIT: folder}
    (folder / "config.json").write_text("{}")
    path = local_path("org/m-GGUF")  # the only one there is
    assert path.name == "m-Q8_0.gguf"
    assert open_model(path).spec.vocab_size == 16
    split(folder / "big", 2)
    refusal(lambda: local_path("org/m-GGUF"), "2 GGUF models", "org/m-GGUF/big/m-00001-of-00002.gguf")
    server.log.clear()
    path = local_path("org/m-GGUF@main/big/m-00001-of-00002.gguf")
    assert sorted(server.log) == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert open_model(path).spec.vocab_size == 16
    assert local_path("org/m-GGUF/m-Q8_0.gguf").name == "m-Q8_0.gguf"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local_path("org/m-GGUF/m-Q8_0.gguf").name == "m-Q8_0.gguf"
    assert local_path("org/m-GGUF").is_dir()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    refusal(lambda: local_path("org/m-GGUF/absent.gguf"), "has no file 'absent.gguf'")
    (folder / "big" / "m-00002-of-00002.gguf").unlink()
    refusal(lambda: local_path("org/m-GGUF/big/m-00001-of-00002.gguf"), "has no file 'big/m-00002-of-00002.gguf'")


def test_private_gated_and_missing_models(server: MockHub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal(lambda: local_path("org/absent"), "'org/absent'", "set HF_TOKEN")
    server.gated.add("org/tiny")
    refusal(lambda: local_path("org/tiny"), "'org/tiny' is gated", "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert local_path("org/tiny").name == COMMIT
    refusal(lambda: local_path("org/a--b"), "'org/a--b' is no id")


def test_a_full_disk_is_named_before_anything_is_written(
    server: MockHub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda path: usage._replace(free=100))
    refusal(lambda: local_path("org/tiny"), "'org/tiny' needs 0.0 GB", "HF_HOME")
    assert server.log == []
    monkeypatch.undo()


def test_a_disk_that_fills_up_is_named(server: MockHub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transfer.os, "fsync", full)
    refusal(lambda: local_path("org/tiny"), "the disk is full")


def test_what_is_here_wins_over_an_id(server: MockHub, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    write_folder(tmp_path / "org" / "tiny")
    assert local_path("org/tiny") == Path("org/tiny")
    assert server.log == []


@pytest.mark.parametrize(("text", "want"), [
    ("org/name", HubModel("org/name")),
    ("org/name@v1.0", HubModel("org/name", "v1.0")),
    ("org/name/x.gguf", HubModel("org/name", None, "x.gguf")),
    ("org/name@main/sub/x.gguf", HubModel("org/name", "main", "sub/x.gguf")),
    ("name.gguf", None), ("./org/name", None), ("/org/name", None), ("org/name/x.bin", None), ("org/../name", None),
    ("org/name/../x.gguf", None), ("org/name//x.gguf", None), ("~/org/name", None), ("a\0b/c", None), ("", None),
])  # fmt: skip
def test_ids(text: str, want: HubModel | None) -> None:
    assert parse_id(text) == want
    if want is None:
        assert local_path(text) == Path(text), "left to open_model, which says what is wrong with it"


def test_the_command_line_runs_an_id(server: MockHub, tiny: Path, tmp_path: Path) -> None:
    """The real way in: a fresh process that learns of the hub by its environment."""
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("HF_")},
        "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    code = (
        "from penstock import LLM, SamplingParams as S; import sys;"
        "out = LLM('org/tiny', revision=sys.argv[1], skip_tokenizer_init=True, max_model_len=32)"
        ".generate({'prompt_token_ids': [1, 5]}, S(max_tokens=4, temperature=0, detokenize=False));"
        "print(out[0].outputs[0].token_ids)"
    )

    def run(revision: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, revision], env=environment | more, capture_output=True, text=True, timeout=120,
            cwd=tmp_path,
        )  # fmt: skip

    first = run("main")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("[")
    offline = run("main", HF_HUB_OFFLINE="1")
    assert (offline.stdout, offline.stderr) == (first.stdout, "")
    plan = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "plan", "org/none"], env=environment, capture_output=True,
        text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert plan.returncode == 1
    assert plan.stderr.startswith("penstock: error: there is neither a folder 'org/none' here nor such a model")
    assert len(plan.stderr.splitlines()) == 1
