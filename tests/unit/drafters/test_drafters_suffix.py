"""`suffix`: the store of outputs, what is drafted from it, and how much of it helps."""

from __future__ import annotations

import random
import statistics
import time
import tracemalloc
from typing import Any

import pytest

from penstock.core.batch import Appended, Fork, ScheduledRow, SchedulerOutput
from penstock.core.draft import NO_DRAFT, DraftTree, Outcome
from penstock.drafters.output_store import BYTES_PER_TOKEN, OutputStore
from penstock.drafters.suffix import SuffixDrafter
from penstock.runner.rows import RowStore
from penstock.runner.runner import concerns_drafter
from tests.drafting import added, answer, appended, job, removed


def make(max_requests: int = 10, max_bytes: int = 1 << 20, **more: float) -> SuffixDrafter:
    return SuffixDrafter(OutputStore(max_requests, max_bytes), RowStore((), (), 4, 4096), **more)  # type: ignore[arg-type]


def tell(drafter: SuffixDrafter, output: SchedulerOutput) -> None:
    """As a rank does: the drafter first, if it has to hear of it, then the rows."""
    if concerns_drafter(output):
        drafter.track(output)
    drafter.rows.apply(output)


def found(store: OutputStore, *tail: int) -> list[tuple[int, list[int], int]]:
    return [(m.length, list(m.tokens[m.end : m.end + 3]), m.key) for m in store.find(tail, 8)]


def test_the_store_finds_what_outputs_said() -> None:
    store = OutputStore(10, 1 << 20)
    store.add(1, [1, 2, 3, 4, 5], 0)
    store.add(2, [9, 2, 3, 6], 0)
    assert found(store, 8, 2, 3) == [(2, [6], 2), (2, [4, 5], 1)]
    assert found(store, 1, 2, 3) == [(2, [6], 2), (3, [4, 5], 1)]
    assert found(store, 4, 5) == [], "nothing followed"
    assert found(store, 3) == []
    store.add(3, [2, 3, 7], 2)
    assert found(store, 2, 3)[0] == (2, [7], 3), "a prompt's end is found"
    assert found(store, 9, 9) == []
    store.add(1, [5, 5, 5], 0)
    assert [key for _, _, key in found(store, 2, 3)] == [3, 2], "the same request again replaces what it said"


def test_the_store_drafts_no_prompt() -> None:
    store = OutputStore(10, 1 << 20)
    store.add(1, [1, 2, 3, 4, 5, 6], 4)
    assert found(store, 1, 2) == found(store, 2, 3) == []
    assert found(store, 3, 4) == [(2, [5, 6], 1)]


@pytest.mark.parametrize(("max_requests", "max_tokens"), [(3, 1000), (50, 40), (0, 1000), (5, 0)])
def test_the_store_keeps_its_bounds_and_forgets_without_a_trace(max_requests: int, max_tokens: int) -> None:
    rng = random.Random(1)
    store = OutputStore(max_requests, max_tokens * BYTES_PER_TOKEN)
    keys = set()
    for key in range(60):
        store.add(key, [rng.randrange(4) for _ in range(rng.randrange(60))], rng.randrange(3))
        keys.add(key)
        assert len(store) <= max_requests
        assert store.num_bytes <= max_tokens * BYTES_PER_TOKEN
        if rng.random() < 0.3:
            store.discard(rng.randrange(key + 1))
        store.find([rng.randrange(4), rng.randrange(4)], 5)
    for key in keys:
        store.discard(key)
    assert (len(store), store.num_tokens, store.num_pairs) == (0, 0, 0)


def test_what_was_useful_stays_longest() -> None:
    drafter = make(max_requests=2)
    drafter.store.add(1, [1, 2, 3, 4], 0)
    drafter.store.add(2, [5, 6, 7, 8], 0)
    assert drafter.propose([job([9, 1, 2])])[0].token_ids == [3, 4]
    drafter.store.add(3, [10, 11, 12, 13], 0)
    assert drafter.propose([job([9, 5, 6])]) == [NO_DRAFT]
    assert drafter.propose([job([9, 1, 2])])[0].token_ids == [3, 4]


