"""GGUF models compute what the models they were made from do: tokens of transformers, logits of decoded weights."""

from __future__ import annotations

import tracemalloc
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig

from penstock import LLM, SamplingParams
from penstock.core.model_spec import Attention, ModelSpec
from penstock.families.checkpoint import WeightRef
from penstock.families.registry import open_model
from penstock.formats.gguf import read_gguf
from penstock.formats.llama2c import read_tokenizer
from penstock.weights import load as weights_module
from penstock.weights.load import load_weights
from tests.ggml import F32, stored_values, write_gguf
from tests.models.gguf_writer import file_metadata, file_tensors
from tests.models.parity import vary
from tests.paged import Paged
from tests.shared import shared

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "tie_word_embeddings": False, "rms_norm_eps": 2.0**-16,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "attention_bias": True},
    "llama3_rope": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "rope_parameters": YARN},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen2moe": {
        "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64, "norm_topk_prob": False,
    },
    "qwen3moe": {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "norm_topk_prob": True, "head_dim": 16,
    },
}  # fmt: skip


@cache
def reference(case: str) -> PreTrainedModel:
    config = AutoConfig.for_model(**(SIZES | CASES[case]), attn_implementation="eager")
    return vary(AutoModelForCausalLM.from_config(config), list(CASES).index(case))


@cache
def original(case: str) -> tuple[ModelSpec, dict[str, F32]]:
    with TemporaryDirectory() as folder:
        reference(case).save_pretrained(folder)
        checkpoint = open_model(folder)
        return checkpoint.spec, load_weights(checkpoint, checkpoint.spec, "float32")


def write(path: Path, case: str, kind: str = "F32", decoded: bool = False) -> None:
    """The model of a case as a GGUF file; matrices in `kind`, or what the scalar oracle makes of them then."""
    arch = case if case.startswith("qwen") else "llama"
    tensors = file_tensors(*original(case), arch)
    if decoded:
        tensors = {name: array if array.ndim == 1 else stored_values(kind, array) for name, array in tensors.items()}
        kind = "F32"
    kinds = {name: ("F32" if array.ndim == 1 else kind, array) for name, array in tensors.items()}
    write_gguf(path, file_metadata(original(case)[0], arch), kinds)


def paged(path: Path, dtype: str = "float32") -> Paged:
    checkpoint = open_model(path)
    weights = load_weights(checkpoint, checkpoint.spec, dtype)
    return Paged(checkpoint.spec, weights, num_slabs=200, block_size=8)


@pytest.mark.parametrize("case", list(CASES))
def test_a_float32_file_computes_what_transformers_does(tmp_path: Path, case: str) -> None:
    write(tmp_path / "m.gguf", case)
    model, ours = reference(case), paged(tmp_path / "m.gguf")
    ids = np.random.default_rng(1).integers(0, 64, 100).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].numpy()
        text = model.generate(torch.tensor([ids[:9]]), max_new_tokens=40, do_sample=False)[0, 9:].tolist()
    assert want.std() > 0.5, "a flat model proves nothing"
    np.testing.assert_allclose(ours.one_go("a", ids), want, atol=1e-4)
    got = paged(tmp_path / "m.gguf").greedy({0: ids[:9]}, 40)[0]
    assert got == text
    assert len(set(text)) > 8


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("case", ["llama", "qwen2", "mixtral"])
def test_a_coded_file_computes_what_its_decoded_weights_do(tmp_path: Path, case: str, kind: str) -> None:
    """Bit for bit: the same program, once with weights of the file, once with those that the scalar oracle decoded."""
    write(tmp_path / "coded.gguf", case, kind)
    write(tmp_path / "plain.gguf", case, kind, decoded=True)
    ids = list(range(30))
    got, want = paged(tmp_path / "coded.gguf").one_go("a", ids), paged(tmp_path / "plain.gguf").one_go("a", ids)
    np.testing.assert_array_equal(got, want)
    write(tmp_path / "exact.gguf", case)
    assert np.abs(got - paged(tmp_path / "exact.gguf").one_go("a", ids)).max() > 1e-4, "coding loses something"


MIX = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_k": "Q5_K", "ffn_up": "Q3_K", "ffn_gate": "Q2_K", "output": "Q6_K"}


