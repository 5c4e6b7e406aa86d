"""One budget for weights, keys and values (row B19): a search shares it out, and an engine does what was planned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.base.errors import ConfigError
from penstock.cli.main import main
from penstock.config import from_kwargs
from penstock.core.page_ops import HOST
from penstock.families.registry import open_model
from penstock.launch import offload
from penstock.launch.hub import local_path
from penstock.plan.offload import kept_layers
from penstock.plan.probe import probe
from penstock.plan.resolve import resolve
from tests.native.running import pytestmark_native

pytestmark = pytestmark_native
TEXTS = [f"Once upon a time, {n} children" for n in range(24)]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
RATES = {"read": 1e9, "step_s": 0.002, "row_s": 0.0001, "layers_share": 0.9, "kv_read": 1e9}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def rates(tmp_path: Path, **changes: float) -> str:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(RATES | changes))
    return str(path)


def tokens_of(llm: LLM) -> list[Any]:
    return [out.outputs[0].token_ids for out in llm.generate(TEXTS, GREEDY)]


def decided(llm: LLM) -> dict[str, Any]:
    return {d.name: (d.value, d.why) for d in llm.engine.plan.decisions}


def test_B19_weights_and_keys_and_values_beyond_one_budget_run_as_planned(tmp_path: Path) -> None:
    """A third of what weights, keys and values of 24 sequences take: layers come from the disk, and so do the keys and
    values of those sequences for which there is no room; tokens of the plain engine; memory and reads as planned."""
    plain = LLM("nano", max_model_len=128, max_num_seqs=1)
    wanted = tokens_of(plain)
    memory = 4_800_000
    llm = LLM("nano", max_model_len=128, memory_bytes=memory, offload_rates=rates(tmp_path), max_num_seqs=24)
    value, why = decided(llm)["offload_policy"]
    assert value == "24 sequences, 0 of 6 layers stay, 0 read ahead, keys and values of 24 on the disk", why
    core: Any = llm.engine.core
    found, storage = core.executor.runner._forward._resident, core.executor.runner.storage
    assert found.most_bytes + storage.num_bytes <= memory
    blocks = storage.num_bytes // core.kv.pools[0].num_slabs
    assert found.num_bytes + 24 * 4 * blocks > 2 * memory, "it does not fit"
    assert tokens_of(llm) == wanted
    assert core.kv.num_layerwise == 24
    steps = core.stats.num_steps
    coming = sum(s.num_bytes for s in found.segments if not s.stays)
    assert found.num_read <= (steps + 1) * coming, "weights once for each step of all rows"
    pages: Any = storage.tiers[HOST]
    assert 0 < pages.num_read < 24 * steps * 4 * 6 * pages._each[0], "no more than the blocks of those that are away"


def test_B19_a_budget_for_all_needs_no_disk(tmp_path: Path) -> None:
    llm = LLM("nano", max_model_len=128, memory_bytes=40_000_000, offload_rates=rates(tmp_path), max_num_seqs=8)
    assert decided(llm)["offload_policy"][0] == "8 sequences, 6 of 6 layers stay, 0 read ahead"
    assert decided(llm)["packed_weights"][0] != "streamed"


def test_B19_rates_are_measured_once_and_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = {"max_model_len": 128, "memory_bytes": 4_000_000}
    assert main(["plan", "nano", "--max-model-len", "128", "--memory-bytes", "4000000", "--explain"]) == 0
    assert "estimated" in capsys.readouterr().out
    first = decided(LLM("nano", **memory))
    assert "measured just now" in first["offload_rates"][1]
    kept = list(cache.glob("offload/*.json"))
    found = json.loads(kept[0].read_text())
    assert len(kept) == 1
    assert min(found["read"], found["kv_read"], found["step_s"]) > 0
    assert len(found["layers"]) == 6
    assert 0 < found["layers_share"] < 1
    monkeypatch.setattr(offload, "measured", None)
    second = decided(LLM("nano", **memory))
    assert "kept in" in second["offload_rates"][1]
    assert second["offload_policy"] == first["offload_policy"]
    assert main(["plan", "nano", "--max-model-len", "128", "--memory-bytes", "4000000", "--explain", "--json"]) == 0
    told = {d["name"]: d["value"] for d in json.loads(capsys.readouterr().out)["decisions"]}
    assert told["offload_policy"] == first["offload_policy"][0], "the plan is told before anything runs"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"memory_bytes": 300_000}, "give at least"),
        ({"memory_bytes": 1 << 30, "weight_memory_bytes": 1 << 20}, "leave one of both away"),
        ({"memory_bytes": 1 << 30, "num_gpu_blocks_override": 9}, "leave one of both away"),
        ({"memory_bytes": 1 << 30, "ops": "ref"}, "native kernels"),
        ({"memory_bytes": 1 << 30, "offload_rates": "nowhere.json"}, "nowhere.json"),
    ],
)
def test_budgets_that_cannot_be(settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        LLM("nano", **({"max_model_len": 128, "offload_rates": rates(tmp_path)} | settings))


@pytest.mark.parametrize("text", ["{}", "no rates", json.dumps(RATES | {"read": 0}), json.dumps(RATES | {"more": 1})])
def test_files_without_rates_are_told_of(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="offload_rates"):
        LLM("nano", max_model_len=128, memory_bytes=1 << 30, offload_rates=str(path))


def test_a_budget_is_not_ignored_where_nothing_shares_it_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nano", "--device", "h100-sxm", "--memory-bytes", "4000000"]) != 0
    assert "leave it or --device away" in capsys.readouterr().err
    spec = open_model(local_path("nano")).spec
    with pytest.raises(ConfigError, match="here give weight_memory_bytes"):
        resolve(from_kwargs(model="nano", ops="native", memory_bytes=1 << 30), spec, probe())


def test_what_is_planned_fits_whatever_the_budget(tmp_path: Path) -> None:
    """Every plan's settings are what it reckoned with, and resolve."""
    config = from_kwargs(model="nano", max_model_len=128, ops="native", memory_bytes=1, offload_rates=rates(tmp_path))
    spec, seen = open_model(local_path("nano")).spec, set()
    for memory in range(3_000_000, 16_000_000, 1_000_000):
        one = replace(config, execution=replace(config.execution, memory_bytes=memory))
        found = offload.search(one, spec, probe())
        settings = offload.planned(one, found)
        plan = found.chosen
        keeps = kept_layers(found.model.layers, plan.weight_bytes, plan.prefetch, beside=found.model.beside)
        assert plan.weight_bytes + plan.kv_bytes == memory
        assert settings.scheduler.max_num_seqs == plan.rows
        seen.add((plan.rows, plan.away > 0, keeps.count(True)))
    assert len(seen) > 4
