"""Scale sets and coded differences, from their folders to served tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock import LLM, LoRARequest, SamplingParams
from penstock.base.errors import InputError
from penstock.cli.main import main
from penstock.formats.safetensors import read_safetensors
from penstock.weights.delta import coded
from tests.adapting import nano, nano_folder
from tests.codes import Kind, write
from tests.native.running import ISAS

OPS = ["ref", *(["native"] if ISAS else [])]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=1)
SMALL: dict[str, Any] = {
    "skip_tokenizer_init": True, "max_model_len": 64, "threads": 1, "activation_quantization": "none",
    "num_gpu_blocks_override": 64,
}  # fmt: skip
PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 9, 3, 17, 21, 8], [30, 2, 11, 6, 40, 12, 7, 7, 19])]


def served(llm: LLM, adapter: LoRARequest | list[LoRARequest | None] | None = None) -> list[Any]:
    """Tokens and their log-probabilities."""
    prompts = PROMPTS if not isinstance(adapter, list) else [PROMPTS[0]] * len(adapter)
    found = [out.outputs[0] for out in llm.generate(prompts, PARAMS, lora_request=adapter)]
    return [[(t, each[t].logprob) for t, each in zip(o.token_ids, o.logprobs, strict=True)] for o in found]


def tuned_nano(folder: Path, seed: int, size: float = 0.03, norm: bool = False) -> Path:
    """The bundled nano, every product of its layers moved a little."""
    folder.mkdir()
    rng, config = np.random.default_rng(seed), json.loads((nano() / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    tensors = {}
    for name, ref in read_safetensors(nano() / "model.safetensors").items():
        raw = np.fromfile(ref.path, np.uint8, ref.nbytes, offset=ref.offset)
        x = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(ref.shape)
        if "proj" in name or (norm and "norm" in name):
            x = x + rng.normal(0, size, x.shape).astype(np.float32) * np.abs(x).mean()
        tensors[name] = x
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_E16_codes_are_the_nearest_that_so_few_bits_allow(bits: int) -> None:
    d = np.random.default_rng(bits).normal(0, 0.01, (6, 64)).astype(np.float32)
    lost = {}
    for group in (0, 32):
        codes, scales, values = coded(d, bits, group)
        assert codes.shape == (6, 64 * bits // 8)
        assert scales.shape == (6, 64 // group if group else 1)
        each = np.repeat(scales.astype(np.float32), group or 64, axis=1)
        top = 1 if bits == 1 else (1 << bits - 1) - 1
        if bits > 1:
            inside = np.abs(d) <= top * each
            assert (np.abs(values - d)[inside] <= each[inside] * 0.501).all()
        else:
            np.testing.assert_array_equal(values, np.where(d >= 0, each, -each))
        lost[group] = float(np.square(values - d).sum() / np.square(d).sum())
    assert lost[32] < lost[0] < {1: 0.5, 2: 0.5, 4: 0.03, 8: 0.0002}[bits]


def test_E16_deltas_of_fine_tuned_models_are_served_over_one_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of eight bits: the fine-tuned model's own log-probabilities, nearly; of one bit in a sixteenth of its bytes.
    Beside a LoRA and the base, each as alone."""
    tuned = {n: tuned_nano(tmp_path / f"tuned{n}", n) for n in (1, 2)}
    asked: dict[str, LoRARequest] = {}
    for name, number, bits, group in (("fine", 1, 8, 0), ("other", 2, 4, 64), ("short", 1, 1, 0)):
        out = tmp_path / name
        args = ["--delta-of", str(tuned[number]), "--delta-bits", str(bits), "--delta-group", str(group)]
        assert main(["quantize", str(nano()), *args, "--out", str(out)]) == 0
        asked[name] = LoRARequest(name, len(asked) + 1, str(out))
    assert "42 modules" in capsys.readouterr().out
    whole = sum(ref.nbytes for n, ref in read_safetensors(tuned[1] / "model.safetensors").items() if "proj" in n)
    assert (tmp_path / "short" / "adapter_model.safetensors").stat().st_size < whole / 2 / 14, "of 16 bits each"
    asked["low"] = LoRARequest("low", 9, str(nano_folder(tmp_path / "low", 3)))
    llm = LLM(nano(), enable_lora=True, ops=OPS[-1], dtype="float32", **SMALL)
    plain, expected = served(llm), served(LLM(tuned[1], ops=OPS[-1], dtype="float32", **SMALL))
    for one, want, base in zip(served(llm, asked["fine"]), expected, plain, strict=True):
        assert abs(one[0][1] - want[0][1]) < 0.05 * abs(base[0][1] - want[0][1]) + 1e-3
    together = served(llm, [None, *asked.values(), asked["fine"]])
    alone = [served(llm, [one])[0] for one in (None, *asked.values(), asked["fine"])]
    assert together == alone
    assert len({str(one) for one in together}) == 5


