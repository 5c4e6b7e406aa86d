"""Adapters and scales trained beside frozen models: gradients, losses, what is written, and what serves it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock import LLM, LoRARequest, SamplingParams
from penstock.backends.gpu.train.open import open_trainer
from penstock.backends.gpu.train.trainer import Trainer
from penstock.base.errors import UnsupportedError
from penstock.config import from_kwargs
from penstock.core.matrix_format import parse_scheme
from penstock.families.registry import open_model
from penstock.formats.safetensors_out import write_safetensors
from penstock.launch.finetune import Finetuner, finetuner_of, read_state
from penstock.launch.finetune_jobs import Job, JobFolder, new_id
from penstock.quant.nf4 import nf4_parts
from penstock.quant.reference import quantised
from tests.adapting import nano
from tests.quantised import golden
from tests.training import examples, loss, pico, recipe, stored_pico, trained

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
       "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "float32"}  # fmt: skip


def gradients(slice_tokens: int) -> tuple[dict[str, torch.Tensor], Any]:
    texts = examples(1, 21)
    trainer, changed = open_trainer(open_model(nano()), texts, recipe(slice_tokens=slice_tokens))
    with torch.no_grad():
        for i, own in enumerate(changed.parameters.values()):
            own += 0.05 * torch.randn(own.shape, generator=torch.Generator().manual_seed(i))
    found: dict[str, torch.Tensor] = {}
    trainer._update = lambda: found.update({n: p.grad for n, p in changed.parameters.items()})  # type: ignore[method-assign]
    for _ in trainer._step():
        pass
    return found, changed


def test_J28_gradients_of_slices_are_those_of_transformers() -> None:
    net = AutoModelForCausalLM.from_pretrained(nano(), dtype=torch.float32)
    for slice_tokens in (7,):
        found, changed = gradients(slice_tokens)
        own = {n: p.detach().clone().requires_grad_() for n, p in changed.parameters.items()}
        hooks = []
        for name, module in net.named_modules():
            if f"{name}.lora_A" in own:
                a, b = own[f"{name}.lora_A"], own[f"{name}.lora_B"]
                hooks.append(module.register_forward_hook(lambda m, x, y, a=a, b=b: y + 2.0 * (x[0] @ a.T) @ b.T))
        text = examples(1, 21)[0]
        ids = torch.tensor([text.token_ids])
        labels = torch.where(torch.tensor([text.targets]), ids, -100)
        net(ids, labels=labels).loss.backward()
        for hook in hooks:
            hook.remove()
        assert len(own) == 36
        for name, p in own.items():
            torch.testing.assert_close(found[name], p.grad, rtol=1e-3, atol=1e-4 * float(p.grad.abs().max()))


def test_J28_a_training_that_stops_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    texts, how = examples(6, 14), recipe(epochs=2, batch_size=2)
    whole, changed = trained(open_model(pico()), texts, how)
    first, _ = open_trainer(open_model(pico()), texts, how)
    for _ in first.work():
        if first.step == 2:
            break
    write_safetensors(tmp_path / "state", first.state())
    again, others = open_trainer(open_model(pico()), texts, how, state=read_state(tmp_path / "state"))
    again.run()
    assert again.losses == [again.losses[0]._replace(step=i, value=x.value) for i, x in enumerate(again.losses)]
    assert [x.value for x in again.losses[2:]] == [x.value for x in whole.losses[2:]]
    assert again.num_tokens == whole.num_tokens
    for name, p in changed.parameters.items():
        assert torch.equal(p, others.parameters[name]), name


class Clock:
    """Seconds that pass while a piece of work is done: a thousandth each."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s

    def timed(self, work: Iterator[str]) -> Iterator[str]:
        for kind in work:
            yield kind
            self.s += 0.001


def job_in(folder: JobFolder, texts: list[Any], how: Any, at: int = 1) -> Job:
    job = Job(
        id=new_id(), created_at=at, base="pico", model="pico", name="ft:pico:x", training_file="file-x", recipe=how,
        num_examples=len(texts), num_tokens=9, hyperparameters={},
    )  # fmt: skip
    folder.create(job, texts)
    return job


def finetuner(folder: JobFolder, share: float, clock: Clock) -> Finetuner:
    def open_job(job: Job) -> tuple[Trainer, Any]:
        trainer, changed = open_trainer(open_model(pico()), folder.examples(job.id), job.recipe)
        inner = trainer.work
        trainer.work = lambda: clock.timed(inner())  # type: ignore[method-assign]
        return trainer, changed

    return Finetuner(folder, "pico", share, open_job, now=clock)


def until_open(work: Finetuner) -> None:
    for _ in range(2000):
        if work._ready():
            return
        time.sleep(0.01)
    raise AssertionError("it was never opened")


