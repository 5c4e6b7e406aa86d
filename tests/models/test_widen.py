"""tools/widen.py: the widened model is the same function, in more numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.base.bf16 import narrow, widen
from penstock.core.model_spec import Attention, Rope
from penstock.families.registry import open_model
from penstock.weights.load import load_weights
from tests.oracle import NaiveModel
from tests.shared import shared

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import widen as tool
from widen import Shape

ATOL = 1e-4
LENGTH = 200

SOURCES: dict[str, dict[str, Any]] = {
    "gqa": {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "mqa": {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": False},
    "mha": {
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "tie_word_embeddings": False,
        "head_dim": 16,
        "hidden_size": 48,
    },
}
TARGETS: dict[str, tuple[str, Shape]] = {
    # E, L, H, G, D, F, V
    "width only": ("gqa", Shape(80, 2, 4, 2, 8, 80)),
    "all that grows": ("gqa", Shape(56, 5, 12, 3, 8, 121)),
    "twice the head dimension": ("gqa", Shape(64, 2, 4, 2, 16, 80)),
    "an odd head dimension": ("gqa", Shape(64, 3, 6, 3, 22, 80)),
    "two kv heads in one": ("gqa", Shape(56, 3, 7, 1, 16, 96)),
    "a group in several": ("mqa", Shape(48, 3, 4, 4, 8, 80)),
    "a group in several, of unequal parts": ("mqa", Shape(48, 2, 9, 3, 16, 80)),
    "three in two, each with room for two": ("mha", Shape(64, 2, 4, 2, 32, 80)),
    "vocabulary, tied": ("gqa", Shape(64, 3, 8, 2, 16, 96, 300)),
    "vocabulary, untied": ("mqa", Shape(64, 3, 4, 2, 16, 96, 131)),
    "nothing grows": ("gqa", Shape(32, 2, 4, 2, 8, 80)),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of small random models, saved by transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            torch.manual_seed(0)
            config = LlamaConfig(**{
                "vocab_size": 97, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 8,
                "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
                "initializer_range": 0.35, **SOURCES[name],
            })  # fmt: skip
            model = LlamaForCausalLM(config).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(0.2 * torch.randn_like(parameter))
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return folder


def params_of(s: Shape, vocab: int, tied: bool) -> int:
    """By the formula, not by the spec."""
    attention = 2 * s.hidden * s.head_dim * (s.heads + s.kv_heads)
    layer = attention + 3 * s.hidden * s.width + 2 * s.hidden
    return s.layers * layer + s.hidden + (1 if tied else 2) * vocab * s.hidden


def greedy(folder: Path, prompts: list[list[int]], length: int = LENGTH) -> list[list[int]]:
    llm = LLM(folder, skip_tokenizer_init=True, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    return [o.outputs[0].token_ids for o in outputs]


def logits(folder: Path, tokens: list[int], vocab: int) -> np.ndarray:
    """Logits after each token; what is added to all of the old vocabulary's alike is taken off."""
    checkpoint = open_model(folder)
    weights = load_weights(checkpoint, checkpoint.spec, "float32")
    out = NaiveModel(checkpoint.spec, weights).logits(tokens)
    assert out.shape[1] == vocab or (out[:, vocab:] < out[:, :vocab].min() - 1000).all(), "a new row might win"
    out = out[:, :vocab].astype(np.float64)
    return out - out.mean(axis=1, keepdims=True)


def compare(before: Path, after: Path, prompts: list[list[int]], vocab: int, length: int = LENGTH) -> float:
    """The largest difference of a logit; asserts equal text first."""
    texts = greedy(before, prompts, length)
    assert greedy(after, prompts, length) == texts
    assert all(len(set(text)) > 15 for text in texts), "a constant text would hide mistakes"
    tokens = [*prompts[0], *texts[0]]
    want = logits(before, tokens, vocab)
    assert want.std() > 0.3, "logits of no size would hide mistakes"
    return float(np.abs(logits(after, tokens, vocab) - want).max())


