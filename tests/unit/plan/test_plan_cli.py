"""`penstock plan` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from penstock.plan.devices import PRESETS
from tests.command import penstock, process
from tests.shared import shared

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def plan(*args: str) -> CompletedProcess[str]:
    return penstock("plan", *args)


def as_json(*args: str, status: int = 0) -> dict[str, Any]:
    done = plan(*args, "--json")
    assert done.returncode == status, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def test_a_config_alone_is_enough_as_a_folder_and_as_a_file(folder: Path) -> None:
    a = as_json(str(folder), "--memory", "4GiB")
    b = as_json(str(folder / "config.json"), "--memory", "4GiB")
    assert a.pop("model") != b.pop("model")
    assert a == b
    assert (a["num_layers"], a["max_position"], a["longest_context"], a["refusal"]) == (2, 4096, 4096, None)
    assert a["weight_bytes"]["float32"] == 4 * a["num_params"]
    assert a["available_bytes"] == 4 * 1024**3


def test_the_tables_tell_what_the_report_holds(folder: Path) -> None:
    args = ("plan", str(folder), "--explain", "--memory", "4GiB")  # what is free changes all the time
    done = process(*args)
    assert (done.returncode, done.stdout) == (0, penstock(*args).stdout), done.stderr
    assert done.stderr == ""
    for words in ("2 layers", "weights, float32", "KV per token", "4,096", "decode x64", "prefill",
                  "max_num_batched_tokens", "read_bytes_per_s", "all that the model was made for"):  # fmt: skip
        assert words in done.stdout, words
    assert "only" not in plan(str(folder)).stdout, "this machine runs it"


def test_it_plans_for_the_operations_that_would_run(folder: Path) -> None:
    ops = {d["name"]: d["value"] for d in as_json(str(folder))["decisions"]}.get("ops")
    wanted = "cpu-ref" if ops == "ref" else "native-"
    assert as_json(str(folder))["device"]["name"].startswith(wanted)
    assert as_json(str(folder), "--ops", "ref")["device"]["name"] == "cpu-ref"
    if ops == "native":
        one, two = (as_json(str(folder), "--threads", n)["device"]["flops_per_s"]["float32"] for n in "12")
        assert two == 2 * one


def test_another_device_with_its_memory_and_dtype(folder: Path) -> None:
    r = as_json(str(folder), "--device", "l4")
    assert (r["device"]["name"], r["dtype"], r["available_bytes"]) == ("l4", "bfloat16", 23034 * 1024**2)
    assert as_json(str(folder), "--device", "l4", "--memory", "1GiB")["available_bytes"] == 1024**3
    (folder / "own.toml").write_text(
        'name = "own"\nread_bytes_per_s = 1e9\nhost_copy_bytes_per_s = 1e9\nstep_overhead_s = 0.5\n'
        "memory_bytes = 2_000_000_000\nflops_per_s = {bfloat16 = 1e9}\n"
    )
    r = as_json(str(folder), "--device", str(folder / "own.toml"), "--context", "10")
    assert (r["available_bytes"], r["speeds"][1]["context"], r["speeds"][1]["limit"]) == (2 * 10**9, 10, "overhead")
    assert "CPUs only" in plan(str(folder), "--device", "l4").stdout


def test_help_names_every_device_and_takes_every_engine_flag() -> None:
    text = " ".join(plan("--help").stdout.split())
    for word in (*PRESETS, "--max-model-len", "--block-size", "--config", "--json", "--explain"):
        assert word in text, word


def test_what_does_not_fit_is_exit_status_1_with_the_change_that_helps(folder: Path) -> None:
    args = (str(folder), "--memory", "1GiB", "--kv-cache-memory-bytes", "64K", "--dtype", "float32")
    done = plan(*args)
    assert done.returncode == 1
    assert "One sequence alone can have up to 512 tokens" in done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert "use max_model_len 512 (or less)" in done.stderr
    assert plan(*args, "--max-model-len", "512").returncode == 0
    refused = as_json(*args, status=1)
    assert refused["refusal"] in done.stderr
    assert refused["longest_context"] == 512


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--device", "h300"], "h100-sxm"),
        (["--memory", "0"], "--memory"),
        (["--memory", "lots"], "lots"),
        (["--context", "0"], "--context"),
        (["--prefix-cache", "magic"], "radix"),
        (["--max-model-len", "5000"], "4096"),
        (["--block-sise", "3"], "--block-size"),
    ],
)
def test_bad_input_is_one_line(folder: Path, args: list[str], says: str) -> None:
    done = plan(str(folder), *args)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert says in done.stderr


def test_models_that_cannot_be_planned_are_one_sentence(folder: Path) -> None:
    def refusal(path: Path | str = folder, **changes: Any) -> str:
        (folder / "config.json").write_text(json.dumps(TINY | changes))
        done = plan(str(path))
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
        return done.stderr

    assert "which Penstock does not know" in refusal(architectures=["NewForCausalLM"], model_type="new")
    assert "attention_magic" in refusal(attention_magic=0.5)
    assert "'gptq'" in refusal(quantization_config={"quant_method": "gptq"})
    assert "there is no model" in refusal(folder / "nothing.json")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "W4A8_AWQ"}}')
    assert "W4A8_AWQ" in refusal()
    assert "W4A8_AWQ" in refusal(folder / "config.json")


def test_a_folder_with_weights_is_checked_as_it_is_before_a_run(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    done = plan(str(folder))
    assert done.returncode == 1
    assert "model.safetensors" in done.stderr
    assert plan(str(folder / "config.json")).returncode == 0, "the config alone can still be planned for"


def test_a_plan_for_several_devices(folder: Path) -> None:
    args = (str(folder), "--device", "l4", "--devices", "4", "--link-bandwidth", "16g", "--link-latency-us", "20")
    done = plan(*args)
    assert done.returncode == 0, done.stderr
    for words in ("of 4 x l4 with 22.5 GiB each", "on the wire", "tokens/s: a batch of 64", "Limit: ", "not measured"):
        assert words in " ".join(done.stdout.split()), words
    found = as_json(*args, "--context", "400", "--max-num-seqs", "9")
    assert found["load"] == {"prompt": 300, "output": 100, "waiting": 9}
    assert found["stages"][-1]["last"] == 2
    assert found["tokens_per_s"] == pytest.approx(found["batch"] / found["step_s"])
    refused = plan(*args, "--device-memory", "100")
    assert refused.returncode == 1
    assert "no plan fits: on 4 devices of 100 bytes" in refused.stderr
    assert "--devices: must be at least 1, not 0" in plan(*args[:-6], "--devices", "0").stderr
    assert "every 1e-06 s" in plan(*args, "--max-token-ms", "0.001").stderr


def test_a_llama2c_model() -> None:
    r = as_json(str(shared("models", "stories260K")))
    assert (r["family"], r["num_params"], r["longest_context"]) == ("llama", 260_032, 512)


PARAMETERS = {
    "TinyLlama--TinyLlama-1.1B-Chat-v1.0": 1.1e9, "meta-llama--Llama-3.2-3B": 3.2e9,
    "meta-llama--Llama-3.1-8B": 8.0e9, "meta-llama--Meta-Llama-3.1-8B": 8.0e9,
    "meta-llama--Meta-Llama-3.1-70B": 70.6e9, "meta-llama--Meta-Llama-3.1-405B": 405.9e9,
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_real_llamas_on_an_h200(name: str) -> None:
    path = str(shared("data", "configs", "model", f"{name}.config.json"))
    small = PARAMETERS[name] < 1e10
    r = as_json(path, "--device", "h200", status=0 if small else 1)
    assert r["num_params"] == pytest.approx(PARAMETERS[name], rel=0.02)
    if small:
        prefill, *decodes = r["speeds"]
        assert 0 < decodes[0]["tokens_per_s"] < decodes[1]["tokens_per_s"] < decodes[2]["tokens_per_s"]
        assert (prefill["limit"], decodes[0]["limit"]) == ("compute", "memory")
        # Reading the weights once is the floor of a decode step.
        assert decodes[0]["seconds"] > 0.9 * r["weight_bytes"][r["dtype"]] / 4.8e12
    elif "405B" in name:
        assert "the weights take" in r["refusal"]
    else:
        assert 0 < r["longest_context"] < 131072, "bfloat16 weights leave room for a little"
