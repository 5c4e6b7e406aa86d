"""RWKV-4 and RWKV-7 from rwkv.cpp files: published logits, a float64 form, batches, ten thousand tokens (row C30)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from penstock import LLM, SamplingParams
from penstock.families.registry import open_model
from penstock.weights.load import load_weights
from tests.engine.harness import Collector, request
from tests.models.rwkv_exact import Exact, read
from tests.paged import Paged
from tests.shared import shared
from tests.unit.cli.test_cli import penstock
from tests.unit.families.test_rwkv_cpp import version_4, version_7, write

FILES = {
    "v4": ("rwkv4-tiny-660K", "tiny-rwkv-4v0-660K-FP32.bin", "expected-logits-4v0-660K.bin"),
    "v4 Q5_1": ("rwkv4-tiny-660K", "tiny-rwkv-4v0-660K-Q5_1.bin", "expected-logits-4v0-660K.bin"),
    "v7": ("rwkv7-tiny-834K", "tiny-rwkv-7v0-834K-FP32.bin", "expected-logits-7v0-834K.bin"),
    "v7 FP16": ("rwkv7-tiny-834K", "tiny-rwkv-7v0-834K-FP16.bin", "expected-logits-7v0-834K.bin"),
}
PLAIN = ["v4", "v7"]
PROMPT = list(b'"in')
TEXTS = [b'"in', b"Once upon a time there was", b"x", b"def f(x):\n    return x + 1\n", bytes(range(256))]


def path_of(name: str) -> Path:
    folder, file, _ = FILES[name]
    return shared("models", folder, file)


def published(name: str) -> npt.NDArray[np.float32]:
    """Logits after '"in' that came with the files; they were made with the authors' own implementation."""
    folder, _, file = FILES[name]
    return np.fromfile(shared("models", folder, file), "<f4")


def paged(name: str, dtype: str = "float32") -> Paged:
    checkpoint = open_model(path_of(name))
    weights = load_weights(checkpoint, checkpoint.spec, dtype)
    return Paged(checkpoint.spec, weights, max_model_len=checkpoint.spec.max_position)


def assert_greedy(
    name: str, prompt: list[int], tokens: list[int], logits: npt.NDArray[np.float64] | None = None
) -> None:
    """Each token is the likeliest one after those before it, in float64; so the whole text is the greedy one."""
    want = exact(name).logits(prompt + tokens) if logits is None else logits
    assert tokens == want[len(prompt) - 1 : -1].argmax(1).tolist()


@cache
def exact(name: str, *, parallel: bool = False) -> Exact:
    return Exact(read(path_of(name)), parallel=parallel)


@pytest.mark.parametrize("name", ["v4", "v7", "v7 FP16"])
def test_C30_logits_equal_the_published_ones(name: str) -> None:
    """Measured: 1.0e-6, 2.4e-7 and 4.8e-7; the weights of version 7 are all but representable in float16."""
    want = published(name)
    model = paged(name)
    alone = model.one_go("alone", PROMPT)
    assert np.abs(alone[-1] - want).max() < 3e-6
    np.testing.assert_array_equal(model.chunked("token by token", PROMPT, [1]), alone)
    batch = {i: (list(text), [len(text) - 1]) for i, text in enumerate(TEXTS)}
    np.testing.assert_array_equal(model.run(batch)[0][0], alone[-1])
    assert np.abs(exact(name).logits(PROMPT)[-1] - want).max() < 3e-6
    assert want.std() > 0.5


@pytest.mark.parametrize(("name", "bound"), [("v4", 5e-3), ("v7 FP16", 3e-6)])
def test_weights_held_in_float16(name: str, bound: float) -> None:
    """Measured: 1.6e-3 for float32 weights that are rounded, 4.8e-7 for weights that were float16 in the file."""
    difference = np.abs(paged(name, "float16").one_go("a", PROMPT)[-1] - published(name)).max()
    assert difference < bound


def test_Q5_1_blocks_are_those_of_today() -> None:
    """Every weight is within half a step of the FP32 file's, and the sum of differences of logits is near the one that
    rwkv.cpp's own tests state (0.278, with activations in 8 bits)."""
    full, coded = (open_model(path_of(name)) for name in ("v4", "v4 Q5_1"))
    want, got = (load_weights(c, c.spec, "float32") for c in (full, coded))
    num_coded = 0
    for name, ref in coded.weights.items():
        if ref.tensor.dtype != "Q5_1":
            np.testing.assert_array_equal(got[name], want[name])
            continue
        num_coded += 1
        blocks = want[name].reshape(-1, 32)
        step = (blocks.max(1) - blocks.min(1)) / 31
        rounded = 1e-3 * np.abs(blocks).max(1) + 1e-6  # of the block's two float16 numbers
        assert (np.abs(got[name].reshape(-1, 32) - blocks).max(1) <= 0.5 * step + rounded).all()
    assert num_coded == 4 * 7
    difference = paged("v4 Q5_1").one_go("a", PROMPT)[-1] - published("v4 Q5_1")
    assert abs(difference.sum()) < 0.3
    assert 1e-3 < np.abs(difference).max() < 0.15


@pytest.mark.parametrize("name", PLAIN)
def test_C30_logits_and_64_greedy_tokens_equal_the_float64_form(name: str) -> None:
    """On all 256 bytes in a row (the greedy text of these models is dull), in one go and in chunks."""
    model = paged(name)
    ids = list(TEXTS[-1])
    want = exact(name).logits(ids)
    got = model.one_go("a", ids)
    assert np.abs(got - want).max() < 1e-5
    np.testing.assert_array_equal(model.chunked("b", ids, [100, 1, 7]), got)
    text = model.greedy(dict(enumerate(map(list, TEXTS))), 64)
    for i in (0, 1, 3):
        assert_greedy(name, list(TEXTS[i]), text[i])


