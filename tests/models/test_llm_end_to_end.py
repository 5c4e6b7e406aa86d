"""`LLM` from folders on disk to text, against Hugging Face `generate()` and a checkpoint's recorded text."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LLM, BeamSearchParams, SamplingParams
from penstock.base.errors import ConfigError, InputError
from tests.shared import shared


@pytest.fixture(scope="module")
def stories() -> LLM:
    return LLM(shared("models", "stories260K"))


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A small random Llama saved by transformers itself."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False, initializer_range=0.25,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder, model


def test_A01_L18_greedy_tokens_equal_hugging_face_generate_on_100_prompts(tiny_folder: tuple[Path, Any]) -> None:
    import torch

    folder, model = tiny_folder
    rng = random.Random(4)
    lengths = [1, 2, 5, 9, 16, 23, 31, 40, 52, 60]
    prompts = [[rng.randrange(3, 97) for _ in range(n)] for n in lengths for _ in range(10)]
    llm = LLM(folder, skip_tokenizer_init=True, max_num_batched_tokens=96, max_num_seqs=16, block_size=8)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(temperature=0, max_tokens=64))
    for first in range(0, 100, 10):  # prompts of one length: a batch without padding
        batch = torch.tensor(prompts[first : first + 10])
        with torch.no_grad():
            theirs = model.generate(
                batch, attention_mask=torch.ones_like(batch), do_sample=False, max_new_tokens=64, pad_token_id=0
            )[:, batch.shape[1] :].tolist()
        for ids, output in zip(theirs, outputs[first : first + 10], strict=True):
            ended = 2 in ids
            ids = ids[: ids.index(2) + 1] if ended else ids
            assert output.outputs[0].token_ids == ids
            assert output.outputs[0].finish_reason == ("stop" if ended else "length")
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) > 90, "degenerate model: the test shows nothing"


def test_D03_beam_search_equals_hugging_face(tiny_folder: tuple[Path, Any]) -> None:
    """Without an end token both search alike; Hugging Face divides by the generated length alone."""
    import torch

    folder, model = tiny_folder
    llm = LLM(folder, skip_tokenizer_init=True)
    rng = random.Random(5)
    width, n = 4, 12
    for _ in range(6):
        prompt = [rng.randrange(3, 97) for _ in range(rng.randrange(2, 20))]
        params = BeamSearchParams(beam_width=width, max_tokens=n, ignore_eos=True)
        (ours,) = llm.beam_search([{"prompt_token_ids": prompt}], params)
        with torch.no_grad():
            theirs = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), num_beams=width,
                num_return_sequences=width, do_sample=False, max_new_tokens=n, eos_token_id=None, pad_token_id=0,
                return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
        assert [s.tokens for s in ours.sequences] == theirs.sequences.tolist()
        scores = [s.cum_logprob / n for s in ours.sequences]
        np.testing.assert_allclose(scores, theirs.sequences_scores.tolist(), atol=1e-4)


def test_C82_stories260K_writes_its_recorded_text(stories: LLM) -> None:
    """The checkpoint's recorded greedy text, byte for byte, alone and in company."""
    reference = shared("models", "stories260K", "reference_greedy.txt").read_text(encoding="utf-8").rstrip("\n")
    params = SamplingParams(temperature=0, max_tokens=256)
    alone = stories.generate({"prompt_token_ids": [1]}, params)[0]
    assert alone.outputs[0].text == reference
    company = stories.generate(
        [{"prompt_token_ids": [1]}, "Once upon a time", "The dog", "Lily and Tom went to"],
        [params, SamplingParams(temperature=0.9, seed=3, max_tokens=90), params, SamplingParams(n=3, max_tokens=30)],
    )
    assert company[0].outputs[0].text == reference