@pytest.mark.parametrize("name", TARGETS)
def test_a_widened_model_says_the_same(name: str, source: Callable[[str], Path], tmp_path: Path) -> None:
    which, shape = TARGETS[name]
    before = source(which)
    spec = tool.widen(before, tmp_path, shape)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 97, n).tolist() for n in (3, 40)]
    assert compare(before, tmp_path, prompts, 97) < ATOL
    after = open_model(tmp_path).spec
    assert after == spec
    tied = SOURCES[which]["tie_word_embeddings"]
    assert after.num_params == params_of(shape, shape.vocab or 97, tied)
    (mixer,) = {layer.mixer for layer in after.layers}
    assert isinstance(mixer, Attention)
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (shape.heads, shape.kv_heads, shape.head_dim)


@pytest.mark.parametrize(
    "shape", [Shape(128, 7, 16, 8, 16, 256), Shape(224, 6, 14, 2, 32, 304), Shape(80, 6, 20, 10, 12, 172, 700)]
)
def test_stories260K_tells_the_same_story(shape: Shape, tmp_path: Path) -> None:
    """Its rope turns neighbours; the second shape has four kv heads' numbers in one head of one kv head."""
    before = shared("models", "stories260K", "stories260K.bin")
    tool.widen(before, tmp_path, shape)
    assert compare(before, tmp_path, [[1]], 512) < ATOL
    text = LLM(tmp_path, tokenizer=str(before.parent / "tok512.model"), dtype="float32").generate(
        {"prompt_token_ids": [1]}, SamplingParams(temperature=0, max_tokens=LENGTH)
    )
    reference = (before.parent / "reference_greedy.txt").read_text(encoding="utf-8")
    assert len(text[0].outputs[0].text) > 300
    assert reference.startswith(text[0].outputs[0].text)


def test_transformers_computes_the_same_with_the_widened_folder(source: Callable[[str], Path], tmp_path: Path) -> None:
    """Also where frequencies are given pair by pair."""
    import torch
    from transformers import AutoModelForCausalLM

    tokens = torch.tensor([np.random.default_rng(0).integers(3, 97, 50).tolist()])
    for name in ("two kv heads in one", "twice the head dimension", "vocabulary, untied"):
        which, shape = TARGETS[name]
        tool.widen(source(which), tmp_path / name, shape)
        folders = (source(which), tmp_path / name)
        models = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in folders]
        with torch.no_grad():
            want, got = (m.eval()(input_ids=tokens).logits[0, :, :97] for m in models)
        assert float((got - want).abs().max()) < ATOL


def test_what_meets_only_zeros_is_random(source: Callable[[str], Path], tmp_path: Path) -> None:
    """Nothing to skip or compress in the matrices that are free to be anything; where they count, bits are kept."""
    shape = Shape(56, 5, 12, 3, 16, 121)
    tool.widen(source("gqa"), tmp_path, shape, "bfloat16")
    checkpoint = open_model(tmp_path)
    assert checkpoint.spec.dtype == "bfloat16"
    weights = load_weights(checkpoint, checkpoint.spec, "float32")
    old = open_model(source("gqa"))
    before = load_weights(old, old.spec, "float32")
    first = 0
    for i, layer in enumerate((0, 2)):  # where the two old layers went
        for part in ("k", "v", "gate", "up"):
            name = f"layers.{layer}.{part}"
            assert (weights[name] == 0).mean() < 1e-3, name
            first += int(np.isin(widen(narrow(before[f"layers.{i}.{part}"])), weights[name]).all())
        assert (weights[f"layers.{layer}.q"] == 0).mean() < 0.2
    assert first == 8, "the old keys, values and feed-forwards are there bit by bit"
    for layer in (1, 3, 4):
        for part, share in (("q", 0), ("k", 0), ("v", 0), ("gate", 0), ("up", 0), ("o", 1), ("down", 1)):
            assert (weights[f"layers.{layer}.{part}"] == 0).mean() == pytest.approx(share, abs=1e-3)
    assert (tmp_path / "model.safetensors").stat().st_size == pytest.approx(2 * checkpoint.spec.num_params, rel=0.05)


