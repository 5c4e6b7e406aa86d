"""What comes with the package: nano runs without a MODEL being named, fits its size, and writes words."""

from __future__ import annotations

import io
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.base.errors import ConfigError
from penstock.cli.main import main
from penstock.launch.bundled import DEFAULT, bundled_model, bundled_names
from penstock.launch.hub import local_path


def test_nano_is_there_and_small_enough_to_ship() -> None:
    folder = bundled_model(DEFAULT)
    assert folder is not None
    assert bundled_names() == ["nano", "pico"]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 16 * 2**20
    assert (folder / "README.md").is_file(), "a model comes with its card"
    assert bundled_model("../config") is None
    assert bundled_model("nosuch") is None


def test_a_name_on_disk_wins_and_a_revision_makes_no_sense(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_path("nano") == bundled_model("nano")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nano").mkdir()
    assert str(local_path("nano")) == "nano"
    monkeypatch.chdir("/")
    with pytest.raises(ConfigError, match="revision"):
        local_path("nano", revision="main")


def test_run_and_chat_take_nano_when_no_model_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert main(["run", "-p", "Once upon a time", "--max-tokens", "30", "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    assert "this is nano" in err
    assert len(set(out.split())) > 8, "words, not one word again and again"
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/exit\n"))
    assert main(["chat", "--max-tokens", "12", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip()


def test_its_greedy_text_does_not_depend_on_company() -> None:
    llm = LLM("nano", max_num_seqs=4)
    prompts = ["Once upon a time", "The little girl", '"I am not afraid," said', "What is the pass key?"]
    params = SamplingParams(max_tokens=24, temperature=0.0)
    together = [o.outputs[0].text for o in llm.generate(prompts, params)]
    assert together == [llm.generate([p], params)[0].outputs[0].text for p in prompts]


def test_pico_can_draft_for_nano() -> None:
    nano, pico = LLM("nano", max_num_seqs=2), LLM("pico", max_num_seqs=2)
    assert nano.engine.spec.vocab_size == pico.engine.spec.vocab_size
    assert nano.get_tokenizer().encode("The cat sat.") == pico.get_tokenizer().encode("The cat sat.")
    assert pico.engine.plan.weight_bytes < 0.2 * nano.engine.plan.weight_bytes


def test_nano_finds_what_it_was_told() -> None:
    """The skill that measurements of memory rely on: a pass key far back in the text."""
    story = "She went home and sat by the fire. The cat slept. It was a cold night. " * 20
    prompt = f"The pass key is 48213. Remember it. {story}What is the pass key? The pass key is"
    out = LLM("nano", max_num_seqs=2).generate([prompt], SamplingParams(max_tokens=8, temperature=0.0))
    assert out[0].outputs[0].text.strip().startswith("48213")


def test_C82_the_bundled_weights_in_hugging_face_say_the_same() -> None:
    """Trained weights of the Llama kind that every clone has: log-probabilities within 1e-3, greedy text equal."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = bundled_model("nano")
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    llm = LLM("nano", dtype="float32", ops="ref", max_num_seqs=2)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    try:
        for prompt in ("Once upon a time", '"I am not afraid," said the boy. "Are you?"'):
            (out,) = llm.generate([prompt], params)
            ids, text = out.prompt_token_ids, list(out.outputs[0].token_ids)
            with torch.no_grad():
                logp = model(torch.tensor([[*ids, *text]])).logits[0].double().log_softmax(-1)
            assert logp[len(ids) - 1 : -1].argmax(-1).tolist() == text
            want = [float(logp[i, token]) for i, token in enumerate(ids[1:])]
            got = [entry[token].logprob for entry, token in zip(out.prompt_logprobs[1:], ids[1:], strict=True)]
            assert got == pytest.approx(want, abs=1e-3)
            assert max(want) - min(want) > 1
    finally:
        torch.set_num_threads(before)
