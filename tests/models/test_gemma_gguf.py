"""A real file of an architecture with norms on both sides, windows and two ropes: Gemma 3 270M as Q4_K_M (catalogue
row E21), where it has been fetched (tools/models.py)."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.core.model_spec import Attention
from penstock.families.registry import open_model
from penstock.weights.load import load_weights
from tests.models.test_gguf_architectures import LLAMA_CPP, ROOT
from tests.paged import Paged

GGUF = Path.home() / ".cache" / "penstock" / "gemma-3-270m-q4_k_m.gguf"
pytestmark = pytest.mark.skipif(not GGUF.is_file(), reason=f"{GGUF} is not there: python tools/models.py gemma-3-270m")
TOKENS = 64
PROMPTS = [
    "The capital of France is", "def fibonacci(n):\n", "Once upon a time", "Die Hauptstadt von Deutschland ist",
    "Q: What is 12 times 12?\nA:", "import numpy as np\n",
]  # fmt: skip


@cache
def generated(number: int, tokens: int) -> list[tuple[list[int], list[int], str]]:
    """Ids of the first prompts, ids and text of what follows."""
    llm = LLM(GGUF, max_model_len=128, max_num_seqs=2, threads=2, activation_quantization="none")
    asked = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    try:
        outs = [llm.generate(prompt, asked)[0] for prompt in PROMPTS[:number]]
    finally:
        llm.engine.core.executor.close()
    return [(list(o.prompt_token_ids), list(o.outputs[0].token_ids), o.outputs[0].text) for o in outs]


def test_the_file_is_gemma_3() -> None:
    checkpoint = open_model(GGUF)
    mixers = [layer.mixer for layer in checkpoint.spec.layers]
    assert (checkpoint.spec.family, len(mixers), checkpoint.spec.tie_embeddings) == ("gemma3_text", 18, True)
    windows = [m.window for m in mixers if isinstance(m, Attention)]
    thetas = [m.rope.theta for m in mixers if isinstance(m, Attention) and m.rope is not None]
    assert windows == [512, 512, 512, 512, 512, None] * 3
    assert thetas == [1e4, 1e4, 1e4, 1e4, 1e4, 1e6] * 3
    assert (checkpoint.spec.bos_token_id, checkpoint.spec.eos_token_ids) == (2, (1,))


def test_it_tells_sense() -> None:
    (ids, _, _), *_ = found = generated(3, 16)
    texts = [text for _, _, text in found]
    assert ids == [2, 818, 5279, 529, 7001, 563]
    assert "largest city in France" in texts[0]
    assert "if n == 0:" in texts[1]
    assert "little girl named" in texts[2]


def test_it_goes_on_as_llama_cpp_does(tmp_path: Path) -> None:
    """llama.cpp rounds rows to 8 bits, Penstock keeps them here: where the two part, float32 must say what Penstock
    does, or hold both tokens for nearly the same."""
    python = os.environ.get(LLAMA_CPP)
    if not python:
        pytest.skip(f"{LLAMA_CPP} does not name a Python with llama-cpp-python")
    checkpoint = open_model(GGUF)
    weights: Any = load_weights(checkpoint, checkpoint.spec, "float32")
    tool, same = ROOT / "tools" / "oracles" / "llama_cpp_logits.py", 0
    for prompt, tokens, _ in generated(len(PROMPTS), TOKENS):
        ids = ",".join(map(str, prompt))
        command = [python, tool, GGUF, tmp_path / "out.npz", "--ids", ids, "--greedy", str(TOKENS)]
        subprocess.run(command, check=True, env=dict(os.environ))
        theirs = np.load(tmp_path / "out.npz")["tokens"].tolist()
        at = next((i for i in range(TOKENS) if tokens[i] != theirs[i]), None)
        if at is None:
            same += 1
            continue
        exact = Paged(checkpoint.spec, weights, max_model_len=128).one_go("a", [*prompt, *tokens[:at]])[-1]
        assert exact[tokens[at]] > exact.max() - 0.05
    assert same > 0
