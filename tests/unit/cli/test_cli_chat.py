"""`penstock chat`: turns, commands, refusals, with a tiny model that has a chat template."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.cli.main import main
from penstock.core.sampling import SamplingParams
from penstock.launch.llm import LLM

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, every byte a token."""
    path = tmp_path_factory.mktemp("chatty")
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}))
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=257, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def talk(folder: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    return main(["chat", str(folder), "--temperature", "0", "--max-tokens", "8", *flags])


def test_turns_build_on_each_other_and_commands_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert (
        talk(folder, ["/stats", "hello", "/stats", "again", "/stats", "/reset", "hello", "/nonsense"], monkeypatch) == 0
    )
    out, err = capsys.readouterr()
    answers = out.splitlines()
    assert len(answers) == 3
    assert answers[0] == answers[2], "after /reset the same question gets the same greedy answer"
    assert "nothing has been said yet" in err
    assert "begun anew" in err
    assert "/reset begins anew" in err, "an unknown command shows what there is"
    sizes = [int(line.split()[1]) for line in err.splitlines() if line.startswith("prompt ")]
    assert sizes[1] > sizes[0] + 20, "the second turn's prompt holds the first turn"


def test_the_second_turn_finds_the_first_in_the_prefix_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert (
        talk(folder, ["a long first question, over one block", "and?", "/stats"], monkeypatch, "--block-size", "8") == 0
    )
    last = [line for line in capsys.readouterr().err.splitlines() if line.startswith("prompt ")][-1]
    assert int(last.split("(")[1].split()[0]) >= 40


def test_a_question_that_does_not_fit_is_told_and_forgotten(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert talk(folder, ["x" * 400, "hello", "/exit", "never read"], monkeypatch) == 0
    out, err = capsys.readouterr()
    assert "penstock: error:" in err
    assert len(out.splitlines()) == 1


def test_a_system_message_changes_the_answer(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    talk(folder, ["hello", "/system Be brief.", "hello", "/system", "hello"], monkeypatch)
    plain, with_system, without = capsys.readouterr().out.splitlines()
    assert plain == without != with_system
    talk(folder, ["hello"], monkeypatch, "--system", "Be brief.")
    assert capsys.readouterr().out.splitlines() == [with_system]


@pytest.mark.parametrize(
    ("generation", "flags", "expected"),
    [
        (None, [], (0.7, 0.95, 0.05)), ({"temperature": 0.3, "top_k": 5}, [], (0.3, 1.0, 0.0)),
        (None, ["--generation-config", "vllm"], (1.0, 1.0, 0.0)), (None, ["--top-p", "0.5"], (1.0, 0.5, 0.0)),
    ],
)  # fmt: skip
def test_run_chat_and_llm_sample_alike_where_nothing_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, generation: Any, flags: Any,
    expected: tuple[float, ...],
) -> None:  # fmt: skip
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    (model / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps(generation))
    seen: list[SamplingParams] = []
    whole = LLM._stream

    def spy(self: LLM, request: Any, text: Any, params: SamplingParams) -> Any:
        seen.append(params)
        return whole(self, request, text, params)

    monkeypatch.setattr(LLM, "_stream", spy)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["chat", str(model), "--max-tokens", "2", *flags]) == 0
    assert main(["run", str(model), "-p", "hello", "--max-tokens", "2", *flags]) == 0
    assert [(p.temperature, p.top_p, p.min_p, p.max_tokens) for p in seen] == [(*expected, 2)] * 2
    capsys.readouterr()
    if "--top-p" not in flags:
        assert main(["run", str(model), "--explain", *flags]) == 0
        assert "sampling_defaults = " in capsys.readouterr().out
    if "--top-p" not in flags:
        own = {} if not flags else {"generation_config": "vllm"}
        params = LLM(str(model), **own).get_default_sampling_params()
        assert (params.temperature, params.top_p, params.min_p, params.max_tokens) == (*expected, 16)
