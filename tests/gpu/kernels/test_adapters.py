"""Rows of many adapters by the kernels: the reference's results, one row's bits in every company, under graphs."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from penstock.backends.backend import AdapterRoom  # noqa: E402
from penstock.backends.gpu.adapted import TorchTable  # noqa: E402
from penstock.backends.gpu.adapter_plan import numbers_of_adapters  # noqa: E402
from penstock.backends.gpu.backend import TorchBackend  # noqa: E402
from penstock.backends.reference import ReferenceBackend  # noqa: E402
from penstock.base.bf16 import narrow  # noqa: E402
from penstock.model.forward import StepLimits  # noqa: E402
from penstock.ops import adapters as reference  # noqa: E402
from penstock.ops.adapters import LowRank  # noqa: E402
from tests import specs  # noqa: E402
from tests.adapting import made  # noqa: E402
from tests.gpu.kernels import naive  # noqa: E402
from tests.paged import Paged  # noqa: E402

kernels: Any = pytest.importorskip("penstock.backends.gpu.kernels.adapters", reason=naive.ABSENT)
CPU = torch.device("cpu")
INPUTS, OUTPUTS, COUNT, MOST = 600, 150, 5, 40
RANKS = (3, 0, 16, 40, 0)


def parts_of(seed: int) -> list[LowRank | None]:
    """Of ranks that differ; one has no product, the last no entry at all."""
    rng, out = np.random.default_rng(seed), list[LowRank | None]()
    for i, rank in enumerate(RANKS[:-1]):
        a, b = rng.normal(0, 0.1, (rank, INPUTS)), rng.normal(0, 1, (OUTPUTS, rank))
        gain = rng.uniform(0.5, 1.5, OUTPUTS).astype(np.float32) if i % 2 else None
        shift = rng.normal(0, 1, OUTPUTS).astype(np.float32) if i < 2 else None
        out.append(LowRank(a.astype(np.float32), b.astype(np.float32), 0.5 + i, gain, shift))
    return [*out, None]


def table_of(parts: list[LowRank | None], kind: Any) -> TorchTable:
    table = TorchTable(CPU, COUNT, MOST, kind, kernels=True, exact=True, counts=Counter())
    for number, part in enumerate(parts):
        table.put(number, table.prepare({} if part is None else {"w": part}))
    return table


def adapt(table: TorchTable, x: Any, y: Any, numbers: list[int], lengths: list[int]) -> Any:
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    plan: Any = SimpleNamespace(adapters=np.array(numbers, np.int32), query_start_loc=starts)
    memo = {name: torch.from_numpy(array) for name, array in numbers_of_adapters(plan).items()}
    return table.adapt(x, y, SimpleNamespace(memo=memo), table.of("w"))


NUMBERS, LENGTHS = [2, -1, 0, 3, 2, 4, 1], [1, 2, 17, 3, 4, 1, 5]


@pytest.mark.parametrize("kind", list(naive.FLOATS))
def test_rows_of_many_adapters_are_the_reference_s(kind: str) -> None:
    """`y` are columns of a wider product."""
    dtype, rng, parts = naive.FLOATS[kind], np.random.default_rng(0), parts_of(1)
    x, wide = (torch.from_numpy(rng.normal(0, 1, (33, n)).astype(np.float32)).to(dtype) for n in (INPUTS, OUTPUTS + 9))
    step: Any = SimpleNamespace(plan=SimpleNamespace(adapters=np.array(NUMBERS)), bounds=np.cumsum([0, *LENGTHS]))
    y = wide[:, 4:-5]
    want = reference.adapt(x.float().numpy(), y.float().numpy(), step, parts)
    before, size = wide.clone(), float(np.abs(want).max())
    found = adapt(table_of(parts, dtype), x, y, NUMBERS, LENGTHS)
    assert found.dtype == dtype
    may = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.5e-2}[kind] * size
    np.testing.assert_allclose(found.float().numpy(), want, atol=may, rtol=0)
    assert torch.equal(wide[:, :4], before[:, :4]), "columns beside it stay"
    assert torch.equal(found[1:3], before[1:3, 4:-5]), "rows without an adapter keep their bits"
    assert torch.equal(found[27], before[27, 4:-5]), "and those whose adapter leaves this product alone"
    assert float((found.float() - before[:, 4:-5].float()).abs().max()) > 0.1 * size


def test_a_row_has_its_bits_in_every_company() -> None:
    rng = np.random.default_rng(2)
    table = table_of(parts_of(1), torch.float32)
    x, y = (torch.from_numpy(rng.normal(0, 1, (33, n)).astype(np.float32)) for n in (INPUTS, OUTPUTS))
    found = adapt(table, x, y.clone(), NUMBERS, LENGTHS)
    for b, row in ((0, 0), (2, 3), (2, 19), (4, 25), (6, 32)):
        alone = adapt(table, x[row : row + 1], y[row : row + 1].clone(), NUMBERS[b : b + 1], [1])
        assert torch.equal(alone[0], found[row])


def test_tiles_hold_tokens_of_one_adapter() -> None:
    plan: Any = SimpleNamespace(adapters=np.array([1, -1, 0, 1]), query_start_loc=np.array([0, 15, 17, 18, 21]))
    found = numbers_of_adapters(plan, least=20)
    assert found["adapter_order"].tolist() == [17, *range(15), 18, 19, 20, 0]
    assert found["adapter_tiles"].tolist()[:3] == [[0, 0, 1], [1, 1, 16], [1, 17, 2]]
    assert found["adapter_tiles"].tolist()[3:] == [[-1, -1, -1]] * 17


IDS = [3 + i * 7 % 50 for i in range(40)]


def test_captured_steps_read_who_has_which_adapter_anew() -> None:
    """Rows and adapters come and go under graphs that were captured when the first one came."""
    spec, weights = specs.make("llama_gqa")
    weights = {name: narrow(w) if w.ndim == 2 else w for name, w in weights.items()}
    own = {n: made(spec, n, rank=2 + 3 * n, share=0.3) for n in (0, 1)}
    room, drivers = AdapterRoom(2, 8), []
    for ops in ("ref", "torch"):
        driver = Paged(spec, weights, block_size=16, num_slabs=12, max_model_len=32)
        drivers.append(driver)
        if ops == "ref":
            driver.on(ReferenceBackend(), adapters=room)
            continue
        driver.on(TorchBackend(CPU, kernels=True, graphs=(1, 2)), adapters=room)
        driver.planes = tuple(driver.planes)  # type: ignore[assignment]
        driver.program.warm(driver.planes, StepLimits(driver.groups, 16, 2, 2, False), lambda done, total: None)
    plain, fast = drivers
    plainly = {}
    for driver in drivers:
        driver.program.put(0, driver.program.prepare(own[0]))
        driver.adapters = {"a": 0}
        plainly = driver.run({"a": (IDS[:6], [5]), "b": (IDS[:2], [1])})
    assert np.isfinite(plainly["a"]).all()
    for i, step in enumerate(({"a": ([9], [0])}, {"b": ([7], [0])}, {"b": ([7], [0]), "a": ([4], [0])})):
        want, got = plain.run(step), fast.run(step)
        for seq in step:
            apart = np.abs(got[seq] - want[seq]) / float(np.abs(want[seq]).max())
            assert float(np.median(apart)) < 1e-2
        if i == 1:
            for driver in drivers:  # another adapter under the same number, of products that are adapted already
                parts = {n: own[0][n]._replace(factor=-2.0) for n in own[0]}
                driver.program.put(0, driver.program.prepare(parts))
    inner: Any = fast.program._inner
    assert fast.program.graphs.counts == {1: 1}, "a step without adapters runs the plain graph"
    assert inner.graphs.counts == {"eager": 1, 1: 1, 2: 1}
    assert inner.graphs.problem is None
