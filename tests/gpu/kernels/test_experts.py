"""Mixtures of experts against each pair by itself in float64: the kernels, and the forms on torch beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from penstock.backends.gpu import expert_ops  # noqa: E402
from penstock.backends.gpu.ops import activate, activate_gated, by_row, linear  # noqa: E402
from penstock.backends.gpu.placed import ExpertStack, Placement, StoredTensor, part_of, rows_of  # noqa: E402
from penstock.backends.gpu.tables import EXACT  # noqa: E402
from penstock.core.router import Router  # noqa: E402
from penstock.ops.ref.experts import ExpertWeights, Routes  # noqa: E402
from penstock.ops.ref.experts import route as ref_route  # noqa: E402
from tests.gpu.kernels import naive  # noqa: E402
from tests.stored import FORMATS, random_stored  # noqa: E402

kernels: Any = pytest.importorskip("penstock.backends.gpu.kernels.experts", reason=naive.ABSENT)
from penstock.backends.gpu.kernel_ops import KernelTable  # noqa: E402

CPU = torch.device("cpu")
FORMS = {
    "many": (expert_ops.experts, linear), "rows": (expert_ops.experts_by_row, by_row(linear)),
    "kernels": (expert_ops.experts_by_kernels, linear),
}  # fmt: skip


def routes(kind: str, tokens: int, choices: int, num: int, seed: int = 0) -> Any:
    """Ascending ids and shares: "random", "few" (most experts have nobody), "same" (each token has the same)."""
    rng = np.random.default_rng(seed)
    ids = []
    for _ in range(tokens):
        pool = num if kind == "random" else choices if kind == "same" else min(num, choices + 1)
        ids.append(np.sort(rng.permutation(pool)[:choices]) + (num - pool))
    found: Any = (np.array(ids, np.int64).reshape(tokens, choices), rng.uniform(0.05, 1, (tokens, choices)))
    return Routes(torch.from_numpy(found[0]), torch.from_numpy(found[1].astype(np.float32)))


def weights(num: int, hidden: int, width: int, gated: bool = True, biased: bool = False, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return rng.normal(0, shape[-1] ** -0.5 if len(shape) > 1 else 1, shape).astype(np.float32)

    return [
        ExpertWeights(
            normal(width, hidden) if gated else None, normal(width, hidden), normal(hidden, width),
            normal(width) if gated and biased else None, normal(width) if biased else None,
            normal(hidden) if biased else None,
        )
        for _ in range(num)
    ]  # fmt: skip


def plainly(x: Any, at: Any, given: Any, activation: str, limit: float | None, scale_input: bool) -> Any:
    """Token by token, choice by choice, in float64."""
    values = [ExpertWeights(*(None if w is None else torch.from_numpy(np.asarray(
        w if isinstance(w, np.ndarray) else w.values())).double() for w in one[:6])) for one in given]  # fmt: skip
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for i, share in zip(at.ids[t].tolist(), at.weights[t].double(), strict=True):
            w: Any = values[i]
            h = x[t].double() * (share if scale_input else 1.0)
            up = w.up @ h + (0.0 if w.up_bias is None else w.up_bias)
            if w.gate is None:
                inner = activate(up, activation)
            else:
                gate = w.gate @ h + (0.0 if w.gate_bias is None else w.gate_bias)
                inner = activate_gated(gate, up, activation, limit)
            y = w.down @ inner + (0.0 if w.down_bias is None else w.down_bias)
            out[t] += y * (1.0 if scale_input else share)
    return out


def normal(seed: int, *shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def far(found: Any, wanted: Any) -> float:
    assert found.shape == wanted.shape
    assert found.dtype == torch.float32
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("tokens", "choices", "num", "hidden", "width", "kind", "activation", "more"),
    [
        (1, 2, 5, 40, 24, "random", "silu", {}),
        (1, 1, 1, 16, 16, "same", "gelu", {}),
        (7, 8, 8, 32, 20, "random", "silu", {"biased": True}),
        (9, 1, 12, 24, 16, "few", "gelu_tanh", {"scale_input": True}),
        (37, 3, 4, 33, 17, "random", "swiglu_clamped", {"biased": True, "limit": 1.5}),
        (11, 2, 6, 32, 16, "random", "swiglu_clamped", {}),
        (40, 2, 9, 48, 32, "same", "relu2", {"gated": False}),
        (5, 4, 70, 20, 11, "few", "relu", {"gated": False, "biased": True, "scale_input": True}),
        (66, 8, 16, 17, 9, "random", "silu", {}),
    ],
)
def test_each_token_passes_through_its_experts(
    form: str, tokens: int, choices: int, num: int, hidden: int, width: int, kind: str, activation: str, more: Any
) -> None:
    """Also where most experts have no token, all tokens one expert, and a token all experts."""
    given = weights(num, hidden, width, more.get("gated", True), more.get("biased", False))
    limit, scale_input = more.get("limit"), more.get("scale_input", False)
    x, at = normal(1, tokens, hidden), routes(kind, tokens, choices, num)
    placed = Placement(CPU).place(given)
    assert isinstance(placed, ExpertStack)
    assert expert_ops.why_no_kernel(placed, activation) is None
    run, product = FORMS[form]
    found = run(x, at, placed, activation, limit, scale_input, product)
    assert far(found, plainly(x, at, given, activation, limit, scale_input)) < 3e-6


@pytest.mark.parametrize("form", FORMS)
def test_a_token_has_the_same_bits_in_every_batch(form: str) -> None:
    """With tiles of one width, of which its expert has another number of others."""
    placed = Placement(CPU).place(weights(6, 40, 24, biased=True))
    x, at = normal(2, 50, 40), routes("random", 50, 3, 6)

    def run(rows: Any) -> Any:
        own: Any = (at.ids[rows].clone(), at.weights[rows].clone())
        if form == "kernels":
            parts = (expert_ops._as_kernel(getattr(placed, n), getattr(placed, f"{n}_bias")) for n in
                     ("gate", "up", "down"))  # fmt: skip
            return kernels.run_experts(x[rows].clone(), *own, *parts, placed.num, "silu", columns=16)
        return FORMS["rows"][0](x[rows].clone(), Routes(*own), placed, "silu", None, False, FORMS["rows"][1])

    whole = run(list(range(50)))
    for rows in ([7], [49, 7], [3, 7, 11, 12, 30], list(range(40, 50))):
        assert torch.equal(run(rows), whole[rows])


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_codes_stay_codes(name: str) -> None:
    """Every format: by the kernels where these take it, else looked up; each with the same numbers."""
    inputs, width, num = 512, 24, 3
    down = [one.down for one in weights(num, inputs, width)]
    given = [ExpertWeights(None, random_stored(name, width, inputs, i), down[i]) for i in range(num)]
    x, at = normal(3, 2, inputs), routes("random", 2, 2, num)
    placed = Placement(CPU).place(given)
    apart = name == "GPTQ act-order"  # each expert has an order of its own
    assert isinstance(placed, ExpertStack) != apart
    assert (expert_ops.why_not_captured(placed) is None) != apart
    wanted = plainly(x, at, given, "relu", None, False)
    pairs_of_16 = {"Q2_K", "Q3_K", "NVFP4", "NVFP4 of ggml"}  # two codes to a byte, groups of 16
    for form, (run, product) in FORMS.items():
        if form != "kernels" or apart or name in (*pairs_of_16, "GPTQ"):
            off = far(run(x, at, placed, "relu", None, False, product), wanted)
            assert off < (1.5e-2 if name == "GPTQ" and form == "kernels" else 1e-5), form
    if apart:
        return
    assert isinstance(placed.up, StoredTensor)
    assert placed.up.num_bytes < num * width * inputs * 2.2
    assert np.array_equal(rows_of(part_of(placed.up, width, 2 * width), slice(0, 4)).numpy(), given[1].up.values(0, 4))
    assert (expert_ops.why_no_kernel(placed, "relu") is None) == (name not in pairs_of_16)
    if name not in pairs_of_16:
        parts = (expert_ops._as_kernel(stack, None) for stack in (placed.up, placed.down))
        exact = kernels.run_experts(x, *at, None, *parts, num, "relu", operands=torch.float32)
        assert far(exact, wanted) < 3e-6, "nothing but the operands was rounded"


@pytest.mark.parametrize("name", ["GPTQ", "Q4_1", "GPTQ 8 bits", "MXFP4", "compressed-tensors int8"])
def test_gates_and_both_products_of_codes_with_wide_tiles(name: str) -> None:
    """More than 16 pairs of an expert; two products of a token are cut where it belongs to two experts."""
    for hidden, width, coded in ((512, 16, ("gate", "up")), (16, 512, ("down",))):
        given = []
        for i, one in enumerate(weights(2, hidden, width)):
            codes = {p: random_stored(name, *getattr(one, p).shape, 5 * i + len(p)) for p in coded}
            given.append(one._replace(**codes))
        x, at = normal(4, 35, hidden), routes("random", 35, 2, 2)
        placed = Placement(CPU).place(given)
        parts = [expert_ops._as_kernel(s, None) for s in (placed.gate, placed.up, placed.down)]
        found = kernels.run_experts(x, *at, *parts, 2, "silu", operands=torch.float32, columns=64)
        assert far(found, plainly(x, at, given, "silu", None, False)) < 4e-6, name


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_floats_of_16_bits(kind: str) -> None:
    dtype = naive.FLOATS[kind]
    x, at = normal(5, 6, 64), routes("random", 6, 2, 4)
    gate, up = (normal(i, 4 * 32, 64).to(dtype) for i in (6, 7))
    down = normal(8, 4 * 64, 32).to(dtype)
    found = kernels.run_experts(x, *at, *map(kernels.Stack, (gate, up, down)), 4, "silu")
    given = [ExpertWeights(*(w.float().view(4, -1, w.shape[1])[i].numpy() for w in (gate, up, down))) for i in range(4)]
    assert 1e-6 < far(found, plainly(x, at, given, "silu", None, False)) < 2e-2


def test_what_differs_is_no_stack() -> None:
    """Experts of two shapes or types keep the form that waits for the host, and the numbers."""
    given = weights(2, 16, 8)
    short = [given[0], ExpertWeights(*(None if w is None else w.astype(np.float16) for w in given[1][:6]))]
    placed = Placement(CPU).place(short)
    assert not isinstance(placed, ExpertStack)
    x, at = normal(9, 5, 16), routes("random", 5, 1, 2)
    for run, product in FORMS.values():
        wanted = plainly(x, at, short, "silu", None, False)
        assert far(run(x, at, placed, "silu", None, False, product), wanted) < 3e-6


def test_a_stack_is_there_once() -> None:
    given = weights(3, 16, 8, biased=True)
    placement = Placement(CPU)
    first, again = placement.place(given), placement.place(list(given))
    assert all(a is b for a, b in zip(first, again, strict=True) if isinstance(a, torch.Tensor))
    assert placement.num_bytes == sum(w.nbytes for one in given for w in one[:6] if w is not None)


def test_nobody_asks_the_device() -> None:
    """No shape follows from numbers: every form runs on tensors without any (torch's "meta")."""
    meta = torch.device("meta")
    placed = Placement(CPU).place(weights(4, 16, 8, biased=True))
    on_meta = ExpertStack(*(p.to(meta) if isinstance(p, torch.Tensor) else p for p in placed))
    for tokens in (1, 9):
        own: Any = (torch.zeros((tokens, 2), dtype=torch.int64, device=meta), torch.zeros((tokens, 2), device=meta))
        for run in (expert_ops.experts, expert_ops.experts_by_row):
            assert run(torch.zeros((tokens, 16), device=meta), Routes(*own), on_meta, "silu", None, False,
                       linear).shape == (tokens, 16)  # fmt: skip


def test_what_the_kernel_does_not_take() -> None:
    x, at = normal(1, 2, 32), routes("random", 2, 1, 2)
    plain = kernels.Stack(normal(2, 64, 32))
    with pytest.raises(ValueError, match="no kernel knows the activation 'mish'"):
        kernels.run_experts(x, *at, None, plain, plain, 2, "mish")
    narrow = kernels.Stack(torch.zeros((64, 32), dtype=torch.uint8), 8, torch.ones((64, 4)), group=8)
    with pytest.raises(ValueError, match="groups of 8 inputs are no multiple of 16"):
        kernels.run_experts(x, *at, None, narrow, narrow, 2, "silu")
    with pytest.raises(ValueError, match="two formats"):
        kernels.run_experts(x, *at, narrow, plain, plain, 2, "silu")
    none = routes("random", 0, 2, 2)
    assert kernels.run_experts(x[:0], *none, None, plain, plain, 2, "silu").shape == (0, 32)


@pytest.mark.parametrize("form", ["rows", "kernels"])
def test_experts_are_added_in_id_order(form: str) -> None:
    """Bit for bit: the sum of what each choice gives where the others weigh nothing, the lowest id first."""
    placed = Placement(CPU).place(weights(6, 24, 16))
    x, at = normal(10, 9, 24), routes("random", 9, 4, 6)
    run, product = FORMS[form]

    def some(*choices: int) -> Any:
        own: Any = (at.ids, torch.zeros_like(at.weights).index_copy(1, torch.tensor(choices), at.weights[:, choices]))
        return run(x, Routes(*own), placed, "silu", None, False, product)

    alone = [some(k) for k in range(4)]
    assert torch.equal(some(0, 1, 2, 3), ((alone[0] + alone[1]) + alone[2]) + alone[3])
    assert not torch.equal(some(0, 1, 2, 3), ((alone[3] + alone[2]) + alone[1]) + alone[0]), "the order shows"


@pytest.mark.parametrize(("num", "choices", "named"), [
    (16, 2, {}), (60, 4, {"renormalize": True, "scale": 2.5}), (8, 8, {"score": "sigmoid", "renormalize": True}),
    (33, 3, {"chosen_only": True}), (130, 6, {"score": "sigmoid", "correction": True, "expert_scale": True}),
])  # fmt: skip
def test_routes(num: int, choices: int, named: dict[str, Any]) -> None:
    """The reference's ids, ties included, and its weights."""
    rng = np.random.default_rng(num)
    logits = rng.integers(-9, 9, (5, num)).astype(np.float32) / 4
    logits[3], logits[4, 1] = 0.5, -np.inf
    more = [rng.normal(0, 0.5, num).astype(np.float32) if named.get(name) else None
            for name in ("correction", "expert_scale")]  # fmt: skip
    wanted = ref_route(logits, choices, Router(**named), *more)
    table = KernelTable(EXACT)
    found = table["route"](torch.from_numpy(logits), choices, Router(**named),
                           *(None if w is None else torch.from_numpy(w) for w in more))  # fmt: skip
    assert table.counts == {"route": 1}
    assert found.ids.tolist() == wanted.ids.tolist()
    np.testing.assert_allclose(found.weights.numpy(), wanted.weights, rtol=2e-6)
