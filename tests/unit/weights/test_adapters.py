"""PEFT folders read: what they do to products, and what is wrong with broken ones, in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.base.errors import ModelError
from penstock.core.weight_map import Cut
from penstock.families.checkpoint import WeightRef
from penstock.families.registry import open_model
from penstock.formats.tensor_ref import TensorRef
from penstock.model.adapted import adaptable
from penstock.weights.adapters import AdapterFacts, Sites, adapter_facts, load_adapter, model_sites, sites_of
from penstock.weights.load import read_weight
from tests import specs
from tests.adapting import nano, nano_folder, nano_shapes, write_folder
from tests.models.gguf_writer import write_model

Q = "model.layers.0.self_attn.q_proj"
RNG = np.random.default_rng(7)


def stored(name: str, shape: tuple[int, int], take: Any, axes: tuple[int, ...] = ()) -> WeightRef:
    tensor = TensorRef(Path("x"), name, "F32", shape, 0, 4 * shape[0] * shape[1])
    return WeightRef(tensor, Cut(name, shape, take, axes=axes))


SITES: Sites = sites_of(
    {
        "q": stored("h.0.fused.weight", (6, 5), ((0, 2),)),
        "k": stored("h.0.fused.weight", (6, 5), ((2, 6),)),
        "o": stored("h.0.turned.weight", (5, 6), ((0, 5), (1, 4)), (1, 0)),
    },
    {"q": (2, 5), "k": (4, 5), "o": (3, 5)},
)


def real(*shape: int) -> Any:
    return RNG.normal(0, 1, shape).astype(np.float32)


def pair(rows: int, cols: int, rank: int = 3) -> dict[str, Any]:
    return {"lora_A.weight": real(rank, cols), "lora_B.weight": real(rows, rank)}


def facts(path: Path, sites: Sites = SITES, max_rank: int = 8, max_bytes: int = 1 << 20) -> AdapterFacts:
    return adapter_facts(path, sites, max_rank=max_rank, max_bytes=max_bytes)


def load(path: Path, base: Any = None, sites: Sites = SITES) -> Any:
    own = {} if base is None else base
    hash = facts(path, sites).hash
    return load_adapter(path, sites, own.__getitem__, hash=hash, max_rank=8, max_bytes=1 << 20)


def delta(part: Any) -> Any:
    return part.factor * part.b @ part.a


def test_J25_modules_that_are_fused_or_turned_reach_their_products(tmp_path: Path) -> None:
    modules = {"h.0.fused": pair(6, 5), "h.0.turned": pair(6, 5)}
    found = load(write_folder(tmp_path, modules, r=3, lora_alpha=6, fan_in_fan_out=True))
    whole = 2.0 * modules["h.0.fused"]["lora_B.weight"] @ modules["h.0.fused"]["lora_A.weight"]
    np.testing.assert_allclose(delta(found["q"]), whole[:2], rtol=1e-5)
    np.testing.assert_allclose(delta(found["k"]), whole[2:], rtol=1e-5)
    turned = 2.0 * modules["h.0.turned"]["lora_B.weight"] @ modules["h.0.turned"]["lora_A.weight"]
    np.testing.assert_allclose(delta(found["o"]), turned[1:4], rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({"lora_alpha": 6}, 2.0),
        ({"lora_alpha": 6, "use_rslora": True}, 6 / np.sqrt(3)),
        ({"lora_alpha": 6, "alpha_pattern": {"h.0.fused": 12}}, 4.0),
        ({"lora_alpha": 6, "r": 1, "rank_pattern": {r"h\.\d+\.fused": 3}}, 2.0),
        ({"lora_alpha": 6, "alpha_pattern": {"other": 12}, "targets": r".*fused"}, 2.0),
        ({"lora_alpha": 6, "targets": "all-linear"}, 2.0),
    ],
)
def test_J25_what_scales_an_adapter(tmp_path: Path, config: dict[str, Any], factor: float) -> None:
    found = load(write_folder(tmp_path, {"h.0.fused": pair(6, 5)}, **config))
    assert [part.factor for part in found.values()] == [pytest.approx(factor)] * 2


def test_J24_dora_and_biases_make_what_peft_makes(tmp_path: Path) -> None:
    """Source of the formulas: peft, `DoraLinearLayer.forward`."""
    own = pair(6, 5) | {"lora_magnitude_vector": real(6), "bias": real(6)}
    base = {"q": real(2, 5), "k": real(4, 5), "q.bias": real(2), "k.bias": real(4)}
    found = load(write_folder(tmp_path, {"h.0.fused": own}, lora_alpha=6, use_dora=True, bias="all"), base)
    weight = np.concatenate([base["q"], base["k"]])
    x, low = real(5), 2.0 * own["lora_B.weight"] @ own["lora_A.weight"]
    gain = own["lora_magnitude_vector"] / np.linalg.norm(weight + low, axis=1)
    expected = gain * ((weight + low) @ x) + own["bias"]
    got = []
    for name in ("q", "k"):
        p = found[name]
        got.append((base[name] @ x + base[name + ".bias"]) * p.gain + p.shift + p.factor * (p.b @ (p.a @ x)))
    np.testing.assert_allclose(np.concatenate(got), expected, rtol=1e-4, atol=1e-5)
    only = write_folder(tmp_path / "bias", {"h.0.fused": pair(6, 5) | {"lora_B.bias": own["bias"]}}, lora_alpha=6)
    np.testing.assert_allclose(load(only)["q"].shift, 2.0 * own["bias"][:2])


def test_J25_the_hash_is_of_what_counts(tmp_path: Path) -> None:
    first = facts(nano_folder(tmp_path / "a", 1), nano_sites()).hash
    again = nano_folder(tmp_path / "b", 1, base_model_name_or_path="somewhere else", inference_mode=True)
    assert facts(again, nano_sites()).hash == first
    assert facts(nano_folder(tmp_path / "c", 2), nano_sites()).hash != first
    assert facts(nano_folder(tmp_path / "d", 1, lora_alpha=9), nano_sites()).hash != first


def nano_sites() -> Sites:
    found = open_model(nano())
    return sites_of(found.weights, adaptable(found.spec))


def test_an_adapter_that_has_changed_is_not_loaded(tmp_path: Path) -> None:
    folder = nano_folder(tmp_path, 1)
    hash = facts(folder, nano_sites()).hash
    nano_folder(tmp_path, 2)
    with pytest.raises(ModelError, match="has changed since it was loaded"):
        load_adapter(folder, nano_sites(), {}.__getitem__, hash=hash, max_rank=8, max_bytes=1 << 20)


BROKEN: list[tuple[str, Any, str]] = [
    ("rank", {"r": 5}, "lora_A of 4 rows"),
    ("no rank", {"r": None}, "has r 'None'; a number is needed"),
    ("too large", {}, "max_lora_rank is 3"),
    ("kind", {"peft_type": "IA3"}, "of kind 'IA3'"),
    ("whole modules", {"modules_to_save": ["lm_head"]}, "modules_to_save: whole modules"),
    ("replication", {"layer_replication": [[0, 1]]}, "layer_replication"),
    ("init", {"init_lora_weights": "pissa"}, "begins from weights that 'pissa' has changed"),
    ("dora", {"use_dora": True}, "use_dora is True"),
    ("target without weights", {"target_modules": ["q_proj", "v_proj", "o_proj"]}, "names the target 'o_proj'"),
    ("weights without target", {"target_modules": ["q_proj"]}, "which target_modules does not name"),
    ("no targets", {"target_modules": None}, "has no target_modules"),
    ("endless pattern", {"target_modules": "(a+)+b"}, "repeats a group"),
    ("no pattern", {"target_modules": "["}, "is no regular expression"),
    ("bias", {"bias": "some"}, "has bias 'some'"),
]


@pytest.mark.parametrize(("name", "config", "sentence"), BROKEN, ids=[name for name, _, _ in BROKEN])
def test_a_broken_config_is_refused_in_a_sentence(tmp_path: Path, name: str, config: Any, sentence: str) -> None:
    folder = nano_folder(tmp_path, 1)
    given = json.loads((folder / "adapter_config.json").read_text()) | config
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in given.items() if v is not None}))
    with pytest.raises(ModelError, match=sentence) as caught:
        facts(folder, nano_sites(), max_rank=3 if name == "too large" else 8)
    assert "\n" not in str(caught.value)


def test_broken_tensors_are_refused_in_a_sentence(tmp_path: Path) -> None:
    rows, cols = nano_shapes()[Q]

    def refused(name: str, sentence: str, **tensors: Any) -> None:
        folder = write_folder(tmp_path / name, {Q: pair(rows, cols)})
        found = load_file(folder / "adapter_model.safetensors")
        for end, x in tensors.items():
            found.pop(f"base_model.model.{Q}.{end.replace('__', '.')}", None)
            if x is not None:
                found[x[0]] = x[1]
        save_file(found, folder / "adapter_model.safetensors")
        with pytest.raises(ModelError, match=sentence) as caught:
            facts(folder, nano_sites())
        assert "\n" not in str(caught.value)

    a = f"base_model.model.{Q}.lora_A.weight"
    refused("half", "without the other", lora_A__weight=None)
    refused("other base", r"made for another base", lora_A__weight=(a, real(3, cols + 1)))
    refused("nan", "holds NaN or infinity", lora_A__weight=(a, np.full((3, cols), np.nan, np.float32)))
    refused("integers", "is I32; F32, F16 and BF16", lora_A__weight=(a, np.ones((3, cols), np.int32)))
    refused("strange", "belongs to no low-rank pair", extra=("something", real(2)))
    embedding = "base_model.model.model.embed_tokens.lora_embedding_A"
    refused("embedding", "adapts an embedding", extra=(embedding, real(3, 4)))
    head = {f"lm_head.lora_{m}.weight": x for m, x in (("A", real(3, cols)), ("B", real(9, 3)))}
    whole = write_folder(tmp_path / "head", {"lm_head": {k.removeprefix("lm_head."): x for k, x in head.items()}})
    with pytest.raises(ModelError, match="'lm_head', which is no product of a layer"):
        facts(whole, nano_sites())


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no folder"):
        facts(tmp_path / "nothing", nano_sites())
    folder = nano_folder(tmp_path / "pickled", 1)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match="a pickle, which can run any code"):
        facts(folder, nano_sites())
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors"):
        facts(folder, nano_sites())
    short = nano_folder(tmp_path / "short", 1)
    (short / "adapter_model.safetensors").write_bytes((short / "adapter_model.safetensors").read_bytes()[:-9])
    with pytest.raises(ModelError, match="truncated"):
        facts(short, nano_sites())
    with pytest.raises(ModelError, match="lora_memory allows 10"):
        facts(nano_folder(tmp_path / "large", 1), nano_sites(), max_bytes=10)


def test_J25_rows_of_a_gguf_file_that_lie_in_another_order(tmp_path: Path) -> None:
    """Converters of Llamas put rotary pairs side by side: the pair of A and B is of the rows as they were."""
    spec, weights = specs.make("llama_gqa")
    file = write_model(tmp_path / "m.gguf", spec, weights, "llama")
    found = open_model(file)
    own = model_sites(found.weights, found.spec, adaptable(found.spec))
    modules, whole = {}, dict(weights)
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        rows, cols = weights[f"layers.1.{name}"].shape
        room = "mlp" if name in ("gate", "up", "down") else "self_attn"
        modules[f"model.layers.1.{room}.{name}_proj"] = made = pair(rows, cols)
        whole[f"layers.1.{name}"] = weights[f"layers.1.{name}"] + 2.0 * made["lora_B.weight"] @ made["lora_A.weight"]
    merged = open_model(write_model(tmp_path / "merged.gguf", spec, whole, "llama"))
    parts = load(write_folder(tmp_path / "a", modules), {}, own)
    assert len(parts) == 7
    for name, part in parts.items():
        shape = part.b.shape[0], part.a.shape[1]
        base, expected = (read_weight(m.weights[name], shape) for m in (found, merged))
        np.testing.assert_allclose(base + delta(part), expected, rtol=1e-4, atol=1e-5)