def test_a_mixture_of_k_quants(tmp_path: Path) -> None:
    """What a Q4_K_M file looks like, and more: rows of 256, types by tensor; memory beside the result stays small."""
    rng = np.random.default_rng(0)
    e, f, v = 256, 256, 40
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (v, e), "output": (v, e), "blk.0.attn_q": (e, e), "blk.0.attn_k": (64, e),
        "blk.0.attn_v": (64, e),
        "blk.0.attn_output": (e, e), "blk.0.ffn_gate": (f, e), "blk.0.ffn_up": (f, e), "blk.0.ffn_down": (e, f),
        "output_norm": (e,), "blk.0.attn_norm": (e,), "blk.0.ffn_norm": (e,),
    }  # fmt: skip
    tensors = {
        name + ".weight": (rng.standard_normal(shape) * (1.5 / e**0.5 if "blk" in name else 0.4)).astype(np.float32)
        if len(shape) == 2 else np.ones(shape, np.float32)
        for name, shape in shapes.items()
    }  # fmt: skip
    kinds = {n: MIX.get(n.split(".")[-2], "Q4_K") if a.ndim == 2 else "F32" for n, a in tensors.items()}
    metadata: dict[str, Any] = {"general.architecture": "qwen2"} | {
        f"qwen2.{key}": value for key, value in {
            "context_length": 128, "embedding_length": e, "block_count": 1, "feed_forward_length": f,
            "attention.head_count": 4, "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-6,
        }.items()
    }  # fmt: skip
    write_gguf(tmp_path / "coded.gguf", metadata, {n: (kinds[n], a) for n, a in tensors.items()})
    plain = {n: ("F32", a if a.ndim == 1 else stored_values(kinds[n], a)) for n, a in tensors.items()}
    write_gguf(tmp_path / "plain.gguf", metadata, plain)
    assert len(set(kinds.values())) == 6
    checkpoint = open_model(tmp_path / "coded.gguf")
    assert checkpoint.spec.dtype == "bfloat16"
    ids = list(range(30))
    want = paged(tmp_path / "plain.gguf").one_go("a", ids)
    np.testing.assert_array_equal(paged(tmp_path / "coded.gguf").one_go("a", ids), want)
    for dtype, off in (("float16", 2e-2), ("bfloat16", 2e-1)):
        half = paged(tmp_path / "coded.gguf", dtype).one_go("a", ids)
        np.testing.assert_allclose(half, want, atol=off * want.std())


def test_stories_as_gguf_tell_the_same_story(tmp_path: Path) -> None:
    """A real model: its own weights, already in the order of neighbouring pairs, under GGUF names."""
    folder = shared("models", "stories260K")
    original = open_model(folder)
    spec = original.spec
    weights = load_weights(original, spec, "float32")
    attention = spec.layers[0].mixer
    assert isinstance(attention, Attention)
    names = {"embed": "token_embd", "final_norm": "output_norm"}
    parts = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up",
             "down": "ffn_down", "attn_norm": "attn_norm", "ffn_norm": "ffn_norm"}  # fmt: skip
    tensors = {}
    for name, array in weights.items():
        if name in names:
            tensors[names[name] + ".weight"] = array
        else:
            _, index, part = name.split(".")
            tensors[f"blk.{index}.{parts[part]}.weight"] = array
    metadata: dict[str, Any] = {"general.architecture": "llama"} | {
        f"llama.{key}": value for key, value in {
            "context_length": spec.max_position, "embedding_length": spec.hidden_size, "block_count": len(spec.layers),
            "feed_forward_length": spec.layers[0].ffn.width, "attention.head_count": attention.num_heads,
            "attention.head_count_kv": attention.num_kv_heads, "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": attention.head_dim,
        }.items()
    }  # fmt: skip
    want = paged(folder).greedy({0: [1]}, 100)
    metadata |= vocabulary(folder / "tok512.bin")
    for kind in ("F32", "Q8_0"):  # rows of 172 cannot be coded by 32 and stay as they are
        kinds = {n: (kind if a.ndim == 2 and a.shape[1] % 32 == 0 else "F32", a) for n, a in tensors.items()}
        write_gguf(tmp_path / "m.gguf", metadata, kinds)
        got = paged(tmp_path / "m.gguf").greedy({0: [1]}, 100)
        if kind == "F32":
            assert got == want
        else:
            assert got[0][:20] == want[0][:20]
        out = LLM(tmp_path / "m.gguf").generate("Once upon a time", SamplingParams(temperature=0, max_tokens=20))
        assert out[0].outputs[0].text.startswith(", there was a little girl named Lily.")


def vocabulary(path: Path) -> dict[str, Any]:
    """A llama2.c tokenizer as the metadata of a SentencePiece vocabulary: unknown, control, byte and normal pieces."""
    tokens = read_tokenizer(path, 512)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(text.decode().replace(" ", "▁") for text, _ in tokens[3:])],
        "tokenizer.ggml.scores": [score for _, score in tokens],
        "tokenizer.ggml.token_type": [2, 3, 3, *([6] * 256), *([1] * 253)],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip


def test_decoding_needs_little_memory_beside_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of 2 million elements, 65,536 at a time: no second matrix, and nothing near it."""
    monkeypatch.setattr(weights_module, "_CHUNK", 1 << 16)
    rng = np.random.default_rng(0)
    values = rng.standard_normal((8192, 256), dtype=np.float32)
    for kind in ("Q4_K", "Q6_K", "Q5_1"):
        write_gguf(tmp_path / "m.gguf", {"general.architecture": "none"}, {"x": (kind, values)})
        ref = WeightRef(read_gguf(tmp_path / "m.gguf").tensors["x"])
        raw = {ref.tensor.path: np.fromfile(ref.tensor.path, np.uint8)}
        tracemalloc.start()
        out = weights_module._decoded(raw, ref, "float32", lambda num_bytes: None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert out.nbytes == 8 << 20
        assert peak - out.nbytes < 2 << 20, f"{peak - out.nbytes} bytes beside the result"