@pytest.mark.parametrize("alphabet", [2, 50, 120, 1_000_000])
def test_bytes_are_counted_honestly(alphabet: int) -> None:
    rng = random.Random(2)
    outputs = [[rng.randrange(alphabet) for _ in range(200)] for _ in range(100)]
    tracemalloc.start()
    try:
        store = OutputStore(1000, 1 << 30)
        for key, output in enumerate(outputs):
            store.add(key, output, 0)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.1 * store.num_bytes < used <= store.num_bytes, used / store.num_tokens


def test_drafts_come_from_the_end_that_promises_most() -> None:
    drafter = make(least=0.1)
    text = [1, 2, 3, 4, 5, 8, 1, 2, 3, 4, 6, 9, 7, 2, 3, 4]
    (tree,) = drafter.propose([job(text)])
    assert tree.token_ids[:2] == [6, 5], "newest first of two that came once each"
    assert sum(tree.probs) == pytest.approx(1.5)
    (tree,) = drafter.propose([job([*text, 5])])
    assert tree == DraftTree([8, 1, 2, 3], [-1, 0, 1, 2], [1.0] * 4), "four tokens are the same: four drafts"
    (tree,) = drafter.propose([job([*text, 5], num_nodes=2)])
    assert tree.token_ids == [8, 1]
    assert make(least=0.6).propose([job(text)]) == [NO_DRAFT], "neither followed so often"
    assert drafter.propose([job([1, 2, 3, 4, 5, 6])]) == [NO_DRAFT]
    assert drafter.propose([job([1, 1])]) == [NO_DRAFT]


def test_the_longest_end_that_was_repeated_decides() -> None:
    """Two tokens were followed by 6 three times, by 5 once: but only the 5 followed all four."""
    text = [1, 2, 3, 4, 5, 8, 10, 3, 4, 6, 11, 3, 4, 6, 12, 3, 4, 6, 9, 1, 2, 3, 4]
    (tree,) = make().propose([job(text)])
    assert tree.token_ids == [5, 8, 10, 3]
    assert tree.probs == [1.0] * 4


def test_an_output_is_remembered_when_its_row_is_gone() -> None:
    drafter = make()
    tell(drafter, added(1, [50, 51, 1], 2))
    tell(drafter, appended(1, [2, 9]))
    tell(drafter, appended(1, [3], rollback=1))
    drafter.propose([job([50, 51, 1, 2, 3], 2)])
    drafter.observe([Outcome(1, DraftTree([4, 7], [-1, -1]), [0], [4, 5, 9])])
    assert drafter.propose([job([8, 2, 3], seq_id=2)]) == [NO_DRAFT]
    tell(drafter, removed(1))
    assert drafter.propose([job([8, 2, 3], seq_id=2)])[0].token_ids == [4, 5]
    assert drafter.propose([job([50, 51], seq_id=2)])[0].token_ids == [1, 2]
    assert not drafter.rows


def test_a_row_that_never_drafted_is_remembered_too() -> None:
    """Nothing is told of its plain steps: its tokens are read where the rank keeps them."""
    drafter = make()
    tell(drafter, added(1, [50, 51], 2))
    for token in (7, 8, 9):
        step = appended(1, [token])
        assert not concerns_drafter(step)
        tell(drafter, step)
    tell(drafter, removed(1))
    assert drafter.propose([job([3, 7, 8], seq_id=2)])[0].token_ids == [9]
    tell(drafter, added(3, [50, 51], 2))
    beam = SchedulerOutput(0, scheduled=[ScheduledRow(3, 1, 1, num_candidates=4)], forked=[])
    tell(drafter, beam)
    tell(drafter, SchedulerOutput(0, appended=[Appended(3, [1, 2])], forked=[Fork(3, 4, 1)]))
    tell(drafter, removed(3, 4))
    assert len(drafter.store) == 1, "what beams have tried is not kept"


def test_a_row_catches_up_with_what_it_said_while_it_did_not_draft() -> None:
    drafter = make()
    text = [1, 2, 3, 4, 9, 1, 2]
    tell(drafter, added(1, text, 2))
    assert drafter.propose([job(text)])[0].token_ids == [3, 4]
    text += [5, 6, 7, 1, 2, 5]
    assert drafter.propose([job(text)]) == make().propose([job(text)]) != [NO_DRAFT]


