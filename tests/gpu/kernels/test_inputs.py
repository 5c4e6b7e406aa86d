"""What a decode step begins with, against a step's own numbers and the rows of a matrix."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.gpu.kernels import naive  # noqa: E402

inputs: Any = pytest.importorskip("penstock.backends.gpu.kernels.inputs", reason=naive.ABSENT)


@pytest.mark.parametrize("num_layers", [1, 3, 32])
def test_places_are_slabs_by_layer(num_layers: int) -> None:
    draw = torch.Generator().manual_seed(num_layers)
    tables = torch.randint(0, 50, (5, 4), generator=draw, dtype=torch.int32)
    tables[2] = -1  # a row that fills up a captured step
    ids, positions = (torch.randint(0, 64, (5,), generator=draw, dtype=torch.int32) for _ in range(2))
    pages, offsets, wide_ids, at = inputs.token_places(ids, positions, tables, 16, num_layers, 777)
    slabs = tables.long().gather(1, (positions // 16).long()[:, None])[:, 0]
    wanted = slabs * num_layers + torch.arange(num_layers)[:, None]
    wanted[:, 2] = 777
    for found, right in ((pages, wanted), (offsets, positions % 16), (wide_ids, ids), (at, positions)):
        assert found.dtype == torch.int64
        assert torch.equal(found, right.long())


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_rows_of_the_embedding(kind: str) -> None:
    """Wider than a program; rows further apart than they are long; an id that names no row."""
    weight = torch.randn((9, 1300), generator=torch.Generator().manual_seed(1)).to(naive.FLOATS[kind])[:, :1200]
    ids = torch.tensor([8, 0, 9, 3])
    found = inputs.embed(ids, weight)
    assert found.dtype == torch.float32
    assert torch.equal(found, weight.float()[[8, 0, 0, 3]])
    assert inputs.embed(ids[:0], weight).shape == (0, 1200)
