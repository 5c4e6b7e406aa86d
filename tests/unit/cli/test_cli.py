"""The command line as a person types it: words, exit codes, and that a process of its own says the same as `main`."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import __version__
from penstock.backends.native.backend import NOT_BUILT
from penstock.cli import doctor
from penstock.cli.main import COMMANDS, main
from penstock.core.model_spec import weight_shapes
from penstock.ops.native.library import best_library
from tests.command import penstock, process
from tests.shared import shared


def test_version_and_help() -> None:
    assert process("--version").stdout == f"penstock {__version__}\n"
    shown = process("--help")
    assert shown.returncode == 0
    assert "run" in shown.stdout
    assert "doctor" in shown.stdout
    assert penstock().returncode == 2


def test_an_interrupt_while_a_class_is_made_is_one(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    class Interrupted:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    def make(_: Any) -> int:
        type("Made", (), {"field": Interrupted()})
        return 0

    monkeypatch.setattr(doctor, "doctor", make)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err.strip() == ""


def test_a_process_ends_as_main_returns() -> None:
    """Most tests here call `main`: that stands for a process, streams and status and all."""
    model = str(shared("models", "stories260K"))
    for args, status in (
        (["run", model, "--prompt", "Once", "--max-num-sequences", "3"], 2),
        (["run", model, "--prompt", "Once", "--temperature", "-1"], 1),
        (["run", model, "--prompt", "Once", "--temperature", "0", "--max-tokens", "9"], 0),
    ):
        real, here = process(*args), penstock(*args)
        assert (real.returncode, real.stdout, real.stderr) == (status, here.stdout, here.stderr)
        assert here.returncode == status


def test_run_writes_the_recorded_text() -> None:
    reference = shared("models", "stories260K", "reference_greedy.txt").read_text(encoding="utf-8")
    model = str(shared("models", "stories260K"))
    done = process("run", model, "--prompt", "Once upon a time", "--temperature", "0", "--max-tokens", "100", "--stats")
    assert done.returncode == 0
    text = done.stdout.rstrip("\n")
    assert len(text) > 150
    assert reference.startswith(text)
    assert "generated 100 tokens" in done.stderr
    piped = process("run", model, "--temperature", "0", "--max-tokens", "100", stdin="Once upon a time")
    assert piped.stdout == done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--temperature", "hot"], "not a number"),
        (["--top-p", "1.1"], "top_p"),
        (["--top-k", "1000000000"], "top_k"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--max-tokens", "1e99"], "max_tokens"),
        (["--max-tokens", "513"], "512"),
        (["--n", "1000000000"], "n must"),
        (["--min-tokens", "9", "--max-tokens", "3"], "min_tokens"),
        (["--sampling-seed", str(2**64)], "seed"),
        (["--stop", ""], "stop"),
        (["--prefix-cache", "magic"], "radix"),
        (["--max-model-len", "513"], "512"),
        (["--max-num-sequences", "3"], "max-num-seqs"),
        (["--chat"], "chat template"),
    ],
)
def test_bad_input_is_one_line_that_names_what_to_change(args: list[str], says: str) -> None:
    done = penstock("run", str(shared("models", "stories260K")), "--prompt", "Once", *args)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("penstock: error: ")
    assert says in lines[0]


def test_a_model_that_is_not_there_is_one_line() -> None:
    for name in ("/nowhere/at/all", "org/some-model", ""):
        done = penstock("run", name, "--prompt", "x")
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1


def test_empty_prompt_is_refused() -> None:
    done = penstock("run", str(shared("models", "stories260K")), stdin="")
    assert done.returncode == 1
    assert "prompt" in done.stderr


def test_only_the_flags_of_the_command_are_suggested() -> None:
    """Others have flags of that name, which is no help here."""
    for args, says in (
        (["run", "--max-num-seq", "3"], "did you mean --max-num-seqs?"),
        (["run", "--port", "3"], "unrecognized arguments: --port ("),
        (["run", "--served-model-nam", "x"], "unrecognized arguments: --served-model-nam ("),
        (["serve", "--served-model-nam", "x"], "did you mean --served-model-name?"),
        (["bench", "latency", "--input-ln", "3"], "did you mean --input-len?"),
        (["bench", "latency", "--api-keey", "3"], "unrecognized arguments: --api-keey ("),
        (["serv"], "there is no command serv; did you mean serve?"),
        (["--log-levle", "debug", "run"], "did you mean --log-level?"),
    ):
        done = penstock(*args)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert says in done.stderr
    # What stands behind a flag that nobody knows may be a key.
    assert "sk-1" not in penstock("serve", "--api-keey", "sk-1").stderr + penstock("serve", "--api-keey=sk-1").stderr


def test_explain_says_where_settings_come_from_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded: the model has no weights."""
    monkeypatch.setenv("PENSTOCK_MAX_NUM_SEQS", "3")
    monkeypatch.setenv("PENSTOCK_API_KEY", "sk-secret")
    done = penstock("serve", "nano", "--explain", "-c", "512", "--admin-api-key", "sk-admin")
    assert done.returncode == 0
    assert "max_num_seqs = 3: given by PENSTOCK_MAX_NUM_SEQS\n" in done.stdout
    assert "max_model_len = 512: given by --ctx-size\n" in done.stdout
    assert "api_key = ***: given by PENSTOCK_API_KEY\n" in done.stdout
    assert "max_num_batched_tokens = 512: the default" in done.stdout
    assert "sk-" not in done.stdout + done.stderr
    monkeypatch.setenv("PENSTOCK_PORT", "9")
    done = penstock("run", "nano", "--explain")
    assert done.returncode == 0
    assert "port" not in done.stdout
    assert "given by PENSTOCK_MAX_NUM_SEQS" in done.stdout