def test_a_preempted_row_counts_once() -> None:
    drafter = make()
    tell(drafter, added(1, [9, 1, 2, 3], 1))
    tell(drafter, removed(1))
    tell(drafter, added(1, [9, 1, 2, 3], 1))
    assert len(drafter.store) == 0
    tell(drafter, SchedulerOutput(0, forked=[Fork(1, 2, 1)], removed=[1]))
    assert len(drafter.store) == 1
    tell(drafter, removed(2))
    assert [m.key for m in drafter.store.find([1, 2], 8)] == [2, 1]


def test_no_memory_of_others_if_none_is_wanted() -> None:
    drafter = make(max_requests=0)
    tell(drafter, added(1, [9, 1, 2, 3], 1))
    tell(drafter, removed(1))
    assert drafter.propose([job([9, 1, 2], seq_id=2)]) == [NO_DRAFT]
    assert drafter.propose([job([1, 2, 3, 1, 2], seq_id=2)])[0].token_ids == [3, 1]


AGENT = "One day the little {} wanted to play in the park with a friend. "


def test_D18_repeated_outputs_take_half_the_steps_or_fewer() -> None:
    """Agents ask nearly the same again and again: the outputs of ended requests draft for the next one."""
    drafter = make(1000, 64 << 20)
    first = [AGENT.format(who) for who in ("dog", "cat", "bird")]
    for prompt in first:
        assert answer(prompt, drafter, 24).token_ids == answer(prompt, None).token_ids
    again = [answer(prompt, drafter, 24) for prompt in first]
    steps = sum(a.num_steps for a in again)
    assert sum(len(a.token_ids[0]) for a in again) / steps >= 2, again
    sampled: dict[str, Any] = {"temperature": 0.7, "seed": 3}
    assert answer(first, drafter, 24, **sampled).token_ids == answer(first, None, **sampled).token_ids


def test_D18_text_without_repetition_costs_next_to_nothing() -> None:
    """By counts: hardly a draft per step on text that has no end that came before, and few places are looked at."""
    rng = random.Random(11)
    drafter = make(1000, 64 << 20)
    for key in range(50):
        drafter.store.add(key, [rng.randrange(4096) for _ in range(400)], 0)
    text = [rng.randrange(4096) for _ in range(1000)]
    drafts = [len(drafter.propose([job(text[:n])])[0].token_ids) for n in range(500, 1000)]
    assert sum(drafts) / len(drafts) < 0.05, "drafts per step"


class Timed:
    """A drafter, and processor time in seconds: its own of each step, and that of each step from start to end."""

    wants_hidden = False

    def __init__(self, drafter: SuffixDrafter) -> None:
        self.name = drafter.name
        self.own_s: list[float] = []
        self.step_s: list[float] = []
        self._drafter = drafter

    def track(self, output: Any) -> None:
        self._start = time.thread_time()
        self._drafter.track(output)

    @property
    def rows(self) -> RowStore:
        return self._drafter.rows

    @rows.setter
    def rows(self, rows: RowStore) -> None:
        self._drafter.rows = rows

    def propose(self, jobs: Any) -> Any:
        trees = self._drafter.propose(jobs)
        self._own = time.thread_time() - self._start
        return trees

    def observe(self, outcomes: Any) -> None:
        before = time.thread_time()
        self._drafter.observe(outcomes)
        end = time.thread_time()
        self.own_s.append(self._own + end - before)
        self.step_s.append(end - self._start)


def test_D18_its_own_time_is_a_small_part_of_a_step() -> None:
    """Indicative, and on a model whose steps are as short as steps get: 5 % of nano's step is about 35 microseconds.
    Twice that is let pass here, because machines are busy."""
    timed = Timed(make(1000, 64 << 20))
    told = answer(AGENT.format("fox"), timed, 24, max_tokens=300, temperature=1.3, seed=1)
    assert told.num_drafts < 0.2 * told.num_steps, "this text repeats itself"
    share = statistics.median(timed.own_s) / statistics.median(timed.step_s)
    assert share < 0.1, share
