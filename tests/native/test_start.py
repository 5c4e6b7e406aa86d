"""Native kernels from the front door: which are chosen, what is refused, and weights that are packed only once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.backends.native import backend as launching
from penstock.backends.native import forward
from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.launch.build import info_of
from penstock.launch.bundled import DEFAULT, bundled_model
from tests.command import penstock
from tests.native.running import pytestmark_native

pytestmark = pytestmark_native
NANO = str(bundled_model(DEFAULT))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def start(**more: Any) -> LLM:
    return LLM(NANO, num_gpu_blocks_override=64, max_num_seqs=4, **more)


def tokens(llm: LLM) -> list[int]:
    return [int(t) for t in llm.generate(["Once upon a time"], GREEDY)[0].outputs[0].token_ids]


def decision(llm: LLM, name: str) -> Any:
    return next(d for d in llm.engine.decisions if d.name == name)


def said(llm: LLM) -> str:
    return info_of(llm.engine, from_kwargs(model=NANO)).packed_file


def test_native_is_chosen_and_says_why() -> None:
    llm = start()
    assert decision(llm, "ops").value == "native"
    assert decision(llm, "dtype").value == "bfloat16"
    assert tokens(llm) == tokens(start(threads=1)) == tokens(start(threads=3))


def test_reference_and_native_write_the_same() -> None:
    assert tokens(start(dtype="float32")) == tokens(start(dtype="float32", ops="ref"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quantization": "int9"}, "int8-w8a8"),
        ({"quantization": "int4-w4a8:17"}, "32|64|128"),
        ({"quantization": "int8-w8a8", "ops": "ref"}, "ops is ref"),
        ({"ops": "native", "attention_backend": "ref-online"}, "attention_backend"),
        ({"threads": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("|", r"\|")):
        start(**options)


def test_without_kernels_it_runs_slowly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "best_library", lambda: None)
    llm = start()
    assert decision(llm, "ops").value == "ref"
    assert "C++17" in decision(llm, "ops").why
    with pytest.raises(ConfigError, match=r"C\+\+17"):
        start(ops="native")


@pytest.mark.parametrize("scheme", ["none", "int4-w4a8"])
def test_weights_are_packed_once(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(launching, "SMALL_BYTES", 0)
    times = []
    real = forward.pack
    monkeypatch.setattr(forward, "pack", lambda *a, **kw: times.append(1) or real(*a, **kw))
    llm = start(quantization=scheme)
    first = tokens(llm)
    assert said(llm) == "made"
    packed = len(times)
    assert packed == 6 * 4 + 1, "qkv, o, gate and up, down of six layers, and the output matrix"
    llm = start(quantization=scheme)
    assert tokens(llm) == first
    assert len(times) == packed
    assert said(llm) == "read"
    (file,) = (tmp_path / "weights").glob("*.pst")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    llm = start(quantization=scheme)
    assert tokens(llm) == first
    assert said(llm) == "made"
    assert len(times) == 2 * packed, "a file that has changed is not trusted"


def test_weights_that_are_small_are_packed_anew_and_no_file_is_kept() -> None:
    assert said(start()) == ""


def test_doctor_says_whether_the_next_start_finds_packed_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    assert re.search("packed_file . none", doctor()), "nano is small"
    monkeypatch.setattr(launching, "SMALL_BYTES", 0)
    before = doctor()
    assert re.search("packed_file . missing", before)
    assert re.search("packed_weights . copied", before)
    assert "rounds activations to 8 bits with a scale per 32 or 64 or 128 inputs" in before
    assert "(0 bytes now)" in before
    assert "--tensor-parallel-size 2, 3, 6; with 2 each holds about" in before
    start()
    after = doctor()
    assert re.search("packed_file . there", after)
    assert "(0 bytes now)" not in after


def doctor() -> str:
    done = penstock("doctor", "--all", NANO)
    assert done.returncode == 0
    return " ".join(done.stdout.split())


def test_quantised_weights_take_less_memory() -> None:
    plain, small = start(), start(quantization="int4-w4a8")
    assert small.engine.plan.weight_bytes < 0.75 * plain.engine.plan.weight_bytes
    assert tokens(small)
