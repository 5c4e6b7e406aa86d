"""Models by name: pulled over real sockets from a mock of the hub, in this process and in others that are killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.base.errors import ModelError, UnsupportedError
from penstock.families.registry import open_model
from penstock.launch import aliases, pull, transfer
from penstock.launch.aliases import ALIASES, HubModel, KnownModel
from penstock.launch.bundled import bundled_model
from penstock.launch.hub import local_path
from penstock.launch.listing import leads_out
from penstock.launch.store import ModelStore
from tests.unit.families.test_families import TINY, write_folder
from tests.unit.families.test_gguf import model_metadata, write_model
from tests.unit.formats.test_formats import refusal
from tests.unit.launch.mock_hub import COMMIT, OLD, TOKEN, MockHub, running, sha256
from tests.unit.launch.test_hub import point_at


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MockHub]:
    with running() as server:
        point_at(server, tmp_path, monkeypatch)
        yield server


@pytest.fixture
def store(server: MockHub) -> ModelStore:
    return ModelStore()


@pytest.fixture
def tiny(server: MockHub, tmp_path: Path) -> Path:
    folder = write_folder(tmp_path / "upstream")
    server.repos["org/tiny"] = {COMMIT: folder}
    return folder


@pytest.fixture
def gguf(server: MockHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the name tiny:1k."""
    folder = tmp_path / "ggufs"
    folder.mkdir()
    file = folder / "tiny-Q8_0.gguf"
    write_model(file, model_metadata(), kind="Q8_0")
    server.repos["org/tiny-GGUF"] = {COMMIT: folder}
    alias = KnownModel(HubModel("org/tiny-GGUF", COMMIT, file.name), "apache-2.0", 1000, sha256(file))
    monkeypatch.setitem(ALIASES, "tiny:1k", alias)
    return file


def cache_files(tmp_path: Path) -> set[str]:
    return {
        str(p.relative_to(tmp_path / "cache")) for p in (tmp_path / "cache").rglob("*") if p.is_symlink() or p.is_file()
    }


def kept(tmp_path: Path) -> set[str]:
    """Files of the cache, without what locks leave."""
    return {name for name in cache_files(tmp_path) if not name.startswith(".locks")}


# -- pulling ---------------------------------------------------------------------------------------------------------


def test_a_name_is_pulled_once_and_needs_no_hub_after(server: MockHub, store: ModelStore, gguf: Path) -> None:
    seen: list[tuple[int, int]] = []
    record = pull.pull(store, "tiny:1k", progress=lambda done, total: seen.append((done, total)))
    size = gguf.stat().st_size
    assert seen[-1] == (size, size)
    assert (record.commit, record.quantization, record.licence, record.whole) == (COMMIT, "Q8_0", "apache-2.0", True)
    assert record.files[gguf.name].digest == sha256(gguf) == sha256(Path(record.path))
    server.broken = True
    assert local_path("tiny:1k") == Path(record.path)
    assert pull.pull(store, "tiny:1k").path == record.path, "a commit does not change: nobody is asked"
    assert open_model(record.path).spec.vocab_size == 16
    assert server.log == [gguf.name]


def test_a_name_that_was_not_pulled_comes_when_it_is_run(server: MockHub, store: ModelStore, gguf: Path) -> None:
    path = local_path("tiny:1k")
    assert path.name == gguf.name
    assert [record.name for record in store.all()] == ["tiny:1k"]


