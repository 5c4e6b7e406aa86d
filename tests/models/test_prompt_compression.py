"""Prompt compression offline, nano served and pico reading: exact, deterministic, in the time to the first token."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock import LLM
from penstock.base.errors import ConfigError, InputError
from penstock.config import from_kwargs
from penstock.core.compression import PromptCompression
from penstock.core.sampling import SamplingParams
from penstock.launch import compressor as module
from penstock.launch.compressor import Compressor
from penstock.launch.prompt_reader import PromptReader
from penstock.text.world import byte_tokenizer
from tests.api.test_prompt_compression import GREEDY, METHODS, QUESTION, STORY


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("nano", max_model_len=256, num_gpu_blocks_override=64, threads=1)


@pytest.fixture(scope="module")
def compressor(llm: LLM) -> Compressor:
    return Compressor(llm.config, llm.get_tokenizer())


@pytest.fixture(scope="module")
def pico() -> PromptReader:
    return PromptReader("pico")


def text_of(seed: int, num_words: int) -> str:
    rng = random.Random(seed)
    words = [
        "Ann",
        "the old house",
        "4821",
        "caf\u00e9",
        "\u65e5\u672c",
        "was.",
        "\n\n",
        "and",
        "sat on",
        "<b>",
        "it's",
    ]
    return " ".join(rng.choice(words) for _ in range(num_words))


# -- the reader ----------------------------------------------------------------------------------------------------


def test_the_reader_says_what_the_engine_says(pico: PromptReader) -> None:
    """Nats are minus the log-probabilities of the prompt that an engine with the same model gives."""
    engine = LLM("pico", max_model_len=512, num_gpu_blocks_override=32, threads=1)
    ids = engine.get_tokenizer().encode(STORY * 4)
    out = engine.generate({"prompt_token_ids": [0, *ids]}, SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    assert out.prompt_logprobs is not None
    expected = [-e[i].logprob for e, i in zip(out.prompt_logprobs[1:], ids, strict=True) if e is not None]
    pico.reset()
    np.testing.assert_allclose(pico.nats([], ids), expected, atol=1e-3)
    pico.reset()
    np.testing.assert_allclose(pico.nats([0], ids), expected, atol=1e-3)  # its own beginning is not doubled
    assert pico.nats([], [0])[0] == pytest.approx(np.log(4096))  # nothing stands before it


def test_work_that_is_used_again_changes_nothing(pico: PromptReader, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(STORY * 6)
    pico.reset()
    whole = pico.nats([], ids)
    parts = np.concatenate([pico.nats(ids[:n], ids[n : n + 50]) for n in range(0, len(ids), 50)])
    np.testing.assert_allclose(parts, whole, atol=1e-3)
    pico.nats(ids[:20] + ids[40:60], ids[:10])
    np.testing.assert_allclose(pico.nats(ids[:100], ids[100:150]), whole[100:150], atol=1e-3)


def test_long_texts_are_read_in_windows(pico: PromptReader, llm: LLM) -> None:
    """Windows begin every half of one, each as if the text did; so a token sees a quarter of one at least."""
    ids = llm.get_tokenizer().encode(text_of(1, 4000))
    assert len(ids) > 3 * pico.window
    pico.reset()
    found = pico.nats([], ids)
    assert found.shape == (len(ids),)
    assert np.isfinite(found).all()
    half, piece = pico.window // 2, 256
    for low in range(0, len(ids) - piece, 3 * piece):
        begin = next(b for b in range(0, len(ids), half) if low + piece - b < pico.window)
        assert begin == 0 or low - begin >= pico.window // 4
        pico.reset()
        near = pico.nats(ids[begin:low], ids[low : low + piece])
        np.testing.assert_allclose(near, found[low : low + piece], atol=1e-3)


# -- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_G38_G39_the_ratio_is_exact_over_random_texts(compressor: Compressor, llm: LLM, method: str) -> None:
    tokenizer = llm.get_tokenizer()
    for seed in range(6):
        context = text_of(seed, 30 + 40 * seed).strip()
        ids = tokenizer.encode(f"Read this: {context}\n\nWhat?")
        ends = np.cumsum([len(tokenizer.table[i]) for i in ids])
        starts = np.concatenate([[0], ends[:-1]])
        low, high = len(b"Read this: "), len(f"Read this: {context}".encode())
        inside = int(((starts >= low) & (ends <= high)).sum())
        for percent in (75, 50, 25, 10, 1):
            options = PromptCompression(method=method, rate=percent / 100, context=context)
            found = compressor.compress(ids, options)
            assert len(ids) - len(found.ids) == inside - -(-inside * percent // 100)
            assert found.num_before == len(ids)
            left = iter(ids)
            assert all(i in left for i in found.ids), "tokens keep their order"
            assert found.ids[:3] == ids[:3]
            assert found.text.endswith("What?")
            assert compressor.compress(ids, options).ids == found.ids
        wanted = PromptCompression(method=method, target_tokens=len(ids) - inside + 5, context=context)
        assert len(compressor.compress(ids, wanted).ids) == len(ids) - inside + 5


@pytest.mark.parametrize("method", ["selective-context", "llmlingua"])
def test_each_prompt_is_read_from_its_beginning(
    compressor: Compressor, llm: LLM, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Whatever was read before: steps that are cut otherwise round otherwise, and a near tie would fall otherwise."""
    steps: list[tuple[int, int]] = []
    step = PromptReader._step

    def watched(reader: PromptReader, ids: Sequence[int], start: int) -> Any:
        steps.append((len(ids), start))
        return step(reader, ids, start)

    monkeypatch.setattr(PromptReader, "_step", watched)
    ids = llm.get_tokenizer().encode(STORY * 6)
    options = PromptCompression(method=method, rate=0.3)
    seen = []
    for given in (ids, ids, ids[:120], ids):
        steps.clear()
        compressor.compress(given, options)
        seen.append(list(steps))
    assert seen[0] == seen[1] == seen[3]
    assert seen[0][0][1] == 0