def test_C82_stories260K_equals_the_same_weights_in_hugging_face(stories: LLM) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from penstock.families.registry import open_model
    from penstock.weights.load import load_weights

    checkpoint = open_model(shared("models", "stories260K"))
    weights = load_weights(checkpoint.weights, checkpoint.spec, "float32", None)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=172,
            num_hidden_layers=5,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=512,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    ).eval()

    def half(w: np.ndarray, heads: int) -> np.ndarray:
        # llama2.c rotates neighbouring pairs, Hugging Face the two halves of a head.
        d = w.shape[0] // heads
        return w.reshape(heads, d // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)

    state = {"model.embed_tokens.weight": weights["embed"], "model.norm.weight": weights["final_norm"]}
    names = {
        "o": "self_attn.o_proj",
        "v": "self_attn.v_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    for i in range(5):
        for ours, theirs in names.items():
            state[f"model.layers.{i}.{theirs}.weight"] = weights[f"layers.{i}.{ours}"]
        state[f"model.layers.{i}.self_attn.q_proj.weight"] = half(weights[f"layers.{i}.q"], 8)
        state[f"model.layers.{i}.self_attn.k_proj.weight"] = half(weights[f"layers.{i}.k"], 4)
    missing = model.load_state_dict({k: torch.tensor(np.array(v)) for k, v in state.items()}, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    assert not missing.unexpected_keys
    for prompt in ("Once upon a time", "The big red ball", "Tom said"):
        ids = stories.get_tokenizer().encode(prompt)
        with torch.no_grad():
            theirs = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=100, eos_token_id=2,
                                    pad_token_id=0)[0, len(ids):].tolist()  # fmt: skip
        ours_out = stories.generate(prompt, SamplingParams(temperature=0, max_tokens=100))[0].outputs[0]
        assert ours_out.token_ids == theirs


def test_A02_ttft_and_tpot_are_timed_separately_per_request(stories: LLM) -> None:
    long = "Once upon a time there was a little girl who liked to play. " * 8
    outputs = stories.generate([long, "Tom"], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    for o in outputs:
        assert o.metrics.ttft_s is not None
        assert o.metrics.ttft_s > 0
        tpot = o.metrics.tpot_s(20)
        assert tpot is not None
        assert o.metrics.ttft_s + 19 * tpot == pytest.approx(o.metrics.finished_s - o.metrics.arrival_s)
    assert outputs[0].metrics.ttft_s >= outputs[1].metrics.ttft_s


def test_stop_strings_end_the_sample_at_the_client(stories: LLM) -> None:
    plain = stories.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=60))[0].outputs[0]
    assert "Lily" in plain.text
    for include in (False, True):
        params = SamplingParams(temperature=0, max_tokens=60, stop=["Lily", "zzz"], include_stop_str_in_output=include)
        got = stories.generate("Once upon a time", params)[0].outputs[0]
        cut = plain.text.index("Lily") + (4 if include else 0)
        assert got.text == plain.text[:cut]
        assert (got.finish_reason, got.stop_reason) == ("stop", "Lily")
        assert got.token_ids == plain.token_ids[: len(got.token_ids)]
        assert len(got.token_ids) < len(plain.token_ids)
    later = SamplingParams(temperature=0, max_tokens=60, stop="a", min_tokens=12)
    got = stories.generate("Once upon a time", later)[0].outputs[0]
    assert len(got.token_ids) >= 12
    assert got.finish_reason == "stop"


def test_stop_string_on_one_of_several_samples(stories: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=2, n=4, max_tokens=40, stop=["."])
    out = stories.generate("Once upon a time", params)[0]
    assert len(out.outputs) == 4
    for sample in out.outputs:
        assert "." not in sample.text
        assert (sample.finish_reason == "stop") == (sample.stop_reason == ".")
    assert any(s.stop_reason == "." for s in out.outputs)


def test_stream_equals_generate_and_closing_it_aborts(stories: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    whole = stories.generate("The dog", params)[0].outputs[0]
    texts = [o.outputs[0].text for o in stories.stream("The dog", params)]
    assert texts[-1] == whole.text
    assert all(b.startswith(a) for a, b in pairwise(texts))
    stream = stories.stream("The dog", params)
    next(stream)
    stream.close()
    assert not stories.engine.core.has_work
    assert stories.generate("The dog", params)[0].outputs[0].text == whole.text


def test_same_seed_same_text_and_unseeded_requests_differ(stories: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=123, max_tokens=20)
    a = stories.generate("Once", params)[0].outputs[0].token_ids
    b = stories.generate(["Tom", "Once", "Lily"], [SamplingParams(max_tokens=9), params, SamplingParams()])[1]
    assert b.outputs[0].token_ids == a
    free = [stories.generate("Once", SamplingParams(max_tokens=20))[0].outputs[0].token_ids for _ in range(3)]
    assert len({tuple(f) for f in free}) > 1
    again = [LLM(shared("models", "stories260K"), seed=9).generate("Once")[0].outputs[0].token_ids for _ in range(2)]
    assert again[0] == again[1]


def test_logprobs_dictionaries_have_vllms_shape(stories: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1)
    out = stories.generate("Once upon", params)[0]
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids)
    for token, entry in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert token in entry
    sample = out.outputs[0]
    assert sample.logprobs is not None
    assert len(sample.logprobs) == 5
    for token, entry in zip(sample.token_ids, sample.logprobs, strict=True):
        assert entry[token].rank == 1
        assert len(entry) == 2
    assert sample.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(sample.token_ids, sample.logprobs, strict=True))
    )


