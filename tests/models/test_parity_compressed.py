"""DeepSeek-V4 against transformers: entries of several tokens, the choice of them, residual streams, listed experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import EntryAttention, Experts
from penstock.families.folder import read_quantization
from penstock.families.quantization.scaled import MXFP4, NVFP4
from penstock.families.registry import open_model
from penstock.weights.load import load_weights
from tests.models.parity import VOCAB, check, save, vary
from tests.shared import shared

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "moe_intermediate_size": 10, "num_hidden_layers": 4,
    "num_attention_heads": 4, "head_dim": 12, "qk_rope_head_dim": 6, "q_lora_rank": 14, "o_groups": 2,
    "o_lora_rank": 6, "index_n_heads": 16, "index_head_dim": 8, "index_topk": 5, "sliding_window": 6,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "swiglu_limit": 0.6, "hc_mult": 3, "hc_sinkhorn_iters": 4,
    "max_position_embeddings": 256, "rope_theta": 50.0, "compress_rope_theta": 200.0, "eos_token_id": 96,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "layer_types": [
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe"],
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "deepseek_v4": {},
    "deepseek_v4_yarn": {"rope_parameters": YARN, "hc_mult": 4, "hc_sinkhorn_iters": 1, "index_topk": 100},
    # All windows of one kind: nothing is kept but the window, or entries longer than a block of any page.
    "deepseek_v4_sliding": {"layer_types": ["sliding_attention"] * 4, "num_attention_heads": 2},
    "deepseek_v4_heavy": {
        "layer_types": ["heavily_compressed_attention"] * 4, "routed_scaling_factor": 2.5,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 7},
    },
}  # fmt: skip
SEEDS = {"deepseek_v4": 1, "deepseek_v4_yarn": 2, "deepseek_v4_sliding": 3, "deepseek_v4_heavy": 4}


def model_of(case: str) -> Any:
    torch.manual_seed(0)
    config = DeepseekV4Config(**{**SMALL, **CASES[case]}, experts_implementation="eager")
    model = vary(DeepseekV4ForCausalLM(config), SEEDS[case])
    rng = np.random.default_rng(SEEDS[case])
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("scale"):
                p.copy_(1 + 0.3 * torch.randn_like(p))
        for name, b in model.named_buffers():
            if name.endswith("tid2eid"):
                rows = [rng.permutation(SMALL["n_routed_experts"])[: b.shape[1]] for _ in range(len(b))]
                b.copy_(torch.from_numpy(np.stack(rows)))
            elif name.endswith("e_score_correction_bias"):
                b.copy_(0.3 * torch.randn_like(b))
    return model


@pytest.mark.parametrize("case", list(CASES))
def test_parity(case: str, tmp_path: Path) -> None:
    model = model_of(case)
    found = check(save(model, tmp_path), model, count_params=False)
    tables = ("tid2eid", "e_score_correction_bias")
    beside = sum(b.numel() for name, b in model.named_buffers() if name.endswith(tables))
    assert found.spec.num_params == sum(p.numel() for p in model.parameters()) + beside
    mixers = [layer.mixer for layer in found.spec.layers]
    assert all(isinstance(m, EntryAttention) for m in mixers)


def test_names_of_the_published_files(tmp_path: Path) -> None:
    """Tensors stand there as their makers call them; transformers writes most of them so behind "model."."""
    folder = save(model_of("deepseek_v4"), tmp_path)
    whole = open_model(folder)
    want = {name: np.array(weight) for name, weight in load_weights(whole, whole.spec, "float32").items()}
    path = folder / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(path).items():
        for own, published in (("model.", ""), (".attn.norm.", ".attn.kv_norm."), ("hc_head.hc_", "hc_head_"),
                               ("embed_tokens", "embed")):  # fmt: skip
            name = name.replace(own, published)
        renamed[name] = tensor
    renamed["mtp.0.attn.wq_a.weight"] = torch.zeros(3, 3)  # the head for multi-token prediction is left alone
    path.unlink()
    save_file(renamed, path)
    again = open_model(folder)
    got = load_weights(again, again.spec, "float32")
    assert want.keys() == got.keys()
    assert all(np.array_equal(want[n], np.asarray(got[n])) for n in want)


def test_experts_that_are_listed_are_checked(tmp_path: Path) -> None:
    model = model_of("deepseek_v4")
    table = model.model.layers[3].mlp.gate.tid2eid
    for row, said in (([2, 2], "token 5"), ([1, 6], "6 for token 5"), ([-1, 1], "token 5")):
        with torch.no_grad():
            table[5] = torch.tensor(row)
        folder = save(model, tmp_path / str(row[0]))
        checkpoint = open_model(folder)
        with pytest.raises(ModelError, match=said):
            load_weights(checkpoint, checkpoint.spec, "float32")


def e8m0(scales: torch.Tensor) -> torch.Tensor:
    return (torch.log2(scales) + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def fp8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Codes and powers of two for 16 x 16 of them, and what they stand for."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -k % 16, 0, -n % 16))
    blocks = padded.reshape(len(padded) // 16, 16, -1, 16)
    scale = 2.0 ** torch.ceil(torch.log2(blocks.abs().amax(dim=(1, 3)) / 448))
    each = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[:n, :k]
    codes = (weight / each).to(torch.float8_e4m3fn)
    return {"weight": codes, "scale": e8m0(scale)}, codes.float() * each


def fp4(weight: torch.Tensor, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Codes of E2M1, two to a byte, the first in its low half, with a power of two for 32 inputs."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.reshape(len(weight), -1, 32)
    scale = 2.0 ** torch.ceil(torch.log2(groups.abs().amax(dim=-1, keepdim=True) / 6))
    nearest = ((groups / scale).abs()[..., None] - table).abs().argmin(dim=-1)
    values = (table[nearest] * torch.sign(groups) * scale).reshape(weight.shape)
    codes = (nearest + 8 * (groups < 0)).reshape(weight.shape).to(torch.uint8)
    return {"weight": (codes[:, 0::2] | codes[:, 1::2] << 4).view(dtype), "scale": e8m0(scale[..., 0])}, values


@pytest.mark.parametrize("bytes_are", [torch.int8, torch.uint8])
def test_fp8_with_experts_in_fp4(tmp_path: Path, bytes_are: torch.dtype) -> None:
    """As the published files have it: `x.weight` beside `x.scale`; what nobody rounded stays as it is."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32}
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**{**SMALL, **sizes}))
    for name, b in model.named_buffers():
        if name.endswith("tid2eid"):
            b.copy_(torch.tensor([[1, 4]]).expand_as(b))
    folder = save(model, tmp_path, lambda config: config.update(expert_dtype="fp4", quantization_config={
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
        "weight_block_size": [16, 16],
    }))  # fmt: skip
    path = folder / "model.safetensors"
    stored, want = {}, {}
    for name, tensor in load_file(path).items():
        module, _, end = name.rpartition(".")
        inside = module.endswith(("wq_a", "wq_b", "wkv", "wo_a", "wo_b")) and "compressor" not in name
        coded = ".experts." in name or inside
        parts, values = {end: tensor}, tensor
        if coded:
            parts, values = fp4(tensor, bytes_are) if ".experts." in name else fp8(tensor)
        stored |= {f"{module}.{part}" if module else part: x.contiguous() for part, x in parts.items()}
        want[name] = values
    path.unlink()
    save_file(stored, path)
    found = open_model(folder)
    formats = {str(form) for form in found.stored.values()}
    assert formats == {"8-bit codes (e4m3), a e8m0 scale per 16 x 16", "4-bit codes (e2m1), a e8m0 scale per 32 inputs"}
    weights = load_weights(found, found.spec, "float32")
    for name, tensor in (("layers.1.q_a", "attn.wq_a"), ("layers.1.experts.2.down", "ffn.experts.2.w2"),
                         ("layers.3.experts.5.gate", "ffn.experts.5.w1"), ("layers.2.o_a", "attn.wo_a"),
                         ("layers.1.pool_kv", "attn.compressor.wkv")):  # fmt: skip
        layer = name.split(".")[1]
        expected = want[f"model.layers.{layer}.{tensor}.weight"].numpy()
        assert np.array_equal(np.asarray(weights[name]), expected), name


