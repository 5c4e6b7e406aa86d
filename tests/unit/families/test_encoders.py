"""Files of encoders: what is read of them, and the sentence for what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import ModelError, PenstockError, UnsupportedError
from penstock.core.model_spec import ModelSpec
from penstock.core.pooler import PoolingSpec
from penstock.families.registry import open_model
from tests.encoders import add_modules, write_encoder


def pooler(folder: Path) -> PoolingSpec:
    found = open_model(folder).spec.pooler
    assert found is not None
    return found


def edit(folder: Path, name: str, change: Any) -> Path:
    value = json.loads((folder / name).read_text())
    change(value)
    (folder / name).write_text(json.dumps(value))
    return folder


def refused(folder: Path, kind: type[PenstockError] = UnsupportedError) -> str:
    with pytest.raises(kind) as error:
        open_model(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_model_without_files_gives_means(tmp_path: Path) -> None:
    checkpoint = open_model(write_encoder(tmp_path))
    spec: ModelSpec = checkpoint.spec
    assert spec.is_encoder
    assert not spec.has_head
    assert (spec.num_ids, spec.vector_size, spec.max_position) == (120, 32, 64)
    assert pooler(tmp_path) == PoolingSpec(mode="mean", normalize=True)
    assert not any("pooler" in name for name in checkpoint.weights)


@pytest.mark.parametrize(
    ("field", "mode"),
    [("cls_token", "cls"), ("mean_tokens", "mean"), ("max_tokens", "max"), ("lasttoken", "last"),
     ("weightedmean_tokens", "weightedmean"), ("mean_sqrt_len_tokens", "mean_sqrt_len")],
)  # fmt: skip
def test_modules_say_how_vectors_are_made(tmp_path: Path, field: str, mode: str) -> None:
    folder = add_modules(write_encoder(tmp_path), field, normalize=False, max_tokens=500, prompts={"query": "q: "})
    found = pooler(folder)
    assert (found.mode, found.normalize, found.prompts) == (mode, False, (("query", "q: "),))
    assert found.max_tokens == 64  # as many as it has positions for


def test_dense_layers_bring_weights(tmp_path: Path) -> None:
    checkpoint = open_model(add_modules(write_encoder(tmp_path), "mean_tokens", dense=20))
    assert checkpoint.spec.vector_size == 20
    assert checkpoint.weights["head.0"].tensor.shape == (20, 32)


def test_what_is_not_computed_is_refused(tmp_path: Path) -> None:
    folder = add_modules(write_encoder(tmp_path), "mean_tokens")
    edit(folder, "1_Pooling/config.json", lambda c: c.update(pooling_mode_cls_token=True))
    assert "2 poolings" in refused(folder)
    edit(folder, "1_Pooling/config.json", lambda c: c.update(pooling_mode_cls_token=False))
    edit(folder, "modules.json", lambda m: m.append({"path": "3", "type": "sentence_transformers.models.LSTM"}))
    assert "'LSTM'" in refused(folder)
    edit(folder, "modules.json", lambda m: m[3].update(type="x.Dense", path="../3"))
    assert "outside of the model" in refused(folder, ModelError)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"position_embedding_type": "relative_key"}, "positions of the kind"),
        ({"hidden_act": "mish"}, "activation 'mish'"),
        ({"num_attention_heads": 5}, "does not divide"),
        ({"query_length": 3}, "query_length"),
    ],
)
def test_configs_that_ask_for_more(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    folder = edit(write_encoder(tmp_path), "config.json", lambda c: c.update(change))
    assert sentence in refused(folder, ModelError)


def test_labels_and_scores_of_classifiers(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, labels=1)
    assert (pooler(folder).labels, pooler(folder).scores, pooler(folder).mode) == (("class 0",), "sigmoid", "cls")
    edit(folder, "config.json", lambda c: c.update(sbert_ce_default_activation_function="torch.nn.Identity"))
    assert pooler(folder).scores == "none"
    edit(folder, "config.json", lambda c: c.update(sbert_ce_default_activation_function="torch.nn.Softplus"))
    assert "Softplus" in refused(folder)
    many = write_encoder(tmp_path / "many", labels=3)
    assert pooler(many).scores == "softmax"
    edit(many, "config.json", lambda c: c.update(problem_type="multi_label_classification"))
    assert pooler(many).scores == "sigmoid"
    edit(many, "config.json", lambda c: c.update(id2label={"0": "a", "2": "b"}))
    assert "0 to 1" in refused(many, ModelError)
