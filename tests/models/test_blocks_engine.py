"""GGUF blocks through the whole engine: a file of blocks says what a file of their values says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.backends import BACKENDS
from penstock.backends.native.backend import NOT_BUILT
from penstock.config import from_kwargs
from penstock.core.matrix_format import NONE, codes_matrices
from penstock.eval.scorer import load, make_scorer
from penstock.families.registry import open_model
from penstock.ops.native.library import best_library
from penstock.plan.probe import probe
from penstock.plan.resolve import resolve
from tests.blocks import write_blocks

MIXES: dict[str, dict[str, Any]] = {
    "as Q4_K_M": {"kinds": {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"}},
    "as IQ4_XS, tied": {"kinds": {"": "IQ4_XS", "token_embd": "Q6_K", "attn_k": "Q5_K"}, "tied": True},
    "as IQ2_M": {"kinds": {"": "IQ2_S", "attn_v": "Q4_0", "ffn_down": "IQ3_S", "output": "Q5_K"}},
    "experts of MXFP4": {"kinds": {"": "Q8_0", "_exps": "MXFP4"}, "experts": 3},
    "experts of three formats": {
        "kinds": {"": "Q4_K", "ffn_up": "Q5_K", "ffn_down": "Q6_K", "output": "Q6_K"},
        "experts": 4,
    },
    "experts of NVFP4 with scales": {"kinds": {"": "NVFP4", "token_embd": "Q8_0"}, "factor": 0.2, "experts": 3},
    "NVFP4 with scales": {"kinds": {"": "NVFP4", "token_embd": "Q8_0"}, "factor": 0.2},
}
NATIVE = pytest.mark.skipif(best_library() is None, reason=NOT_BUILT)
SMALL: dict[str, Any] = {
    "skip_tokenizer_init": True, "num_gpu_blocks_override": 32, "max_num_seqs": 4, "threads": 1,
    "activation_quantization": "none",
}  # fmt: skip


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
    ("experts of MXFP4", "ref"), pytest.param("experts of MXFP4", "native", marks=NATIVE),
    pytest.param("experts of three formats", "native", marks=NATIVE),
    pytest.param("experts of NVFP4 with scales", "native", marks=NATIVE), ("NVFP4 with scales", "ref"),
    pytest.param("NVFP4 with scales", "native", marks=NATIVE),
])  # fmt: skip
def test_blocks_and_their_values_say_the_same(tmp_path: Path, mix: str, ops: str) -> None:
    write_blocks(tmp_path / "m.gguf", plain=tmp_path / "plain.gguf", **MIXES[mix])
    want = tokens(started(tmp_path / "plain.gguf", ops="ref", dtype="float32"))
    assert len({tuple(t) for t in want}) > 2
    llm = started(tmp_path / "m.gguf", ops=ops, dtype="float32")
    assert tokens(llm) == want
    checkpoint = open_model(tmp_path / "m.gguf")
    kept = codes_matrices(checkpoint.spec).keys() & checkpoint.stored.keys()
    assert len(kept) >= 8
    assert set(llm.engine.plan.held.matrices) == kept


@NATIVE
@pytest.mark.parametrize("mix", ["as Q4_K_M", "as IQ4_XS, tied", "as IQ2_M"])
def test_weights_take_no_more_than_their_file(tmp_path: Path, mix: str) -> None:
    """Panels, tables, norms: all that is held, whatever of the file was mapped."""
    write_blocks(tmp_path / "m.gguf", **MIXES[mix])
    config = from_kwargs(model=str(tmp_path / "m.gguf"), ops="native", skip_tokenizer_init=True)
    model = load(config)
    forward: Any = make_scorer(model, NONE).forward
    packed = {n for name in forward.matrices for n in name.split()}
    held = sum(m.num_bytes for m in forward.matrices.values())
    held += sum(w.nbytes for name, w in model.weights.items() if name not in packed)
    in_file = sum(ref.tensor.nbytes for ref in open_model(tmp_path / "m.gguf").weights.values())
    assert "embed" in packed
    assert 0.9 * in_file < held <= 1.06 * in_file
    plan = resolve(
        config, model.spec, probe(), stored=model.stored, traits=BACKENDS.traits("native")
    )  # fmt: skip
    assert abs(plan.weight_bytes - held) <= 0.02 * held, "what a plan counts"
