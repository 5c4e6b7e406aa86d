"""Pooled hidden states: the engine's vectors against the naive loop's, whatever chunks, company and preemption do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from penstock.base.errors import InputError
from penstock.core.request import Abort, Control, Request
from penstock.core.vector import embedding
from penstock.launch.bundled import bundled_model
from penstock.launch.llm import LLM
from tests.engine.harness import Knobs, assert_idle, real_engine, request, tiny
from tests.oracle import NaiveModel
from tests.sampled import grid, some

MODELS = ["llama_gqa", "slot", "latent"]
POOLINGS = ["last", "mean", "cls", "max", "weightedmean", "mean_sqrt_len"]


def names() -> list[str]:
    from tests import specs

    return [name for name in specs.ALL if tiny(name)[0].embed_size is None]


def naive_hidden(name: str, ids: list[int]) -> npt.NDArray[np.float32]:
    """Final hidden states [T, E], each from its own prefix alone: the head's matrix is the identity."""
    spec, weights = tiny(name)
    bare = msgspec.structs.replace(
        spec, tie_embeddings=False, lm_head_bias=False, logit_scale=1.0, logit_soft_cap=None,
    )  # fmt: skip
    kept = {k: w for k, w in weights.items() if not k.startswith("lm_head")}
    kept["lm_head"] = np.eye(spec.hidden_size, dtype=np.float32)
    states: npt.NDArray[np.float32] = NaiveModel(bare, kept).logits(ids)
    return states


def naive_pooled(name: str, ids: list[int], pooling: str) -> npt.NDArray[np.float32]:
    hidden = naive_hidden(name, ids)
    if pooling == "mean":
        total = np.zeros(hidden.shape[1])
        for state in hidden:
            total += state
        return (total / len(ids)).astype(np.float32)
    if pooling == "max":
        return hidden.max(axis=0)
    if pooling == "mean_sqrt_len":
        return (hidden.astype(np.float64).sum(axis=0) / len(ids) ** 0.5).astype(np.float32)
    if pooling == "weightedmean":
        total = np.zeros(hidden.shape[1])
        for weight, state in enumerate(hidden.astype(np.float64), 1):
            total += weight * state
        return (total / (len(ids) * (len(ids) + 1) / 2)).astype(np.float32)
    row: npt.NDArray[np.float32] = hidden[-1 if pooling == "last" else 0]
    return row


