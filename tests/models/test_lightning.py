"""Lightning attention against MiniMax-01's in transformers, which computes blocks; ours is one form."""

from __future__ import annotations

import numpy as np
import torch
from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from penstock.core.model_spec import Layer, Lightning, ModelSpec
from tests.oracle import NaiveModel


def test_lightning_attention_is_transformers() -> None:
    config = MiniMaxConfig(
        hidden_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=6, block_size=8,
        layer_types=["linear_attention"] * 3,
    )  # fmt: skip
    torch.manual_seed(4)
    module = MiniMaxLightningAttention(config, 1).eval()
    with torch.no_grad():
        module.norm.weight.add_(0.3 * torch.randn(24))
        x = torch.randn(1, 29, 24)
        want = module(x, position_embeddings=None, attention_mask=None)[0][0].numpy()  # type: ignore[arg-type]
    state = {name: p.detach().numpy() for name, p in module.named_parameters()}
    q, k, v = state["qkv_proj.weight"].reshape(4, 3, 6, 24).transpose(1, 0, 2, 3).reshape(3, 24, 24)
    weights = {
        "q": q, "k": k, "v": v, "z": state["output_gate.weight"], "o": state["out_proj.weight"],
        "state_norm": state["norm.weight"],
    }  # fmt: skip
    decay = tuple(torch.exp(-module.slope_rate).flatten().tolist())
    mixer = Lightning(num_heads=4, head_dim=6, decay=decay, eps=module.norm.variance_epsilon)
    assert {name: w.shape for name, w in weights.items()} == mixer.weight_shapes(24)
    spec = ModelSpec(family="test", vocab_size=8, hidden_size=24, layers=(Layer(mixer=mixer, ffn=None),))
    model = NaiveModel(spec, {f"layers.0.{name}": np.ascontiguousarray(w) for name, w in weights.items()})
    np.testing.assert_allclose(model._mixer(x[0].numpy(), "layers.0.", spec.layers[0]), want, atol=1e-5)
