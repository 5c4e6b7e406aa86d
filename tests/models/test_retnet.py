"""RetNet, which transformers does not have, against the parallel form of the paper, written down here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from penstock.base.errors import ModelError
from penstock.core.model_spec import Lightning
from penstock.families.registry import find_family
from tests.engine.harness import Knobs, real_engine, request, run, tiny
from tests.engine.test_laws_models import test_A08_forced_preemption_at_every_step_index as preempted_at_every_step
from tests.models.parity import VOCAB, check, vary
from tests.oracle import NaiveModel

CONFIG: dict[str, Any] = {
    "architectures": ["RetNetForCausalLM"], "model_type": "retnet", "vocab_size": VOCAB, "hidden_size": 32,
    "num_hidden_layers": 3, "num_heads": 4, "expand_k": 1.0, "expand_v": 2.0, "intermediate_size": 43,
    "hidden_act": "swish", "norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2, "attn_mode": "chunk",
    "max_position_embeddings": 192, "fuse_norm": True,
}  # fmt: skip


class Oracle(torch.nn.Module):
    """Retention by its parallel form over the whole text: no state. Source: Sun et al., arXiv 2307.08621, section 2."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.e, self.heads, self.eps = config["hidden_size"], config["num_heads"], config["norm_eps"]
        self.keys, self.values = (int(self.e * config[f"expand_{n}"]) for n in "kv")
        shapes = {"model.embeddings": (config["vocab_size"], self.e), "model.norm": (self.e,)}
        shapes["lm_head"] = (config["vocab_size"], self.e)
        for n in range(config["num_hidden_layers"]):
            own, f = f"model.layers.{n}.", config["intermediate_size"]
            shapes |= {own + "attn_norm": (self.e,), own + "mlp_norm": (self.e,)}
            shapes |= {own + f"attn.{name}_proj": (self.keys, self.e) for name in "qk"}
            shapes |= {own + f"attn.{name}_proj": (self.values, self.e) for name in "vg"}
            shapes |= {own + "attn.o_proj": (self.e, self.values)}
            shapes |= {own + "attn.g_norm_swish_gate": (self.values // self.heads,)}
            shapes |= {own + f"mlp.{name}_proj": (f, self.e) for name in ("gate", "up")}
            shapes |= {own + "mlp.down_proj": (self.e, f)}
        self.num_layers = config["num_hidden_layers"]
        for name, shape in shapes.items():
            self.register_parameter(name.replace(".", "/"), torch.nn.Parameter(torch.zeros(shape)))

    def w(self, name: str) -> torch.Tensor:
        return self.get_parameter(name.replace(".", "/"))

    def stored(self) -> dict[str, torch.Tensor]:
        return {name.replace("/", ".") + ".weight": p.detach().clone() for name, p in self.named_parameters()}

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.w(name)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        rates = 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
        turn = torch.polar(torch.ones(len(x), half, dtype=x.dtype), torch.arange(len(x))[:, None] * rates)
        out = torch.complex(x[..., :half], x[..., half:]) * turn[:, None]
        return torch.cat([out.real, out.imag], dim=-1)

    def retention(self, x: torch.Tensor, own: str) -> torch.Tensor:
        q, k, v, g = (x @ self.w(f"{own}attn.{name}_proj").T for name in "qkvg")
        q, k, v = (part.reshape(len(x), self.heads, -1) for part in (q, k, v))
        q, k = self.turned(q), self.turned(k) * (self.keys // self.heads) ** -0.5
        ages = torch.arange(len(x))[:, None] - torch.arange(len(x))[None]
        heads = []
        for h in range(self.heads):
            keep = 1 - 2.0 ** (-5 - h)
            fading = torch.where(ages >= 0, keep ** ages.clamp(min=0).to(x.dtype), 0.0)
            heads.append(((q[:, h] @ k[:, h].T) * fading) @ v[:, h])
        out = self.norm(torch.stack(heads, 1), own + "attn.g_norm_swish_gate").reshape(len(x), -1)
        return (out * torch.nn.functional.silu(g)) @ self.w(own + "attn.o_proj").T

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        x = self.w("model.embeddings")[input_ids[0]]
        for n in range(self.num_layers):
            own = f"model.layers.{n}."
            x = x + self.retention(self.norm(x, own + "attn_norm"), own)
            h = self.norm(x, own + "mlp_norm")
            gate, up = (h @ self.w(f"{own}mlp.{name}_proj").T for name in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ self.w(own + "mlp.down_proj").T
        return SimpleNamespace(logits=(self.norm(x, "model.norm") @ self.w("lm_head").T)[None])


@pytest.mark.parametrize("changes", [{}, {"expand_k": 0.5, "expand_v": 1.0, "num_heads": 2}], ids=["usual", "narrow"])
def test_C31_retnet_is_the_paper_s_parallel_form(changes: dict[str, Any], tmp_path: Path) -> None:
    """Logits and greedy text, on the reference, on torch and natively, a prompt at once and in chunks."""
    config = CONFIG | changes
    # Of the first token some seeds have a query nearly at right angles to its key: the head's norm makes any rounding
    # large, in float32 as here.
    model = vary(Oracle(config), seed=5, gain=1.0)
    save_file(model.stored(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = check(tmp_path, model)
    assert {type(layer.mixer) for layer in found.spec.layers} == {Lightning}


def test_C31_the_state_is_of_one_size_over_1000_tokens() -> None:
    spec, weights = tiny("retention")
    core = real_engine(spec, weights, Knobs(num_slots=3, num_blocks=600, budget=499, prefix_cache="none"))
    storage = core.executor._runner.storage  # type: ignore[attr-defined]
    before = [{name: (plane.nbytes, plane.ctypes.data) for name, plane in group.items()} for group in storage.planes]
    prompt = np.random.default_rng(31).integers(3, 61, 980).tolist()
    tokens = run(core, [request(prompt, request_id="long", max_tokens=20)])["long"].tokens[0]
    after = [{name: (plane.nbytes, plane.ctypes.data) for name, plane in group.items()} for group in storage.planes]
    assert before == after
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Lightning)
    assert mixer.cache("float32").num_bytes == 4 * mixer.num_heads * mixer.head_dim * mixer.value_dim
    rows = NaiveModel(spec, weights).logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    assert tokens == rows.argmax(axis=-1).tolist()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_C31_preempted_states_come_back(mode: str) -> None:
    """Every sequence loses its memory at step k, for every k: recomputed, or brought back from the host."""
    preempted_at_every_step("retention", "none", mode)


@pytest.mark.parametrize(("changes", "words"), [
    ({"use_short_conv": True}, "use_short_conv to 'True'"), ({"feature_map": "relu"}, "feature_map"),
    ({"attn": {"layers": [1]}}, "attn to"), ({"num_heads": 5}, "leave no whole heads"),
    ({"num_kv_heads": 2}, "num_kv_heads"), ({"group_norm": True}, "'group_norm'"),
])  # fmt: skip
def test_what_retnet_does_not_compute_is_refused(changes: dict[str, Any], words: str) -> None:
    find_family(CONFIG).spec(CONFIG)
    with pytest.raises(ModelError, match=words):
        find_family(CONFIG).spec(CONFIG | changes)
