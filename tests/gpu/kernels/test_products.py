"""Products with codes, against the decoded matrix; and whose bits a row has."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from penstock.backends.gpu.held import product_why_not  # noqa: E402
from penstock.backends.gpu.placed import Placement  # noqa: E402
from penstock.backends.gpu.tables import EXACT  # noqa: E402
from tests.gpu.kernels import naive  # noqa: E402
from tests.sampled import grid, some  # noqa: E402
from tests.stored import random_stored  # noqa: E402

products: Any = pytest.importorskip("penstock.backends.gpu.kernels.products", reason=naive.ABSENT)
from penstock.backends.gpu.kernel_ops import KernelTable  # noqa: E402
from penstock.backends.gpu.kernels import row_products as rows  # noqa: E402
from penstock.backends.gpu.kernels import word_products as words  # noqa: E402


def normal(seed: int, *shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes_of(seed: int, outputs: int, inputs: int, low: int, high: int) -> Any:
    return torch.randint(low, high, (outputs, inputs), generator=torch.Generator().manual_seed(seed))


def far(found: Any, wanted: Any) -> float:
    assert found.shape == wanted.shape
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(("tokens", "outputs", "inputs", "group"), [
    (1, 70, 192, 192), (3, 16, 100, 100), (17, 130, 256, 64), (2, 5, 1024, 128), (1, 33, 96, 48),
])  # fmt: skip
@pytest.mark.parametrize("bias", [False, True])
def test_int8(tokens: int, outputs: int, inputs: int, group: int, bias: bool) -> None:
    x, codes = normal(1, tokens, inputs), codes_of(2, outputs, inputs, -127, 128).to(torch.int8)
    scales = normal(3, outputs, inputs // group).abs() + 0.1
    b = normal(4, outputs) * 50 if bias else None
    wanted = x.double() @ (codes.double() * scales.double().repeat_interleave(group, 1)).t()
    wanted = wanted if b is None else wanted + b.double()
    assert far(products.product_int8(x, codes, scales, b, operands=torch.float32), wanted) < 2e-6
    assert 1e-5 < far(products.product_int8(x, codes, scales, b), wanted) < 1e-2, "x in 16 bits"


@pytest.mark.parametrize(("tokens", "outputs", "inputs", "group"), [
    (1, 70, 192, 32), (3, 16, 128, 64), (17, 130, 256, 128), (2, 5, 1024, 128), (1, 33, 96, 96),
])  # fmt: skip
@pytest.mark.parametrize("zeros", [False, True])
def test_int4(tokens: int, outputs: int, inputs: int, group: int, zeros: bool) -> None:
    x, codes = normal(1, tokens, inputs), codes_of(2, outputs, inputs, 0, 16).to(torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    scales = normal(3, outputs, inputs // group).abs() + 0.1
    zero = codes_of(5, outputs, inputs // group, 0, 16).float() if zeros else None
    shift = torch.full_like(scales, 8.0) if zero is None else zero
    w = (codes.double() - shift.double().repeat_interleave(group, 1)) * scales.double().repeat_interleave(group, 1)
    bias = normal(6, outputs)
    wanted = x.double() @ w.t() + bias.double()
    assert far(products.product_int4(x, packed, scales, zero, bias, operands=torch.float32), wanted) < 2e-6
    assert 1e-5 < far(products.product_int4(x, packed, scales, zero, bias), wanted) < 1e-2


@pytest.mark.parametrize(("outputs", "inputs"), [(70, 192), (33, 100), (5, 4096), (130, 2100)])
@pytest.mark.parametrize("kind", list(naive.FLOATS))
def test_a_row_of_floats(outputs: int, inputs: int, kind: str) -> None:
    x, w, bias = normal(1, 1, inputs), normal(2, outputs, inputs).to(naive.FLOATS[kind]), normal(3, outputs)
    wanted = x.double() @ w.double().t()
    assert far(rows.product_row(x, w), wanted) < 1e-6, "x is not narrowed"
    assert far(rows.product_row(x, w, bias * 50), wanted + bias.double() * 50) < 1e-6
    assert rows.product_row(x, w, into=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(("shape", "zeros", "kind"), some(grid(
    [(70, 192, 32), (16, 128, 64), (5, 4096, 128), (33, 384, 128), (3, 2048, 2048), (9, 4160, 64)],
    ["none", "codes", "values"], [(4, "int"), (4, "e2m1"), (8, "int")],
), pairs=True))  # fmt: skip
def test_a_row_of_codes(shape: tuple[int, int, int], zeros: str, kind: tuple[int, str]) -> None:
    """Against the product of many rows, which is compared with the decoded matrix."""
    (outputs, inputs, group), (bits, code) = shape, kind
    x, scales = normal(1, 1, inputs), normal(3, outputs, inputs // group).abs() + 0.1
    codes = codes_of(2, outputs, inputs, 0, 16 if bits == 4 else 256).to(torch.uint8)
    held = codes[:, 0::2] | codes[:, 1::2] << 4 if bits == 4 else codes
    how: dict[str, Any] = {"zeros_are": "codes" if zeros == "none" else zeros, "code": code, "offset": 0}
    if zeros == "none":
        how["offset"] = 0 if code == "e2m1" else 8
    zero = None if zeros == "none" else normal(5, *scales.shape) * 4
    bias = normal(6, outputs)
    product = products.product_int4 if bits == 4 else products.product_int8
    wanted = product(x, held, scales, zeros=zero, bias=bias, operands=torch.float32, **how)
    assert far(rows.coded_row(x, held, scales, zero, bias, bits=bits, **how), wanted) < 4e-4


@pytest.mark.parametrize(("shape", "zeros"), some(grid(
    [(5, 70, 512, 128), (20, 9, 1024, 256), (70, 33, 512, 128)], ["none", "codes", "values"],
), pairs=True))  # fmt: skip
def test_several_rows_of_words(shape: tuple[int, int, int, int], zeros: str) -> None:
    (tokens, outputs, inputs, group) = shape
    x, scales = normal(1, tokens, inputs), normal(3, outputs, inputs // group).abs() + 0.1
    codes = codes_of(2, outputs, inputs, 0, 16).to(torch.uint8)
    held, bias = codes[:, 0::2] | codes[:, 1::2] << 4, normal(6, outputs)
    zero = None if zeros == "none" else normal(5, *scales.shape) * 4
    how: dict[str, Any] = {"zeros_are": "codes" if zeros == "none" else zeros, "offset": 8}
    assert words.fits(held, inputs, inputs // group, "uint")
    wanted = products.product_int4(x, held, scales, zero, bias, operands=torch.float32, **how)
    found = words.product_words(x, held, scales, zero, bias, operands=torch.float32, **how)
    assert far(found, wanted) < 1e-5
    assert far(words.product_words(x, held, scales, zero, bias, **how), wanted) < 1e-2, "x in 16 bits"
    one = words.product_words(x[2:3], held, scales, zero, bias, columns=16, **how)
    assert torch.equal(one, words.product_words(x, held, scales, zero, bias, columns=16, **how)[2:3])


@pytest.mark.parametrize("inputs", [64, 20480])
def test_rows_of_words_are_rows(inputs: int) -> None:
    """Each has the bits it has alone; of many inputs, too, which two launches share; one that is no number stays so."""
    x, scales = normal(1, 3, inputs), normal(3, 9, inputs // 32).abs() + 0.1
    x[1], x[2, 5] = 0.0, float("nan")
    codes = codes_of(2, 9, inputs, 0, 16).to(torch.uint8)
    held = codes[:, 0::2] | codes[:, 1::2] << 4
    found = rows.coded_row(x, held, scales, bits=4, offset=8)
    wide = (codes.double() - 8) * scales.double().repeat_interleave(32, 1)
    assert far(found[:2], x[:2].double() @ wide.t()) < 1e-4
    assert bool(found[2].isnan().all())
    assert torch.equal(found[:1], rows.coded_row(x[:1], held, scales, bits=4, offset=8))


def test_rows_of_other_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 48 inputs: a row takes powers of two from 16 on"):
        rows.coded_row(normal(1, 1, 96), codes_of(2, 4, 96, 0, 9).to(torch.uint8), torch.ones(4, 2), bits=8)
    assert not rows.fits(96, 2, 8)
    assert not rows.fits(64, 4, 4)
    assert rows.fits(64, 4, 8)


@pytest.mark.parametrize("kind", list(naive.FLOATS))
def test_floats_in_a_fixed_order(kind: str) -> None:
    """The bits of a row alone are those it has in a batch of any size."""
    x, w, b = (normal(i, *shape).to(naive.FLOATS[kind]) for i, shape in enumerate([(70, 300), (40, 300), (40,)]))
    found = products.product_fixed(x, w, b)
    assert (
        far(found, x.double() @ w.double().t() + b.double())
        < {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}[kind]
    )
    for row in (0, 63, 69):
        assert torch.equal(products.product_fixed(x[row : row + 1], w, b)[0], found[row])


@pytest.mark.parametrize("columns", [16, 64])
def test_codes_in_tiles_of_one_width(columns: int) -> None:
    x, codes = normal(1, 20, 256), codes_of(2, 24, 256, 0, 16).to(torch.uint8)
    packed, scales = codes[:, 0::2] | codes[:, 1::2] << 4, normal(3, 24, 2)
    whole = products.product_int4(x, packed, scales, columns=columns)
    assert torch.equal(products.product_int4(x[7:8], packed, scales, columns=columns)[0], whole[7])


def test_groups_that_no_tile_fits() -> None:
    with pytest.raises(ValueError, match="groups of 24 inputs: this product takes multiples of 16"):
        products.product_int8(normal(1, 1, 48), codes_of(2, 4, 48, -3, 3).to(torch.int8), torch.ones(4, 2))
    with pytest.raises(ValueError, match="groups of 16 inputs: this product takes multiples of 32"):
        products.product_int4(normal(1, 1, 48), codes_of(2, 4, 24, 0, 3).to(torch.uint8), torch.ones(4, 3))
    assert products.product_fixed(normal(1, 0, 8), normal(2, 3, 8)).shape == (0, 3)


@pytest.mark.parametrize("name", [
    "Q8_0", "Q4_0", "Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "TQ2_0", "MXFP4", "GPTQ", "GPTQ 8 bits", "GPTQ whole rows",
    "compressed-tensors int8", "compressed-tensors int4", "FP8 row", "FP8 block", "HQQ", "GPTQ 3 bits",
])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 18])
def test_stored_weights_are_multiplied_as_they_are_held(name: str, tokens: int) -> None:
    """Of every format with groups that a tile fits; the table says what the others are decoded for."""
    matrix = random_stored(name, 20, 512)
    held: Any = Placement(torch.device("cpu")).place(matrix)
    table = KernelTable(EXACT)
    x = normal(1, tokens, 512)
    wanted = x.double() @ torch.from_numpy(matrix.values()).double().t()
    assert far(table.linear(x, held), wanted) < 1e-2
    wordy = held.paired and matrix.format.code == "uint" and 512 // held.scales.shape[1] % 128 == 0
    several = "product_words" if wordy else f"product_int{4 if held.paired else 8}"
    assert table.counts == {"coded_row" if tokens == 1 else several: 1}


def test_others_are_decoded_and_counted() -> None:
    for name, why in (("IQ4_NL", "table"), ("Q2_K", "groups are of 16"), ("GPTQ act-order", "order of their own")):
        matrix = random_stored(name, 20, 512)
        assert why in (product_why_not(matrix.format, matrix.shape) or "")
        held: Any = Placement(torch.device("cpu")).place(matrix)
        table = KernelTable(EXACT)
        x = normal(1, 2, 512)
        assert far(table.linear(x, held), x.double() @ torch.from_numpy(matrix.values()).double().t()) < 1e-5
        assert table.counts == {"torch linear": 1}
