"""What every op table owes: complete, right within a bound and, if it says so, batch-invariant to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backends import BACKENDS
from penstock.base.bf16 import narrow, widen
from penstock.ops.blas import BLAS
from penstock.ops.ref import REF
from penstock.ops.table import BESIDE, OP_NAMES, OpTable
from tests.engine.harness import Knobs, real_engine, request, run, tiny
from tests.engine.naive import log_softmax
from tests.oracle import NaiveModel


@pytest.fixture(params=[REF, BLAS], ids=["ref", "blas"])
def table(request: pytest.FixtureRequest) -> OpTable:
    found = request.param
    assert isinstance(found, OpTable)
    return found


def test_complete(table: OpTable) -> None:
    assert set(table) == OP_NAMES - BESIDE
    assert BACKENDS.traits(table.name).batch_invariant == table.batch_invariant


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("t", "n", "m"), [(1, 1, 1), (3, 17, 5), (9, 64, 172), (16, 33, 1031)])
def test_C53_linear_is_right_within_its_bound(table: OpTable, dtype: str, t: int, n: int, m: int) -> None:
    """|error| <= 4 n eps |x| |w|, with the weights as they are after rounding to their type."""
    rng = np.random.default_rng(t * n * m)
    x = rng.standard_normal((t, n)).astype(np.float32)
    w32 = rng.standard_normal((m, n)).astype(np.float32)
    w = {"float32": w32, "float16": w32.astype(np.float16), "bfloat16": narrow(w32)}[dtype]
    exact = widen(w) if dtype == "bfloat16" else w.astype(np.float32)
    bias = rng.standard_normal(m).astype(np.float32)
    want = x.astype(np.float64) @ exact.astype(np.float64).T + bias
    bound = 4 * n * np.finfo(np.float32).eps * (np.abs(x) @ np.abs(exact).T + np.abs(bias))
    assert np.all(np.abs(table["linear"](x, w, bias) - want) <= bound)


def test_batch_invariance_is_what_the_table_says(table: OpTable) -> None:
    rng = np.random.default_rng(0)
    differs = 0
    for n, m in ((64, 172), (172, 64), (257, 129), (512, 512)):
        x, w = rng.standard_normal((9, n)).astype(np.float32), rng.standard_normal((m, n)).astype(np.float32)
        whole = table["linear"](x, w)
        differs += sum(not np.array_equal(table["linear"](x[i : i + 1], w)[0], whole[i]) for i in range(9))
    if table.batch_invariant:
        assert differs == 0


def test_serves_the_reference_logprobs(table: OpTable) -> None:
    """Through the engine: each chosen token's logprob is the naive one within 1e-4, whatever the table."""
    spec, weights = tiny("llama_gqa")
    model = NaiveModel(spec, weights)
    load = [request([3 + i, 9, 27, 12, 44], max_tokens=8, num_logprobs=0) for i in range(5)]
    got = run(real_engine(spec, weights, Knobs(ops=table.name, budget=32)), load)
    for r in load:
        history = list(r.prompt_token_ids)
        for token, entry in zip(got[r.request_id].tokens[0], got[r.request_id].logprobs[0], strict=True):
            row = log_softmax([float(v) for v in model.logits(history, last_only=True)[0]])
            assert entry.logprob == pytest.approx(row[token], abs=1e-4)
            assert entry.logprob == pytest.approx(max(row), abs=1e-4)
            history.append(token)
