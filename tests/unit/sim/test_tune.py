"""The search for settings: it finds what is best where that is known, takes little memory, and keeps what is given."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import ConfigError, InputError
from penstock.cli.tune import _best, _toml, slo_of, toml_of
from penstock.sim import tune as module
from penstock.sim.metrics import Slo
from penstock.sim.tune import KNOBS, LoadScore, tune

SLO = Slo(1.0, 0.1)


@pytest.fixture
def by_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is its share of good answers and its mean time."""
    monkeypatch.setattr(LoadScore, "of", classmethod(lambda cls, result, slo: cls(*result)))


def peak(settings: Mapping[str, Any]) -> tuple[float, float]:
    """Best where the budget is 256, the policy slo and 16 sequences run; half the memory is enough."""
    share = 0.5
    share += 0.2 * (settings.get("max_num_batched_tokens") == 256)
    share += 0.1 * (settings.get("scheduling_policy") == "slo")
    share += 0.1 * (settings.get("max_num_seqs") == 16)
    share -= 0.3 * (settings.get("kv_cache_memory_bytes", 1000) < 500)
    if settings.get("max_num_seqs") == 64 and settings.get("max_num_batched_tokens") == 64:
        raise ConfigError("a step must hold a token of each sequence")
    return share, 2.0 if settings.get("long_prefill_token_threshold", 0) else 3.0


@pytest.mark.usefixtures("by_formula")
def test_it_finds_the_best_of_every_knob_and_no_more_memory_than_that_needs() -> None:
    found = tune(peak, SLO, {}, 1000)  # type: ignore[arg-type]
    assert found.settings == {
        "scheduling_policy": "slo", "max_num_batched_tokens": 256, "long_prefill_token_threshold": 64,
        "max_num_seqs": 16, "kv_cache_memory_bytes": 500,
    }  # fmt: skip
    assert found.first == LoadScore(0.5, 3.0)
    assert found.score.attained == pytest.approx(0.9)
    assert [one.value for one in found.reasons["max_num_seqs"]] == list(KNOBS["max_num_seqs"])
    assert found.num_runs < 60, "no setting is run twice"


@pytest.mark.usefixtures("by_formula")
def test_what_the_user_gave_stays() -> None:
    given = {"max_num_seqs": 4, "kv_cache_memory_bytes": 900}
    asked: list[Mapping[str, Any]] = []
    found = tune(lambda more: asked.append(more) or peak({**given, **more}), SLO, given, 900)  # type: ignore[arg-type,func-returns-value]
    assert not set(given) & {name for more in asked for name in more}
    assert set(found.settings) == {"scheduling_policy", "max_num_batched_tokens", "long_prefill_token_threshold"}


@pytest.mark.usefixtures("by_formula")
def test_an_impossible_value_is_a_reason_and_not_an_end() -> None:
    def run(settings: Mapping[str, Any]) -> Any:
        if settings.get("max_num_batched_tokens") == 64:
            raise ConfigError("too small")
        return peak(settings)

    found = tune(run, SLO, {}, 1000)
    (refused,) = (one for one in found.reasons["max_num_batched_tokens"] if one.score is None)
    assert (refused.value, refused.why) == (64, "too small")


def test_a_share_counts_before_time_and_small_differences_do_not() -> None:
    assert LoadScore(0.9, 9.0).beats(LoadScore(0.8, 1.0))
    assert not LoadScore(0.901, 1.0).beats(LoadScore(0.9, 1.0))
    assert LoadScore(0.9, 0.9).beats(LoadScore(0.9, 1.0))
    assert not LoadScore(0.9, 0.99).beats(LoadScore(0.9, 1.0))


def test_refused_requests_are_not_good_ones() -> None:
    r = SimpleNamespace(
        arrival_s=np.zeros(2), first_token_s=np.array([0.5, 2.0]), finish_s=np.array([1.0, 3.0]),
        num_output=np.array([11, 11]),
    )  # fmt: skip

    class Requests(SimpleNamespace):
        def __len__(self) -> int:
            return 2

    result = SimpleNamespace(requests=Requests(**vars(r)), refused={"too long": 2})
    assert LoadScore.of(result, SLO) == LoadScore(0.25, 2.0)  # type: ignore[arg-type]


def test_what_is_measured_decides_and_noise_does_not() -> None:
    tried: Any = {"as given": (LoadScore(0.9, 1.0), {}), "tuned": (LoadScore(0.9, 0.99), {"a": 1})}
    assert _best(tried) == "as given"
    assert _best(tried | {"tuned, drafts": (LoadScore(0.95, 1.2), {"a": 1})}) == "tuned, drafts"
    assert _best({}) is None


@pytest.mark.usefixtures("by_formula")
def test_the_file_has_the_settings_their_reasons_and_what_they_are_for() -> None:
    found = tune(peak, SLO, {}, 1000)  # type: ignore[arg-type]
    given = {"max_model_len": 99, "api_key": "server's own"}
    text = toml_of(given, found.settings, found, {"tuned": "well"}, "tuned", {"machine": "M"}, "a load", SLO)
    tables = tomllib.loads(text)
    assert tables["model"] == {"max_model_len": 99}
    assert tables["scheduler"]["max_num_seqs"] == 16
    assert json.loads(tables["execution"]["tuned_for"]) == {"machine": "M"}
    assert "# 256: 90.0% within the limits, 2 s on average\n" in text
    assert "# Measured, tuned: well\n" in text


@pytest.mark.parametrize("value", ["plain", 'a "b"', 'it\'s "b"', 3, True, 0.5, "\n"])
def test_values_are_read_as_they_were(value: Any) -> None:
    assert tomllib.loads(f"x = {_toml(value)}")["x"] == value


def test_limits() -> None:
    assert slo_of("ttft=500ms, tpot=0.05s") == Slo(0.5, 0.05)
    assert slo_of("tpot=2") == Slo(1.0, 2.0)
    for text in ("ttft", "ttft=fast", "ttft=-1", "tbt=1", "", "ttft=nan"):
        with pytest.raises(InputError, match=r"--slo: .* must be ttft=X or tpot=X"):
            slo_of(text)


def test_every_knob_has_its_default_among_its_values() -> None:
    from penstock.config.engine import SETTINGS

    assert set(KNOBS) < set(SETTINGS)
    assert SETTINGS["scheduling_policy"].default in KNOBS["scheduling_policy"]
    assert tuple(sorted(module.KV_SHARES)) == module.KV_SHARES