@pytest.mark.parametrize("method", METHODS)
def test_all_of_it_is_the_same_prompt(llm: LLM, method: str) -> None:
    plain = llm.generate(STORY + QUESTION, GREEDY)[0]
    kept = llm.generate(STORY + QUESTION, GREEDY, prompt_compression={"method": method, "rate": 1.0})[0]
    assert kept.prompt_token_ids == plain.prompt_token_ids
    assert kept.outputs[0].token_ids == plain.outputs[0].token_ids
    short = llm.generate("Once upon a time", GREEDY, prompt_compression={"method": method, "rate": 0.1})[0]
    assert short.prompt == "Once upon a time"  # shorter than the 64 tokens that stay


@pytest.mark.parametrize("method", METHODS)
def test_the_output_ids_are_the_prompt(llm: LLM, method: str) -> None:
    asked = {"method": method, "rate": 0.5, "context": STORY}
    found = llm.generate(STORY + QUESTION, GREEDY, prompt_compression=asked)[0]
    again = llm.generate({"prompt_token_ids": found.prompt_token_ids}, GREEDY)[0]
    assert found.outputs[0].token_ids == again.outputs[0].token_ids
    assert found.prompt is not None
    assert found.prompt.endswith(QUESTION)
    assert list(llm.stream(STORY + QUESTION, GREEDY, prompt_compression=asked))[-1].prompt == found.prompt


def test_a_prompt_that_fits_only_compressed_is_taken(llm: LLM) -> None:
    long = STORY * 10 + QUESTION
    with pytest.raises(InputError, match="maximum context length is 256 tokens"):
        llm.generate(long, GREEDY)
    out = llm.generate(long, GREEDY, prompt_compression={"method": "selective-context", "target_tokens": 200})[0]
    assert len(out.prompt_token_ids) == 200
    with pytest.raises(InputError, match="maximum context length is 256 tokens"):
        llm.generate(long, GREEDY, prompt_compression={"method": "random", "rate": 0.9})


def test_a_chat_keeps_its_template_and_instructions(llm: LLM) -> None:
    messages = [
        {"role": "system", "content": "Answer from the story. " * 3},
        {"role": "user", "content": [{"type": "text", "text": STORY * 4}, {"type": "text", "text": " user "}]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "What did Ann find?"},
    ]
    plain = llm.get_tokenizer().decode(llm.chat(messages[3:], GREEDY)[0].prompt_token_ids, skip_special_tokens=False)
    tail = plain[plain.index("<|im_start|>user") :]
    for method in METHODS:
        out = llm.chat(messages, GREEDY, prompt_compression={"method": method, "rate": 0.1})[0]
        assert out.prompt is not None
        assert out.prompt.endswith(tail)
        assert messages[0]["content"] in out.prompt
        assert out.prompt.count("<|im_start|>") == 5
        last = llm.chat(messages, GREEDY, prompt_compression={"method": method, "rate": 0.1, "messages": [1]})[0]
        assert last.prompt is not None
        assert "Yes.<|im_end|>" in last.prompt
        assert len(last.prompt_token_ids) < len(out.prompt_token_ids)