@pytest.mark.parametrize("name", PLAIN)
def test_C30_parallel_and_recurrent_forms_agree(name: str) -> None:
    """The row asks for 1e-3: the parallel form of the whole text against the program's recurrence, token by token."""
    ids = np.random.default_rng(30).integers(0, 256, 100).tolist()
    parallel = exact(name, parallel=True).logits(ids)
    np.testing.assert_allclose(parallel, exact(name).logits(ids), atol=1e-12)
    assert np.abs(paged(name).chunked("a", ids, [1]) - parallel).max() < 1e-5


def test_C30_state_is_as_large_after_10000_tokens_as_after_one() -> None:
    """Through the engine, 9,000 tokens of prompt and 1,000 of text: one slab at every step, however long the text."""
    llm = LLM(path_of("v4"), enable_prefix_caching=False, max_num_seqs=1, max_num_batched_tokens=512)
    core, group = llm.engine.core, llm.engine.plan.groups[0]
    slab = 4 * 5 * 128 * 4  # layers x planes x channels x float32
    assert group.slab_bytes(32) == slab == llm.engine.plan.kv_bytes
    ids = np.random.default_rng(31).integers(0, 256, 9_000).tolist()
    core.add(request(ids, request_id="long", max_tokens=1_000))
    used: list[int] = []
    collector = Collector()
    while core.has_work:
        collector.take(core.step())
        used.append(core.kv.stats().groups[0].used)
    tokens = collector.requests["long"].tokens[0]
    assert len(tokens) == 1_000
    assert len(used) > 1_000
    assert set(used[:-1]) == {1}
    assert used[-1] == 0
    # Nothing has added up either: float32 is as far from float64 at the end as at the beginning.
    want = exact("v4").logits(ids + tokens)
    got = paged("v4").chunked("a", ids + tokens, [500])
    assert np.abs(got - want).max() < 2e-5
    assert_greedy("v4", ids, tokens, want)


@pytest.mark.parametrize("name", PLAIN)
def test_C30_continuous_batching_of_states(name: str) -> None:
    """24 requests over six slots, in any order and mix: each gets what it gets alone; a common beginning is read
    from a checkpoint of the state."""
    rng = np.random.default_rng(32)
    stem = list(b"The quick brown fox jumps over the lazy dog. " * 2)
    prompts = [rng.integers(0, 256, int(n)).tolist() for n in rng.integers(1, 60, 15)]
    prompts += [stem + rng.integers(0, 256, int(n)).tolist() for n in rng.integers(1, 30, 9)]
    params = [SamplingParams(temperature=0, max_tokens=int(n)) for n in rng.integers(4, 30, len(prompts))]
    params[::5] = [SamplingParams(temperature=0.9, seed=i, max_tokens=20) for i in range(len(params[::5]))]
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    llm = LLM(path_of(name), max_num_seqs=6, max_num_batched_tokens=48, block_size=8, slot_checkpoint_tokens=32)
    together = llm.generate(asked, params)
    alone = LLM(path_of(name), max_num_seqs=1, enable_prefix_caching=False)
    for ids, own, output in zip(asked, params, together, strict=True):
        assert output.outputs[0].token_ids == alone.generate(ids, own)[0].outputs[0].token_ids
    assert sum(output.num_cached_tokens >= 64 for output in together[15:]) >= 3
    for i in (1, 16):
        assert_greedy(name, prompts[i], together[i].outputs[0].token_ids)
    assert not llm.engine.core.has_work


@pytest.mark.parametrize("version", [4, 7])
def test_C30_random_models_equal_both_float64_forms(tmp_path: Path, version: int) -> None:
    """Needs no file from elsewhere, and has several heads, where the published model of version 7 has one."""
    tensors = {}
    for name, value in (version_4() if version == 4 else version_7()).items():
        if value.ndim == 2 and "r_k" not in name and name != "emb.weight":
            value = value * np.float32(2 / value.shape[1] ** 0.5)
        tensors[name] = -np.abs(value) if name.endswith("time_decay") else value
    path = write(tmp_path / "x.bin", tensors, 2 if version == 4 else 3)
    checkpoint = open_model(path)
    model = Paged(checkpoint.spec, load_weights(checkpoint, checkpoint.spec, "float32"))
    ids = np.random.default_rng(version).integers(0, 256, 120).tolist()
    got = model.chunked("a", ids, [50, 1, 7])
    assert got.std() > 0.5
    for parallel in (False, True):
        assert np.abs(got - Exact(read(path), parallel=parallel).logits(ids)).max() < 1e-4


def test_the_command_line_runs_a_file() -> None:
    done = penstock(
        "run", str(path_of("v7")), "--prompt", "In the", "--temperature", "0", "--max-tokens", "12", "--stats"
    )
    assert done.returncode == 0
    assert done.stdout == "In the the the the\n"
    assert "generated 12 tokens" in done.stderr


def test_text_in_and_out_of_a_byte_model() -> None:
    """The file names no tokenizer: with 256 tokens, a token is a byte."""
    llm = LLM(path_of("v7"))
    output = llm.generate("In thé ", SamplingParams(temperature=0, max_tokens=16))[0]
    assert output.prompt_token_ids == list("In thé ".encode())
    assert output.outputs[0].text == bytes(output.outputs[0].token_ids).decode()
    assert output.outputs[0].finish_reason == "length"
