"""Parts of the torch backend against what they stand for: sampling, arrays of a device, stored weights."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backends.gpu import forward, staging
from penstock.backends.gpu.attention import TorchAttention
from penstock.backends.gpu.backend import TorchBackend
from penstock.backends.gpu.codecs import TORCH_CODECS
from penstock.backends.gpu.device_array import DeviceArray, new_plane
from penstock.backends.gpu.placed import Placement, StoredTensor, rows_of
from penstock.backends.gpu.sample import TorchKernel, weigh
from penstock.backends.gpu.step import TorchStep
from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.core.batch import AddedRow, SchedulerOutput
from penstock.core.kv_codec import KV_CODECS
from penstock.core.matrix_format import parse_scheme, rounded_matrices
from penstock.core.sampling import TokenRules
from penstock.core.selection import TokenReads
from penstock.launch.backend import choose_ops
from penstock.model.emitter import Reading
from penstock.ops import draw_weights
from penstock.ops.plan import StepPlan
from penstock.ops.ref import REF
from penstock.quant.reference import QuantisedLinear, quantised
from penstock.runner.device_sampler import DeviceSampler
from penstock.runner.sampler import DraftNode, Sampler
from tests import specs
from tests.native.test_sample import pick, shapes
from tests.paged import Paged
from tests.stored import FORMATS, random_stored

CPU = torch.device("cpu")
KINDS = ("peaked", "flat", "equal", "ties", "zeros", "masked", "one", "tiny", "huge")
RULES = [
    TokenRules(), TokenRules(temperature=0.7, seed=3), TokenRules(temperature=1.3, seed=4, top_k=5),
    TokenRules(temperature=1.0, seed=5, top_p=0.8), TokenRules(temperature=2.0, seed=6, min_p=0.05, top_k=9, top_p=0.9),
    TokenRules(repetition_penalty=1.4),
    TokenRules(frequency_penalty=0.5, presence_penalty=0.2, temperature=0.8, seed=1),
    TokenRules(logit_bias={3: 2.5, 7: -4.0}, temperature=1.0, seed=9), TokenRules(allowed_ids=[2, 5, 6]),
    TokenRules(bad_sequences=[[4], [1, 2]], min_tokens=3, stop_ids=[5], temperature=0.9, seed=2),
    TokenRules(temperature=0.9, seed=8, num_logprobs=4), TokenRules(num_logprobs=2, repetition_penalty=0.7),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logprobs_are_those_of_the_numpy_sampler(kind: str) -> None:
    """With every rule and processor, from logits on the device, which are not written to."""
    rng = np.random.default_rng(len(kind))
    vocab = 211
    logits = np.stack([shapes(kind, vocab, rng) for _ in RULES])
    logits[3, 7] = np.nan
    picks = [pick(i, rules, i, num_samples=1 + i % 3) for i, rules in enumerate(RULES)]
    nodes = [DraftNode(i, rules, 1, 11) for i, rules in enumerate(RULES[:5])]
    found = []
    for sampler, given in (
        (Sampler(vocab), logits),
        (DeviceSampler(TorchKernel(CPU, vocab), vocab), DeviceArray(torch.from_numpy(logits.copy()))),
    ):
        added = [AddedRow(p.seq_id, 0, [1, 2, 3, 3], 2, p.rules) for p in picks]
        sampler.chain.track(SchedulerOutput(0, added=added))
        rows: Any = given
        found.append(sampler.sample(rows, picks, nodes))
        followed = [i for i in range(len(RULES)) if sampler.chain.follows(i) and i != 3]
        found.append([sampler.choose_followed(i, rows[i], DraftNode(i, RULES[i], 0, 7)) for i in followed])
        assert np.array_equal(np.asarray(given), logits, equal_nan=True)
    (want, want_followed), (got, got_followed) = found[:2], found[2:]
    assert got.choices == want.choices
    assert got_followed == want_followed
    assert [(s.seq_id, s.token_ids) for s in got.sampled] == [(s.seq_id, s.token_ids) for s in want.sampled]
    assert [s.logprobs for s in got.sampled] == [s.logprobs for s in want.sampled]
    assert got.errors == want.errors
    assert len(want.sampled) > 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_weights_are_the_same_whole_numbers(kind: str, temperature: float) -> None:
    row = shapes(kind, 5000, np.random.default_rng(1))
    scale = draw_weights.scale_of(temperature)
    np.testing.assert_array_equal(weigh(torch.from_numpy(row), scale).numpy(), draw_weights.weigh(row, scale))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_codes_decode_to_the_same_bits(name: str) -> None:
    matrix = random_stored(name, 24, 256)
    placed = Placement(CPU).place(matrix)
    want = matrix.values()
    np.testing.assert_array_equal(rows_of(placed, slice(0, 24)).numpy(), want)
    chosen = torch.tensor([5, 0, 5, 23])
    np.testing.assert_array_equal(rows_of(placed, chosen).numpy(), want[[5, 0, 5, 23]])
    assert isinstance(placed, StoredTensor), "held as codes"
    assert placed.num_bytes < want.nbytes / 2


@pytest.mark.parametrize("name", list(KV_CODECS))
def test_a_codec_writes_the_same_bytes(name: str) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(0, 3, (3, 8, 2, 64)).astype(np.float32)
    x[0, :, 0] = 0.0
    x[1, 2, 1, 5] = np.inf
    elements, scales = KV_CODECS.get(name).encode(x)
    got, beside = TORCH_CODECS[name].encode(torch.from_numpy(x))
    np.testing.assert_array_equal(np.asarray(DeviceArray(got)), elements)
    assert (scales is None) == (beside is None)
    if scales is not None and beside is not None:
        np.testing.assert_array_equal(np.asarray(DeviceArray(beside)), scales)
    want = KV_CODECS.get(name).decode(elements, scales)
    np.testing.assert_array_equal(TORCH_CODECS[name].decode(got, beside).numpy(), want)


def test_an_array_of_the_device_is_indexed_like_an_array() -> None:
    rng = np.random.default_rng(3)
    plain = rng.normal(size=(6, 4, 2)).astype(np.float32)
    own = new_plane(CPU, plain.shape, np.float32, 0)
    own[:] = plain
    pages, slots = np.array([4, 1], np.int32), np.array([0, 3], np.int32)
    for array in (plain, own):
        x: Any = array
        x[pages, slots] = x[pages[::-1], slots[::-1]].copy()
        x[2:4] = x[0:2]
        x[5] = 0
        x[np.array([0])] *= np.float32(2)
    np.testing.assert_array_equal(np.asarray(own), plain)
    bits = new_plane(CPU, (2, 2), np.uint16, 0x7FC0)
    assert bits.dtype == np.uint16
    assert np.asarray(bits).tolist() == [[0x7FC0] * 2] * 2, "bfloat16 shows as its bits"
    with pytest.raises(TypeError):
        np.cumsum(own)


def test_what_it_cannot_run_is_said() -> None:
    spec, _ = specs.make("llama_gqa")
    assert TorchBackend.why_not(from_kwargs(model="m", device="cpu-torch"), spec) is None
    virtual = TorchBackend.why_not(from_kwargs(model="m", device="cpu-torch", kv_allocator="virtual"), spec)
    assert virtual is not None
    assert "use paged" in virtual


def test_weights_are_there_once() -> None:
    """What two models of a backend share is placed once, and codes stay codes."""
    _, weights = specs.make("llama_gqa")
    placement = Placement(CPU)
    first = [placement.place(w) for w in weights.values()]
    held = placement.num_bytes
    again = [placement.place(w) for w in weights.values()]
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert placement.num_bytes == held == sum(w.nbytes for w in weights.values())
    del first, again
    assert placement.num_bytes == 0, "nobody has them any more"


SCHEMES = ["int8-wo", "int8-wo:32", "int4-wo", "int4-wo:128"]


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("columns", [96, 200])
def test_a_scheme_rounds_to_the_codes_that_native_panels_have(name: str, columns: int) -> None:
    """As `quant.reference.quantised`, which these are packed like; of floats, and of codes that are rounded again."""
    scheme = parse_scheme(name)
    rng = np.random.default_rng(len(name))
    for weight in (rng.normal(0, 1, (40, columns)).astype(np.float32), random_stored("Q6_K", 24, 512)):
        placed = Placement(CPU).place(weight, scheme)
        assert isinstance(placed, StoredTensor)
        want = quantised(weight, scheme)
        np.testing.assert_array_equal(rows_of(placed, slice(0, weight.shape[0])).numpy(), want.values())
        assert placed.codes.numel() == weight.size * scheme.weight_bits // 8, "two codes of 4 bits to a byte"
        scales = placed.scales.numpy().reshape(want.scales.shape)
        np.testing.assert_array_equal(scales, want.scales.astype(np.float32))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama_mha", "experts", "latent", "rwkv7"])
@pytest.mark.sampled(6)
def test_a_model_of_rounded_weights_is_the_reference_s(name: str, scheme: str) -> None:
    """Also of experts, and where the table of embeddings is the output matrix: it is looked up in unrounded."""
    spec, weights = specs.make(name)
    rounded = rounded_matrices(spec)
    linear = QuantisedLinear(parse_scheme(scheme), [w for n, w in weights.items() if n not in rounded])
    backend = TorchBackend(CPU)
    drivers = [Paged(spec, weights, ops=REF.replaced(scheme, {"linear": linear})), Paged(spec, weights)]
    quantising: Any = SimpleNamespace(
        compile=partial(backend.compile, quantization=scheme), new_plane=backend.new_plane
    )
    drivers[1].on(quantising)
    want, got = (d.run({"a": ([3 + i * 7 % 50 for i in range(20)], [10, 19])})["a"] for d in drivers)
    np.testing.assert_allclose(got, want, atol=1e-5 * float(np.abs(want).max()))
    part = backend.compile(drivers[1].graph.copy([0]), drivers[1].groups, max_tokens=4, like=drivers[1].program)
    assert part.scheme.name == scheme
    held = [n.bound[0] for n in part.placed.nodes if n.op == "linear" and n.weights[0] in rounded]
    whole = {id(n.bound[0]) for n in drivers[1].program.placed.nodes if n.op == "linear"}
    assert held
    routers = [n.bound[0] for n in drivers[1].program.placed.nodes if (n.weights or ("",))[0].endswith("router")]
    assert len(routers) == 3 * (name == "experts")
    assert all(isinstance(w, torch.Tensor) for w in routers), "a wrong choice of expert costs more than bits"
    assert all(isinstance(w, StoredTensor) and id(w) in whole for w in held), "a part holds no weights of its own"


def test_schemes_that_round_activations_are_refused() -> None:
    config = from_kwargs(model="m", device="cpu-torch", quantization="int8-w8a8")
    spec, _ = specs.make("llama_gqa")
    with pytest.raises(ConfigError, match="int8-w8a8 rounds activations, and torch only weights"):
        choose_ops(config, spec)
    decided, _ = choose_ops(from_kwargs(model="m", device="cpu-torch", quantization="int4-wo"), spec)
    assert decided.execution.ops == "torch"


def test_a_step_s_numbers_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, positions, rows, and where keys and values of two groups lie, for operations but attention."""
    monkeypatch.setattr(TorchAttention, "attend", lambda self, q, *_, **__: q)
    spec, weights = specs.make("layernorm")
    driver = Paged(spec, weights).on(TorchBackend(CPU))
    seen: list[Any] = []
    real, real_copy = staging.bring, TorchStep.on_device

    def brought(arrays: Any, device: torch.device) -> Any:
        tensors = real(arrays, device)
        seen.append((arrays, tensors))
        return tensors

    monkeypatch.setattr(forward, "bring", brought)
    monkeypatch.setattr(TorchStep, "on_device", lambda step, array: (seen.append(step), real_copy(step, array))[1])
    driver.run({"a": ([3, 4, 5, 6, 7], [4]), "b": ([9], [0])})
    ((arrays, tensors),) = seen
    assert {"token_ids", "positions", "rows", ("slots_of", 0, 0), ("slots_of", 1, 1)} <= set(tensors)
    assert tensors["token_ids"].tolist() == [3, 4, 5, 6, 7, 9]
    assert tensors["rows"].tolist() == [4, 5]
    for key, array in arrays.items():
        np.testing.assert_array_equal(tensors[key].numpy(), array)
    starts = {tensor.data_ptr() % 16 for tensor in tensors.values()}
    assert len(starts) == 1, "each is aligned as kernels want it"
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1


