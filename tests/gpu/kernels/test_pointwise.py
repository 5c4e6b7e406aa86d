"""Norms, activations and rotation with its cache write, against the same in float64 and against the codecs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.ops.ref import pointwise, rotary
from penstock.ops.ref.codecs import int8

torch = pytest.importorskip("torch")
from tests.gpu.kernels import naive  # noqa: E402

loads: Any = pytest.importorskip("penstock.backends.gpu.kernels.loads", reason=naive.ABSENT)
norm: Any = pytest.importorskip("penstock.backends.gpu.kernels.norm", reason=naive.ABSENT)
activation: Any = pytest.importorskip("penstock.backends.gpu.kernels.activation", reason=naive.ABSENT)
rope: Any = pytest.importorskip("penstock.backends.gpu.kernels.rope", reason=naive.ABSENT)

KINDS = list(naive.FLOATS)


def normal(seed: int, *shape: int, kind: str = "float32") -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(naive.FLOATS[kind])


def near(found: Any, wanted: Any) -> bool:
    """Within a few roundings of the type that was asked for."""
    tolerance = 4 * max(naive.rough(found.dtype), 1e-6)
    return bool(((found.double() - wanted).abs() <= tolerance * (1 + wanted.abs())).all())


# -- norms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 40), (2, 1000)])
def test_norms(kind: str, rows: int, width: int) -> None:
    x, r = normal(1, rows, width, kind=kind), normal(2, rows, width, kind=kind)
    w, b = normal(3, width, kind=kind), normal(4, width, kind=kind)
    h = x.double() + r.double()
    for residual, own in ((r, h), (None, x.double())):
        centred = own - own.mean(1, keepdim=True)
        kept, found = norm.rms_norm(x, w, 1e-2, residual)
        assert near(found, own / (own.square().mean(1, keepdim=True) + 1e-2).sqrt() * w.double())
        assert near(kept, own)
        kept, found = norm.layer_norm(x, w, b, 1e-2, residual)
        assert near(found, centred / (centred.square().mean(1, keepdim=True) + 1e-2).sqrt() * w.double() + b.double())
        assert near(kept, own)
    bare = norm.layer_norm(x, None, None, 1e-2)[1]
    assert near(bare, (centred / (centred.square().mean(1, keepdim=True) + 1e-2).sqrt()))
    assert near(norm.rms_norm(x, None, 0.5)[1], own / (own.square().mean(1, keepdim=True) + 0.5).sqrt())


def test_a_norm_reads_columns_of_a_wider_matrix_and_a_row_has_its_bits_alone() -> None:
    wide = normal(5, 4, 96)
    _, found = norm.rms_norm(wide[:, 16:64], None, 1e-5)
    _, alone = norm.rms_norm(wide[2:3, 16:64].contiguous(), None, 1e-5)
    assert torch.equal(found[2:3], alone)
    assert len(norm.rms_norm(wide[:0], None, 1e-5)[1]) == 0


# -- activations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh"])
@pytest.mark.parametrize("kind", KINDS)
def test_gated_activations(name: str, kind: str) -> None:
    both = normal(6, 3, 74, kind=kind) * 4
    both[0, :4] = torch.tensor([0.0, 60.0, -60.0, 1e-3])
    gate, up = both[:, :37], both[:, 37:]
    function = getattr(torch.nn.functional, name.split("_")[0], None) or getattr(torch, name, None)
    x = gate.double()
    if name == "relu2":
        own = torch.relu(x).square()
    elif name == "gelu_tanh":
        own = torch.nn.functional.gelu(x, approximate="tanh")
    else:
        assert function is not None
        own = function(x)
    assert near(activation.activate_gated(gate, up, name), own * up.double())


@pytest.mark.parametrize("limit", [None, 1.5])
def test_the_clamped_gate(limit: float | None) -> None:
    gate, up = normal(7, 2, 33) * 4, normal(8, 2, 33) * 4
    x, y = gate.double(), up.double()
    if limit is not None:
        x, y = x.clamp(max=limit), y.clamp(-limit, limit)
    wanted = x * torch.sigmoid(pointwise.SWIGLU_ALPHA * x) * (y + 1)
    assert near(activation.activate_gated(gate, up, "swiglu_clamped", limit), wanted)


def test_an_unknown_activation() -> None:
    with pytest.raises(ValueError, match="no kernel knows the activation 'mish': it is one of silu"):
        activation.activate_gated(normal(1, 1, 4), normal(1, 1, 4), "mish")


# -- rotation and the cache --------------------------------------------------------------------------------------------


class Written:
    """A call of `rope_write` with planes of a kind, and what rope makes of its inputs."""

    def __init__(self, kind: str, q_kind: str = "float32", interleaved: bool = False, first: int = 0) -> None:
        rng = np.random.default_rng(9)
        tokens, pairs, dim, width = 5, 5, 18, 12
        self.q, self.k = normal(10, tokens, 6, dim, kind=q_kind), normal(11, tokens, 2, dim, kind=q_kind)
        self.v = normal(12, tokens, 2, width, kind=q_kind)
        self.v[1, 0] = 0.0
        positions = np.array([0, 7, 3, 19, 4], np.int32)
        table = rng.standard_normal((2, 20, pairs)).astype(np.float32)
        self.pages, self.places = torch.tensor([3, 0, 3, 1, 2]), torch.tensor([0, 15, 1, 4, 8])
        shapes = (4, 16, 2, dim), (4, 16, 2, width)
        dtype = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}.get(kind) or naive.FLOATS[kind]
        self.planes = [torch.zeros(shape).to(dtype) for shape in shapes]
        self.scales = [torch.full((4, 16, 2, 1), 9.0) for _ in shapes] if kind == "int8" else [None, None]
        angles = rotary.rope_angles(positions, table)
        self.turned_q, self.turned_k = (
            torch.from_numpy(rotary.rope(x.float().numpy(), angles, interleaved, first)) for x in (self.q, self.k)
        )
        self.out = rope.rope_write(
            self.q, self.k, self.v, torch.from_numpy(positions), torch.from_numpy(table), *self.planes, self.pages,
            self.places, interleaved=interleaved, first=first, key_scales=self.scales[0], value_scales=self.scales[1],
        )  # fmt: skip

    def written(self, plane: Any) -> Any:
        return plane[self.pages, self.places]


@pytest.mark.parametrize("q_kind", KINDS)
@pytest.mark.parametrize(("interleaved", "first"), [(False, 0), (True, 0), (False, 4), (True, 4)])
def test_queries_turn_and_keys_and_values_are_written(q_kind: str, interleaved: bool, first: int) -> None:
    own = Written(q_kind, q_kind, interleaved, first)
    assert own.out.dtype == naive.FLOATS[q_kind]
    assert near(own.out, own.turned_q.double())
    assert near(own.written(own.planes[0]), own.turned_k.double())
    assert torch.equal(own.written(own.planes[1]), own.v)
    assert int((own.planes[1] != 0).any(-1).sum()) == 9, "nothing else is written"


def test_int8_codes_are_the_codec_s() -> None:
    own = Written("int8")
    for x, plane, scales in zip((own.turned_k, own.v), own.planes, own.scales, strict=True):
        codes, scale = int8.quantise(x.numpy())
        found = own.written(scales)
        assert torch.allclose(found, torch.from_numpy(scale), rtol=1e-6, atol=0)
        assert int((own.written(plane).int() - torch.from_numpy(codes).int()).abs().max()) <= (x is own.turned_k)
    assert own.written(own.scales[1])[1, 0] == 0
    assert int((own.scales[1] != 9).sum()) == 10


def test_a_key_that_is_no_number_makes_its_scale_one() -> None:
    for bad in (float("nan"), float("inf")):
        v = torch.ones(1, 1, 16)
        v[0, 0, 3] = bad
        planes = [torch.zeros(1, 16, 1, 16, dtype=torch.int8) for _ in range(2)]
        scales = [torch.zeros(1, 16, 1, 1) for _ in range(2)]
        zero = torch.zeros(1, dtype=torch.int32)
        rope.rope_write(v, torch.ones(1, 1, 16), v, zero, torch.ones(2, 1, 8), *planes, zero, zero,
                        key_scales=scales[0], value_scales=scales[1])  # fmt: skip
        assert bool(scales[1][0, 0].isnan().all())
        assert not planes[1].any()
        assert bool(scales[0][0, 0].isfinite().all())


def test_e4m3_is_rounded_as_torch_rounds_it() -> None:
    own = Written("e4m3")
    assert torch.equal(own.written(own.planes[1]).view(torch.uint8), own.v.to(torch.float8_e4m3fn).view(torch.uint8))


def test_every_number_of_e4m3_and_what_lies_between() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = every[every.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    x = torch.cat([every, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), torch.tensor([460.0, -1e9, 1e-20])])
    plane = torch.zeros(1, 16, 1, len(x), dtype=torch.float8_e4m3fn)
    zero = torch.zeros(1, dtype=torch.int32)
    rope.rope_write(x[None, None], x[None, None], x[None, None], zero, torch.ones(2, 1, 1), plane.clone(), plane, zero,
                    zero)  # fmt: skip
    codes = plane[0, 0, 0].view(torch.uint8)
    wanted = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    same = (codes == wanted) | (x.isnan() & ((codes & 127) == 127))
    assert bool(same.all()), x[~same]