def prompts(name: str, *lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(len(lengths))
    high = tiny(name)[0].vocab_size
    return [rng.integers(3, high, n).tolist() for n in lengths]


def pooled(core: Any, requests: list[Request]) -> dict[str, npt.NDArray[np.float32]]:
    for r in requests:
        core.add(r)
    out: dict[str, npt.NDArray[np.float32]] = {}
    while core.has_work:
        for news in core.step():
            assert news.request_id not in out or not news.pooled
            if news.pooled:
                assert news.finish_reason == "stop"
                assert not news.token_ids
                out[news.request_id] = np.frombuffer(news.pooled, "<f4")
    assert_idle(core)
    return out


@pytest.mark.parametrize(("name", "pooling"), some(grid(names(), POOLINGS)))
def test_vectors_are_the_naive_loops_in_chunks_and_in_company(name: str, pooling: str) -> None:
    spec, weights = tiny(name)
    core = real_engine(spec, weights, Knobs(budget=9, threshold=5, wire=True))
    ids = prompts(name, 1, 13, 30)
    asked = [request(p, pooling=pooling) for p in ids]
    company = request(prompts(name, 7)[0], max_tokens=6)
    got = pooled(core, [asked[0], company, *asked[1:]])
    for r, p in zip(asked, ids, strict=True):
        if name == "entries":  # the order of its sums is not the naive loop's
            np.testing.assert_allclose(got[r.request_id], naive_pooled(name, p, pooling), atol=1e-4)
        else:
            np.testing.assert_array_equal(got[r.request_id], naive_pooled(name, p, pooling))


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_preemption_between_chunks_changes_nothing(pooling: str, preemption: str) -> None:
    spec, weights = tiny("llama_gqa")
    core = real_engine(spec, weights, Knobs(budget=6, host_blocks=64, preemption=preemption))
    (ids,) = prompts("llama_gqa", 22)
    r = request(ids, pooling=pooling)
    core.add(r)
    core.step()
    core.step()
    core.add(Control(kind="preempt", request_id=r.request_id))
    got = pooled(core, [])
    assert core.stats.num_preemptions == 1
    np.testing.assert_array_equal(got[r.request_id], naive_pooled("llama_gqa", ids, pooling))


def test_a_prompt_that_is_cached_is_computed_again() -> None:
    spec, weights = tiny("llama_gqa")
    core = real_engine(spec, weights, Knobs())
    (ids,) = prompts("llama_gqa", 25)
    list(pooled(core, [request(ids, max_tokens=2)]))
    before = core.stats.num_scheduled_tokens
    got = pooled(core, [request(ids, pooling="mean", request_id="again")])
    assert core.stats.num_scheduled_tokens - before == len(ids)
    assert core.stats.num_prefix_hit_tokens == 0
    np.testing.assert_array_equal(got["again"], naive_pooled("llama_gqa", ids, "mean"))


def test_an_aborted_prompt_leaves_no_sum_behind() -> None:
    spec, weights = tiny("llama_gqa")
    core = real_engine(spec, weights, Knobs(budget=6))
    (ids,) = prompts("llama_gqa", 22)
    r = request(ids, pooling="mean")
    core.add(r)
    core.step()
    pooler = core.executor._runner.pooler  # type: ignore[attr-defined]
    assert len(pooler) == 1
    core.add(Abort(request_id=r.request_id))
    pooled(core, [request(ids[:4], max_tokens=2)])
    assert len(pooler) == 0


def test_a_nan_ends_its_own_request_alone() -> None:
    spec, weights = tiny("llama_gqa")
    sick = dict(weights)
    sick["embed"] = weights["embed"].copy()
    sick["embed"][5] = np.nan
    core = real_engine(spec, sick, Knobs())
    good, bad = request([7, 8, 9], pooling="mean"), request([7, 5, 9], pooling="mean")
    errors = {}
    core.add(good)
    core.add(bad)
    while core.has_work:
        errors.update({o.request_id: o.error for o in core.step()})
    assert errors[good.request_id] is None
    assert "NaN" in str(errors[bad.request_id])


def test_the_whole_context_may_be_embedded() -> None:
    """Nothing is generated, so no place is kept for it."""
    model = bundled_model("nano")
    assert model is not None
    llm = LLM(str(model), ops="blas", max_model_len=40, num_gpu_blocks_override=8)
    (out,) = llm.embed({"prompt_token_ids": [5] * 40})
    assert len(out.outputs.embedding) == llm.engine.spec.hidden_size
    assert np.linalg.norm(out.outputs.embedding) == pytest.approx(1, abs=1e-6)
    with pytest.raises(InputError, match=r"41 tokens.*40"):
        llm.embed({"prompt_token_ids": [5] * 41})
    with pytest.raises(InputError, match="pooling must be one of last, mean, cls"):
        llm.embed("a", pooling="median")
    with pytest.raises(InputError, match="dimensions must be an integer from 1 to"):
        llm.embed("a", dimensions=0)
    raw = llm.embed("Once upon a time", normalize=False, pooling="mean")[0].outputs.embedding
    cut = llm.embed("Once upon a time", dimensions=3, pooling="mean")[0].outputs.embedding
    np.testing.assert_allclose(cut, np.asarray(raw[:3]) / np.linalg.norm(raw[:3]), rtol=1e-5)


def test_vectors_of_extreme_size_have_length_one() -> None:
    for scale in (1e-30, 1.0, 1e37):
        v = embedding((np.asarray([3, 4]) * scale).astype("<f4").tobytes())
        np.testing.assert_allclose(v, [0.6, 0.8], rtol=1e-6)
    assert embedding(np.zeros(2, "<f4").tobytes()).tolist() == [0, 0]


def test_hidden_states_are_those_of_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, max_num_batched_tokens=16, block_size=8)
    ids = np.random.default_rng(1).integers(3, 67, 45).tolist()
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].numpy()
    for pooling, want in (("last", states[-1]), ("cls", states[0]), ("mean", states.mean(0))):
        (out,) = llm.embed({"prompt_token_ids": ids}, pooling=pooling, normalize=False)
        np.testing.assert_allclose(out.outputs.embedding, want, atol=2e-5)
