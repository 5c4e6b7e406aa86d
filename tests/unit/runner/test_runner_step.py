"""Runner.execute over a fake model that believes only what it reads back through the pages.

The model writes each token into the pages its tables name, reads the whole history back from every layer, and turns
what it read into logits. A wrong table, a missing copy, a stale or unzeroed page changes the logits, and the result
differs from an oracle that knows nothing of pages, batches or forks.
"""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.base.rng import uniform
from penstock.core.batch import AddedRow, Appended, Fork, ScheduledRow, SchedulerOutput, StepOutput, TableUpdate
from penstock.core.cache_spec import CacheSpec, PlaneSpec, group_layers
from penstock.core.page_ops import PageOp
from penstock.core.sampling import TokenRules
from penstock.ops.plan import Planes, StepPlan
from penstock.runner.rows import RowStore
from penstock.runner.runner import Runner
from penstock.runner.sampler import Sampler
from penstock.runner.storage import Storage

V, S = 23, 4
PAGED = CacheSpec("paged", (PlaneSpec("k", 1, 1, "float32"), PlaneSpec("v", 1, 2, "float32")))
SLOT = CacheSpec("slot", (PlaneSpec("state", 1, 1, "float32"),))
GROUPS = group_layers([PAGED, SLOT, PAGED])
PAGED_ONLY = group_layers([PAGED, PAGED])


def logits_after(histories: Sequence[Any], states: Sequence[float]) -> np.ndarray:
    """The model's output as a function of what it remembers."""
    blob = b"".join(np.asarray(h, np.float32).tobytes() for h in histories) + np.asarray(states, np.float32).tobytes()
    return np.random.default_rng(zlib.crc32(blob)).standard_normal(V).astype(np.float32) * 2


def fold(state: float, token: int) -> float:
    return float((state * 31 + token + 1) % 8191)


