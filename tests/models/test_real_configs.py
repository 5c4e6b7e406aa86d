"""Every real config.json at hand becomes a spec of the right size, or a refusal that says what is missing.

The oracle of sizes is transformers itself on the meta device (shapes without memory); where it has no such model, the
number that its makers published.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
import transformers

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import ModelSpec
from penstock.families.registry import find_family
from penstock.plan.flops import num_active_params
from tests.shared import SHARED, shared

FOLDER = SHARED / "data" / "configs" / "model"
SUFFIX = ".config.json"
NAMES = sorted(path.name.removesuffix(SUFFIX) for path in FOLDER.glob("*" + SUFFIX)) or ["none"]

PUBLISHED = {
    # Llama-Nemotron, arXiv 2505.00949, section 2: 49 B; transformers has no such class.
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1": 49_867_145_216,
    # The text part of transformers' Step3p7 and the output matrix (tests/models/test_step_parity.py): 196 B.
    **dict.fromkeys(("stepfun-ai--Step-3.7-Flash", "stepfun-ai--Step-3.7-Flash-FP8"), 195_844_508_736),
}
"""Sizes of models that transformers cannot build."""


SAME_SHAPE = {"mimo": "qwen2", "kimi_k2": "deepseek_v3", "deepseek_ref": "deepseek_v4",
              "minimax_m3": "minimax_m3_vl_text"}  # fmt: skip
"""Model types that transformers does not know -> one it knows whose layers have the same weights."""


SEES = re.compile(
    r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|mm_projector|projector|embed_vision)\."
)
"""Parameters of transformers' models that see, which Penstock leaves out."""


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(shared("data", "configs", "model", name + SUFFIX).read_text())
    # How the weights are stored is another question than what they are; `open_model` asks it.
    for section in (config, config.get("text_config") or {}):
        section.pop("quantization_config", None)
    return config


def spec_of(name: str) -> ModelSpec | ModelError:
    config = config_of(name)
    try:
        return find_family(config).spec(config)
    except ModelError as error:
        return error


def meta_size(config: dict[str, Any]) -> int:
    """Parameters, router corrections, scalars of layers and lists of experts (which transformers keeps as buffers) of
    the model without its memory."""
    model_type = SAME_SHAPE.get(config["model_type"], config["model_type"])
    made = type(transformers.AutoConfig.for_model(model_type)).from_dict(config | {"model_type": model_type})
    kind = transformers.AutoModelForImageTextToText if "text_config" in config else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(made)
    tied = {id(p): p.numel() for n, p in model.named_parameters() if not SEES.match(n)}
    buffers = ("e_score_correction_bias", "layer_scalar", "tid2eid")
    corrections = [b.numel() for n, b in model.named_buffers() if n.endswith(buffers)]
    return sum(tied.values()) + sum(corrections)


@pytest.mark.parametrize("name", NAMES)
def test_real_configs_become_specs_of_the_right_size_or_say_what_is_missing(name: str) -> None:
    found = spec_of(name)
    config = config_of(name)
    if isinstance(found, ModelError):
        text = str(found)
        assert "\n" not in text
        if "architectures" not in config:
            assert "names no architecture" in text
        else:
            assert isinstance(found, UnsupportedError)
            by_field = "a field that Penstock does not know" in text  # the field is what is missing
            assert by_field or (config["architectures"][0] in text and "which needs " in text), text
        return
    want = PUBLISHED[name] if name in PUBLISHED else meta_size(config)
    assert found.num_params == want


def test_most_text_decoders_among_the_real_configs_are_specs() -> None:
    """A refusal is right only for what is truly missing: count both sides, so that nobody refuses their way out."""
    shared("data", "configs", "model")
    results = {name: spec_of(name) for name in NAMES}
    specs = [name for name, found in results.items() if isinstance(found, ModelSpec)]
    assert len(specs) >= 75, sorted(set(NAMES) - set(specs))


@pytest.mark.parametrize(("name", "billions"), [
    # Mixtral, arXiv 2401.04088: 13 B active; DeepSeek-V3, arXiv 2412.19437: 37 B; Kimi K2, arXiv 2507.20534: 32 B;
    # Qwen3, arXiv 2505.09388: 22 B and 3 B.
    ("mistralai--Mixtral-8x7B-v0.1", 12.9), ("deepseek-ai--DeepSeek-V3", 37.6), ("moonshotai--Kimi-K2-Instruct", 32.9),
    ("Qwen--Qwen3-235B-A22B", 22.2), ("Qwen--Qwen3-30B-A3B", 3.4),
])  # fmt: skip
def test_C65_active_parameters_of_real_mixtures(name: str, billions: float) -> None:
    spec = spec_of(name)
    assert isinstance(spec, ModelSpec)
    assert num_active_params(spec) / 1e9 == pytest.approx(billions, abs=0.06)