def test_the_named_shapes_have_the_sizes_of_their_models() -> None:
    """Parameter counts by the released configs: qwen2.5-0.5b has 494,032,768 with its biases, llama-3.2-1b
    1,235,814,400."""
    qwen, llama = tool.SHAPES["qwen2.5-0.5b"], tool.SHAPES["llama-3.2-1b"]
    biases = qwen.layers * qwen.head_dim * (qwen.heads + 2 * qwen.kv_heads)
    assert params_of(qwen, qwen.vocab or 0, True) + biases == 494_032_768
    assert params_of(llama, llama.vocab or 0, True) == 1_235_814_400


def test_nano_fits_the_named_shapes() -> None:
    from train.recipes import RECIPES

    for name in ("nano", "pico", "nano-mqa"):
        for like, shape in tool.SHAPES.items():
            widening = tool.Widening(RECIPES[name], shape)
            assert widening.target.num_params == params_of(shape, shape.vocab or 0, True), (name, like)
            taken = [new for seat in widening.seats for _, new in seat.queries]
            assert len(taken) == len(set(taken)) == (3 if name == "pico" else 6)
            per = shape.heads // shape.kv_heads
            assert all(new // per == seat.new for seat in widening.seats for _, new in seat.queries)


def test_refusals(source: Callable[[str], Path], tmp_path: Path) -> None:
    for shape, words in (
        (Shape(16, 2, 4, 2, 8, 80), "hidden size"),
        (Shape(32, 1, 4, 2, 8, 80), "layers"),
        (Shape(32, 2, 4, 2, 8, 79), "feed-forward"),
        (Shape(32, 2, 2, 1, 8, 80), "no room"),
        (Shape(32, 2, 4, 2, 4, 80), "head dimension"),
        (Shape(32, 2, 4, 2, 8, 80, 50), "vocabulary is 50"),
        (Shape(32, 2, 4, 2, 8, 80, 120), "component to spare"),
    ):
        with pytest.raises(ValueError, match=words):
            tool.widen(source("gqa"), tmp_path, shape)
    spec = open_model(source("gqa")).spec
    import msgspec

    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Attention)
    for changed in ({"window": 9}, {"qkv_bias": True}, {"rope": Rope(dim=4)}):
        layer = msgspec.structs.replace(spec.layers[0], mixer=msgspec.structs.replace(mixer, **changed))
        other = msgspec.structs.replace(spec, layers=(layer,) * 2)
        with pytest.raises(ValueError, match="Llama's kind"):
            tool.Widening(other, Shape(64, 2, 4, 2, 8, 80))


def test_command(source: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "wide"
    assert tool.main([str(source("gqa")), str(out), "--shape", "64,3,8,2,16,96", "--dtype", "float32"]) == 0
    assert "parameters became" in capsys.readouterr().err
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 3
    assert tool.main([str(source("gqa")), str(out), "--shape", "8,3,8,2,16,96"]) == 1
    assert "hidden size" in capsys.readouterr().err


@pytest.mark.parametrize(("hidden", "atol"), [(64, ATOL), (128, ATOL), (80, 5e-2)])
def test_a_bfloat16_model_stays_itself_in_bfloat16(
    hidden: int, atol: float, source: Callable[[str], Path], tmp_path: Path
) -> None:
    """Whole copies of the residual are exact; where the last one is rounded, the model hardly changes."""
    import torch
    from transformers import AutoModelForCausalLM

    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(source("gqa"), dtype=torch.bfloat16).save_pretrained(half)
    tool.widen(half, tmp_path / "wide", Shape(hidden, 3, 8, 2, 16, 96), "bfloat16")
    tokens = np.random.default_rng(5).integers(3, 97, 120).tolist()
    want = logits(half, tokens, 97)
    assert want.std() > 0.3
    assert np.abs(logits(tmp_path / "wide", tokens, 97) - want).max() < atol
