"""Text parts of checkpoints that also see: where the text is, whether the head is tied, what is read over and refused.

What they compute is compared with transformers in tests/models/test_parity_vision.py.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM
from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import ModelSpec, weight_shapes
from penstock.families.registry import FAMILIES, find_family, open_model, read_model, unread_decision
from penstock.families.vision import LAYOUTS, TextPart
from tests.quantised import golden
from tests.quantised import write as write_quantised
from tests.shared import shared
from tests.unit.families.test_families import TINY, tiny_tensors, write_folder

Tensors = dict[str, np.ndarray[Any, Any]]
TEXT = {key: value for key, value in TINY.items() if key not in ("architectures", "tie_word_embeddings")}
LLAVA = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {"depth": 1}}
PARTS = [name for name in FAMILIES.names() if isinstance(FAMILIES.get(name)(), TextPart)]


def seeing(decoder: str, head: str, *, tied: bool = False) -> Tensors:
    """A text under these names, beside tensors that see."""
    out: Tensors = {"multi_modal_projector.linear_1.weight": np.ones((2, 2), np.float32)}
    for name in (
        "vision_tower.x.weight",
        "model.vision_tower.a.weight",
        "model.visual.b.weight",
        "visual.c.bias",
    ):
        out[name] = np.ones(3, np.float32)
    for name, array in tiny_tensors(TINY).items():
        if name.startswith("model."):
            out[decoder + name.removeprefix("model.")] = array
        elif not tied:
            out[head + name.removeprefix("lm_head")] = array
    return out


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_text_is_found_under_every_name_that_files_have_it(layout: Any, tmp_path: Path) -> None:
    plain = open_model(write_folder(tmp_path / "plain"))
    found = open_model(write_folder(tmp_path / "llava", LLAVA | {"text_config": TEXT}, seeing(*layout)))
    assert (found.spec.family, found.spec.layers) == ("llava", plain.spec.layers)
    assert found.weights.keys() == plain.weights.keys() == weight_shapes(plain.spec).keys()
    ends = {name: ref.tensor.name.rpartition("layers.")[2] for name, ref in plain.weights.items() if "layers" in name}
    assert all(found.weights[name].tensor.name == f"{layout.decoder}layers.{end}" for name, end in ends.items())
    assert found.weights["lm_head"].tensor.name == f"{layout.head}.weight"


def test_fields_that_stand_side_by_side_are_those_of_a_text_config(tmp_path: Path) -> None:
    """The first Qwen2-VL and Qwen2.5-VL, whose positions are of the kind `mrope`."""
    nested = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
        "vision_config": {"depth": 1}, "image_token_id": 9, "tie_word_embeddings": False,
        "text_config": TEXT | {"model_type": "qwen2_5_vl_text", "use_sliding_window": False, "rope_theta": 1e6},
    }  # fmt: skip
    flat = {**nested.pop("text_config"), **nested, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}  # type: ignore[dict-item]
    nested["text_config"] = {k: flat[k] for k in flat if k not in nested}
    assert find_family(flat).spec(flat) == find_family(nested).spec(nested)


@pytest.mark.parametrize(("outside", "inside", "in_file", "tied"), [
    (None, None, True, True), (None, None, False, False),  # versions differ: the file tells
    (True, False, True, True), (True, False, False, False), (False, True, False, False),
    (None, False, True, True), (True, None, True, True), (True, True, False, True), (False, False, False, False),
])  # fmt: skip
def test_a_head_is_tied_if_the_config_says_so_or_else_if_there_is_none(
    outside: bool | None, inside: bool | None, in_file: bool, tied: bool, tmp_path: Path
) -> None:
    """`in_file`: the file has no head of its own."""
    config = LLAVA | {"tie_word_embeddings": outside, "text_config": TEXT | {"tie_word_embeddings": inside}}
    found = open_model(write_folder(tmp_path, config, seeing(*LAYOUTS[1], tied=in_file)))
    assert found.spec.tie_embeddings is tied
    assert ("lm_head" in found.weights) is not tied


def test_a_missing_head_is_said(tmp_path: Path) -> None:
    config = LLAVA | {"tie_word_embeddings": False, "text_config": TEXT}
    with pytest.raises(ModelError, match=r"lacks 1 of the .*language_model.lm_head.weight"):
        open_model(write_folder(tmp_path, config, seeing(*LAYOUTS[1], tied=True)))


@pytest.mark.parametrize(("changes", "text", "words"), [
    ({"text_config": TEXT | {"model_type": "mamba"}}, {}, "'mamba'; this family has llama, mistral, qwen2"),
    ({"text_config": [1]}, {}, "text_config as .*must be an object"),
    ({"use_cross_attention": True}, {}, "'use_cross_attention' to 'True'"),
    ({}, {"shrink_factor": 2}, "'shrink_factor' to '2'"),
    ({}, {"vocab_size": 0}, "vocab_size as '0'"),
    ({}, {"rope_scaling": 3}, "rope_scaling as '3'"),
    ({}, {"rope_scaling": {"type": "default", "axes": 3}}, "'axes'"),
])  # fmt: skip
def test_what_is_not_understood_is_refused(changes: dict[str, Any], text: dict[str, Any], words: str) -> None:
    config = LLAVA | {"text_config": TEXT | text} | changes
    with pytest.raises(ModelError, match=words):
        find_family(config).spec(config)
    seeing = config | {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
    with pytest.raises(ModelError):
        find_family(seeing).spec(seeing)


def test_tensors_that_nobody_knows_are_refused(tmp_path: Path) -> None:
    tensors = seeing(*LAYOUTS[1]) | {"language_model.model.layers.0.cross_attn.weight": np.ones(2, np.float32)}
    with pytest.raises(UnsupportedError, match=r"holds 1 tensors .*cross_attn"):
        open_model(write_folder(tmp_path, LLAVA | {"text_config": TEXT}, tensors))


@pytest.mark.parametrize("inside", [False, True])
def test_codes_keep_their_names_and_their_format(inside: bool, tmp_path: Path) -> None:
    """NVFP4 as nvidia writes it: patterns name modules with what stands in front, and vision modules too. Kimi K2.5 has
    its quantization_config inside of text_config."""
    stored = golden("modelopt")["nvfp4"]
    plain = open_model(write_quantised(tmp_path / "plain", stored))
    text = json.loads((tmp_path / "plain" / "config.json").read_text())
    told = {"quantization_config": text.pop("quantization_config") | {
        "exclude_modules": [
            "language_model.model.layers.0*", "language_model.model.layers.1.self_attn*", "vision_tower*",
            "language_model.model.layers.1.mlp.gate_proj", "language_model.model.layers.1.mlp.up_proj",
            "language_model.lm_head",
        ],
    }}  # fmt: skip
    text = {key: value for key, value in text.items() if key != "architectures"}
    config = LLAVA | ({"text_config": text | told} if inside else {"text_config": text, **told})
    tensors = {
        "language_model." + name: array for name, array in load_file(tmp_path / "plain" / "model.safetensors").items()
    }
    folder = tmp_path / "llava"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors | {"vision_tower.a.weight": torch.ones(3)}, folder / "model.safetensors")
    found = open_model(folder)
    assert found.stored == plain.stored
    assert found.stored.keys() == {"layers.1.down"}
    (folder / "model.safetensors").unlink()
    assert read_model(folder).stored == found.stored, "as planned without the file"


@pytest.mark.parametrize(("name", "expected"), [
    # Of 40 layers, 30 are of the delta rule with 5 matrices (q, k, v, z, o), 10 of attention with 5 (with the gate);
    # 256 experts and a shared one of 3 matrices; the head.
    ("nvidia--Qwen3.6-35B-A3B-NVFP4", {("e4m3", 8): 40 * 5, ("e2m1", 4): 40 * 257 * 3 + 1}),
    ("nvidia--Qwen3.5-122B-A10B-NVFP4", {("e2m1", 4): 48 * 256 * 3}),
    ("nvidia--Kimi-K2.5-NVFP4", {("e2m1", 4): 60 * 385 * 3 + 3}),
])  # fmt: skip
def test_real_configs_tell_which_matrices_of_the_text_are_codes(name: str, expected: dict[Any, int]) -> None:
    found = read_model(shared("data", "configs", "model", f"{name}.config.json")).stored
    assert Counter((format.code, format.bits) for format in found.values()) == expected


def test_experts_may_lie_apart_or_the_other_way_round(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe",
        "vision_config": {"depth": 1}, "tie_word_embeddings": False, "text_config": {
            **{k: v for k, v in TEXT.items() if k != "intermediate_size"}, "model_type": "qwen3_vl_moe_text",
            "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "head_dim": 4,
        },
    }  # fmt: skip
    family = find_family(config)
    spec = family.spec(config)
    rng = np.random.default_rng(3)
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in weight_shapes(spec).items()}
    variants: dict[str, Tensors] = {"stacked": {}, "turned": {}, "apart": {}}
    for logical, place in family.weight_map(spec).items():
        for tensors in variants.values():
            if isinstance(place, str):
                tensors[place] = values[logical]
    for n in range(2):
        at = f"model.language_model.layers.{n}.mlp.experts"
        parts = {p: np.stack([values[f"layers.{n}.experts.{i}.{p}"] for i in range(3)]) for p in ("gate", "up", "down")}
        both = np.concatenate([parts["gate"], parts["up"]], axis=1)
        variants["turned"] |= {f"{at}.gate_up_proj": both, f"{at}.down_proj": parts["down"]}
        variants["stacked"] |= {
            f"{at}.gate_up_proj": both.transpose(0, 2, 1),
            f"{at}.down_proj": parts["down"].transpose(0, 2, 1),
        }
        variants["apart"] |= {f"{at}.{i}.{p}_proj.weight": parts[p][i] for p in parts for i in range(3)}
    from penstock.weights.load import load_weights

    for how, tensors in variants.items():
        folder = write_folder(tmp_path / how, config, {k: np.ascontiguousarray(v) for k, v in tensors.items()})
        checkpoint = open_model(folder)
        got = load_weights(checkpoint, checkpoint.spec, "float32")
        assert all(np.array_equal(got[name], array) for name, array in values.items()), how


@pytest.mark.parametrize("name", PARTS)
def test_every_weight_of_a_text_part_has_a_place_in_every_layout(name: str) -> None:
    family = FAMILIES.get(name)()
    config = {"text_config": {**TEXT, "model_type": family.texts[0][0], **SIZES.get(name, {})}}
    spec = family.spec(config)
    assert unread_decision(spec)[0].value == "not read"
    for layout in LAYOUTS:
        names = {layout.decoder + "embed_tokens.weight"}
        assert set(family.layout(spec, names)) == set(weight_shapes(spec))
    assert family.layout(spec, set()) == family.weight_map(spec)


SIZES: dict[str, dict[str, Any]] = {
    "kimi_k25": {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 4,
                 "n_shared_experts": 1, "first_k_dense_replace": 1},
    "qwen3_5_moe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": None},
    "llama4": {"num_local_experts": 4},
    "gemma3": {"hidden_act": None},
    "minimax_m3_vl": {"index_n_heads": 2, "num_key_value_heads": 2},
    "gemma3n": {"num_kv_shared_layers": 0, "hidden_act": None},
    "gemma4": {"hidden_size_per_layer_input": 4, "hidden_act": None},
}  # fmt: skip


def test_images_are_said_not_to_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = LLAVA | {"text_config": TEXT}
    folder = write_folder(tmp_path, config, seeing(*LAYOUTS[1]))
    with caplog.at_level(logging.WARNING, "penstock.launch"):
        llm = LLM(folder, skip_tokenizer_init=True, max_model_len=32)
        said = [r.getMessage() for r in caplog.records if r.name == "penstock.launch"]
        caplog.clear()
        LLM(write_folder(tmp_path / "plain"), skip_tokenizer_init=True, max_model_len=32)
    assert len(said) == 1
    assert said[0].startswith("images are not read: a llava checkpoint has a vision tower")
    assert [(d.name, d.value) for d in llm.engine.decisions if d.name == "images"] == [("images", "not read")]
    assert not [r for r in caplog.records if r.name == "penstock.launch"]


def test_plain_families_have_nothing_unread() -> None:
    assert not unread_decision(ModelSpec(family="llama", vocab_size=4, hidden_size=4, layers=()))
