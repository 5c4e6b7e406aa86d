"""Settings of KV selectors: when selections take place, what budgets mean, and what is refused, with which words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.base.errors import ConfigError
from penstock.cli.main import main
from penstock.config import from_kwargs
from penstock.config.selection import parse_budget, parse_selection
from penstock.core.machine import Machine
from penstock.core.model_spec import Alibi, ModelSpec, QkNorm
from penstock.launch.selection import keeping_of
from penstock.plan.resolve import resolve
from penstock.plan.simulated import sim_plan
from tests import specs

MACHINE = Machine(num_cores=2, memory_bytes=1 << 33, available_bytes=1 << 32)


def refused(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        from_kwargs(model="m", **settings)
    assert caught.value.field in settings
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "num_tokens", "kept"),
    [("25%", 100, 25), ("25%", 101, 26), ("100%", 77, 77), ("0.5%", 10, 1), ("512", 100, 100), ("512", 1000, 512)],
)
def test_a_budget_is_tokens_or_a_share_rounded_up(text: str, num_tokens: int, kept: int) -> None:
    assert parse_budget(text).of(num_tokens) == kept


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"kv_budget": "0"}, "kv_budget: '0' keeps nothing"),
        ({"kv_budget": "0%"}, "kv_budget: '0%' keeps nothing"),
        ({"kv_budget": "-5"}, "kv_budget: '-5' keeps nothing"),
        ({"kv_budget": "101%"}, "kv_budget: '101%' is more than there is; use at most 100%"),
        ({"kv_budget": "nan%"}, "kv_budget: 'nan%' keeps nothing"),
        ({"kv_budget": "a few"}, "kv_budget: 'a few' is neither a number of tokens (512) nor a share"),
        ({"kv_selector": "h2o,snapkv"}, "names several; a cache can be cut down by one selector only"),
        ({"kv_selector_config": "{}"}, "there is no kv_selector whose options these could be"),
        ({"kv_selector": "h2o", "kv_selector_config": "[1"}, "kv_selector_config: is not JSON"),
        ({"kv_selector": "h2o", "kv_selector_config": "[1]"}, "kv_selector_config: must be an object"),
        ({"kv_selector": "h2o", "kv_selector_config": '{"sink": 4}'}, "kv_selector_config: sink: unknown; known: "),
        ({"kv_selector": "h2o", "kv_selector_config": '{"interval": 0}'}, "interval: must be at least 1"),
        ({"kv_selector": "h2o", "kv_budget": "4"}, "kv_budget: 4 tokens are not more than the 4 sinks"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_what_to_change(settings: dict[str, Any], text: str) -> None:
    assert text in refused(**settings)


def test_an_unknown_selector_is_named_with_those_there_are() -> None:
    config = from_kwargs(model="m", kv_selector="h20")
    with pytest.raises(ConfigError, match=r"unknown kv_selector 'h20'; choose one of: .*h2o.*snapkv"):
        keeping_of(config)


def test_selections_take_place_at_positions_of_the_sequence_alone() -> None:
    config = parse_selection("h2o", "50%", '{"interval": 10}')
    assert config is not None
    assert [config.next_position(p, 25) for p in (0, 24, 25, 34, 35, 36)] == [25, 25, 35, 35, 45, 45]
    within = parse_selection("h2o", "50%", '{"interval": 10, "prompt_interval": 8}')
    assert within is not None
    assert [within.next_position(p, 25) for p in (0, 8, 23, 24, 25)] == [8, 16, 24, 25, 35]


def refusal(model: str, **settings: Any) -> str:
    config = from_kwargs(model="m", **settings)
    with pytest.raises(ConfigError) as caught:
        resolve(config, specs.make(model)[0], MACHINE, keeping=keeping_of(config))
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "settings", "text"),
    [
        ("latent", {"kv_selector": "h2o"}, "kv_selector: h2o needs keys and values in every layer, and layer 0"),
        ("slots", {"kv_selector": "snapkv"}, "kv_selector: snapkv needs keys and values in every layer"),
        ("llama_biased", {"kv_selector": "infinigen"}, "works out layer 0's queries in the layer before"),
        ("windowed", {"kv_selector": "window"}, "is for layers that see all of their context, and layer"),
        ("llama_gqa", {"kv_selector": "h2o", "kv_allocator": "virtual"}, "kv_allocator virtual has none; use paged"),
        (
            "llama_gqa",
            {"kv_selector": "streaming", "speculative_config": '{"method": "ngram"}'},
            "cannot be combined with speculative_config",
        ),
    ],
)
def test_a_model_or_setting_that_cannot_serve_it_is_refused(model: str, settings: dict[str, Any], text: str) -> None:
    assert text in refusal(model, **settings)


def test_scores_by_distance_and_keys_that_turn_otherwise_are_refused() -> None:
    def with_mixer(**change: Any) -> ModelSpec:
        spec = specs.make("llama_gqa")[0]
        layer = spec.layers[0]
        layer = msgspec.structs.replace(layer, mixer=msgspec.structs.replace(layer.mixer, **change))
        return msgspec.structs.replace(spec, layers=(layer, *spec.layers[1:]))

    def refused_for(spec: ModelSpec, **settings: Any) -> str:
        config = from_kwargs(model="m", **settings)
        with pytest.raises(ConfigError) as caught:
            resolve(config, spec, MACHINE, keeping=keeping_of(config))
        return str(caught.value)

    assert "layer 0 scores by distance (ALiBi)" in refused_for(with_mixer(alibi=Alibi(), rope=None), kv_selector="h2o")
    assert "rotary positions inside the cache, and layer 0 has none" in refused_for(
        with_mixer(rope=None), kv_selector="streaming"
    )
    norm = QkNorm(kind="unit", after_rope=True)
    assert "layer 0 does more behind it" in refused_for(with_mixer(qk_norm=norm), kv_selector="streaming")


def test_positions_inside_the_cache_need_no_longer_context_of_the_model() -> None:
    spec = specs.make("llama_gqa")[0]
    more = 4 * spec.max_position
    config = from_kwargs(model="m", kv_selector="streaming", kv_budget="64", max_model_len=more)
    assert resolve(config, spec, MACHINE, keeping=keeping_of(config)).max_model_len == more
    config = from_kwargs(model="m", kv_selector="h2o", kv_budget="64", max_model_len=more)
    with pytest.raises(ConfigError, match="positions this model was made for"):
        resolve(config, spec, MACHINE, keeping=keeping_of(config))


def test_a_plan_and_a_simulation_refuse_what_an_engine_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    for command, *more in (
        ("plan", "nano", "--kv-selector", "snapkv", "--kv-allocator", "contiguous"),
        ("plan", "nano", "--kv-selector", "quest", "--kv-cache-dtype", "int4"),
        ("plan", "nano", "--kv-selector", "quest", "--kv-cache-dtype", '{"dtype": "int8", "layers": {"0": "int4"}}'),
    ):
        assert main([command, *more]) != 0
        assert "kv_selector:" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="of which a simulation knows nothing"):
        sim_plan(from_kwargs(model="m", kv_selector="h2o"), specs.make("llama_gqa")[0], 1 << 30)


def test_a_plan_knows_who_counts_inside_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nano", "--kv-selector", "streaming", "--kv-budget", "512", "--max-model-len", "100000"]) == 0
    assert "100,000" in capsys.readouterr().out
