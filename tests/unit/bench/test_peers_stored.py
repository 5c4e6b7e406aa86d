"""Files in GGUF's own formats beside other engines: drawn blocks, turns, tokens that part, engines that fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.peers import make_blocks, make_experts, make_mixers, stored_formats
from benchmarks.peers.engines import Place, Spec, problem
from benchmarks.peers.make_models import DEVIATION, SHAPES

from penstock import LLM, SamplingParams
from penstock.formats.gguf import read_gguf
from tests.ggml import scalar_decode

SMALL: dict[str, Any] = SHAPES["llama-3.1-8b"] | {
    "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "vocab_size": 1024, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("blocks") / "small-Q4_K_M.gguf"
    make_blocks.write(SMALL, out)
    return out


# -- a large model's shape ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "draw"), [("Q4_K", make_blocks.q4_k), ("Q6_K", make_blocks.q6_k)])
def test_drawn_blocks_are_weights_as_in_other_random_models(kind: str, draw: Any) -> None:
    values = scalar_decode(kind, draw(400, np.random.default_rng(0)))
    assert values.size == 400 * 256
    assert abs(values.mean()) < 0.02 * DEVIATION
    assert values.std() == pytest.approx(DEVIATION, rel=0.03)
    sub_blocks = values.reshape(-1, 32 if kind == "Q4_K" else 16)
    assert np.abs(sub_blocks.mean(axis=1)).max() < 1.5 * DEVIATION, "no group has a mean of its own"
    assert len(np.unique(values)) > 200


def test_six_bits_are_where_llama_cpp_has_them() -> None:
    kinds = {n: make_blocks.kind(f"blk.{n}.ffn_down.weight", (4096, 14336), 32) for n in range(32)}
    six = [n for n, kind in kinds.items() if kind == make_blocks.Q6_K]
    assert six == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert make_blocks.kind("output.weight", (128256, 4096), 32) == make_blocks.Q6_K
    assert make_blocks.kind("blk.0.attn_q.weight", (4096, 4096), 32) == make_blocks.Q4_K
    assert make_blocks.kind("blk.0.attn_norm.weight", (4096,), 32) == make_blocks.F32


def test_the_file_is_a_model(small: Path) -> None:
    held = read_gguf(small)
    assert {t.dtype for t in held.tensors.values()} == {"F32", "Q4_K", "Q6_K"}
    llm = LLM(str(small), max_model_len=64, num_gpu_blocks_override=16)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    (output,) = llm.generate({"prompt_token_ids": [7, 11, 300, 5]}, params)
    assert output.outputs[0].logprobs is not None
    best = [max(entry.values(), key=lambda e: e.logprob).logprob for entry in output.outputs[0].logprobs]
    assert all(-20 < logprob < 0 for logprob in best)


@pytest.mark.parametrize(
    ("shape", "less"),
    [
        ("mamba2-1.3b", {"inner": 128, "state": 16, "heads": 4}),
        ("qwen3.5-0.8b", {"inner": 64, "state": 32, "heads": 2, "groups": 2, "head_dim": 32, "intermediate_size": 64}),
        ("deepseek-v2-lite", {
            "rank": 32, "rope": 8, "nope": 32, "value": 32, "experts": 4, "chosen": 2, "expert_width": 32,
            "intermediate_size": 64,
        }),
    ],
)  # fmt: skip
def test_shapes_of_states_and_latent_keys_are_models(shape: str, less: dict[str, Any], tmp_path: Path) -> None:
    c = make_mixers.SHAPES[shape] | {"hidden_size": 64, "vocab_size": 512, "num_attention_heads": 2} | less
    out = tmp_path / "small-q8_0.gguf"
    values = make_mixers.header(c, 4)
    if shape == "qwen3.5-0.8b":
        values |= {"qwen35.rope.dimension_count": 8, "qwen35.rope.dimension_sections": [2, 1, 1, 0]}
    make_experts.write(list(make_mixers.tensors(c, 4)), values, out, make=make_mixers.drawn)
    llm = LLM(str(out), max_model_len=64)
    (output,) = llm.generate(
        {"prompt_token_ids": [7, 11, 300, 5]}, SamplingParams(max_tokens=4, temperature=0, logprobs=1, ignore_eos=True)
    )
    assert output.outputs[0].logprobs is not None
    best = [max(entry.values(), key=lambda e: e.logprob).logprob for entry in output.outputs[0].logprobs]
    assert all(-20 < logprob < 0 for logprob in best)


def test_shapes_that_cannot_be_coded_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows of 896: k-quants code 256 together"):
        make_blocks.write(SHAPES["qwen2.5-0.5b"], tmp_path / "x.gguf")
    assert list(tmp_path.iterdir()) == []


# -- turns ---------------------------------------------------------------------------------------------------------


def test_where_tokens_part() -> None:
    assert stored_formats.parted([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 6]]) == [None, 1]


def test_prompts_differ_by_round_and_wrap_round() -> None:
    ids = list(range(1000))
    first, second = (stored_formats.prompt(ids, 980, n) for n in (0, 1))
    assert first[:2] == [37, 38]
    assert second[:2] == [74, 75]
    assert first[-1] == (37 + 979) % 1000
    assert stored_formats.prompt(ids, 4, -1) == [0, 1, 2, 3]


def test_what_one_token_reads(small: Path) -> None:
    """The embedding has a head beside it here, so it is not read."""
    tensors = read_gguf(small).tensors
    beside = tensors["token_embd.weight"].nbytes
    assert stored_formats.read_per_token(read_gguf(small)) == sum(t.nbytes for t in tensors.values()) - beside


def test_engines_without_figures_keep_their_line() -> None:
    assert "not installed" in str(problem(Spec("ik", "q4_0"), "m", Place(Path("/nowhere"))))
    rows = stored_formats.rows(
        {"engines": {"penstock": {"error": "no memory"}, "ik": {"version": "", "start_s": 0.0, "resident": {}}}}
    )
    assert rows[0][:2] == ["penstock", "no memory"]
    assert rows[1][:2] == ["ik", "no round"]


def test_a_comparison_of_engines_that_are_not_real(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    fakes = {
        name: ("fake", {"token_s": 0.001, "name": name, "log": str(log), **more})
        for name, more in {
            "penstock": {},
            "other": {"token_s": 0.002},
            "dies": {"die": 1},
            "tires": {"last": 4},
        }.items()
    }
    monkeypatch.setattr(stored_formats, "CONTESTANTS", fakes)
    out = tmp_path / "out.json"
    asked = ["--files", str(small), "--pairs", "3", "--new", "32", "--out", str(out), "--peers", str(tmp_path)]
    assert stored_formats.main([*asked, "--engines", "penstock,other,dies,tires", "--threads", "1"]) == 0
    (found,) = json.loads(out.read_text())["files"]
    ours, other, dead, tired = (found["engines"][name] for name in ("penstock", "other", "dies", "tires"))
    assert ours["decode_tps"]["median"] > 0
    assert len(ours["rounds"]["decode"]) == 3
    assert other["parted"] == [None, None, None]
    assert other["decode_ratio"]["low"] <= other["decode_ratio"]["value"] <= other["decode_ratio"]["high"]
    assert ours["resident"]["all"] > ours["resident"]["anonymous"] > 1e6
    assert other["decode_ratio"]["value"] > 1, "the other one takes twice as long"
    assert "the process ended" in dead["error"]
    assert "the process ended" in tired["error"]
    assert len(tired["rounds"]["decode"]) == len(tired["parted"]) == 1, "of what it did before its figures stay"
    runs = [line.split()[0] for line in log.read_text().splitlines() if line.endswith("run 1")]
    turns = [name for name in runs[::2] if name in ("penstock", "other")]
    assert turns == ["penstock", "other", "penstock", "other", "other", "penstock", "penstock", "other"]
    assert stored_formats.main([*asked, "--engines", "penstock", "--threads", "1", "--sequences", "3"]) == 0
    (three,) = json.loads(out.read_text())["files"]
    together = three["engines"]["penstock"]["decode_tps"]["median"]
    assert together > 1.5 * ours["decode_tps"]["median"], "of all three"
    shown = [row[0] for row in stored_formats.rows(found)]
    assert shown == ["penstock", "other", "dies", "tires, failed"]
    assert "3 of 3" in capsys.readouterr().out


def test_what_is_asked_wrongly_costs_nothing(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for asked, said in (
        (["--files", str(tmp_path / "no.gguf")], "no.gguf is not there"),
        (["--files", str(small), "--engines", "penstock,vllm"], "there is no engine 'vllm': penstock, llama.cpp, ik"),
        (["--files", str(small), "--new", "8"], "--new is at least 32"),
    ):
        with pytest.raises(SystemExit):
            stored_formats.main(asked)
        assert said in capsys.readouterr().err
