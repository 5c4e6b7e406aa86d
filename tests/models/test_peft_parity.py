"""Adapters that PEFT has made, over the bundled nano: logits as PEFT's own on transformers. Skips without peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LLM, LoRARequest, SamplingParams
from tests.adapting import nano
from tests.native.running import ISAS

peft = pytest.importorskip("peft", reason="pip install peft")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CASES: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "rslora": {"target_modules": r".*\.(up|down)_proj", "use_rslora": True},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "patterns": {
        "target_modules": ["q_proj", "down_proj"], "rank_pattern": {"down_proj": 2, r"layers\.1\.self_attn\.q_proj": 3},
        "alpha_pattern": {"down_proj": 7},
    },
    "lora_bias": {"target_modules": ["o_proj", "gate_proj"], "lora_bias": True},
}  # fmt: skip
IDS = [5, 90, 3, 17, 210, 8, 30, 2, 11, 6, 40, 12]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_J25_J24_logits_are_those_of_peft(case: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_pretrained(nano(), dtype=torch.float32)
    own = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, **CASES[case]))
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.rand_like(parameter) * 0.4 + 0.8)
            elif "lora" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
        wanted = own(torch.tensor([IDS])).logits[0].numpy()
        with own.disable_adapter():
            base = own(torch.tensor([IDS])).logits[0].numpy()
    own.save_pretrained(tmp_path)
    assert np.abs(wanted - base).max() > 0.5
    for ops in ("ref", *(["native"] if ISAS else [])):
        llm = LLM(nano(), enable_lora=True, ops=ops, max_model_len=64, dtype="float32")
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprobs=0)
        found = llm.generate({"prompt_token_ids": IDS}, params, lora_request=LoRARequest("a", 1, str(tmp_path)))[0]
        logs = wanted - np.log(np.exp(wanted - wanted.max(-1, keepdims=True)).sum(-1, keepdims=True))
        logs -= wanted.max(-1, keepdims=True)
        for i, entries in enumerate((found.prompt_logprobs or [])[1:]):
            assert entries is not None
            assert entries[IDS[i + 1]].logprob == pytest.approx(float(logs[i, IDS[i + 1]]), abs=2e-4), (case, ops, i)