def test_J28_slices_between_steps_make_the_adapter_that_training_alone_makes(tmp_path: Path) -> None:
    folder, texts, how = JobFolder(tmp_path), examples(4, 13), recipe(epochs=3)
    job = job_in(folder, texts, how)
    work = finetuner(folder, 0.3, Clock())
    until_open(work)
    rng = np.random.default_rng(0)
    for _ in range(20_000):  # requests come and go
        if work._job is None:
            break
        if rng.random() < 0.9:
            work.between(float(rng.uniform(0, 0.05)))
        else:
            left = int(rng.integers(0, 9))
            calls = iter([False] * left)
            work.rest(lambda calls=calls: next(calls, True))
    assert work._writing is not None
    work._writing.join()
    state = folder.state(job.id)
    assert (state.status, state.step, state.num_steps) == ("succeeded", 12, 12)
    alone, changed = trained(open_model(pico()), texts, how)
    told = [e.data["train_loss"] for e in folder.events(job.id) if e.data is not None]
    assert told == [round(x.value, 6) for x in alone.losses]
    assert alone.losses[-1].value < 0.8 * alone.losses[0].value
    other = tmp_path / "other.safetensors"
    write_safetensors(other, changed.tensors())
    assert (tmp_path / job.id / "adapter" / "adapter_model.safetensors").read_bytes() == other.read_bytes()


