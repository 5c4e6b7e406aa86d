"""GGUF blocks through the whole engine: a file of blocks says what a file of their values says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.backends.native.backend import NOT_BUILT
from penstock.core.matrix_format import row_matrices
from penstock.families.registry import open_model
from penstock.ops.native.library import best_library
from tests.blocks import write_blocks

MIXES: dict[str, dict[str, Any]] = {
    "as Q4_K_M": {"kinds": {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"}},
    "as IQ4_XS, tied": {"kinds": {"": "IQ4_XS", "token_embd": "Q6_K", "attn_k": "Q5_K"}, "tied": True},
    "as IQ2_M": {"kinds": {"": "IQ2_S", "attn_v": "Q4_0", "ffn_down": "IQ3_S", "output": "Q5_K"}},
    "experts of MXFP4": {"kinds": {"": "Q8_0", "_exps": "MXFP4"}, "experts": 3},
    "NVFP4 with scales": {"kinds": {"": "NVFP4", "token_embd": "Q8_0"}, "factor": 0.2},
}
NATIVE = pytest.mark.skipif(best_library() is None, reason=NOT_BUILT)
SMALL: dict[str, Any] = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 32, "max_num_seqs": 4, "threads": 1}


def started(path: Path, **more: Any) -> LLM:
    return LLM(path, **SMALL, **more)


def tokens(llm: LLM) -> list[list[int]]:
    rng = random.Random(3)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 40) for _ in range(n)]} for n in (1, 3, 8, 13)]
    found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
    return [output.outputs[0].token_ids for output in found]


@pytest.mark.parametrize(("mix", "ops"), [
    ("as Q4_K_M", "ref"), ("as Q4_K_M", "blas"), pytest.param("as Q4_K_M", "native", marks=NATIVE),
    ("as IQ4_XS, tied", "ref"), pytest.param("as IQ4_XS, tied", "native", marks=NATIVE), ("as IQ2_M", "ref"),
    ("experts of MXFP4", "ref"), ("NVFP4 with scales", "ref"),
])  # fmt: skip
def test_blocks_and_their_values_say_the_same(tmp_path: Path, mix: str, ops: str) -> None:
    write_blocks(tmp_path / "m.gguf", plain=tmp_path / "plain.gguf", **MIXES[mix])
    want = tokens(started(tmp_path / "plain.gguf", ops="ref", dtype="float32"))
    assert len({tuple(t) for t in want}) > 2
    llm = started(tmp_path / "m.gguf", ops=ops, dtype="float32")
    assert tokens(llm) == want
    checkpoint = open_model(tmp_path / "m.gguf")
    kept = row_matrices(checkpoint.spec).keys() & checkpoint.stored.keys() - {"embed"}
    assert len(kept) >= 7
    assert set(llm.engine.plan.held.matrices) == (set() if ops == "native" else kept)


@NATIVE
def test_native_kernels_have_the_values_in_16_bits(tmp_path: Path) -> None:
    """The same as before blocks could stay blocks, not exact values in float32."""
    write_blocks(tmp_path / "m.gguf", MIXES["as Q4_K_M"]["kinds"])
    plan = started(tmp_path / "m.gguf", ops="native").engine.plan
    assert (plan.held.dtype, dict(plan.held.matrices)) == ("bfloat16", {})
    (said,) = [d for d in plan.decisions if d.name == "weights"]
    assert said.value == "bfloat16"