def test_numbers_of_both_types_and_none_are_brought_as_they_are() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.integers(-9, 1 << 40, (3, 5)), "b": rng.integers(-9, 9, 7).astype(np.int32),
        "none": np.zeros((2, 0), np.int64), "c": rng.integers(0, 9, (4, 2)).astype(np.int32).T,
    }  # fmt: skip
    for key, tensor in staging.bring(arrays, CPU).items():
        assert tensor.numpy().dtype == arrays[key].dtype
        np.testing.assert_array_equal(tensor.numpy(), arrays[key])


def test_equal_numbers_are_copied_once() -> None:
    plan = StepPlan(*(np.zeros(1, np.int32) for _ in range(5)), ())
    step = TorchStep(plan, (), CPU)
    one = step.on_device(np.array([1, 2], np.int32))
    assert step.on_device(np.array([1, 2], np.int32)) is one
    assert step.on_device(np.array([[1, 2]], np.int32)).shape == (1, 2)
    assert step.on_device(np.array([1, 3], np.int32)).tolist() == [1, 3]


def test_B18_what_is_rehearsed_is_read() -> None:
    """Tokens that were chosen a layer ahead, by the reference, and no others."""
    ids = tuple(int(x) for x in np.random.default_rng(2).integers(3, 60, 64))
    spec, weights = specs.make("llama_gqa")
    reading = Reading(tokens=TokenReads(share=0.3, recent=3, reach=0.05))
    drivers = [Paged(spec, weights, num_slabs=40, reading=reading) for _ in range(2)]
    drivers[1].on(TorchBackend(CPU, invariant=True))
    got = []
    for driver in drivers:
        driver.choose_from["a"] = 40
        got.append(driver.chunked("a", ids, (40, 1, 3, 20)))
    np.testing.assert_allclose(got[1], got[0], atol=2e-3)
    plain = Paged(spec, weights).chunked("a", ids, (64,))
    assert np.abs(got[0][40:] - plain[40:]).max() > 0.02