class PageReader:
    """The fake model. `sick` tokens turn the logits after them into NaN."""

    def __init__(self, groups: Any, sick: int = -1) -> None:
        self.groups = groups
        self.sick = sick
        self.plans: list[tuple[list[int], list[int]]] = []

    def run(self, plan: StepPlan, planes: Sequence[Planes]) -> np.ndarray:
        self.plans.append((plan.token_ids.tolist(), plan.logits_indices.tolist()))
        out = np.full((len(plan.token_ids), V), np.nan, np.float32)
        for b in range(len(plan.seq_lens)):
            for t in range(plan.query_start_loc[b], plan.query_start_loc[b + 1]):
                out[t] = self._token(plan, planes, b, t)
        return out[plan.logits_indices]

    def _token(self, plan: StepPlan, planes: Sequence[Planes], b: int, t: int) -> np.ndarray:
        token, position = int(plan.token_ids[t]), int(plan.positions[t])
        histories, states = [], []
        for group, where, arrays in zip(self.groups, plan.groups, planes, strict=True):
            for i in range(len(group.layers)):
                pages = where.pages(b, i)
                if group.spec.kind == "slot":
                    slot = arrays["state"][pages[0]]
                    slot[0, 0] = fold(float(slot[0, 0]), token)
                    states.append(float(slot[0, 0]))
                    continue
                page, offset = pages[position // S], position % S
                arrays["k"][page, offset, 0, 0] = token + 1
                arrays["v"][page, offset, 0] = (position, token * 2 + 1)
                read = [arrays[n][pages].reshape(len(pages) * S, -1)[: position + 1] for n in ("k", "v")]
                histories.append(np.concatenate(read, axis=1))
        if token == self.sick:
            return np.full(V, np.nan, np.float32)
        return logits_after(histories, states)


def oracle_logits(tokens: Sequence[int], groups: Any = GROUPS) -> np.ndarray:
    history = np.array([[t + 1, p, t * 2 + 1] for p, t in enumerate(tokens)], np.float32)
    state = 0.0
    for token in tokens:
        state = fold(state, token)
    num_slots = sum(len(g.layers) for g in groups if g.spec.kind == "slot")
    num_paged = sum(len(g.layers) for g in groups if g.spec.kind == "paged")
    return logits_after([history] * num_paged, [state] * num_slots)


def oracle_next(tokens: Sequence[int], rules: TokenRules, sample_index: int, groups: Any = GROUPS) -> int:
    logits = oracle_logits(tokens, groups).astype(np.float64)
    if rules.greedy:
        return int(np.argmax(logits))
    p = np.exp((logits - logits.max()) / rules.temperature)
    u, total = uniform(rules.seed, sample_index, len(tokens)), 0.0
    for token in range(V):
        total += p[token]
        if total > u * p.sum():
            return token
    raise AssertionError


class Ticks:
    def __init__(self) -> None:
        self.t = 0.0

    def now(self) -> float:
        self.t += 0.25
        return self.t


def make(groups: Any = GROUPS, num_slabs: Sequence[int] = (40, 8), sick: int = -1) -> Runner:
    model = PageReader(groups, sick)
    storage = Storage(groups, num_slabs[: len(groups)], S, poison=True)
    rows = RowStore(groups, num_slabs[: len(groups)], S, V)
    return Runner(model, rows, storage, Sampler(V), clock=Ticks(), strict=True)


def zero_slabs(group: int, slabs: Sequence[int], per_slab: int) -> list[PageOp]:
    return [PageOp(group, -1, s * per_slab, per_slab) for s in slabs]


def start(
    seq_id: int, tokens: list[int], slabs: list[int], slot: int, rules: TokenRules, **more: Any
) -> dict[str, Any]:
    """Lists of a step that adds one row with memory of its own."""
    return {
        "added": [AddedRow(seq_id, 0, tokens, more.get("prompt_len", len(tokens)), rules)],
        "tables": [TableUpdate(seq_id, 0, 0, slabs), TableUpdate(seq_id, 1, 0, [slot])],
        "page_ops": zero_slabs(0, slabs, 2) + zero_slabs(1, [slot], 1),
    }


def tokens_of(out: StepOutput, seq_id: int) -> list[int]:
    (hit,) = [s for s in out.sampled if s.seq_id == seq_id]
    return hit.token_ids


SAMPLED = TokenRules(temperature=0.8, seed=11)


@pytest.mark.parametrize("rules", [TokenRules(), SAMPLED])
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_D01_chunks_and_decode_equal_the_oracle(rules: TokenRules, chunk: int) -> None:
    """Prompt of 9 tokens (blocks of 4) in chunks, then 12 decode steps."""
    runner, tokens = make(), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    lists, step, done = start(1, list(tokens), [7, 2, 30], 5, rules), 0, 0
    while len(tokens) < 21:
        n = min(chunk, len(tokens) - done)
        last = done + n == len(tokens)
        if len(tokens) == 13 and done == 12:
            lists["tables"] = [TableUpdate(1, 0, 3, [9, 1, 11])]
            lists["page_ops"] = zero_slabs(0, [9, 1, 11], 2)
        out = runner.execute(SchedulerOutput(step, scheduled=[ScheduledRow(1, done, n, int(last))], **lists))
        assert out.step == step
        assert out.duration_s == 0.25
        done, step, lists = done + n, step + 1, {}
        if not last:
            assert out.sampled == []
            continue
        assert tokens_of(out, 1) == [oracle_next(tokens, rules, 0)]
        tokens.append(tokens_of(out, 1)[0])
        lists["appended"] = [Appended(1, tokens[-1:])]
    assert len(set(tokens[9:])) > 3, "the model is too dull to notice a mistake"


def test_D02_samples_fork_and_the_parent_ends_in_the_same_step() -> None:
    """Three first tokens from one set of logits; then two forks, one of which inherits what the parent leaves."""
    runner, prompt = make(), [8, 7, 6, 5, 4, 3]
    out = runner.execute(
        SchedulerOutput(0, scheduled=[ScheduledRow(1, 0, 6, 3)], **start(1, prompt, [0, 1], 0, SAMPLED))
    )
    first = tokens_of(out, 1)
    assert first == [oracle_next(prompt, SAMPLED, j) for j in range(3)]
    assert len(set(first)) > 1
    # Sequence 2 takes the parent's memory over, sequence 3 gets copies of the tail block (slab 1 -> 4) and the state.
    out = runner.execute(
        SchedulerOutput(
            1,
            forked=[Fork(1, 2, 1), Fork(1, 3, 2)],
            removed=[1],
            appended=[Appended(2, [first[1]]), Appended(3, [first[2]])],
            tables=[
                TableUpdate(2, 0, 0, [0, 1]),
                TableUpdate(3, 0, 0, [0, 4]),
                TableUpdate(2, 1, 0, [0]),
                TableUpdate(3, 1, 0, [1]),
            ],
            page_ops=[PageOp(0, 2, 8, 2), PageOp(1, 0, 1, 1)],
            scheduled=[ScheduledRow(3, 6, 1, 1), ScheduledRow(2, 6, 1, 1)],
        )
    )
    assert 1 not in runner.rows
    assert [s.seq_id for s in out.sampled] == [3, 2]
    for seq_id, index in ((2, 1), (3, 2)):
        assert tokens_of(out, seq_id) == [oracle_next([*prompt, first[index]], SAMPLED, index)]


def test_rollback_forgets_tokens() -> None:
    runner = make(PAGED_ONLY)
    tokens, rules = [1, 2, 3, 4, 5, 6], TokenRules(frequency_penalty=1e9)
    added = AddedRow(1, 0, list(tokens), 3, rules)
    lists = {"tables": [TableUpdate(1, 0, 0, [3, 5])], "page_ops": zero_slabs(0, [3, 5], 2)}
    runner.execute(SchedulerOutput(0, added=[added], scheduled=[ScheduledRow(1, 0, 6, 1)], **lists))
    out = runner.execute(
        SchedulerOutput(1, appended=[Appended(1, [9], rollback=2)], scheduled=[ScheduledRow(1, 4, 1, 1)])
    )
    kept = [1, 2, 3, 4, 9]
    logits = oracle_logits(kept, PAGED_ONLY)
    logits[[4, 9]] = -np.inf  # the penalty forbids what was generated, and no longer 5 and 6
    assert tokens_of(out, 1) == [int(np.argmax(logits))]
    assert runner.rows[1].tokens.tolist() == kept


def test_rollback_frees_penalised_tokens() -> None:
    """The best token was generated and rolled back: it must be possible again, and only then."""
    rules = TokenRules(presence_penalty=1e9)
    for rolled_back in (False, True):
        runner = make(PAGED_ONLY)
        best = int(np.argmax(oracle_logits([1, 2, 3], PAGED_ONLY)))
        lists = {"tables": [TableUpdate(1, 0, 0, [3, 5])], "page_ops": zero_slabs(0, [3, 5], 2)}
        runner.execute(SchedulerOutput(0, added=[AddedRow(1, 0, [1, 2, 3, best], 3, rules)], **lists))
        rollback = [Appended(1, [], rollback=1)] if rolled_back else [Appended(1, [best], rollback=1)]
        last = 3 if rolled_back else 4
        out = runner.execute(SchedulerOutput(1, appended=rollback, scheduled=[ScheduledRow(1, 0, last, 1)]))
        if rolled_back:
            assert tokens_of(out, 1) == [best]
        else:
            assert tokens_of(out, 1) != [best]


def test_preempted_rows_come_back() -> None:
    """Removed and added again, elsewhere, with what they had generated: the sampled token does not change."""
    runner, tokens = make(), [4, 4, 2, 1, 7]
    runner.execute(SchedulerOutput(0, scheduled=[ScheduledRow(1, 0, 4)], **start(1, tokens, [0, 1], 0, SAMPLED)))
    again = start(1, [*tokens, 3, 2], [6, 3], 2, SAMPLED, prompt_len=5)
    out = runner.execute(SchedulerOutput(1, removed=[1], scheduled=[ScheduledRow(1, 0, 7, 1)], **again))
    assert tokens_of(out, 1) == [oracle_next([*tokens, 3, 2], SAMPLED, 0)]


def test_ragged_rows_read_their_own_pages() -> None:
    runner, tokens = make(PAGED_ONLY), [5, 4, 3, 2, 1, 0]
    lists = {"tables": [TableUpdate(1, 0, 0, [3, 5])], "page_ops": zero_slabs(0, [3, 5], 2)}
    runner.execute(SchedulerOutput(0, added=[AddedRow(1, 0, tokens, 6, TokenRules())], **lists))
    runner.execute(SchedulerOutput(1, scheduled=[ScheduledRow(1, 0, 5)]))
    # Layer 1 of the tail block (page 11) moves to page 60; layer 0 stays where it was.
    out = runner.execute(
        SchedulerOutput(
            2,
            tables=[TableUpdate(1, 0, 1, [10], layer=0), TableUpdate(1, 0, 1, [60], layer=1)],
            page_ops=[PageOp(0, 11, 60, 1), PageOp(0, -1, 11, 1)],
            scheduled=[ScheduledRow(1, 5, 1, 1)],
        )
    )
    assert tokens_of(out, 1) == [oracle_next(tokens, TokenRules(), 0, PAGED_ONLY)]


def test_prompt_logprobs_in_chunks() -> None:
    rules = TokenRules(num_logprobs=2, num_prompt_logprobs=3)
    runner, tokens = make(), [3, 1, 4, 1, 5, 9, 2]
    entries, first_positions = [], []
    lists = start(1, tokens, [2, 9], 1, rules)
    for begin, n in ((0, 3), (3, 3), (6, 1)):
        job = ScheduledRow(1, begin, n, int(begin + n == 7), 0, begin)
        out = runner.execute(SchedulerOutput(begin, scheduled=[job], **lists))
        lists = {}
        for record in out.prompt_logprobs:
            first_positions.append(record.start)
            entries += record.entries
    assert first_positions == [1, 4]
    assert [e.token_id for e in entries] == tokens[1:]
    for p, entry in enumerate(entries):
        logits = oracle_logits(tokens[: p + 1]).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-9)
        assert entry.top_ids == np.argsort(-expected, kind="stable")[:3].tolist()
        assert entry.top_logprobs == pytest.approx(np.sort(expected)[::-1][:3].tolist(), abs=1e-9)
        assert entry.rank == 1 + int((expected > expected[entry.token_id]).sum())
    (sampled,) = out.sampled
    assert sampled.logprobs[0].rank == 1
    assert sampled.logprobs[0].token_id == sampled.token_ids[0] == int(np.argmax(oracle_logits(tokens)))
    assert len(sampled.logprobs[0].top_ids) == 2


