"""One check for every family: a tiny random model made with transformers, saved, opened, run, compared.

The oracle is transformers' own forward in float64 over the whole text (no cache). Compared are float32 logits (1e-4)
and 64 greedy tokens, with the prompt in one go, in chunks, alone and in a batch (`draws`: of fewer tokens).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.backends.gpu.backend import TorchBackend
from penstock.backends.native.backend import NativeBackend
from penstock.backends.native.obstacle import native_obstacle
from penstock.core.model_spec import Attention, EntryAttention, Latent, ModelSpec
from penstock.families.registry import open_model
from penstock.ops.native.library import best_library
from penstock.ops.native.program import Pool
from penstock.weights.load import load_weights
from tests.paged import Paged
from tests.sampled import draws

VOCAB = 97
ATOL = 1e-4
CHUNKS = (7, 1, 16, 3, 5)
TORCH = TorchBackend(torch.device("cpu"))


class Parity(NamedTuple):
    """What was compared: `worst` is the largest difference of a logit, `spread` the standard deviation of logits."""

    spec: ModelSpec
    worst: float
    spread: float


def random_model(make: Callable[[Any], torch.nn.Module], config: Any, seed: int = 0, std: float = 0.25) -> Any:
    """A model of `config` with every parameter random: fresh norms are ones and fresh biases zeros, and hide mistakes.

    Matrices get a standard deviation of `std` / sqrt(columns / 16), so that hidden states stay of order one; vectors
    are scattered around what they start as.
    """
    torch.manual_seed(seed)
    model = make(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim >= 2 and "embed" not in name and "wte" not in name:
                p.normal_(std=std * (16 / p.shape[-1]) ** 0.5 * 2)
            elif p.ndim >= 2:
                p.normal_(std=1.0)
            else:
                p.add_(torch.randn_like(p) * 0.2)
    return model


def vary(
    model: Any, seed: int, *, norms: float = 0.1, biases: float = 0.2, gain: float = 2.0, buffers: bool = False
) -> Any:
    """The same model with every parameter random, layers outweighing the embedding, so that greedy text is varied.

    Matrices get a standard deviation of `gain` / sqrt(columns); decays of recurrent layers go from slow to fast.
    """
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *(model.named_buffers() if buffers else ())]:
            noise = torch.randn_like(p)
            if name.endswith("A_log"):
                p.copy_(torch.log(0.05 + 4 * torch.rand_like(p)))
            elif "norm" in name or name.endswith(".D"):
                p.copy_(1 + norms * noise)
            elif p.ndim == 1:
                p.copy_(noise - 1 if "dt_" in name else biases * noise)
            elif "embed" in name or "lm_head" in name:
                p.copy_(0.4 * noise)  # logits of deviation 2, as real models have; errors grow with them
            else:
                p.copy_(noise * gain / p.shape[-1] ** 0.5)
    return model.eval()


def oracle(model: Any, ids: Sequence[int]) -> np.ndarray:
    """Logits [T, V] of transformers in float64."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].double().numpy()