def test_prefix_cache_is_reported_and_salts_keep_apart(stories: LLM) -> None:
    stories.reset_prefix_cache()
    ids = stories.get_tokenizer().encode("Once upon a time there was a cat who sat on a mat and ate a rat. " * 4)
    params = SamplingParams(temperature=0, max_tokens=2)
    first = stories.generate({"prompt_token_ids": ids}, params)[0]
    second = stories.generate({"prompt_token_ids": ids}, params)[0]
    salted = stories.generate({"prompt_token_ids": ids, "cache_salt": "mine"}, params)[0]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= 64
    assert salted.num_cached_tokens == 0
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == salted.outputs[0].token_ids


BAD = [
    ("", {}, "prompt"),
    ({"prompt_token_ids": []}, {}, "prompt"),
    ({"prompt_token_ids": [1, -1]}, {}, "prompt"),
    ({"prompt_token_ids": [1, 512]}, {}, "prompt"),
    ({"prompt_token_ids": [1.5]}, {}, "prompt"),
    ({"prompt_token_ids": [1] * 513}, {}, "prompt"),
    ({"prompt_token_ids": [1] * 500}, {"max_tokens": 13}, "max_tokens"),
    ({"promt": "x"}, {}, "prompt"),
    ("x", {"max_tokens": 0}, "max_tokens"),
    ("x", {"max_tokens": 2**31}, "max_tokens"),
    ("x", {"temperature": float("nan")}, "temperature"),
    ("x", {"temperature": -1}, "temperature"),
    ("x", {"top_p": 0}, "top_p"),
    ("x", {"top_k": -2}, "top_k"),
    ("x", {"min_p": 2}, "min_p"),
    ("x", {"logprobs": 10**6}, "logprobs"),
    ("x", {"logit_bias": {512: 1.0}}, "logit_bias"),
    ("x", {"stop": [""]}, "stop"),
    ("x", {"stop_token_ids": [512]}, "stop_token_ids"),
    ("x", {"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ("x", {"min_tokens": 20, "max_tokens": 4}, "min_tokens"),
    ("x", {"seed": 2**64}, "seed"),
]


@pytest.mark.parametrize(("prompt", "params", "param"), BAD, ids=lambda v: str(v)[:30])
def test_bad_input_is_one_clear_error_and_nobody_else_notices(
    stories: LLM, prompt: Any, params: dict[str, Any], param: str
) -> None:
    """FEATURES 4.3 rows 10-13 and 16-22 through the front end: nothing of the call runs, the engine stays clean."""
    with pytest.raises(InputError) as caught:
        stories.generate(["Once upon a time", prompt], [SamplingParams(max_tokens=4), SamplingParams(**params)])
    assert caught.value.param is not None
    assert param in caught.value.param or caught.value.param in ("prompt_token_ids",)
    assert "\n" not in str(caught.value)
    assert not stories.engine.core.has_work


def test_prompt_too_long_by_one_names_both_numbers(stories: LLM) -> None:
    with pytest.raises(InputError, match=r"513.*512"):
        stories.generate({"prompt_token_ids": [1] * 500}, SamplingParams(max_tokens=13))
    fits = stories.generate({"prompt_token_ids": [1] * 500}, SamplingParams(max_tokens=12, ignore_eos=True))[0]
    assert len(fits.outputs[0].token_ids) == 12
    rest = stories.generate({"prompt_token_ids": [1] * 505}, SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert len(rest.outputs[0].token_ids) == 7


def test_generated_text_goes_on_where_the_prompt_stopped(stories: LLM) -> None:
    """The first generated word keeps its leading space, and prompt + text reads like the whole decoded at once."""
    tokenizer = stories.get_tokenizer()
    spaced = 0
    for prompt in ("Once upon a", "Tom", "The big dog", "Lily"):
        params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, n=3)
        out = stories.generate(prompt, params)[0]
        for sample in out.outputs:
            whole = tokenizer.decode(out.prompt_token_ids + sample.token_ids)
            assert prompt + sample.text == whole
            spaced += sample.text.startswith(" ")
        (beam,) = stories.beam_search(prompt, BeamSearchParams(beam_width=1, max_tokens=6))
        assert prompt + beam.sequences[0].text == tokenizer.decode(beam.sequences[0].tokens)
    assert spaced > 3


def test_open_streams_and_generate_do_not_take_each_others_outputs(stories: LLM) -> None:
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=15) for i in range(3)]
    prompts = ["Once upon", "Tom and", "The cat"]
    alone = [stories.generate(p, s)[0].outputs[0].text for p, s in zip(prompts, params, strict=True)]
    a, b = (stories.stream(p, s) for p, s in zip(prompts[:2], params[:2], strict=True))
    texts = {"a": next(a).outputs[0].text, "b": next(b).outputs[0].text}
    between = stories.generate(prompts[2], params[2])[0].outputs[0].text
    beams = stories.beam_search("Lily", BeamSearchParams(beam_width=2, max_tokens=4))
    for out in a:
        texts["a"] = out.outputs[0].text
    for out in b:
        texts["b"] = out.outputs[0].text
    assert [texts["a"], texts["b"], between] == alone
    assert len(beams[0].sequences) == 2
    c, d = (stories.stream(p, s) for p, s in zip(prompts[:2], params[:2], strict=True))
    next(c)
    next(d)
    c.close()  # aborts its own request only
    assert list(d)[-1].outputs[0].text == alone[1]
    assert not stories.engine.core.has_work