def test_a_row_with_nan_logits_fails_alone() -> None:
    """Sequence 2 reads the sick token; 1 and 3 get exactly the tokens they get without it."""
    results = {}
    for company in (True, False):
        runner = make(sick=22)
        added, tables, ops, jobs = [], [], [], []
        for seq_id, tokens in ((1, [1, 2]), (2, [3, 22]), (3, [5, 6, 7])):
            if seq_id == 2 and not company:
                continue
            lists = start(seq_id, tokens, [seq_id], seq_id, SAMPLED)
            added, tables, ops = added + lists["added"], tables + lists["tables"], ops + lists["page_ops"]
            jobs.append(ScheduledRow(seq_id, 0, len(tokens), 1))
        out = runner.execute(SchedulerOutput(0, added=added, tables=tables, page_ops=ops, scheduled=jobs))
        assert [e.seq_id for e in out.errors] == ([2] if company else [])
        assert all("position 2" in e.message for e in out.errors)
        results[company] = [(s.seq_id, s.token_ids) for s in out.sampled]
    assert (
        results[True]
        == results[False]
        == [
            (1, [oracle_next([1, 2], SAMPLED, 0)]),
            (3, [oracle_next([5, 6, 7], SAMPLED, 0)]),
        ]
    )


def test_a_step_without_work_runs_no_model() -> None:
    runner = make()
    out = runner.execute(SchedulerOutput(4, **start(1, [1, 2], [0], 0, SAMPLED)))
    assert (out.step, out.sampled, out.errors, out.duration_s) == (4, [], [], 0.25)
    assert 1 in runner.rows
    assert runner._forward.plans == []  # type: ignore[attr-defined]