def oracle_greedy(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """What the oracle says after `prompt` and after each of `tokens` but the last, from one run over all of them.

    Equal to `tokens` if and only if they are its own greedy text (by induction over them, since it is causal).
    """
    logits = oracle(model, [*prompt, *tokens[:-1]])
    return logits[len(prompt) - 1 :].argmax(axis=-1).tolist()


def save(model: Any, folder: Path, edit: Callable[[dict[str, Any]], None] | None = None) -> Path:
    """As `save_pretrained` writes it; `edit` changes config.json afterwards (to try the fields of older versions)."""
    model.save_pretrained(folder)
    if edit is not None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        edit(config)
        path.write_text(json.dumps(config))
    return folder


def check(
    folder: Path, model: Any, *, length: int = 60, greedy: int = 64, max_model_len: int = 192, seed: int = 1,
    attention: str = "ref", kv_dtype: str = "float32", count_params: bool = True, slack: float = 1.0,
) -> Parity:  # fmt: skip
    """Raises AssertionError unless the model saved in `folder` computes what `model` does.

    `length`: tokens of the longest prompt; make it longer than windows and original contexts. `slack`: times ATOL, for
    models whose errors add up over the text.
    """
    checkpoint = open_model(folder)
    spec = checkpoint.spec
    if count_params:
        assert spec.num_params == sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    weights = load_weights(checkpoint, spec, "float32")
    model = model.double()
    rng = np.random.default_rng(seed)
    prompts = {name: rng.integers(3, spec.vocab_size, n).tolist() for name, n in (("a", length), ("b", 1), ("c", 23))}

    def fresh() -> Paged:
        return Paged(spec, weights, max_model_len=max_model_len, attention=attention, kv_dtype=kv_dtype)

    want = {name: oracle(model, ids) for name, ids in prompts.items()}
    runs = {
        "one go": fresh().one_go("a", prompts["a"]),
        "chunks": fresh().chunked("a", prompts["a"], CHUNKS),
        "token by token": fresh().chunked("a", prompts["a"], (draws(length - 20, 1), 1)),
    }
    torched = [fresh().on(TORCH) for _ in range(2)]  # the second column: what runs on GPUs, on the CPU
    runs["torch, in one go"] = torched[0].one_go("a", prompts["a"])
    runs["torch, in chunks"] = torched[1].chunked("a", prompts["a"], (23, 1, 16))
    if best_library() is not None and kv_dtype == "float32" and native_obstacle(spec) is None:
        native = NativeBackend(Pool(best_library(), 2))  # the third column: native kernels
        runs["native, in one go"] = fresh().on(native).one_go("a", prompts["a"])
        runs["native, in chunks"] = fresh().on(native).chunked("a", prompts["a"], CHUNKS)
        assert np.array_equal(runs["native, in one go"], runs["native, in chunks"]), "native: chunks show"
    company = fresh()
    runs["in a batch"] = company.run({name: (ids, range(len(ids))) for name, ids in prompts.items()})["a"]
    worst = 0.0
    for how, got in runs.items():
        difference = float(np.abs(got - want["a"]).max())
        assert difference <= slack * (3 * ATOL if how.startswith(("torch", "native")) else ATOL), (
            f"{how}: logits differ by {difference:.2e}"
        )
        worst = max(worst, difference)
    tokens = fresh().greedy({"a": prompts["a"]}, greedy)["a"]
    assert tokens == oracle_greedy(model, prompts["a"], tokens), "greedy tokens, alone"
    together = fresh().greedy(prompts, min(greedy, draws(20, greedy)))
    assert together["a"] == tokens[: len(together["a"])], "greedy tokens, in a batch"
    assert together["c"] == oracle_greedy(model, prompts["c"], together["c"]), "greedy tokens of the neighbour"
    assert len(set(tokens)) > 4, "a constant text would hide mistakes: choose another seed"
    spread = float(np.std(want["a"]))
    assert spread > 0.05, "logits of no size would hide mistakes"
    _record(spec, worst, spread)
    return Parity(spec, worst, spread)


def _record(spec: ModelSpec, worst: float, spread: float) -> None:
    """One line for `tools/families.py`, which asks for it by naming a file."""
    path = os.environ.get("PENSTOCK_PARITY_LOG")
    if path is None:
        return
    mixers = [layer.mixer for layer in spec.layers]
    ropes = {rope.kind + ("" if rope.dim == m.head_dim else " partial") for m in mixers
             if isinstance(m, Attention) and (rope := m.rope) is not None}  # fmt: skip
    ropes |= {m.rope.kind for m in mixers if isinstance(m, Latent) and m.rope is not None}
    ropes |= {m.rope.kind + " partial" for m in mixers if isinstance(m, EntryAttention)}
    ropes |= {"ALiBi" for m in mixers if isinstance(m, Attention) and m.alibi is not None}
    line = {
        "test": os.environ["PYTEST_CURRENT_TEST"].rsplit(" ", 1)[0], "family": spec.family, "dtype": spec.dtype,
        "positions": sorted(ropes | ({"learned"} if spec.positions else set())), "worst": worst, "spread": spread,
    }  # fmt: skip
    with open(path, "a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")
