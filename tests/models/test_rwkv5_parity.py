"""RWKV-5 and RWKV-6, which transformers does not have, against the parallel form of the paper, written down here.

Files of RWKV-6 in GGUF are compared with llama.cpp in test_gguf_architectures.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.base.errors import ModelError
from penstock.core.model_spec import ChannelMix, ModelSpec, Rwkv5, Rwkv6
from penstock.families.registry import find_family, open_model
from penstock.families.rwkv5 import Rwkv5Family, Rwkv6Family
from tests.models.parity import VOCAB, check

CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "attention_hidden_size": 64, "head_size": 16, "num_hidden_layers": 3,
    "intermediate_size": None, "layer_norm_epsilon": 1e-5, "rescale_every": 6, "bos_token_id": 0, "eos_token_id": 0,
    "tie_word_embeddings": False, "use_cache": True, "context_length": 8, "transformers_version": "4.33.1",
}  # fmt: skip
NAMES: dict[int, dict[str, Any]] = {
    n: {
        "architectures": [f"Rwkv{n}ForCausalLM"], "model_type": f"rwkv{n}",
        "auto_map": {"AutoModelForCausalLM": f"modeling_rwkv{n}.Rwkv{n}ForCausalLM"},
    }
    for n in (5, 6)
}  # fmt: skip
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "5": (5, {}),
    "5, tied": (5, {"tie_word_embeddings": True, "head_size": 32, "intermediate_size": 40, "head_size_divisor": 1}),
    "6": (6, {}),
    "6, of other ranks": (
        6,
        {"time_mix_extra_dim": 5, "time_decay_extra_dim": 7, "head_size": 64, "num_hidden_layers": 2},
    ),
}


class Oracle(torch.nn.Module):
    """The whole text at once: what a token reads is a sum over all earlier ones, each faded since; there is no state.

    Source: Peng et al., arXiv 2404.05892, section 3.
    """

    def __init__(self, version: int, config: dict[str, Any], seed: int) -> None:
        super().__init__()
        self.version, e, size = version, config["hidden_size"], config["head_size"]
        self.heads, self.num_layers = e // size, config["num_hidden_layers"]
        self.divisor, f = config.get("head_size_divisor", 8), config["intermediate_size"] or 224
        rank, decay_rank = config.get("time_mix_extra_dim", 32), config.get("time_decay_extra_dim", 64)
        shapes: dict[str, tuple[int, ...]] = {"rwkv.embeddings.weight": (VOCAB, e)}
        norms = ["rwkv.blocks.0.pre_ln", "rwkv.ln_out"]
        for n in range(self.num_layers):
            own = f"rwkv.blocks.{n}."
            norms += [own + name for name in ("ln1", "ln2", "attention.ln_x")]
            shapes |= {f"{own}attention.{name}.weight": (e, e) for name in (*LONG.values(), "output")}
            shapes |= {f"{own}feed_forward.key.weight": (f, e), f"{own}feed_forward.value.weight": (e, f)}
            shapes |= {f"{own}feed_forward.receptance.weight": (e, e), f"{own}attention.time_faaaa": (self.heads, size)}
            mixes, ffn = (
                [f"attention.time_mix_{long}" for long in LONG.values()],
                ("time_mix_key", "time_mix_receptance"),
            )
            if version == 6:
                mixes, ffn = [f"attention.time_maa_{name}" for name in "xwkvrg"], ["time_maa_k", "time_maa_r"]
                a = own + "attention."
                shapes |= {f"{a}time_maa_w1": (e, 5 * rank), f"{a}time_maa_w2": (5, rank, e)}
                shapes |= {f"{a}time_decay_w1": (e, decay_rank), f"{a}time_decay_w2": (decay_rank, e)}
            shapes |= {own + name: (1, 1, e) for name in (*mixes, *(f"feed_forward.{name}" for name in ffn))}
            shapes[f"{own}attention.time_decay"] = (self.heads, size) if version == 5 else (1, 1, e)
        shapes |= {f"{name}.{part}": (e,) for name in norms for part in ("weight", "bias")}
        self.tied = config["tie_word_embeddings"]
        if not self.tied:
            shapes["head.weight"] = (VOCAB, e)
        rng = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            noise = torch.randn(shape, generator=rng)
            if name.endswith("time_decay"):
                value = noise * 1.5 - 1.5  # from hardly fading to gone after a token
            elif shape[:2] == (1, 1):
                value = torch.rand(shape, generator=rng)
            elif len(shape) == 1:
                value = noise * 0.2 + name.endswith("weight")
            elif name.endswith(("time_faaaa", "embeddings.weight", "head.weight")):
                value = noise * (0.25 if "weight" in name else 0.5)
            else:
                value = noise * 2.5 / shape[-2 if "_w" in name else -1] ** 0.5
            self.register_parameter(name.replace(".", "/"), torch.nn.Parameter(value))

    def w(self, name: str) -> Tensor:
        return self.get_parameter(name.replace(".", "/"))

    def stored(self) -> dict[str, Tensor]:
        return {name.replace("/", "."): p.detach().clone() for name, p in self.named_parameters()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.w(name + ".weight"), self.w(name + ".bias"))

    def time_mix(self, x: Tensor, past: Tensor, own: str) -> Tensor:
        if self.version == 5:
            mixed = {n: x * (mix := self.w(f"{own}time_mix_{long}")[0]) + past * (1 - mix) for n, long in LONG.items()}
            fading = -torch.exp(self.w(own + "time_decay")).reshape(1, -1).expand(len(x), -1)
        else:
            low = torch.tanh((x + (past - x) * self.w(own + "time_maa_x")[0]) @ self.w(own + "time_maa_w1"))
            shares = torch.einsum("tnr,nre->nte", low.reshape(len(x), 5, -1), self.w(own + "time_maa_w2"))
            mixed = {
                n: x + (past - x) * (self.w(f"{own}time_maa_{n}")[0] + share)
                for n, share in zip("wkvrg", shares, strict=True)
            }
            low = torch.tanh(mixed["w"] @ self.w(own + "time_decay_w1")) @ self.w(own + "time_decay_w2")
            fading = -torch.exp(self.w(own + "time_decay")[0] + low)
        r, k, v, g = (mixed[n] @ self.w(f"{own}{LONG[n]}.weight").T for n in "rkvg")
        r, k, v, fading = (part.reshape(len(x), self.heads, -1) for part in (r, k, v, fading))
        total = torch.cumsum(fading, 0)
        since = (total - fading)[:, None] - total[None]  # of token s, when token t reads: all tokens between them
        earlier = torch.ones(len(x), len(x)).tril(-1).bool()[:, :, None, None]
        scores = torch.einsum("thd,shd,tshd->hts", r, k, torch.exp(since.where(earlier, -torch.inf)))
        own_score = (r * k * self.w(own + "time_faaaa")).sum(-1, keepdim=True)
        out = torch.einsum("hts,shd->thd", scores, v) + own_score * v
        out = out.reshape(len(x), -1) / self.divisor
        weight, bias = self.w(own + "ln_x.weight"), self.w(own + "ln_x.bias")
        out = torch.nn.functional.group_norm(out, self.heads, weight, bias)
        return (out * torch.nn.functional.silu(g)) @ self.w(own + "output.weight").T

    def channel_mix(self, x: Tensor, past: Tensor, own: str) -> Tensor:
        if self.version == 5:
            pairs = [(self.w(f"{own}time_mix_{name}")[0], name) for name in ("key", "receptance")]
            k, r = (x * mix + past * (1 - mix) for mix, _ in pairs)
        else:
            k, r = (x + (past - x) * self.w(f"{own}time_maa_{name}")[0] for name in "kr")
        k = torch.relu(k @ self.w(own + "key.weight").T) ** 2
        return torch.sigmoid(r @ self.w(own + "receptance.weight").T) * (k @ self.w(own + "value.weight").T)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        x = self.norm(self.w("rwkv.embeddings.weight")[input_ids[0]], "rwkv.blocks.0.pre_ln")
        for n in range(self.num_layers):
            own = f"rwkv.blocks.{n}."
            h = self.norm(x, own + "ln1")
            x = x + self.time_mix(h, shifted(h), own + "attention.")
            h = self.norm(x, own + "ln2")
            x = x + self.channel_mix(h, shifted(h), own + "feed_forward.")
        head = self.w("rwkv.embeddings.weight" if self.tied else "head.weight")
        return SimpleNamespace(logits=(self.norm(x, "rwkv.ln_out") @ head.T)[None])


LONG = {"r": "receptance", "k": "key", "v": "value", "g": "gate"}


def shifted(h: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(h[:1]), h[:-1]])


def written(case: str, folder: Path, seed: int = 2) -> Oracle:
    version, changes = CASES[case]
    config = CONFIG | NAMES[version] | changes
    model = Oracle(version, config, seed)
    save_file(model.stored(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("case", list(CASES))
def test_folders_compute_the_paper_s_parallel_form(case: str, tmp_path: Path) -> None:
    """Logits and greedy text, on the reference, on torch and natively, a prompt at once and in chunks."""
    found = check(tmp_path, written(case, tmp_path))
    assert {type(layer.mixer) for layer in found.spec.layers} == {Rwkv5 if CASES[case][0] == 5 else Rwkv6}
    assert found.spread > 0.3


def test_world_models_of_version_5_may_go_by_the_name_of_version_4(tmp_path: Path) -> None:
    written("5", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"architectures": ["RwkvForCausalLM"], "model_version": "5_2"}))
    assert open_model(tmp_path).spec.family == "rwkv5"
    path.write_text(json.dumps(config | {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv6"}))
    with pytest.raises(ModelError, match="contradicts itself"):
        open_model(tmp_path)


def spec_of(version: int, **changes: Any) -> ModelSpec:
    return find_family(NAMES[version]).spec(CONFIG | NAMES[version] | changes)


def test_sizes_that_configs_leave_open_are_the_published_ones() -> None:
    """Of the models with 1.6 and with 7 billion parameters."""
    for e, layers, ranks, width in ((2048, 24, (32, 64), 7168), (4096, 32, (64, 128), 14336)):
        sizes = {"hidden_size": e, "num_hidden_layers": layers, "attention_hidden_size": e, "vocab_size": 65536}
        spec = spec_of(6, head_size=64, **sizes)
        m, ffn = spec.layers[0].mixer, spec.layers[0].ffn
        assert isinstance(m, Rwkv6)
        assert ffn == ChannelMix(version=6, width=width)
        assert (m.mix_rank, m.decay_rank, m.num_heads, m.eps) == (*ranks, e // 64, pytest.approx(64e-5))
        assert (spec.bos_token_id, spec.eos_token_ids, spec.max_position) == (0, (0,), 2**20)
        assert round(spec.num_params / 1e8) == {2048: 16, 4096: 76}[e]
    defaults = Rwkv5Family().spec({"model_type": "rwkv5"}), Rwkv6Family().spec({"model_type": "rwkv6"})
    for spec in defaults:
        assert (spec.vocab_size, spec.hidden_size, len(spec.layers)) == (65536, 768, 24)
    assert defaults[0].layers[0].mixer == Rwkv5(num_heads=12, head_dim=64, eps=pytest.approx(64e-5))


@pytest.mark.parametrize("version", [5, 6])
@pytest.mark.parametrize(("change", "culprit"), [
    ({"head_size": 48}, "head_size 48"), ({"attention_hidden_size": 128}, "attention_hidden_size"), ({"new": 1}, "new"),
    ({"model_version": "6_0a"}, "model_version"), ({"head_size_divisor": 0}, "head_size_divisor"),
])  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(version: int, change: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ModelError, match=culprit):
        spec_of(version, **change)