def test_the_token_goes_to_the_hub_and_to_nobody_else(
    server: MockHub, store: ModelStore, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.gated.add("org/tiny-GGUF")
    pull.pull(store, "tiny:1k")
    assert server.tokens == [(gguf.name, f"Bearer {TOKEN}")]
    assert server.store is not None
    assert server.store.tokens == [(gguf.name, None)]


def test_gated_models_and_terms_are_said_before_anything_comes(
    server: MockHub, store: ModelStore, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.gated.add("org/tiny-GGUF")
    refusal(lambda: pull.pull(store, "tiny:1k"), "is gated", "accept its conditions", "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    refusal(lambda: pull.pull(store, "tiny:1k"), "is gated")
    server.gated.clear()
    asked = KnownModel(ALIASES["tiny:1k"].model, "gemma", 1000, terms=aliases.GEMMA_TERMS)
    monkeypatch.setitem(ALIASES, "tiny:1k", asked)
    refusal(lambda: pull.pull(store, "tiny:1k"), "Gemma's terms of use", "--accept-terms")
    refusal(lambda: local_path("tiny:1k"), "--accept-terms")
    assert server.log == []
    assert pull.pull(store, "tiny:1k", accept_terms=True).whole
    assert local_path("tiny:1k").exists(), "accepted once"


def test_what_comes_is_what_was_listed(server: MockHub, store: ModelStore, gguf: Path, tmp_path: Path) -> None:
    server.faults[gguf.name] = "spoiled"
    refusal(lambda: pull.pull(store, "tiny:1k"), "is another file", sha256(gguf), "nothing of it was kept")
    assert kept(tmp_path) == set()
    server.faults.clear()
    assert pull.pull(store, "tiny:1k").whole


def test_small_files_are_checked_as_git_hashes_them(
    server: MockHub, store: ModelStore, tiny: Path, tmp_path: Path
) -> None:
    server.faults["config.json"] = "spoiled"
    refusal(lambda: pull.pull(store, "org/tiny"), "'config.json' is another file")
    assert kept(tmp_path) == set()
    server.faults.clear()
    record = pull.pull(store, "org/tiny")
    assert {len(file.digest) for file in record.files.values()} == {40, 64}
    assert record.quantization == "F32"


def test_a_file_that_the_table_does_not_know_is_not_begun(
    server: MockHub, store: ModelStore, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALIASES, "tiny:1k", KnownModel(ALIASES["tiny:1k"].model, "", 1000, "0" * 64))
    refusal(lambda: pull.pull(store, "tiny:1k"), f"known is {'0' * 64}")
    assert server.log == []


def test_a_body_without_an_end_is_ended(server: MockHub, store: ModelStore, gguf: Path, tmp_path: Path) -> None:
    server.faults[gguf.name] = "endless"
    refusal(lambda: pull.pull(store, "tiny:1k"), "sends more", f"{gguf.stat().st_size:,} bytes")
    most = max((p.stat().st_size for p in (tmp_path / "cache").rglob("*") if p.is_file()), default=0)
    assert most <= gguf.stat().st_size


def test_a_cut_connection_goes_on_where_it_was(server: MockHub, store: ModelStore, gguf: Path) -> None:
    server.faults[gguf.name], server.cuts = "cut", 0
    assert server.store is not None
    server.store.cuts = 3
    pull.pull(store, "tiny:1k")
    starts = [start for _, start in server.ranges]
    assert len(starts) == 4
    assert starts == sorted(starts)
    assert starts[1] == gguf.stat().st_size // 2


def test_ranges_that_are_ignored_begin_anew(server: MockHub, store: ModelStore, gguf: Path, tmp_path: Path) -> None:
    cut_off(tmp_path, gguf, gguf.read_bytes()[:1000])
    server.faults[gguf.name] = "whole"
    seen: list[int] = []
    pull.pull(store, "tiny:1k", progress=lambda done, total: seen.append(done))
    assert 0 in seen
    assert seen[-1] == gguf.stat().st_size
    assert sha256(local_path("tiny:1k")) == sha256(gguf)


def test_a_spoiled_beginning_is_thrown_away(server: MockHub, store: ModelStore, gguf: Path, tmp_path: Path) -> None:
    cut_off(tmp_path, gguf, b"?" * 1000)
    pull.pull(store, "tiny:1k")
    assert server.ranges == [(gguf.name, 1000), (gguf.name, 0)]
    assert sha256(local_path("tiny:1k")) == sha256(gguf)


def test_what_lies_in_the_cache_is_not_believed(server: MockHub, store: ModelStore, gguf: Path, tmp_path: Path) -> None:
    blob = tmp_path / "cache" / "models--org--tiny-GGUF" / "blobs" / sha256(gguf)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(bytes(gguf.stat().st_size))
    path = local_path("org/tiny-GGUF")  # no link to it: it is brought again
    assert sha256(path) == sha256(gguf)
    blob.write_bytes(bytes(gguf.stat().st_size))
    refusal(lambda: pull.pull(store, "tiny:1k"), "was there already and is not what the hub lists", "remove it")
    assert path.exists(), "whoever brought it may want it"


def cut_off(tmp_path: Path, file: Path, begun: bytes) -> None:
    blobs = tmp_path / "cache" / "models--org--tiny-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{sha256(file)}.penstock.incomplete").write_bytes(begun)


def test_a_hub_that_stops_again_and_again_is_given_up(server: MockHub, store: ModelStore, gguf: Path) -> None:
    server.faults[gguf.name] = "gone"
    refusal(lambda: pull.pull(store, "tiny:1k"), "answered 404")
    assert server.store is not None
    server.faults.clear()
    server.store.broken = True
    server.store.shutdown()
    server.store.server_close()
    refusal(lambda: pull.pull(store, "tiny:1k"), "the connection broke off", "what has arrived is kept")


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [
    "../evil.json", "/etc/evil.json", "a/../../b.json", "a//b.json", "./a.json", "~/a.json", "a\\b.json", "a\nb.json",
    "",
])  # fmt: skip
def test_names_that_lead_out_are_refused(
    server: MockHub, store: ModelStore, tiny: Path, tmp_path: Path, name: str
) -> None:
    assert leads_out(name)
    server.listed["org/tiny"] = [name]
    refusal(lambda: pull.pull(store, "org/tiny"), "a name that leads out of it")
    refusal(lambda: local_path("org/tiny"), "a name that leads out of it")
    assert kept(tmp_path) == set()


def test_shards_that_lead_out_are_no_shards(server: MockHub, store: ModelStore, tiny: Path) -> None:
    (tiny / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "../../../../evil.safetensors"}}
    (tiny / "model.safetensors.index.json").write_text(json.dumps(index))
    refusal(lambda: pull.pull(store, "org/tiny"), "lacks 1 of its 1 shards", "evil.safetensors")


