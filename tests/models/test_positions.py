"""nano with other positions, from the switch to the tokens (catalogue rows G05, G06, G07, G09, G37)."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.backends.native.forward import NativeForward
from penstock.backends.reference import BlasBackend
from penstock.base.errors import ConfigError
from penstock.cli.main import main
from penstock.config import from_kwargs, from_toml
from penstock.core.matrix_format import parse_scheme
from penstock.core.model_spec import ModelSpec, Rope
from penstock.eval.perplexity import Window, token_nats
from penstock.eval.scorer import ProgramScorer, load
from penstock.launch.build import plan_of
from penstock.launch.bundled import bundled_model
from tests import specs
from tests.native.running import ISAS, pool, pytestmark_native
from tests.paged import Paged

TRAINED, LAYERS, KV_HEADS = 2048, 6, 3
OPS = ["ref", pytest.param("native", marks=pytestmark_native)]
FACTORS = [1.0, 1.25, 1.5, 2.0] * 4
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "ntk": {"rope_type": "ntk", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 2.0},
    "longrope": {"rope_type": "longrope", "factor": 2.0, "long_factor": FACTORS, "start_tokens": 4},
    "heads": {"rope_type": "linear", "factor": 2.0, "head_factors": [[1.2, 1.5, 1.8]] * LAYERS},
}


def text(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [0, *(rng.randrange(3, 4000) for _ in range(n - 1))]


def nano(ops: str, **more: Any) -> LLM:
    return LLM("nano", ops=ops, max_num_seqs=2, skip_tokenizer_init=True, **more)


def logprobs(llm: LLM, ids: Sequence[int]) -> list[float]:
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, logprobs=1, detokenize=False)
    (out,) = llm.generate([{"prompt_token_ids": list(ids)}], params)
    prompt = [entry[token].logprob for entry, token in zip(out.prompt_logprobs[1:], ids[1:], strict=True)]
    tokens = out.outputs[0].token_ids
    return [*prompt, *(step[token].logprob for step, token in zip(out.outputs[0].logprobs, tokens, strict=True))]


@pytest.mark.parametrize("ops", OPS)
def test_G06_dynamic_equals_plain_up_to_the_trained_length_bit_for_bit(ops: str) -> None:
    ids = text(48)
    plain = logprobs(nano(ops), ids)
    assert logprobs(nano(ops, rope_scaling=SCALINGS["dynamic"], max_model_len=TRAINED), ids) == plain
    assert logprobs(nano(ops, rope_scaling=SCALINGS["dynamic"]), ids) != plain


@pytest.mark.parametrize("ops", OPS)
def test_G37_factors_of_one_change_no_bit_of_any_probability(ops: str) -> None:
    ids = text(48)
    ones = {"rope_type": "default", "head_factors": [[1.0] * KV_HEADS] * LAYERS}
    plain, same = nano(ops), nano(ops, rope_scaling=ones)
    assert same.engine.spec.layers != plain.engine.spec.layers, "the heads have tables of their own"
    assert logprobs(same, ids) == logprobs(plain, ids)
    others = ones | {"head_factors": [[1.0, 1.0, 1.5]] * LAYERS}
    assert logprobs(nano(ops, rope_scaling=others), ids) != logprobs(plain, ids)


@pytestmark_native
@pytest.mark.parametrize("kind", sorted(SCALINGS))
def test_G05_G06_G07_G09_G37_native_programs_say_what_the_reference_says(kind: str) -> None:
    """40 tokens at stretched positions, through the engine. Sums are taken in another order."""
    ids = text(40, seed=2)
    given = {"rope_scaling": SCALINGS[kind], "dtype": "float32"}
    native, ref = (np.array(logprobs(nano(ops, **given), ids)) for ops in ("native", "ref"))
    np.testing.assert_allclose(native[: len(ids) - 1], ref[: len(ids) - 1], atol=2e-3)


@pytestmark_native
@pytest.mark.parametrize("name", ["llama_gqa", "llama_mqa", "parallel"])
def test_G37_factors_per_head_are_the_same_in_native_and_reference_programs(name: str) -> None:
    spec, weights = specs.make(name)
    changed = _with_head_factors(spec)
    ref, native = (Paged(changed, weights, num_slabs=200) for _ in range(2))
    program: Any = NativeForward(
        native.graph, native.groups, pool(ISAS[0], 1), parse_scheme("none"), max_tokens=64
    )  # fmt: skip
    native.program = program
    ids = [3 + i * 7 % (spec.vocab_size - 3) for i in range(50)]
    want, got = ref.chunked("a", ids, [50]), native.chunked("a", ids, [50])
    np.testing.assert_allclose(got, want, atol=2e-4)
    plain = Paged(spec, weights, num_slabs=200).chunked("a", ids, [50])
    assert np.abs(plain - want).max() > 1e-3, "the factors do something"


def _with_head_factors(spec: ModelSpec) -> ModelSpec:
    layers = []
    for layer in spec.layers:
        mixer = layer.mixer
        how = getattr(mixer, "rope", None)
        if isinstance(how, Rope):
            factors = tuple(1.0 + 0.5 * g + 0.25 for g in range(mixer.num_kv_heads))  # type: ignore[union-attr]
            mixer = msgspec.structs.replace(mixer, rope=msgspec.structs.replace(how, head_factors=factors))
        layers.append(msgspec.structs.replace(layer, mixer=mixer))
    return msgspec.structs.replace(spec, layers=tuple(layers))


@pytestmark_native
def test_G06_G07_untrained_perplexity_at_twice_the_length_falls_from_linear_to_ntk_to_yarn() -> None:
    """On nano's own card, 4,096 tokens of text of several kinds; held-out prose: benchmarks/quality/positions.py."""
    costs = {}
    for kind in ("linear", "ntk", "yarn"):
        model = load(from_kwargs(model="nano", rope_scaling=SCALINGS[kind]))
        assert model.max_len == 2 * TRAINED
        assert model.tokenizer is not None
        card = (Path(str(bundled_model("nano"))) / "README.md").read_text("utf-8")
        ids = [0, *model.tokenizer.encode(card)[: 2 * TRAINED - 1]]
        assert len(ids) == 2 * TRAINED
        costs[kind] = token_nats(ProgramScorer(model, BlasBackend()).logits(ids), Window(tuple(ids), 1)).mean()
    assert costs["yarn"] <= costs["ntk"] < costs["linear"] - 0.1, costs


