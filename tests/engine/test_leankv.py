"""Row B26, LeanKV's third level in the engine: who reads what, in whose room, and what it is worth."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.config.selection import parse_selection
from penstock.core.selection import KVLine, Selecting
from penstock.launch.selection import NO_KINDS
from penstock.runner import levels as levels_module
from penstock.select import KV_SELECTORS
from penstock.select.bench import SelectionBench
from penstock.select.leankv import LeanKV
from tests.engine.harness import assert_idle, disturbed, real_engine, tiny
from tests.engine.naive import generate
from tests.engine.test_kv_selection import CONTROLS, draw_knobs, model_logits_of, settings_of, workload
from tests.selective import SelectiveModel

SIZE = 4
I32 = npt.NDArray[np.int32]


class Union(LeanKV):
    """For the naive model, in which nothing is rounded: both levels are kept, as the engine does, in whole pages."""

    def __init__(self, bench: SelectionBench) -> None:
        super().__init__(bench)
        self.coarse: dict[tuple[int, int], set[int]] = {}
        self.last = 0

    def select(self, at: Selecting, lines: Sequence[KVLine]) -> list[I32]:
        if at.num_tokens <= self.last:  # the naive model begins anew
            self.coarse = {}
        self.last = at.num_tokens
        for line in lines:
            held = self.coarse.get((line.layer, line.head), set())
            line.coarse = np.array([p in held for p in line.positions.tolist()], np.bool_)
        out = []
        for line, whole, middle in zip(lines, *self.levels(at, lines), strict=True):
            middle = middle[: len(middle) // (2 * SIZE) * 2 * SIZE]
            self.coarse[line.layer, line.head] = set(line.positions[middle].tolist())
            out.append(np.sort(np.concatenate([whole, middle])))
        return out


def exact_halves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Coarse pages hold what they were given, as it is, in any type. Returns how many were read and written."""
    kept: dict[tuple[int, str, int], Any] = {}
    counts = [0, 0]

    def store(planes: Any, name: str, pages: I32, x: Any) -> None:
        for page, tokens in zip(pages.tolist(), x.reshape(len(pages), 2 * SIZE, *x.shape[1:]), strict=True):
            kept[id(planes), name, page] = tokens.copy()
            counts[1] += 1

    def read(planes: Any, name: str, pages: I32) -> Any:
        counts[0] += len(pages)
        return np.concatenate([kept[id(planes), name, page] for page in pages.tolist()])

    monkeypatch.setattr(levels_module, "store_halves", store)
    monkeypatch.setattr(levels_module, "read_halves", read)
    monkeypatch.setattr("penstock.ops.ref.codecs.halves.read_halves", read)  # attention imports it when it is needed
    return counts


@pytest.mark.parametrize("budget", ["40%", "14"])
def test_B26_three_levels_are_the_naive_models(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tokens are whole, which coarse, and where they stand, whatever the steps, the company and preemptions: with
    rounding taken away, tokens are those of the naive model."""
    counts = exact_halves(monkeypatch)
    spec, weights = tiny("llama_gqa")
    rng = random.Random(f"levels-{budget}")
    config = parse_selection("leankv", budget, settings_of("leankv"))
    assert config is not None
    bench = SelectionBench(config, spec, *NO_KINDS, lambda: "")
    of = model_logits_of(SelectiveModel(spec, weights, Union(bench), config, block_size=SIZE))
    for _ in range(2):
        knobs = replace(draw_knobs(rng, "leankv", budget, 0), block_size=SIZE, num_blocks=64 * rng.choice([1, 4]))
        core = real_engine(spec, weights, knobs)
        collector = disturbed(core, workload(spec.vocab_size), rng, CONTROLS, times=12, note=knobs)
        for r in workload(spec.vocab_size):
            want = [generate(of(len(r.prompt_token_ids)), r, i)[0] for i in range(r.n)]
            assert [collector.requests[r.request_id].tokens[i] for i in range(r.n)] == want, (r.request_id, knobs)
        assert_idle(core)
    assert min(counts) > 0, "there were coarse pages"


def test_B26_levels_are_within_the_budget_and_what_is_coarse_stays_so() -> None:
    config = parse_selection("leankv", "25%", '{"sinks": 2, "recent": 4, "middle": 0.5}')
    assert config is not None
    spec, _ = tiny("llama_gqa")
    made = KV_SELECTORS.get("leankv")(SelectionBench(config, spec, *NO_KINDS, lambda: ""))
    rng = np.random.default_rng(3)
    for num_tokens in (64, 100, 257):
        lines = []
        for head in range(4):
            seen = rng.random((8, 1, num_tokens), np.float32) ** (1 + 4 * head)
            line = KVLine(0, head, np.arange(num_tokens, dtype=np.int32), recent=lambda seen=seen: seen)
            line.coarse = rng.random(num_tokens) < 0.3
            line.coarse[:2] = line.coarse[-4:] = False
            lines.append(line)
        budget = num_tokens // 4
        whole, middle = made.levels(Selecting(num_tokens, num_tokens, budget, np.zeros(num_tokens, np.int32)), lines)
        assert sum(map(len, whole)) + sum(map(len, middle)) / 2 <= 4 * budget
        assert sum(map(len, middle)) >= sum(map(len, whole)), "two in the room of one"
        assert len({len(w) for w in whole}) > 1, "heads keep different numbers"
        for line, w, m in zip(lines, whole, middle, strict=True):
            assert line.coarse is not None
            assert not line.coarse[w].any()
            assert not set(w.tolist()) & set(m.tolist())
            assert {0, 1, *range(num_tokens - 4, num_tokens)} <= set(w.tolist())


def test_B26_other_formats_are_refused_in_one_sentence() -> None:
    from penstock.base.errors import ConfigError
    from penstock.config import from_kwargs
    from penstock.launch.selection import keeping_of
    from penstock.plan.keeping import check_keeping

    spec, _ = tiny("llama_gqa")
    for given, good in (("int8", False), ('{"dtype": {"k": "int8", "v": "int4"}}', True)):
        config = from_kwargs(model="unused", kv_selector="leankv", kv_cache_dtype=given)
        keeping = keeping_of(config)
        assert keeping is not None
        if good:
            check_keeping(config, spec, keeping)
            continue
        with pytest.raises(ConfigError, match="halves 8-bit keys and 4-bit values; use kv_cache_dtype"):
            check_keeping(config, spec, keeping)
