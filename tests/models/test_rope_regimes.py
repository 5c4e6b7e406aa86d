"""Positions that go by the length of the context: one choice per engine, made by max_model_len (G06, G09).

transformers chooses by the text at hand, so it is the oracle of both choices: of the original one with texts up to the
trained length, of the extended one with the first tokens of a text beyond it.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from penstock.cli.main import main
from penstock.config import from_kwargs
from penstock.core.messages import EngineInfo
from penstock.families.registry import open_model
from penstock.launch.build import plan_of
from penstock.server.main import _positions
from penstock.weights.load import load_weights
from tests.models.parity import oracle, random_model
from tests.paged import Paged

TRAINED, LONGEST = 32, 128
ATOL = 3e-4  # transformers keeps frequencies in float32, which a hundred positions show
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
IDS = np.random.default_rng(5).integers(3, 97, LONGEST).tolist()


def model_of(kind: str, folder: Path) -> Any:
    if kind == "dynamic":
        rope: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        model = random_model(
            LlamaForCausalLM, LlamaConfig(**SIZES, max_position_embeddings=TRAINED, rope_parameters=rope)
        )
    else:
        rope = {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.3, 1.6],
            "long_factor": [1.5, 2.5, 5.0, 9.0], "original_max_position_embeddings": TRAINED,
        }  # fmt: skip
        config = Phi3Config(
            **SIZES, max_position_embeddings=LONGEST, original_max_position_embeddings=TRAINED, rope_parameters=rope
        )
        model = random_model(Phi3ForCausalLM, config)
    model.save_pretrained(folder)
    return model


def ours(folder: Path, ids: list[int], max_model_len: int) -> np.ndarray:
    checkpoint = open_model(folder)
    weights = load_weights(checkpoint, checkpoint.spec, "float32")
    return Paged(checkpoint.spec, weights, max_model_len=max_model_len).one_go("a", ids)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_G06_G09_both_regimes_equal_transformers(kind: str, tmp_path: Path) -> None:
    model = model_of(kind, tmp_path).double()
    short, whole = IDS[:TRAINED], IDS
    original, extended = oracle(model, short), oracle(model, whole)
    assert np.abs(original - extended[:TRAINED]).max() > 0.1, "the two regimes must be told apart"
    np.testing.assert_allclose(ours(tmp_path, short, TRAINED), original, atol=ATOL)
    np.testing.assert_allclose(ours(tmp_path, IDS[:7], 9), original[:7], atol=ATOL)
    # With a longer limit a short text is what a text of that length begins with, not what transformers makes of it.
    np.testing.assert_allclose(ours(tmp_path, whole, LONGEST), extended, atol=ATOL)
    np.testing.assert_allclose(ours(tmp_path, short, LONGEST), extended[:TRAINED], atol=ATOL)


def test_G09_the_choice_is_said_at_the_start_and_by_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_of("longrope", tmp_path)

    def decided(**settings: Any) -> tuple[str, str]:
        plan = plan_of(from_kwargs(model=str(tmp_path), **settings))
        (found,) = [d for d in plan.decisions if d.name == "rope_regime"]
        return str(found.value), found.why

    value, why = decided()
    assert value == "extended"
    assert f"max_model_len {TRAINED} gives the short factors" in why
    info = cast("EngineInfo", SimpleNamespace(decisions=[("rope_regime", value, why)]))
    assert _positions(info) == f"positions: {why}\n"
    value, why = decided(max_model_len=TRAINED)
    assert value == "original"
    assert "short factors" in why
    assert not _positions(cast("EngineInfo", SimpleNamespace(decisions=[("rope_regime", value, why)])))
    assert decided(max_model_len=TRAINED + 1)[0] == "extended"
    assert main(["doctor", str(tmp_path)]) in (0, 1)
    assert "rope_regime" in capsys.readouterr().out


def test_G06_dynamic_says_its_theta_and_others_say_nothing() -> None:
    def regimes(**settings: Any) -> list[tuple[str, bool]]:
        plan = plan_of(from_kwargs(model="nano", **settings))
        return [(str(d.value), "plain theta" in d.why) for d in plan.decisions if d.name == "rope_regime"]

    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    assert regimes(rope_scaling=dynamic) == [("extended", True)]
    assert regimes(rope_scaling=dynamic, max_model_len=2048) == [("original", True)]
    assert regimes() == regimes(rope_scaling={"rope_type": "yarn", "factor": 2.0}) == []
    same = [1.5] * 16
    assert (
        regimes(rope_scaling={"rope_type": "longrope", "factor": 2.0, "short_factor": same, "long_factor": same}) == []
    )
