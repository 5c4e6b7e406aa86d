"""The short convolution of LFM2 against transformers' module, whose parameters are all random."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from penstock.core.model_spec import Layer, ModelSpec, ShortConv
from tests.oracle import NaiveModel


@pytest.mark.parametrize("bias", [False, True])
def test_a_short_convolution_is_transformers(bias: bool) -> None:
    config = Lfm2Config(
        hidden_size=24, num_hidden_layers=1, conv_L_cache=3, conv_bias=bias, layer_types=["conv"],
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(3)
    module = Lfm2ShortConv(config, 0).eval()
    x = torch.randn(1, 19, 24)
    with torch.no_grad():
        want = module(x)[0].numpy()
    state = {name: p.detach().numpy() for name, p in module.named_parameters()}
    names = {"in_proj.weight": "in", "conv.weight": "conv", "out_proj.weight": "o"} | (
        {"in_proj.bias": "in.bias", "conv.bias": "conv.bias", "out_proj.bias": "o.bias"} if bias else {}
    )
    assert set(names) == set(state)
    mixer = ShortConv(width=24, conv=3, bias=bias)
    weights = {
        f"layers.0.{ours}": state[theirs].reshape(mixer.weight_shapes(24)[ours]) for theirs, ours in names.items()
    }
    spec = ModelSpec(family="test", vocab_size=8, hidden_size=24, layers=(Layer(mixer=mixer, ffn=None),))
    got = NaiveModel(spec, weights)._mixer(x[0].numpy(), "layers.0.", spec.layers[0])
    np.testing.assert_allclose(got, want, atol=1e-5)