def test_layers_by_ratio_and_by_number() -> None:
    """Published files give `compress_ratios`, one more than there are layers, and `num_hash_layers`."""
    base = {k: v for k, v in SMALL.items() if k not in ("layer_types", "mlp_layer_types", "compress_rates")}
    base |= {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
    spec = _spec(base | {"compress_ratios": [0, 4, 128, 4, 0], "num_hash_layers": 1, "num_nextn_predict_layers": 1})
    assert [layer.mixer.every for layer in spec.layers] == [None, 4, 128, 4]  # type: ignore[union-attr]
    assert [isinstance(f := layer.ffn, Experts) and f.router.listed for layer in spec.layers] == [True, *[False] * 3]
    with pytest.raises(UnsupportedError, match="compress_ratios"):
        _spec(base | {"compress_ratios": [0, 4, 64, 4]})
    with pytest.raises(ModelError, match="for each of 4 layers"):
        _spec(base | {"layer_types": ["sliding_attention"]})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"scoring_func": "softmax"}, "scoring_func"), ({"n_shared_experts": 2}, "n_shared_experts 2"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"), ({"o_groups": 5}, "o_groups 5 does not divide"),
        ({"index_head_dim": 4}, "index_head_dim 4 is smaller"), ({"qk_rope_head_dim": 5}, "no whole pairs"),
        ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types"), ({"a_new_field": 3}, "a_new_field"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        _spec({**SMALL, "model_type": "deepseek_v4", **more})


def _spec(config: dict[str, Any]) -> Any:
    from penstock.families.registry import find_family

    return find_family(config).spec(json.loads(json.dumps(config)))


@pytest.mark.parametrize(
    ("name", "experts"),
    [("deepseek-ai--DeepSeek-V4-Flash", MXFP4), ("nvidia--DeepSeek-V4-Flash-NVFP4", NVFP4),
     ("sgl-project--DeepSeek-V4-Flash-FP8", None)],
)  # fmt: skip
def test_how_published_files_store_their_experts(name: str, experts: Any) -> None:
    """As far as their configurations tell; no tensor of them is here."""
    config = json.loads(shared("data", "configs", "model", name + ".config.json").read_text())
    method = read_quantization(Path("nowhere"), [], config)
    assert method is not None
    usual = method.expected("layers.3.attn.wq_a", (1024, 4096))
    assert str(usual) == "8-bit codes (e4m3), a float32 scale per 128 x 128"
    assert method.expected("layers.3.ffn.experts.7.w1", (2048, 4096)) == (experts or usual)