@pytest.mark.parametrize("sha", ["../../evil", "main", "", "A" * 40])
def test_a_commit_that_is_none_is_refused(server: MockHub, store: ModelStore, tiny: Path, sha: str) -> None:
    server.extra["sha"] = sha
    refusal(lambda: pull.pull(store, "org/tiny"), "as a commit of 'org/tiny', which is none")


def test_a_file_without_a_hash_is_refused(server: MockHub, store: ModelStore, tiny: Path) -> None:
    for digest in ("", "../../evil", "Z" * 40):
        server.extra["siblings"] = [
            {"rfilename": "config.json", "size": 3, "blobId": digest},
            {"rfilename": "model.safetensors", "size": 3, "blobId": digest},
        ]
        refusal(lambda: pull.pull(store, "org/tiny"), "names no hash of 'config.json'")


def test_links_that_lead_out_of_the_cache_are_not_followed(
    server: MockHub, store: ModelStore, tiny: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes((tiny / "model.safetensors").read_bytes())
    snapshot = tmp_path / "cache" / "models--org--tiny" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(secret)
    refusal(lambda: pull.pull(store, "org/tiny"), "leads out of the cache")
    refusal(lambda: local_path("org/tiny"), "leads out of the cache")


def test_a_link_that_the_repository_holds_comes_as_a_file(server: MockHub, store: ModelStore, tiny: Path) -> None:
    """The hub sends where a link leads as the content of the file: it is a text, and no template is read elsewhere."""
    (tiny / "chat_template.jinja").write_text("../../../../../../etc/passwd")
    record = pull.pull(store, "org/tiny")
    found = Path(record.path) / "chat_template.jinja"
    assert found.read_text() == "../../../../../../etc/passwd"
    assert found.resolve().parent.name == "blobs"


def test_pickles_are_refused_by_name(server: MockHub, store: ModelStore, tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    refusal(lambda: pull.pull(store, "org/tiny"), "'pytorch_model.bin'", "convert it", kind=UnsupportedError)
    assert server.log == []


def test_the_disk_has_a_bound(
    server: MockHub, store: ModelStore, tiny: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(p.stat().st_size for p in tiny.iterdir())
    refusal(lambda: pull.pull(store, "org/tiny", max_bytes=size - 1), "more than --max-disk allows")
    assert server.log == []
    pull.pull(store, "org/tiny", max_bytes=size)
    both = size + gguf.stat().st_size
    refusal(lambda: pull.pull(store, "tiny:1k", max_bytes=both - 1), "the models that were pulled 0.00 GB")
    usage = transfer.shutil.disk_usage("/")
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda path: usage._replace(free=gguf.stat().st_size - 1))
    refusal(lambda: pull.pull(store, "tiny:1k", max_bytes=both), "needs 0.0 GB more on the disk")
    assert gguf.name not in server.log
    monkeypatch.undo()


def test_what_is_not_there_is_said_with_the_nearest_names(server: MockHub, store: ModelStore, gguf: Path) -> None:
    refusal(lambda: local_path("qwen2.5-coder"), "nearest are", "qwen2.5-coder:0.5b", "qwen2.5-coder:1.5b")
    refusal(lambda: local_path("tinny:1k"), "tiny:1k")
    refusal(lambda: pull.pull(store, "smolm2:135m"), "smollm2:135m")
    refusal(lambda: pull.remove(store, "tiny:1k"), "no model of the name 'tiny:1k' was pulled")
    refusal(lambda: local_path("xxxxxxxx"), "penstock list --available")


def test_the_table_is_sound() -> None:
    for name, alias in ALIASES.items():
        assert name == name.lower()
        assert alias.sha256 == "" or len(bytes.fromhex(alias.sha256)) == 32
        assert alias.model.revision is None or len(bytes.fromhex(alias.model.revision)) == 20
        assert alias.num_bytes > 10_000_000
        assert alias.licence
        assert bool(alias.terms) == name.startswith(("gemma", "llama"))


def test_hashes_of_the_table_are_those_of_the_files_that_are_here() -> None:
    from tools.models import FOLDER, MODELS

    known = {file: digest for model in MODELS.values() for file, digest in model.files.items()}
    same = [a.model.file for a in ALIASES.values() if a.model.file in known]
    assert len(same) == 2
    for alias in ALIASES.values():
        if alias.model.file in known:
            assert alias.sha256 == known[alias.model.file]
            if (FOLDER / alias.model.file).is_file():
                assert (FOLDER / alias.model.file).stat().st_size == alias.num_bytes


# -- removing --------------------------------------------------------------------------------------------------------


def test_rm_removes_what_was_brought_and_nothing_else(
    server: MockHub, store: ModelStore, tiny: Path, gguf: Path, tmp_path: Path
) -> None:
    config = tmp_path / "cache" / "models--org--tiny" / "snapshots" / COMMIT / "config.json"
    local_path("org/tiny", weights=False)  # by somebody else, as far as the record knows
    before = kept(tmp_path)
    record = pull.pull(store, "org/tiny")
    assert [file.made for _, file in sorted(record.files.items())] == [False, True]
    assert kept(tmp_path) > before
    _, num_bytes = pull.remove(store, "org/tiny")
    assert num_bytes == (tiny / "model.safetensors").stat().st_size
    assert kept(tmp_path) == before
    assert config.is_file()
    pull.pull(store, "tiny:1k")
    pull.remove(store, "tiny:1k")
    assert kept(tmp_path) == before
    assert store.all() == []


def test_files_of_two_names_go_with_the_last(server: MockHub, store: ModelStore, gguf: Path, tmp_path: Path) -> None:
    pull.pull(store, "tiny:1k")
    record = pull.pull(store, "org/tiny-GGUF")
    assert not any(file.made for file in record.files.values())
    pull.remove(store, "tiny:1k")
    assert Path(record.path).is_file()
    with pytest.raises(ModelError):
        pull.remove(store, "tiny:1k")
    assert pull.remove(store, "org/tiny-GGUF")[1] == gguf.stat().st_size
    assert kept(tmp_path) == set()


def test_a_newer_commit_takes_the_place_of_the_older(
    server: MockHub, store: ModelStore, tiny: Path, tmp_path: Path
) -> None:
    first = pull.pull(store, "org/tiny")
    newer = tmp_path / "newer"
    shutil.copytree(tiny, newer)
    (newer / "config.json").write_text(json.dumps(TINY | {"rms_norm_eps": 0.5}))
    server.repos["org/tiny"] = {OLD: newer, COMMIT: tiny}
    assert local_path("org/tiny") == Path(first.path), "until it is pulled again"
    hold = store.hold(first.path)
    refusal(lambda: pull.pull(store, "org/tiny"), "is in use")
    hold.close()
    second = pull.pull(store, "org/tiny")
    assert second.missing() is None
    assert local_path("org/tiny") == Path(second.path)
    assert not Path(first.path).exists()
    assert open_model(second.path).spec.layers[0].norm.eps == 0.5, "the weights, which both have, are still here"
    assert pull.remove(store, "org/tiny")[1] == second.num_bytes, "brought by the first pull, removed with the second"
    assert kept(tmp_path) == set()


def test_a_folder_of_yours_has_a_name_and_stays(
    server: MockHub, store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "own")
    record = pull.name_local(store, folder, "mine:1")
    assert local_path("mine:1") == folder
    assert record.num_bytes == sum(p.stat().st_size for p in folder.iterdir())
    hold = store.hold(folder)
    refusal(lambda: pull.remove(store, "mine:1"), "mine:1 is in use")
    hold.close()
    assert pull.remove(store, "mine:1")[1] == 0
    assert folder.is_dir()
    pull.name_local(store, folder, None)
    monkeypatch.chdir("/")
    (folder / "config.json").write_text("{}")
    refusal(lambda: local_path("own"), "is gone or was changed")
    nano = bundled_model("nano")
    assert nano is not None
    for name, text in (("../x", "cannot be a name"), ("a b", "cannot be a name"), ("nano", "comes with Penstock"),
                       ("qwen3:0.6b", "is the name of another model")):  # fmt: skip
        refusal(lambda name=name: pull.name_local(store, nano, name), text)


def test_a_name_of_the_table_goes_to_the_very_file(server: MockHub, store: ModelStore, gguf: Path) -> None:
    assert pull.name_local(store, gguf, "tiny:1k").licence == "apache-2.0"
    assert local_path("tiny:1k") == gguf
    pull.remove(store, "tiny:1k")
    gguf.write_bytes(gguf.read_bytes() + b"\0")
    refusal(lambda: pull.name_local(store, gguf, "tiny:1k"), "is the name of another model")


# -- other processes -------------------------------------------------------------------------------------------------


def environment(server: MockHub, tmp_path: Path) -> dict[str, str]:
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("HF_")}, "HF_ENDPOINT": server.url,
        "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "home"),
        "PENSTOCK_CACHE": str(tmp_path / "penstock"), "XDG_RUNTIME_DIR": str(tmp_path),
    }  # fmt: skip


