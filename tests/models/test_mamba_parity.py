"""Mamba and Mamba-2 against transformers: tiny random checkpoints, saved and opened as folders (catalogue row C34).

transformers runs a prompt in the parallel form where there is one (Mamba-2's chunked scan, here in chunks of 16) and
single tokens in the recurrent form; ours is one form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

from penstock.families.registry import open_model
from penstock.weights.load import load_weights
from tests.models.parity import vary
from tests.oracle import NaiveModel
from tests.paged import Paged

V, E, LAYERS = 97, 32, 2
MAMBA: dict[str, dict[str, Any]] = {
    "plain": {},
    "biased": {"use_bias": True, "conv_kernel": 3, "time_step_rank": 5, "tie_word_embeddings": False},
    "no conv bias": {"use_conv_bias": False, "expand": 3, "state_size": 16, "conv_kernel": 2},
}
MAMBA2: dict[str, dict[str, Any]] = {
    "plain": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "groups": {"num_heads": 8, "head_dim": 8, "n_groups": 4, "use_bias": True},
    "no conv bias": {
        "num_heads": 4, "head_dim": 16, "n_groups": 2, "use_conv_bias": False, "conv_kernel": 2,
        "tie_word_embeddings": True,
    },
    "group per head": {"num_heads": 3, "head_dim": 32, "n_groups": 3, "expand": 3, "conv_kernel": 3},
    "time step limit": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "time_step_limit": (0.1, 0.6)},
}  # fmt: skip
CASES = [("mamba", case) for case in MAMBA] + [("mamba2", case) for case in MAMBA2]
NEW_TOKENS = 64
Model = MambaForCausalLM | Mamba2ForCausalLM


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mamba")


def reference(family: str, case: str) -> Model:
    """A random model in which every kind of parameter matters; decays from slow to fast."""
    common: dict[str, Any] = {
        "vocab_size": V, "hidden_size": E, "num_hidden_layers": LAYERS, "state_size": 7, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if family == "mamba":
        model: Model = MambaForCausalLM(MambaConfig(**(common | MAMBA[case])))
    else:
        model = Mamba2ForCausalLM(Mamba2Config(chunk_size=16, **(common | MAMBA2[case])))
    return vary(model, 10 + CASES.index((family, case)), norms=0.2, gain=1.5)


def both(folders: Path, family: str, case: str) -> tuple[Model, Paged, NaiveModel]:
    model = reference(family, case)
    folder = folders / f"{family} {case}"
    model.save_pretrained(folder)
    checkpoint = open_model(folder)
    weights = load_weights(checkpoint, checkpoint.spec, "float32")
    assert checkpoint.spec.num_params == sum(p.numel() for p in model.parameters())
    return model, Paged(checkpoint.spec, weights, max_model_len=500), NaiveModel(checkpoint.spec, weights)


def exact(model: Model, ids: list[int]) -> np.ndarray:
    """Logits [T, V] in float64 and in the parallel form: no state, every token sums over all before it."""
    w = {k: v.double().numpy() for k, v in model.state_dict().items()}
    x = w["backbone.embeddings.weight"][ids]
    for i in range(LAYERS):
        own = {k.removeprefix(f"backbone.layers.{i}."): v for k, v in w.items() if f"layers.{i}." in k}
        h = _rms(x, own["norm.weight"])
        x = x + (_mamba if isinstance(model, MambaForCausalLM) else _mamba2)(h, own, model.config)
    return _rms(x, w["backbone.norm_f.weight"]) @ w["lm_head.weight"].T


def _rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _convolved(x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
    taps = w["mixer.conv1d.weight"][:, 0]
    columns = [np.convolve(x[:, j], taps[j, ::-1])[: len(x)] for j in range(x.shape[1])]
    return _silu(np.stack(columns, axis=1) + w.get("mixer.conv1d.bias", 0.0))


def _linear(x: np.ndarray, w: dict[str, np.ndarray], name: str) -> np.ndarray:
    return x @ w[f"mixer.{name}.weight"].T + w.get(f"mixer.{name}.bias", 0.0)


def _decays(steps: np.ndarray) -> np.ndarray:
    """dt * a [T, ...] -> what is left at t of what came in at s [T, T, ...]."""
    total = np.cumsum(steps, axis=0)
    gone = total[:, None] - total[None]
    past = np.tril(np.ones((len(steps),) * 2, bool)).reshape(len(steps), len(steps), *[1] * (steps.ndim - 1))
    return np.where(past, np.exp(np.where(past, gone, 0.0)), 0.0)


def _mamba(h: np.ndarray, w: dict[str, np.ndarray], config: MambaConfig) -> np.ndarray:
    x, gate = np.split(_linear(h, w, "in_proj"), 2, axis=1)
    x = _convolved(x, w)
    rank, n = config.time_step_rank, config.state_size
    dt, b, c = np.split(_linear(x, w, "x_proj"), [rank, rank + n], axis=1)
    dt = np.logaddexp(0, _linear(dt, w, "dt_proj"))
    left = _decays(dt[:, :, None] * -np.exp(w["mixer.A_log"]))
    y = np.einsum("tsin,tn,sn,si->ti", left, c, b, dt * x, optimize=True)
    return _linear((y + w["mixer.D"] * x) * _silu(gate), w, "out_proj")


def _mamba2(h: np.ndarray, w: dict[str, np.ndarray], config: Mamba2Config) -> np.ndarray:
    heads, g, n, t = config.num_heads, config.n_groups, config.state_size, len(h)
    inner = heads * config.head_dim
    gate, x, dt = np.split(_linear(h, w, "in_proj"), [inner, 2 * inner + 2 * g * n], axis=1)
    x, b, c = np.split(_convolved(x, w), [inner, inner + g * n], axis=1)
    x = x.reshape(t, heads, -1)
    b, c = (np.repeat(v.reshape(t, g, n), heads // g, axis=1) for v in (b, c))
    dt = np.clip(np.logaddexp(0, dt + w["mixer.dt_bias"]), *config.time_step_limit)
    left = _decays(dt * -np.exp(w["mixer.A_log"]))
    y = np.einsum("tsh,thn,shn,shp->thp", left, c, b, dt[:, :, None] * x, optimize=True)
    y = (y + w["mixer.D"][:, None] * x).reshape(t, inner) * _silu(gate)
    normed = _rms(y.reshape(t, g, -1), w["mixer.norm.weight"].reshape(g, -1)).reshape(t, inner)
    return _linear(normed, w, "out_proj")


@pytest.mark.parametrize(("family", "case"), CASES)
def test_C34_logits_equal_transformers(folders: Path, family: str, case: str) -> None:
    """In one go, in chunks and token by token. A group norm of few channels can make float32 itself noisy (one case):
    then the parallel form in float64 decides."""
    model, paged, _ = both(folders, family, case)
    ids = np.random.default_rng(len(case)).integers(0, V, 150).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].numpy()
    assert want.std() > 1, "a flat model proves nothing"
    one_go = paged.one_go("one go", ids)
    true = exact(model, ids[:90])
    theirs, ours = (np.abs(x[:90] - true).max() for x in (want, one_go))
    assert ours < max(1e-4, 2 * theirs)
    assert theirs < 1e-3, "the parallel form says something else"
    np.testing.assert_allclose(one_go, want, atol=max(1e-4, theirs))
    np.testing.assert_array_equal(paged.chunked("chunks", ids, [7, 64, 1, 30]), one_go)
    np.testing.assert_array_equal(paged.chunked("decode", ids, [2, 1]), one_go)


@pytest.mark.parametrize(("family", "case"), CASES)
def test_C34_greedy_text_equals_generate(folders: Path, family: str, case: str) -> None:
    """64 tokens after 8 prompts, all of ours in one ragged batch; shorter than the convolution and longer than chunks.

    transformers cuts the time step in prompts only and not in single tokens, so it may not use its cache where limits
    bite.
    """
    model, paged, naive = both(folders, family, case)
    rng = np.random.default_rng([34, CASES.index((family, case))])
    prompts: dict[int, list[int]] = {}
    want: dict[int, list[int]] = {}
    for length in (1, 2, 9, 70):
        batch = rng.integers(0, V, (2, length))
        with torch.no_grad():
            out = model.generate(
                torch.tensor(batch), attention_mask=torch.ones(batch.shape, dtype=torch.long), do_sample=False,
                max_new_tokens=NEW_TOKENS, use_cache=case != "time step limit",
            )  # fmt: skip
        for ids, text in zip(batch.tolist(), out[:, length:].tolist(), strict=True):
            want[len(prompts)] = text
            prompts[len(prompts)] = ids
    got = paged.greedy(prompts, NEW_TOKENS)
    assert got == want
    assert sum(len(set(text)) >= 8 for text in got.values()) > len(prompts) // 2
    assert naive.greedy(prompts[4], NEW_TOKENS) == want[4]
    alone = paged.chunked("alone", prompts[7], [11, 3])[-1:]
    text = []
    for _ in range(NEW_TOKENS):
        text.append(int(alone[0].argmax()))
        alone = paged.one_go("alone", text[-1:])
    assert text == want[7]