def test_E16_what_a_delta_cannot_hold_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned = tuned_nano(tmp_path / "tuned", 1, norm=True)
    assert main(["quantize", str(nano()), "--delta-of", str(tuned), "--out", str(tmp_path / "d")]) == 0
    assert "left out: 13 weights that differ" in capsys.readouterr().out
    for args, sentence in (
        (["--delta-of", str(tuned)], "needs --out"),
        (["--delta-of", str(nano()), "--out", str(tmp_path / "e")], "do not differ in any product"),
        (["--delta-of", str(write(tmp_path / "x", Kind())), "--out", str(tmp_path / "e")], "have other shapes"),
    ):
        assert main(["quantize", str(nano()), *args]) != 0
        assert sentence in capsys.readouterr().err
    llm = LLM(nano(), enable_lora=True, ops="ref", **SMALL)
    for change, sentence in (
        ({"bits": 3}, "bits are one of"),
        ({"group_size": 48}, "groups one of"),
        ({"peft_type": "PEQA"}, "end in scales"),
        ({"target_modules": ["q_proj"]}, "target_modules does not name"),
    ):
        broken = tmp_path / "broken"
        shutil.copytree(tmp_path / "d", broken, dirs_exist_ok=True)
        config = json.loads((broken / "adapter_config.json").read_text()) | change
        (broken / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match=sentence):
            served(llm, LoRARequest("b", 1, str(broken)))


KINDS = {"gptq": Kind(), "ordered": Kind(ordered=True, symmetric=False, version=2), "rows": Kind(bits=8, group=-1),
         "awq": Kind("awq")}  # fmt: skip


def scale_set(folder: Path, base: Path, seed: int) -> tuple[Path, Path]:
    """A scale set for a base of codes, and the base with its scales replaced by it."""
    rng, tensors = np.random.default_rng(seed), load_file(base / "model.safetensors")
    own, whole = {}, dict(tensors)
    for name, x in tensors.items():
        if name.endswith(".scales"):
            whole[name] = (x.astype(np.float32) * rng.uniform(0.7, 1.4, x.shape)).astype(np.float16)
            own[name] = np.ascontiguousarray(whole[name].T)
    replaced = folder.with_name(folder.name + "-whole")
    shutil.copytree(base, replaced)
    save_file(whole, replaced / "model.safetensors")
    folder.mkdir()
    save_file(own, folder / "adapter_model.safetensors")
    targets = sorted({n.split(".")[-2] for n in own})
    config = {"peft_type": "PEQA", "base_model_name_or_path": base.name, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder, replaced


@pytest.mark.parametrize("kind", KINDS)
def test_E19_a_scale_set_of_a_request_is_the_base_with_its_scales_replaced(tmp_path: Path, kind: str) -> None:
    """Exactly, beside the base and another set; its bytes are those of the scales."""
    base = write(tmp_path / "base", KINDS[kind])
    sets = [scale_set(tmp_path / f"set{n}", base, n) for n in (1, 2)]
    asked = [LoRARequest(f"s{n}", n + 1, str(folder)) for n, (folder, _) in enumerate(sets)]
    for ops in OPS:
        llm = LLM(base, enable_lora=True, ops=ops, **SMALL)
        alone = [served(LLM(whole, ops=ops, **SMALL)) for _, whole in sets]
        for one, want in zip(asked, alone, strict=True):
            assert served(llm, one) == want, ops
        together = served(llm, [asked[0], None, asked[1]])
        assert [together[0], together[2]] == [alone[0][0], alone[1][0]], ops
        assert together[1] == served(LLM(base, ops=ops, **SMALL))[0], ops
        assert len({str(one) for one in together}) == 3
        assert llm.engine.adapters is not None
        ref = llm.engine.adapters.read(sets[0][0])
        num_bytes = sum(x.nbytes for n, x in load_file(base / "model.safetensors").items() if n.endswith("qweight"))
        assert ref.num_bytes < num_bytes / (7 if kind != "rows" else 20)


def test_E19_sets_for_another_base_are_refused(tmp_path: Path) -> None:
    base = write(tmp_path / "base", Kind())
    folder, _ = scale_set(tmp_path / "set", base, 1)
    dense = LLM(tmp_path / "base-dense", enable_lora=True, ops="ref", **SMALL)
    with pytest.raises(InputError, match="which is held as numbers here"):
        served(dense, LoRARequest("s", 1, str(folder)))
    llm = LLM(base, enable_lora=True, ops="ref", **SMALL)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(iter(tensors))
    for x, sentence in (
        (tensors[name][:, :1], "it was made for another base"),
        (np.full_like(tensors[name], np.nan), "NaN"),
        (tensors[name].astype(np.float32) * 1e9, "too large for the base"),
    ):
        save_file(tensors | {name: np.ascontiguousarray(x)}, folder / "adapter_model.safetensors")
        with pytest.raises(InputError, match=sentence):
            served(llm, LoRARequest("s", 1, str(folder)))
