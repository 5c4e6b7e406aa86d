"""The guide docs/guides/add-a-family.md is executed: its toy family is added, and its models run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.base.errors import UnsupportedError
from penstock.core.sampling import SamplingParams
from penstock.families import registry
from penstock.families.registry import open_model
from penstock.launch.llm import LLM
from penstock.weights.load import load_weights
from tests.oracle import NaiveModel

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "add-a-family.md"
CONFIG: dict[str, Any] = {
    "architectures": ["TernForCausalLM"], "model_type": "tern", "vocab_size": 61, "n_embd": 32, "n_layer": 3,
    "n_head": 4, "n_kv_head": 2, "n_ctx": 128, "n_inner": 43, "window": 7, "hidden_act": "silu", "use_bias": False,
    "rope_theta": 1000.0, "bos_token_id": 1, "eos_token_id": None, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The guide's file as a module, and the guide's line of registration."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    source = next(b for b in blocks if b.startswith("# src/penstock/families/tern.py"))
    line = next(b for b in blocks if b.startswith("_register("))
    (tmp_path / "penstock_guide_tern.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "ARCHITECTURES", dict(registry.ARCHITECTURES))
    families = registry.FAMILIES
    monkeypatch.setattr(families, "_entries", dict(families._entries))
    # The guide names the file's place inside the package; here it lies beside the test.
    exec(line.replace("penstock.families.tern", "penstock_guide_tern"), {"_register": registry._register})
    yield
    sys.modules.pop("penstock_guide_tern", None)


def checkpoint(folder: Path, **changes: Any) -> Path:
    """A random model as its makers would have saved it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    rng = np.random.default_rng(5)
    e, f, kv = 32, 43, 16
    shapes = {"wte.weight": (61, e), "ln_f.weight": (e,), "head.weight": (61, e)}
    for i in range(3):
        p = f"h.{i}."
        shapes |= {f"{p}ln_{n}.weight": (e,) for n in (1, 2, 3, 4)}
        shapes |= {f"{p}attn.q.weight": (e, e), f"{p}attn.k.weight": (kv, e), f"{p}attn.v.weight": (kv, e)}
        shapes |= {f"{p}attn.out.weight": (e, e), f"{p}mlp.in.weight": (2 * f, e), f"{p}mlp.out.weight": (e, f)}
        shapes[f"{p}attn.mask"] = (1,)
    tensors = {
        name: (1.0 + 0.1 * rng.standard_normal(s) if "ln_" in name else rng.standard_normal(s) * 2 / np.sqrt(s[-1]))
        for name, s in shapes.items()
    }
    save_file({name: t.astype(np.float32) for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.usefixtures("added")
def test_the_guides_family_runs(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "tern")
    opened = open_model(folder)
    assert opened.spec.family == "tern"
    assert opened.spec.layers[0].placement == "both"
    weights = load_weights(opened, opened.spec, "float32")
    fused = np.vstack([weights["layers.1.gate"], weights["layers.1.up"]])
    assert fused.shape == (86, 32)
    prompt = np.random.default_rng(1).integers(3, 61, 40).tolist()  # longer than the window
    naive = NaiveModel(opened.spec, weights, max_model_len=128)
    llm = LLM(str(folder), skip_tokenizer_init=True, block_size=4)
    params = SamplingParams(max_tokens=24, temperature=0.0)
    out = llm.generate([{"prompt_token_ids": p} for p in (prompt, prompt[:9])], params)
    assert list(out[0].outputs[0].token_ids) == naive.greedy(prompt, 24)
    assert list(out[1].outputs[0].token_ids) == naive.greedy(prompt[:9], 24)
    assert len(set(naive.greedy(prompt, 24))) > 4


@pytest.mark.usefixtures("added")
def test_the_guides_family_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="use_bias"):
        open_model(checkpoint(tmp_path / "a", use_bias=True))
    with pytest.raises(UnsupportedError, match="'logit_scale'"):
        open_model(checkpoint(tmp_path / "b", logit_scale=2.0))


def test_without_the_guides_line_the_family_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="'TernForCausalLM', which Penstock does not know"):
        open_model(checkpoint(tmp_path / "c"))