def test_J28_between_steps_no_more_time_is_taken_than_was_given(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    job_in(folder, examples(4, 13), recipe(epochs=50))
    clock = Clock()
    work = finetuner(folder, 0.1, clock)
    until_open(work)
    for step_s, count in ((0.002, 300), (0.05, 30), (0.4, 4)):  # shorter than a piece, longer, and a long one
        begun, stepped = 0.0, 0.0
        for _ in range(count):
            before = clock.s
            work.between(step_s)
            begun += clock.s - before
            stepped += step_s
        assert 0.5 * 0.1 * stepped < begun <= 0.1 * stepped + 0.012, (step_s, begun, stepped)
    none = finetuner(JobFolder(tmp_path), 0.0, clock)
    none.between(5.0)
    assert none._job is None


def test_J28_a_job_that_is_killed_goes_on_from_its_checkpoint_and_one_that_is_cancelled_ends(tmp_path: Path) -> None:
    config = from_kwargs(model=str(pico()), enable_lora=True, finetune_root=str(tmp_path))
    folder, how = JobFolder(tmp_path), recipe(epochs=3)
    jobs = [job_in(folder, examples(3, 11, seed), how, at=seed) for seed in range(2)]
    for job in jobs:
        made = msgspec.structs.replace(job, base=str(pico()))
        (tmp_path / job.id / "job.json").write_bytes(msgspec.json.encode(made))
    work = finetuner_of(config)
    assert work is not None
    until_open(work)
    trainer = work._opened[0]  # type: ignore[index]
    while trainer.step < 4:
        work._piece()
    work._save(jobs[0], trainer.state(), work._state("running"))
    while trainer.step < 6:  # lost
        work._piece()
    other = Finetuner(folder, str(pico()), 0.05, work._open)  # another process
    until_open(other)
    assert other._opened[0].step == 4  # type: ignore[index]
    while other._job is jobs[0] or (other._job is not None and other._job.id == jobs[0].id):
        other._piece()
    assert other._writing is not None
    other._writing.join()
    alone, changed = trained(open_model(pico()), examples(3, 11, 0), how)
    write_safetensors(tmp_path / "alone", changed.tensors())
    assert (tmp_path / jobs[0].id / "adapter" / "adapter_model.safetensors").read_bytes() == (
        tmp_path / "alone"
    ).read_bytes()
    assert len(alone.losses) == 9
    other._looked_s = -1e9
    until_open(other)
    folder.cancel(jobs[1].id)
    while other._job is not None:
        other._piece()
    assert folder.state(jobs[1].id).status == "cancelled"
    assert folder.events(jobs[1].id)[-1].message == "the job is cancelled"


def test_E18_nf4_is_what_bitsandbytes_stores_and_nearer_to_normal_weights_than_int4() -> None:
    rng = np.random.default_rng(1)
    weight = rng.normal(0, 0.05, (64, 512)).astype(np.float32)
    parts = nf4_parts(weight)
    table, nested = parts[".weight.quant_map"], parts[".weight.nested_quant_map"]
    state = json.loads(parts[".weight.quant_state.bitsandbytes__nf4"].tobytes())
    absmax = nested[parts[".weight.absmax"]] * np.repeat(parts[".weight.nested_absmax"], 256)[:512]
    absmax = absmax + np.float32(state["nested_offset"])
    pairs = parts[".weight"][:, 0]
    codes = np.stack([pairs >> 4, pairs & 15], axis=1).reshape(64, 512)
    values = table[codes] * np.repeat(absmax, 64).reshape(64, 512)
    nf4 = float(np.sqrt(np.mean((values - weight) ** 2)))
    for group in (64, 32):
        rounded = quantised(weight, parse_scheme(f"int4-wo:{group}")).values()
        int4 = float(np.sqrt(np.mean((rounded - weight) ** 2)))
        assert nf4 < int4 if group == 64 else nf4 < 1.1 * int4, (group, nf4, int4)
    # As the library itself rounds its own example, by what it decodes to.
    known = golden("bitsandbytes")["nf4 nested"]
    again = nf4_parts(known.values.numpy())
    assert np.array_equal(again[".weight"], known.parts[".weight"].numpy())


def served(out: Path, base: Path, changed: Any, texts: Sequence[Any]) -> float:
    """Mean loss of the texts' tokens behind the second, of the base with what was written of `changed`."""
    write_safetensors(out / "adapter_model.safetensors", changed.tensors())
    (out / "adapter_config.json").write_text(json.dumps(changed.config()))
    llm = LLM(base, enable_lora=True, ops="ref", max_model_len=64)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    asked = LoRARequest("x", 1, str(out))
    outs = llm.generate([{"prompt_token_ids": t.token_ids} for t in texts], params, lora_request=asked)
    losses = [
        -one.prompt_logprobs[i][text.token_ids[i]].logprob  # type: ignore[index]
        for text, one in zip(texts, outs, strict=True) for i in range(2, 16)
    ]  # fmt: skip
    return float(np.mean(losses))


def test_E18_an_adapter_is_trained_over_a_frozen_nf4_base_and_served_over_it(tmp_path: Path) -> None:
    folder = stored_pico(tmp_path / "nf4", nf4_parts, NF4)
    base = open_model(folder)
    assert len(base.stored) == 12  # rows of o are no whole number of blocks: read as values
    texts, fresh = examples(8, 16), examples(4, 16, seed=5)
    before = (folder / "model.safetensors").read_bytes()
    trainer, changed = open_trainer(base, texts, recipe(epochs=2, slice_tokens=16))
    was = loss(trainer, fresh)
    trainer.run()
    now = loss(trainer, fresh)
    assert now < 0.7 * was, (was, now)
    assert (folder / "model.safetensors").read_bytes() == before
    assert abs(served(tmp_path, folder, changed, fresh) - now) < 1e-4


def gptq_parts(weight: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """3 bits in groups of 32, as GPTQ files have them: qweight [K * 3 / 32, N], scales [G, N], symmetric zeros."""
    n, k = weight.shape
    grouped = weight.reshape(n, -1, 32)
    scale = (np.abs(grouped).max(axis=2) / 3.5).astype(np.float16)
    codes = np.clip(np.rint(grouped / np.maximum(scale.astype(np.float32), 1e-8)[:, :, None]) + 4, 0, 7)
    codes = codes.reshape(n, k).astype(np.uint64)
    bits = np.zeros((k * 3, n), np.uint8)
    for bit in range(3):
        bits[bit::3] = (codes.T >> np.uint64(bit) & np.uint64(1)).astype(np.uint8)
    words = np.packbits(bits.T.reshape(n, -1, 32), axis=2, bitorder="little").view("<i4")[:, :, 0].T
    groups = k // 32
    zero = np.zeros((n * 3, groups), np.uint8)
    for bit in range(3):
        zero[bit::3] = 3 >> bit & 1  # stored as zero - 1
    zeros = np.packbits(zero.T.reshape(groups, -1, 32), axis=2, bitorder="little").view("<i4")[:, :, 0]
    return {".qweight": np.ascontiguousarray(words), ".qzeros": np.ascontiguousarray(zeros),
            ".scales": np.ascontiguousarray(scale.T), ".g_idx": (np.arange(k) // 32).astype(np.int32)}  # fmt: skip


GPTQ3 = {"quant_method": "gptq", "bits": 3, "group_size": 32, "desc_act": False, "sym": True}


def test_E19_scales_alone_are_tuned_to_a_task(tmp_path: Path) -> None:
    folder = stored_pico(tmp_path / "three", gptq_parts, GPTQ3)
    base = open_model(folder)
    assert {str(f.bits) for f in base.stored.values()} == {"3"}
    texts, fresh = examples(8, 16), examples(4, 16, seed=5)
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    how = recipe(kind="peqa", targets=every, epochs=2, learning_rate=1e-2, slice_tokens=16)
    trainer, changed = open_trainer(base, texts, how)
    was = loss(trainer, fresh)
    trainer.run()
    now = loss(trainer, fresh)
    assert now < 0.8 * was, (was, now)
    tensors = changed.tensors()
    assert changed.config()["peft_type"] == "PEQA"
    assert tensors["model.layers.0.self_attn.q_proj.scales"].shape == (96, 2)
    assert {x.dtype for x in tensors.values()} == {np.dtype(np.float16)}
    assert sum(x.nbytes for x in tensors.values()) < 0.2 * (folder / "model.safetensors").stat().st_size
    # Codes as they were, scales as they are written: the same loss, here and where they are served.
    assert abs(loss(trainer, fresh) - now) < 1e-6
    assert abs(served(tmp_path, folder, changed, fresh) - now) < 1e-4


def test_what_cannot_be_trained_is_said_in_a_sentence() -> None:
    base = open_model(pico())
    with pytest.raises(UnsupportedError, match="no product of this model is called 'c_attn'; it has down_proj"):
        open_trainer(base, examples(1, 8), recipe(targets=("c_attn",)))
    with pytest.raises(UnsupportedError, match=r"scales of model.layers.0.mlp.down_proj: its weights are plain"):
        open_trainer(base, examples(1, 8), recipe(kind="peqa"))
