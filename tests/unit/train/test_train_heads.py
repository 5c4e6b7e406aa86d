"""tools/train/heads.py: what is trained is what the engine runs, and training helps."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from penstock.drafters.heads import read_heads

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from train.heads import MedusaHeads, adapter_loss, hidden_states, logits_of, loss_of, save
from train.interpreter import SpecModule
from train.recipes import RECIPES

SPEC = RECIPES["tiny"]


def model() -> SpecModule:
    torch.manual_seed(0)
    made = SpecModule(SPEC, 64)
    made.initialise(3)
    made.requires_grad_(False)
    made.named_weights()["embed"].mul_(20)  # as large as a trained one's
    return made


def test_the_engine_runs_the_heads_that_were_trained(tmp_path: Path) -> None:
    heads = MedusaHeads(3, 2, SPEC.hidden_size)
    with torch.no_grad():
        for p in heads.parameters():
            p.copy_((torch.randn_like(p) * 0.3).bfloat16())
    save(heads, tmp_path, "ab", None)
    read, config = read_heads(tmp_path, "medusa", SPEC.hidden_size, "ab")
    hidden = torch.randn(5, SPEC.hidden_size)
    with torch.no_grad():
        want = heads(hidden).transpose(0, 1).numpy()
    np.testing.assert_allclose(read(hidden.numpy()), want, rtol=1e-4, atol=1e-5)
    assert (config["num_heads"], config["num_blocks"]) == (3, 2)


def test_untrained_heads_are_the_models_own() -> None:
    m, tokens = model(), torch.randint(0, SPEC.vocab_size, (2, 30))
    (hidden,) = hidden_states(m, tokens, (len(SPEC.layers),))
    out = MedusaHeads(2, 1, SPEC.hidden_size)(hidden.flatten(0, 1)).detach()
    for head in out:
        np.testing.assert_allclose(logits_of(m, head), m(tokens).flatten(0, 1), atol=1e-5)


def test_each_head_learns_the_token_at_its_own_distance() -> None:
    """Rows that count up: the token k places behind the next one is known, and a head that looks elsewhere is wrong."""
    torch.manual_seed(1)
    m, heads = model(), MedusaHeads(2, 1, SPEC.hidden_size)
    optimiser = torch.optim.Adam(heads.parameters(), lr=0.02)
    start = torch.arange(8)[:, None] * 5
    tokens = (start + torch.arange(24)) % 40 + 3
    first, _ = loss_of(m, heads, tokens, 1)
    for _ in range(150):
        loss, right = loss_of(m, heads, tokens, 1)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 0.5 * float(first.detach())
    assert right.min() > 0.8
    (hidden,) = hidden_states(m, tokens, (len(SPEC.layers),))
    with torch.no_grad():
        drafts = logits_of(m, heads(hidden[:, 10])).argmax(-1)
    assert (drafts == torch.stack([tokens[:, 12], tokens[:, 13]])).float().mean() > 0.8


def test_an_adapter_learns_what_the_whole_model_says() -> None:
    torch.manual_seed(2)
    m, adapter = model(), MedusaHeads(1, 1, SPEC.hidden_size)
    tokens = torch.randint(0, 200, (4, 32))
    optimiser = torch.optim.Adam(adapter.parameters(), lr=0.02)
    _, before = adapter_loss(m, adapter, tokens, 1, 1)
    for _ in range(100):
        loss, after = adapter_loss(m, adapter, tokens, 1, 1)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert float(after[0]) > float(before[0]) + 0.02 or float(before[0]) > 0.97