def test_only_wanted_logits_are_asked_for() -> None:
    runner = make()
    lists = start(1, [1, 2, 3, 4, 5], [0, 1], 0, SAMPLED)
    runner.execute(SchedulerOutput(0, scheduled=[ScheduledRow(1, 0, 4)], **lists))
    runner.execute(SchedulerOutput(1, scheduled=[ScheduledRow(1, 4, 1, 0, 2)]))
    assert runner._forward.plans == [([1, 2, 3, 4], []), ([5], [0])]  # type: ignore[attr-defined]


def test_poison_shows_pages_that_were_never_zeroed() -> None:
    """The checker itself: without the zero ops, the slot state starts as NaN and the token differs."""
    runner, lists = make(), start(1, [1, 2], [0], 0, TokenRules(num_logprobs=0))
    lists["page_ops"] = []
    out = runner.execute(SchedulerOutput(0, scheduled=[ScheduledRow(1, 0, 2, 1)], **lists))
    logits = oracle_logits([1, 2])
    assert out.sampled[0].logprobs[0].logprob != pytest.approx(float(logits.max() - np.log(np.exp(logits).sum())))


def test_rows_may_not_write_each_others_pages() -> None:
    runner = make()
    runner.execute(SchedulerOutput(0, **start(1, [1, 2], [0], 0, SAMPLED)))
    lists = start(2, [1, 2], [0], 1, SAMPLED)
    with pytest.raises(AssertionError, match="writes page"):
        runner.execute(SchedulerOutput(1, scheduled=[ScheduledRow(2, 0, 2, 1)], **lists))


def test_the_rank_needs_no_torch() -> None:
    code = (
        "import sys, penstock.runner.runner, penstock.executor.inproc\n"
        "from penstock.runner.logits.chain import LogitsChain\n"
        "LogitsChain(8)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