def test_explain_reads_no_weights(tmp_path: Path) -> None:
    folder = _hf_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    done = penstock("serve", str(folder), "--explain")
    assert done.returncode == 0, done.stderr
    assert "max_model_len = " in done.stdout


def test_every_command_says_how_it_is_called() -> None:
    for name in COMMANDS:
        done = penstock(name, "--help")
        assert done.returncode == 0
        assert f"penstock {name}" in done.stdout
        done = penstock(name, "--no-such-thing")
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1


def test_the_doctor_begins_with_what_a_user_needs() -> None:
    done = penstock("doctor")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert f"penstock {__version__}" in lines[0]
    assert "GB/s" in lines[0]
    assert lines[1].startswith("GPU: ")
    assert "speed was measured on one H100 (docs/guides/gpu.md)" in lines[1]
    said = done.stdout
    order = ("What can run here", "Models by name:", "Other hosts, for engines", "Missing:", "Next: penstock serve")
    assert [said.index(words) for words in order] == sorted(said.index(words) for words in order)
    assert len(lines) < 26
    assert "radix" not in said


def test_doctor_lists_the_parts_and_explains_a_model() -> None:
    done = penstock("doctor", str(shared("models", "stories260K")), "--all")
    assert done.returncode == 0
    for word in ("radix", "fcfs", "llama", "260,032", "max_model_len"):
        assert word in done.stdout
    library = best_library()
    kernels = NOT_BUILT if library is None else f"native kernels for {library.pst_isa_name().decode()}"
    said = " ".join(done.stdout.split())
    assert kernels in said
    assert ("the reference operations run token by token" in said) == (library is None)


def _hf_folder(folder: Path) -> Path:
    """A minimal Llama folder whose every file is right."""
    import numpy as np
    from safetensors.numpy import save_file

    from penstock.families.registry import find_family

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32, "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32",
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    spec = find_family(config).spec(config)
    names = find_family(config).weight_map(spec)
    tensors = {names[k]: np.ones(shape, np.float32) for k, shape in weight_shapes(spec).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def _edit(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def _huge_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes((2**63).to_bytes(8, "little") + path.read_bytes()[8:])


def _nan(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4:] = struct.pack("<f", float("nan"))
    path.write_bytes(bytes(data))


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")


HOSTILE: list[tuple[str, Callable[[Path], None], str]] = [
    ("truncated", _truncate, "model.safetensors"),
    ("header of 2^63 bytes", _huge_header, "model.safetensors"),
    ("NaN weights", _nan, "NaN"),
    ("pickle only", _pickle, "safetensors"),
    ("unknown architecture with code", lambda f: _edit(f, architectures=["Evil"], auto_map={"x": "y"}), "never run"),
    ("quantised", lambda f: _edit(f, quantization_config={"quant_method": "gptq"}), "gptq"),
    ("unknown rope", lambda f: _edit(f, rope_scaling={"rope_type": "spiral", "factor": 2.0}), "spiral"),
    ("unknown field", lambda f: _edit(f, attention_magic=0.5), "attention_magic"),
    ("not JSON", lambda f: (f / "config.json").write_text("{") and None, "config.json"),
    ("too many layers", lambda f: _edit(f, num_hidden_layers=2), "lacks"),
    ("other width", lambda f: _edit(f, intermediate_size=25), "shape"),
]


@pytest.mark.parametrize(("what", "harm", "says"), HOSTILE, ids=[h[0] for h in HOSTILE])
def test_broken_or_hostile_model_folders_are_one_clear_sentence(
    tmp_path: Path, what: str, harm: Callable[[Path], None], says: str
) -> None:
    folder = _hf_folder(tmp_path / "model")
    harm(folder)
    done = penstock("run", str(folder), "--prompt", "x")
    assert done.returncode == 1, what
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert says in done.stderr


def test_the_folder_of_these_tests_is_fine_when_nothing_harms_it(tmp_path: Path) -> None:
    done = penstock("run", str(_hf_folder(tmp_path / "model")), "--prompt", "x")
    assert "tokenizer" in done.stderr, "it has no tokenizer.json, and that alone must be what is wrong"
    done = penstock("doctor", str(tmp_path / "model"))
    assert done.returncode == 0


def test_run_compresses_its_prompt() -> None:
    given = ("run", "nano", "--prompt", "The old house stood there. " * 8, "--max-tokens", "2", "--temperature", "0",
             "--max-model-len", "64", "--num-gpu-blocks-override", "8", "--stats")  # fmt: skip
    plain = penstock(*given)
    assert "prompt 49 tokens" in plain.stderr
    done = penstock(*given, "--prompt-compression", '{"method": "random", "rate": 0.5, "keep_last": 0}')
    assert done.returncode == 0
    assert "prompt 25 tokens" in done.stderr
    for text in ("half", "[1]"):
        bad = penstock(*given, "--prompt-compression", text)
        assert bad.returncode != 0
        assert "--prompt-compression must be a JSON object" in bad.stderr