def test_a_stop_string_may_begin_before_min_tokens_and_end_after(stories: LLM) -> None:
    plain = stories.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
    stop = "was a l"
    assert stop in plain.text
    lengths = []
    for min_tokens in range(8):
        params = SamplingParams(temperature=0, max_tokens=20, stop=stop, min_tokens=min_tokens)
        got = stories.generate("Once upon a time", params)[0].outputs[0]
        lengths.append(len(got.token_ids))
        if got.finish_reason == "stop":
            assert got.text == plain.text[: plain.text.index(stop)]
    ends_at = lengths[0]
    assert lengths[:ends_at] == [ends_at] * ends_at, "counts as long as it ends after min_tokens"
    assert lengths[ends_at:] == [20] * (8 - ends_at)


def test_priorities_swap_and_waiting_policies_work_offline(stories: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = ["Once upon a time", "Tom", "Lily and the dog"]
    want = [o.outputs[0].text for o in stories.generate(prompts, params)]
    folder = shared("models", "stories260K")
    for settings in (
        {"scheduling_policy": "priority:ageing_s=5", "max_num_seqs": 1},
        {"scheduling_policy": "dynamic:timeout_s=0.05,size=8"},
        {"kv_allocator": "virtual"},
        {"kv_allocator": "contiguous-pow2", "prefix_cache": "none"},
        {"swap_space": 0.01, "num_gpu_blocks_override": 16, "preemption_mode": "swap"},
        {"eviction": "priority", "depth": 2},
    ):
        llm = LLM(folder, **settings)
        got = llm.generate(prompts, params, priority=[3, 2, 1])
        assert [o.outputs[0].text for o in got] == want, settings
        if "max_num_seqs" in settings:
            firsts = [o.metrics.first_token_s for o in got]
            assert firsts == sorted(firsts, reverse=True), "the smallest number goes first"
    with pytest.raises(InputError, match="priority"):
        stories.generate(prompts, params, priority=[1])


def test_settings_that_contradict_or_do_not_exist_are_refused_before_loading() -> None:
    folder = shared("models", "stories260K")
    for settings, says in (
        ({"preemption_mode": "swap"}, "swap_space"),
        ({"kv_allocator": "buddy"}, "paged"),
        ({"scheduling_policy": "priority:speed=3"}, "ageing_s"),
    ):
        with pytest.raises(ConfigError, match=says):
            LLM(folder, **settings)


def test_closing_a_stream_leaves_nothing_in_flight_at_depth_2() -> None:
    llm = LLM(shared("models", "stories260K"), depth=2, max_num_batched_tokens=8, max_num_seqs=4)
    stream = llm.stream("Once upon a time there was a cat and a dog and a bird", SamplingParams(n=2, max_tokens=30))
    next(stream)
    others = llm.stream("Tom and Lily went to the park to play with the ball", SamplingParams(max_tokens=5))
    next(others)
    stream.close()
    others.close()
    assert not llm.engine.core.has_work
