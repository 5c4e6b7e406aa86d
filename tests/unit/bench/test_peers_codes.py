"""Stored formats among the peers' cells: what is written, read by Penstock and by the reference, and judged."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.peers import codes, convert, make_models, online, refcheck, workloads
from benchmarks.peers.engines import CODES, GGUF, Place, Spec, needed_path, options_of, problem
from benchmarks.peers.reference import Reference
from benchmarks.peers.stored_reference import CodesReference, GgufReference

from penstock.core.sampling import SamplingParams
from penstock.launch.llm import LLM

SMALL = make_models.SHAPES["tiny"] | {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A model in bfloat16 and in all forms of codes, in the folder `models`."""
    place = Place(tmp_path_factory.mktemp("peers"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(make_models.SHAPES, "small", SMALL)
        make_models.make("small", place.models)
    for form in (*CODES, "gguf"):
        out, make = convert.plan("small", form, place)
        make()
        assert out.exists()
    return place


def answers(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    llm = LLM(str(path), skip_tokenizer_init=True, num_gpu_blocks_override=32, max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [o.outputs[0].token_ids for o in llm.generate([{"prompt_token_ids": p} for p in prompts], params)]


@pytest.mark.parametrize("form", CODES)
def test_codes_are_near_the_weights(small: Place, form: str) -> None:
    """The scale's half, and what float16 takes of the scale."""
    name = "model.layers.1.mlp.down_proj.weight"
    w, back = Reference(small.model("small")).weight(name), CodesReference(small.model(f"small-{form}")).weight(name)
    assert back.shape == w.shape
    limit = np.abs(w).max() / (7 if form != "awq4" else 7.5) / 2 * 1.1
    assert np.abs(back - w).max() <= limit
    assert np.corrcoef(back.ravel(), w.ravel())[0, 1] > 0.98


def test_shuffled_inputs_have_groups_of_128(small: Place) -> None:
    reference = CodesReference(small.model("small-gptq4-order"))
    order = reference.raw("model.layers.0.mlp.down_proj.g_idx")
    assert sorted(order) == sorted(np.arange(512) // codes.GROUP)
    assert (np.diff(order) < 0).any()


@pytest.mark.parametrize("form", CODES)
def test_penstock_and_the_reference_read_the_same_checkpoint(small: Place, form: str) -> None:
    """Answers of the model before rounding are further away, so it is the codes that are read."""
    prompts = [workloads.single(n, 1, 0, highest=1024)[0] for n in (16, 33)]
    folder = small.model(f"small-{form}")
    reference = CodesReference(folder)

    def verdict(path: Path) -> dict[str, Any]:
        found = list(zip(prompts, answers(path, prompts), strict=True))
        return refcheck.check(reference, found, refcheck.bits_of(form))

    right, other = verdict(folder), verdict(small.model("small"))
    assert right["ok"]
    assert right["mean_gap"] < other["mean_gap"] / 4


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_the_reference_of_a_gguf_file_is_the_one_of_its_checkpoint(tmp_path: Path, family: str) -> None:
    pytest.importorskip("gguf")
    config = {k: v for k, v in SMALL.items() if "window" not in k or family == "qwen2"} | {"model_type": family}
    place = Place(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(make_models.SHAPES, "small", config)
        make_models.make("small", place.models)
    out, make = convert.plan("small", "gguf", place)
    make()
    ids = [workloads.single(19, 1, 0, highest=1024)[0]]
    ours, plain = GgufReference(out), Reference(place.model("small"))
    (a,), (b,) = ours.hidden(ids), plain.hidden(ids)
    np.testing.assert_allclose(ours.logits(a), plain.logits(b), atol=1e-5)


def test_a_cell_of_a_stored_format_is_judged_by_its_own_file(small: Place) -> None:
    path = needed_path(Spec("vllm", "awq4"), "small", small)
    assert path == small.models / "small-awq4"
    assert needed_path(Spec("openvino", "q8_0"), "small", small) == small.models / "small-q8_0.gguf"
    assert "small-q8_0.gguf is missing" in str(problem(Spec("penstock", "q8_0"), "small", small))
    assert {refcheck.bits_of(p) for p in (*GGUF, *CODES)} == {8}
    assert refcheck.bits_of("int4") == 4


def test_the_adapter_of_penstock_loads_what_the_cell_needs(small: Place) -> None:
    """Adapters import nothing of this package, so the rule stands there a second time."""
    file = Path(online.__file__).parent / "adapters" / "penstock_.py"
    tree = ast.parse(file.read_text())
    wanted = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "path_of"]
    wanted_too = [n for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign)]
    scope: dict[str, object] = {"Any": object}
    exec(compile(ast.Module([*wanted_too, *wanted], []), str(file), "exec"), scope)
    for precision in ("bf16", "int8", *GGUF, *CODES):
        path = scope["path_of"](str(small.model("small")), precision)  # type: ignore[operator]
        assert Path(path) == needed_path(Spec("penstock", precision), "small", small)


def test_two_servers_have_a_binary_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_SERVER", "/one")
    monkeypatch.delenv("IK_LLAMA_SERVER", raising=False)
    place = Place(tmp_path)
    assert options_of(Spec("llamacpp", "q8_0"), place, {}) == {"server": "/one", "is_ik": False}
    assert "name it with IK_LLAMA_SERVER" in str(problem(Spec("ik-server", "q8_0"), "m", place))
    monkeypatch.setenv("IK_LLAMA_SERVER", "/two")
    assert options_of(Spec("ik-server", "q8_0"), place, {}) == {"server": "/two", "is_ik": True}


def test_a_server_of_a_stored_format_takes_the_file_as_it_is(small: Place) -> None:
    words = online.command(Spec("penstock", "q4_k_m"), "small", small, 1234, 2, [])
    assert words[words.index("serve") + 1].endswith("small-q4_k_m.gguf")
    assert "--quantization" not in words
