"""`penstock tune`, and that its file is refused where it was not made."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock import LLM, SamplingParams
from penstock.base.errors import ConfigError
from penstock.cli.main import main
from penstock.config.load import from_toml
from penstock.families.registry import read_spec
from penstock.launch import tuned as module
from penstock.launch.hub import local_path
from penstock.launch.tuned import check_tuned, model_mark, tuned_for
from penstock.plan.probe import probe

LOAD = ["--trace", "synthetic:poisson?rate=200&prompt=60&output=20", "--limit", "24"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tune")
    out, report = folder / "tuned.toml", folder / "r.json"
    flags = ["--max-model-len", "256", "--kv-cache-memory-bytes", "8MiB", "--slo", "ttft=100ms,tpot=20ms"]
    done = main(["tune", "nano", *LOAD, *flags, "--minutes", "0.05", "--verify", "8", "--out", str(out), "--json",
                 str(report)])  # fmt: skip
    assert done == 0
    return out, json.loads(report.read_text())


def test_the_file_serves_here(made: tuple[Path, dict[str, Any]]) -> None:
    out, report = made
    tables = tomllib.loads(out.read_text())
    assert tables["model"]["max_model_len"] == 256
    assert tables["cache"]["kv_cache_memory_bytes"] == 8 << 20, "what was given stays"
    assert set(report["measured"]) >= {"as given", "tuned"}
    assert len(report["reasons"]["scheduling_policy"]) == 6
    config = from_toml(out, model="nano")
    llm = LLM.from_config(config)
    wanted = LLM("nano", max_model_len=256).generate("Once", SamplingParams(temperature=0, max_tokens=8))
    assert llm.generate("Once", SamplingParams(temperature=0, max_tokens=8))[0].outputs == wanted[0].outputs


@pytest.mark.parametrize(("what", "value"), [("machine", "Z80, 1 cores"), ("version", "0.0.1"), ("model", "00" * 8)])
def test_elsewhere_it_is_refused(made: tuple[Path, dict[str, Any]], tmp_path: Path, what: str, value: str) -> None:
    text = made[0].read_text()
    own = made[1]["tuned_for"][what]
    assert own in text
    (tmp_path / "t.toml").write_text(text.replace(own, value))
    with pytest.raises(ConfigError, match=f"tuned for {what} {value}, and this is .*run penstock tune here"):
        LLM.from_config(from_toml(tmp_path / "t.toml", model="nano"))


def test_another_model_of_the_same_shape_is_another_model(tmp_path: Path) -> None:
    path = local_path("nano")
    copy = tmp_path / path.name
    (shutil.copytree if path.is_dir() else shutil.copy)(path, copy)
    spec = read_spec(path) if path.is_dir() else None
    file = max((p for p in copy.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size) if path.is_dir() else copy
    spec = spec or read_spec(path)
    assert model_mark(copy, spec) == model_mark(path, spec), "it may lie anywhere"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert model_mark(copy, spec) != model_mark(path, spec)


def test_fewer_cores_are_another_machine() -> None:
    path = local_path("nano")
    spec, machine = read_spec(path), probe()
    said = json.dumps(tuned_for(path, spec, machine))
    check_tuned(said, path, spec, machine)
    with pytest.raises(ConfigError, match="tuned for machine"):
        check_tuned(said, path, spec, msgspec.structs.replace(machine, num_cores=machine.num_cores + 1))
    for broken in ("{", "[]", '{"machine": "x"}'):
        with pytest.raises(ConfigError, match="tuned_for: must be an object with machine, version, model"):
            check_tuned(broken, path, spec, machine)


def test_a_machine_that_says_nothing_of_itself_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*args: Any, **kwargs: Any) -> str:
        raise OSError("no such file")

    monkeypatch.setattr(module.Path, "read_text", gone)
    assert module._processor() == "unknown processor"


@pytest.mark.parametrize(("given", "said"), [
    (["tune", "nano"], "--trace: name the load to tune for"),
    (["tune", "nano", *LOAD, "--slo", "fast"], "--slo: 'fast' must be ttft=X or tpot=X"),
    (["tune", "nano", *LOAD, "--verify", "-1"], "--verify must not be negative"),
    (["tune", "nano", *LOAD, "--steps", "/nowhere.json"], "/nowhere.json"),
])  # fmt: skip
def test_what_is_wrong_is_one_sentence(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given) != 0
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err