@pytest.mark.parametrize("method", ["selective-context", "llmlingua"])
def test_G38_G39_the_compressor_s_time_is_in_the_ttft(llm: LLM, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    asked: dict[str, Any] = {"method": method, "rate": 0.5, "context": STORY}
    step = PromptReader._step

    def slow(reader: PromptReader, *args: Any) -> Any:
        time.sleep(0.4)
        return step(reader, *args)

    monkeypatch.setattr(PromptReader, "_step", slow)
    out = llm.generate(STORY + QUESTION, GREEDY, prompt_compression=asked)[0]
    assert out.metrics.ttft_s is not None
    assert out.metrics.ttft_s >= 0.4


def test_who_does_not_ask_pays_nothing() -> None:
    quiet = LLM("nano", max_model_len=64, num_gpu_blocks_override=16, threads=1)
    quiet.generate("Once", SamplingParams(max_tokens=1))
    assert quiet._compressor.num_bytes == 0
    quiet.generate(STORY[:150], SamplingParams(max_tokens=1), prompt_compression={"method": "random", "rate": 0.5})
    assert quiet._compressor.num_bytes == 0  # the baseline reads nothing


# -- refusals ------------------------------------------------------------------------------------------------------


def test_another_tokenizer_is_refused_clearly() -> None:
    other = byte_tokenizer()
    asked = PromptCompression(method="llmlingua", rate=0.5, keep_last=0)
    lazy = Compressor(from_kwargs(model="nano"), other)
    with pytest.raises(InputError, match=r"needs the model's tokenizer, and pico has another") as caught:
        lazy.compress(other.encode(STORY), asked)
    assert caught.value.param == "prompt_compression"
    with pytest.raises(ConfigError, match=r"needs the model's tokenizer, and nano has another") as early:
        Compressor(from_kwargs(model="nano", prompt_compressor="nano"), other)
    assert early.value.field == "prompt_compressor"
    for name, said in (("no/such/model.gguf/x", "cannot be used"), ("/nowhere", "cannot be used")):
        with pytest.raises(ConfigError, match=said):
            Compressor(from_kwargs(model="nano", prompt_compressor=name), other)


def test_requests_that_make_no_sense(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"method": "random", "rate": 0.5, "keep_last": 0}
    cases: list[tuple[dict[str, Any], str]] = [
        (asked | {"context": "not there"}, "does not stand in the prompt"),
        (asked | {"context": "a"}, "more than once"),
        (asked | {"messages": [0]}, "is for chats"),
    ]
    for given, said in cases:
        with pytest.raises(InputError, match=said):
            llm.generate(STORY + QUESTION, GREEDY, prompt_compression=given)
    with pytest.raises(InputError, match="there is no message 3; there are 1"):
        llm.chat([{"role": "user", "content": STORY}], GREEDY, prompt_compression=asked | {"messages": [3]})
    with pytest.raises(InputError, match="prompt_logprobs tells of the prompt as it was sent"):
        llm.generate(STORY, SamplingParams(max_tokens=1, prompt_logprobs=1), prompt_compression=asked)
    none = Compressor(from_kwargs(model="nano", prompt_compressor="none"), llm.get_tokenizer())
    with pytest.raises(InputError, match="prompt_compressor is none"):
        none.compress([1, 2], PromptCompression(method="random", rate=0.5))
    bare = Compressor(from_kwargs(model="nano"), None)
    with pytest.raises(InputError, match="needs a tokenizer"):
        bare.compress([1, 2], PromptCompression(method="random", rate=0.5))
    monkeypatch.setattr(module, "MAX_WINDOWS", 0)
    with pytest.raises(InputError, match="takes at most 0"):
        llm.generate(STORY + QUESTION, GREEDY, prompt_compression={"method": "llmlingua", "rate": 0.5, "keep_last": 0})
    with pytest.raises(InputError, match=r"\[1\] must be a token id"):
        llm.generate({"prompt_token_ids": [1, 99999]}, GREEDY, prompt_compression=asked)