def test_G05_the_switch_raises_the_longest_context() -> None:
    for factor, longest in ((2.0, 4096), (4.0, 8192)):
        plan = plan_of(from_kwargs(model="nano", rope_scaling={"rope_type": "linear", "factor": factor}))
        assert plan.max_model_len == longest
        assert "rope" in {d.name for d in plan.decisions}
    with pytest.raises(ConfigError, match="4097 is more than the 4096 positions"):
        plan_of(from_kwargs(model="nano", rope_scaling=SCALINGS["linear"], max_model_len=4097))
    with pytest.raises(ConfigError, match="or stretch rotary positions with rope_scaling"):
        plan_of(from_kwargs(model="nano", max_model_len=4096))
    assert plan_of(from_kwargs(model="nano", rope_theta=1e6)).max_model_len == TRAINED


def test_G05_command_line_toml_and_keywords_are_one_switch(tmp_path: Any, capsys: Any) -> None:
    given = json.dumps(SCALINGS["yarn"])
    assert main(["plan", "nano", "--rope-scaling", given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_position"] == 4096
    toml = tmp_path / "c.toml"
    toml.write_text(f"[model]\nmodel = 'nano'\nrope_scaling = '{given}'\n")
    assert from_toml(toml) == from_kwargs(model="nano", rope_scaling=given)
    assert main(["run", "nano", "-p", "x", "--rope-scaling", '{"rope_type": "spiral", "factor": 2}']) != 0
    assert "rope_scaling: rope_type: must be one of" in capsys.readouterr().err