def penstock(server: MockHub, tmp_path: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", *args], env=environment(server, tmp_path), cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def big_model(server: MockHub, tmp_path: Path) -> Path:
    """A GGUF file of 3 MB, of which 16 KiB come each 20 ms: four seconds."""
    folder = tmp_path / "big"
    folder.mkdir()
    file = folder / "big-Q8_0.gguf"
    write_model(file, model_metadata() | {"filler": "x" * 3_000_000}, kind="Q8_0")
    server.repos["org/big"] = {COMMIT: folder}
    return file


def arrived(tmp_path: Path, file: Path) -> int:
    partial = tmp_path / "cache" / "models--org--big" / "blobs" / f"{sha256(file)}.penstock.incomplete"
    return partial.stat().st_size if partial.exists() else 0


def test_a_pull_goes_on_after_its_process_was_killed(server: MockHub, tmp_path: Path, store: ModelStore) -> None:
    file = big_model(server, tmp_path)
    server.faults[file.name] = "slow"
    first = penstock(server, tmp_path, "pull", "org/big")
    deadline_s = time.monotonic() + 60
    while arrived(tmp_path, file) < 200_000:
        assert time.monotonic() < deadline_s
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    begun = arrived(tmp_path, file)
    assert 200_000 <= begun < file.stat().st_size
    record = store.get("org/big")
    assert record is not None
    assert not record.whole
    server.faults.clear()
    second = penstock(server, tmp_path, "pull", "org/big")
    out, errors = second.communicate(timeout=60)
    assert (second.returncode, errors) == (0, ""), "no bar where there is no terminal"
    assert out == "org/big is here (3 MB, Q8_0, apache-2.0)\nnext: penstock serve org/big\n"
    assert server.ranges == [(file.name, 0), (file.name, begun)], "only the rest came"
    assert sha256(local_path("org/big")) == sha256(file)


def test_two_processes_pull_one_model_once(server: MockHub, tmp_path: Path) -> None:
    file = big_model(server, tmp_path)
    server.faults[file.name] = "slow"
    both = [penstock(server, tmp_path, "pull", "org/big") for _ in range(2)]
    results = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert server.log == [file.name]
    assert sum("another process is pulling org/big" in errors for _, errors in results) == 1


def test_a_model_in_use_is_not_removed(server: MockHub, tmp_path: Path, store: ModelStore, tiny: Path) -> None:
    record = pull.pull(store, "org/tiny")
    code = (
        "import sys; from penstock import LLM;"
        "llm = LLM('org/tiny', skip_tokenizer_init=True, max_model_len=32); print('up', flush=True); sys.stdin.read()"
    )
    user = subprocess.Popen(
        [sys.executable, "-c", code], env=environment(server, tmp_path), cwd=tmp_path, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert user.stdout is not None
    assert user.stdout.readline() == "up\n"
    assert store.in_use("org/tiny")
    refusal(lambda: pull.remove(store, "org/tiny"), "org/tiny is in use")
    assert Path(record.path).is_dir()
    user.send_signal(signal.SIGKILL)
    user.communicate()
    assert not store.in_use("org/tiny"), "the dead hold nothing"
    assert pull.remove(store, "org/tiny")[1] == record.num_bytes
