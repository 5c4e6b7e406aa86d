"""Encoders in GGUF files against the folders that they are made of, as llama.cpp's converter makes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from penstock.base.errors import ModelError, UnsupportedError
from penstock.families.registry import open_model
from penstock.formats.gguf import read_gguf
from penstock.launch.llm import LLM
from penstock.text.gguf import tokenizer_from_gguf
from penstock.text.tokenizer import Tokenizer
from tests.encoders import add_modules, write_encoder
from tests.ggml import write_gguf
from tests.models import test_encoder_parity as parity

BERT = {
    r"embeddings\.word_embeddings": "token_embd", r"embeddings\.position_embeddings": "position_embd",
    r"embeddings\.token_type_embeddings": "token_types", r"embeddings\.LayerNorm": "token_embd_norm",
    r"encoder\.layer\.(\d+)\.attention\.self\.query": r"blk.\1.attn_q",
    r"encoder\.layer\.(\d+)\.attention\.self\.key": r"blk.\1.attn_k",
    r"encoder\.layer\.(\d+)\.attention\.self\.value": r"blk.\1.attn_v",
    r"encoder\.layer\.(\d+)\.attention\.output\.dense": r"blk.\1.attn_output",
    r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm": r"blk.\1.attn_output_norm",
    r"encoder\.layer\.(\d+)\.intermediate\.dense": r"blk.\1.ffn_up",
    r"encoder\.layer\.(\d+)\.output\.dense": r"blk.\1.ffn_down",
    r"encoder\.layer\.(\d+)\.output\.LayerNorm": r"blk.\1.layer_output_norm",
    r"pooler\.dense": "cls", "classifier": "cls.output",
}  # fmt: skip
NOMIC = {
    r"embeddings\.word_embeddings": "token_embd", r"embeddings\.token_type_embeddings": "token_types",
    r"embeddings\.LayerNorm": "token_embd_norm", r"layers\.(\d+)\.self_attn\.o_proj": r"blk.\1.attn_output",
    r"layers\.(\d+)\.post_attention_layernorm": r"blk.\1.attn_output_norm",
    r"layers\.(\d+)\.post_mlp_layernorm": r"blk.\1.layer_output_norm",
    r"layers\.(\d+)\.mlp\.(up|gate|down)_proj": r"blk.\1.ffn_\2", r"layers\.(\d+)\.qkv": r"blk.\1.attn_qkv",
}  # fmt: skip
MODERN = {
    r"embeddings\.tok_embeddings": "token_embd", r"embeddings\.norm": "token_embd_norm", "final_norm": "output_norm",
    r"layers\.(\d+)\.attn_norm": r"blk.\1.attn_norm", r"layers\.(\d+)\.mlp_norm": r"blk.\1.ffn_norm",
    r"layers\.(\d+)\.attn\.Wqkv": r"blk.\1.attn_qkv", r"layers\.(\d+)\.attn\.Wo": r"blk.\1.attn_output",
    r"layers\.(\d+)\.mlp\.Wi": r"blk.\1.ffn_up", r"layers\.(\d+)\.mlp\.Wo": r"blk.\1.ffn_down",
    r"head\.dense": "cls", r"head\.norm": "cls.norm", "classifier": "cls.output",
}  # fmt: skip


def renamed(tensors: dict[str, Any], names: dict[str, str], prefix: str) -> dict[str, Any]:
    out = {}
    for name, tensor in tensors.items():
        base, _, ending = name.removeprefix(prefix + ".").rpartition(".")
        found = [re.sub(old, new, base) for old, new in names.items() if re.fullmatch(old, base)]
        if found:
            out[f"{found[0]}.{ending}"] = ("F32", np.asarray(tensor, np.float32))
    return out


def metadata(arch: str, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    own = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"], "attention.causal": False,
        "attention.layer_norm_epsilon": config.get("layer_norm_eps", config.get("norm_eps")), **more,
    }  # fmt: skip
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in own.items()}}


def word_pieces(folder: Path) -> dict[str, Any]:
    """As `_set_vocab_bert` writes a vocabulary."""
    told = json.loads((folder / "tokenizer.json").read_text())
    special = {t["content"] for t in told["added_tokens"]}
    words, kinds = told["model"]["vocab"], dict.fromkeys(special, 3)
    by_id = {i: t for t, i in words.items()}
    whole = [by_id.get(i, f"[PAD{i}]") for i in range(max(by_id) + 1)]
    kinds |= {t: 5 for t in whole if t not in words}
    tokens = [t if t in kinds else t[2:] if t.startswith("##") else "\u2581" + t for t in whole]
    return {
        "tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(t, 1) for t in whole],
        "tokenizer.ggml.bos_token_id": words["[CLS]"], "tokenizer.ggml.seperator_token_id": words["[SEP]"],
        "tokenizer.ggml.unknown_token_id": words["[UNK]"], "tokenizer.ggml.token_type_count": 2,
    }  # fmt: skip


def bert_file(folder: Path, path: Path, **more: Any) -> Path:
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    names = BERT if "classifier.weight" in tensors else {k: v for k, v in BERT.items() if "pooler" not in k}
    found = renamed({n: t for n, t in tensors.items() if "position_ids" not in n}, names, "bert")
    return write_gguf(path, metadata("bert", config, **more) | word_pieces(folder), found)


TEXTS = ["the mill stands by the river .", "A fox", "Wheels turn water; zzz Ünknown"]


@pytest.mark.parametrize(("kind", "mode"), [(1, "mean_tokens"), (2, "cls_token")])
def test_bert_gives_the_vectors_and_ids_of_its_folder(kind: int, mode: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "folder")
    path = bert_file(folder, tmp_path / "bert.gguf", pooling_type=kind)
    add_modules(folder, mode)
    plain, made = LLM(folder, ops="native"), LLM(path, ops="native")
    for text in TEXTS:
        assert made.get_tokenizer().encode(text) == plain.get_tokenizer().encode(text)
    want, got = ([out.outputs.embedding for out in llm.embed(TEXTS)] for llm in (plain, made))
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert np.abs(np.subtract(want[0], want[1])).max() > 0.05
    assert made.score(TEXTS[0], TEXTS[1])[0].outputs.score < 1


def test_a_cross_encoder_in_a_file(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "folder", labels=3)
    path = bert_file(folder, tmp_path / "rank.gguf", pooling_type=4, **{
        "classifier.output_labels": ["class 0", "class 1", "class 2"],
    })  # fmt: skip
    plain, made = LLM(folder, ops="ref"), LLM(path, ops="ref")
    want, got = ([out.outputs.probs for out in llm.classify(TEXTS)] for llm in (plain, made))
    np.testing.assert_allclose(got, want, atol=1e-6)
    spec = open_model(path).spec
    assert spec.pooler is not None
    assert spec.pooler.labels == ("class 0", "class 1", "class 2")


@pytest.mark.parametrize("kind", ["NomicBert", "ModernBert"])
def test_files_of_other_encoders(kind: str, tmp_path: Path) -> None:
    model = parity.made(kind)
    folder = parity.saved(model, tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    if kind == "NomicBert":
        for i in range(4):
            parts = [tensors.pop(f"layers.{i}.self_attn.{n}_proj.weight") for n in "qkv"]
            tensors[f"layers.{i}.qkv.weight"] = np.concatenate(parts)
        more = {"rope.freq_base": 1000.0, "pooling_type": 1}
        found = renamed(tensors, NOMIC, "nomic_bert"), metadata("nomic-bert", config, **more)
    else:
        more = {"rope.freq_base": 160000.0, "rope.freq_base_swa": 10000.0, "attention.sliding_window": 12,
                "attention.sliding_window_pattern": [False, True, True, False]}  # fmt: skip
        found = renamed(tensors, MODERN, "model"), metadata("modern-bert", config, **more)
    path = write_gguf(tmp_path / "model.gguf", found[1], found[0])
    llm = LLM(path, ops="native", skip_tokenizer_init=True)
    for ids in parity.TEXTS[:3]:
        np.testing.assert_allclose(parity.states(llm, [ids])[0], parity.hidden(model, ids), atol=1e-4)


def test_what_a_file_says_wrongly(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "folder", labels=2)
    with pytest.raises(UnsupportedError, match="pooling_type 9"):
        open_model(bert_file(write_encoder(tmp_path / "plain"), tmp_path / "a.gguf", pooling_type=9))
    with pytest.raises(ModelError, match="labels unlike the 2"):
        open_model(bert_file(folder, tmp_path / "b.gguf", **{"classifier.output_labels": ["a", "b", "c"]}))


MINILM = Path.home() / ".cache" / "penstock" / "all-minilm-l6-v2"


@pytest.mark.skipif(not MINILM.is_dir(), reason=f"{MINILM} is not there: python tools/models.py all-minilm-l6-v2")
def test_ids_of_a_published_vocabulary(tmp_path: Path) -> None:
    told = {"general.architecture": "bert", **word_pieces(MINILM)}
    path = write_gguf(tmp_path / "vocabulary.gguf", told, {"x": ("F32", np.zeros(1, np.float32))})
    made, plain = tokenizer_from_gguf(read_gguf(path).metadata), Tokenizer.from_hf(MINILM / "tokenizer.json")
    for text in ("The mill stands by the river.", "Ünïcödé, 水車 and emoji 🦊!", "un-\tbelievably  [MASK] x" * 5):
        assert made.encode(text) == plain.encode(text)
        assert made.encode_plain(text) == plain.encode_plain(text)
        assert made.encode_pair(text, "a fox") == plain.encode_pair(text, "a fox")
