"""Shards that load with as many bits as a deadline allows (benchmarks/studies/elastic_shards)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from benchmarks.studies.elastic_shards import (
    VERSIONS,
    Pipeline,
    Plan,
    Replay,
    Store,
    end_s,
    gains_of,
    nats,
    plan,
    profile,
    scorer_of,
)

from penstock.config import from_kwargs
from penstock.core.matrix_format import parse_scheme
from penstock.eval.sample import SAMPLE
from penstock.eval.scorer import LoadedModel, ProgramScorer, load
from penstock.ops.ref.product import rows_as_float32
from penstock.quant.reference import quantised

RATE = 1e6
TOP = len(VERSIONS) - 1


class Case:
    """nano in all versions, with seconds that shards might take."""

    def __init__(self, folder: Path) -> None:
        self.model: LoadedModel = load(from_kwargs(model="nano", ops="blas", dtype="float32", max_model_len=512))
        self.store = Store(self.model, folder)
        assert self.model.tokenizer is not None
        self.ids = self.model.tokenizer.encode(SAMPLE)[:640]
        self.compute_s = [0.01 + 0.005 * (i % 3) for i in range(len(self.store.shards))]
        self.gains = gains_of(profile(self.model, self.store, self.ids[:320]), self.store.errors)

    def end(self, made: Plan) -> float:
        return end_s([own[v] for own, v in zip(self.store.num_bytes, made, strict=True)], self.compute_s, RATE)

    def plan(self, deadline_s: float, memory: float = float("inf")) -> Plan:
        return plan(self.store.num_bytes, self.gains, self.compute_s, RATE, deadline_s, memory)

    def replay(self, made: Plan, memory: float = float("inf")) -> tuple[Replay, float]:
        """Carried out on a text that the profile has not seen: nats."""
        replay = Replay(self.model, self.store, made, self.compute_s, Pipeline(RATE, memory))
        return replay, nats(scorer_of(self.model, replay), self.ids[320:])


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    return Case(tmp_path_factory.mktemp("shards"))


def test_B22_every_version_holds_the_formats_own_values(case: Case) -> None:
    for shard in (0, 1, len(case.store.shards) - 1):
        for version, name in enumerate(VERSIONS):
            found, size = case.store.read(shard, version)
            scheme, bits = parse_scheme(name), 0
            for weight, values in found.items():
                whole = rows_as_float32(case.model.weights[weight], 0, values.shape[0])
                want = quantised(whole, scheme).values() if scheme.weight_bits else whole
                np.testing.assert_array_equal(values, want)
                bits += scheme.format.num_bytes(values.shape) if scheme.weight_bits else 2 * values.size
            assert size == bits
    assert all(own == sorted(own) for own in case.store.num_bytes)
    assert all(own == sorted(own, reverse=True) and own[TOP] == 0 for own in case.store.errors)


def test_B22_plans_meet_their_deadlines_in_replay_and_more_time_is_more_right(case: Case) -> None:
    num = len(case.store.shards)
    first, last = case.end([0] * num), case.end([TOP] * num)
    found = []
    for deadline in np.linspace(first, last, 6):
        made = case.plan(deadline)
        replay, own = case.replay(made)
        assert replay.pipeline.computed_s <= deadline
        assert replay.num_bytes == sum(case.store.num_bytes[i][v] for i, v in enumerate(made))
        # Nothing that the deadline had room for is left out.
        for i, v in enumerate(made):
            assert v == TOP or case.end([*made[:i], v + 1, *made[i + 1 :]]) > deadline
        found.append(own)
    assert case.replay([TOP] * num)[0].pipeline.computed_s > 2 * first  # so the first deadline is a tight one
    assert found[0] > found[-1] + 0.02
    assert all(later <= sooner + 0.01 for sooner, later in pairwise(found)), found


def test_B22_with_all_the_time_it_takes_the_model_is_the_whole_one(case: Case) -> None:
    made = case.plan(case.end([TOP] * len(case.store.shards)))
    assert set(made) == {TOP}
    replay, _ = case.replay(made)
    whole = ProgramScorer(case.model, case.model.backend).logits(case.ids[:96])
    np.testing.assert_array_equal(scorer_of(case.model, replay).logits(case.ids[:96]), whole)


def test_B22_the_profile_says_where_bits_belong(case: Case) -> None:
    """The same deadline, and what matters least first: worse on a text that neither has seen."""
    num = len(case.store.shards)
    deadline = 0.6 * case.end([0] * num) + 0.4 * case.end([2] * num)
    importance = [own[TOP] for own in case.gains]
    wrong = gains_of([1 / w for w in importance], case.store.errors)
    backwards = plan(case.store.num_bytes, wrong, case.compute_s, RATE, deadline)
    assert case.replay(case.plan(deadline))[1] < case.replay(backwards)[1] - 0.005

    def at(raised: int) -> float:
        made = [TOP if i == raised else 0 for i in range(num)]
        return nats(scorer_of(case.model, case.replay(made)[0]), case.ids[:320])

    most = int(np.argmax(importance))
    assert importance[most] == pytest.approx(at(-1) - at(most))


def test_B22_shards_that_wait_stay_within_a_memory(case: Case) -> None:
    num = len(case.store.shards)
    sizes = [own[TOP] for own in case.store.num_bytes]
    memory = float(max(sizes))
    deadline = 1.5 * case.end([0] * num)
    made = case.plan(deadline, memory)
    assert case.replay(made, memory)[0].pipeline.computed_s <= deadline
    with pytest.raises(ValueError, match=r"a shard of [\d,]+ bytes does not fit into a memory of 1,000"):
        case.plan(deadline, 1000)


def test_B22_a_deadline_that_is_too_short_is_refused_with_the_shortest(case: Case) -> None:
    least = case.end([0] * len(case.store.shards))
    with pytest.raises(ValueError, match=rf"0\.001 s are too short: .* the end is at {least:.3g} s; ask for that"):
        case.plan(0.001)
    case.plan(least)


def test_B22_a_shard_computes_when_it_is_there_and_those_before_are_done() -> None:
    """Bytes 10, 20, 10 at 10 a second: there at 1, 3, 4. Computing takes 1, 2, 3: done at 2, 5, 8."""
    assert end_s([10, 20, 10], [1, 2, 3], 10) == 8
    # With room for 30, the third waits until the first is computed: that is before the second is there, no matter.
    assert end_s([10, 20, 10], [1, 2, 3], 10, 30) == 8
    # With room for 20, the second waits until 2 (there at 4, done at 6), the third until 6 (there at 7, done at 10).
    assert end_s([10, 20, 10], [1, 2, 3], 10, 20) == 10


def test_B22_what_loads_while_others_compute_costs_nothing(case: Case) -> None:
    """Where computing is what takes time, the shortest deadline there is has room for more bits, but in the first."""
    slow = [60 * s for s in case.compute_s]
    fewest = end_s([own[0] for own in case.store.num_bytes], slow, RATE)
    made = plan(case.store.num_bytes, case.gains, slow, RATE, fewest)
    assert made[0] == 0
    assert made[4:] == [TOP] * (len(made) - 4)


def drawn(seed: int) -> tuple[float, float]:
    """What a plan wins, and what the best of all plans does."""
    rng = np.random.default_rng(seed)
    sizes = [sorted(rng.integers(4, 40, 3).tolist()) for _ in range(5)]
    gains = [[0.0, *sorted(rng.uniform(0, 5, 2).tolist())] for _ in range(5)]
    compute_s = rng.uniform(0, 3, 5).tolist()

    def end(made: Plan) -> float:
        return end_s([own[v] for own, v in zip(sizes, made, strict=True)], compute_s, 10)

    def won(made: Plan) -> float:
        return sum(own[v] for own, v in zip(gains, made, strict=True))

    deadline = 0.5 * end([0] * 5) + 0.5 * end([2] * 5)
    best = max(won(list(made)) for made in product(range(3), repeat=5) if end(list(made)) <= deadline)
    found = plan(sizes, gains, compute_s, 10, deadline)
    assert end(found) <= deadline
    return won(found), best


def test_B22_plans_win_nearly_what_the_best_of_all_wins() -> None:
    shares = [found / best for found, best in map(drawn, range(12))]
    assert min(shares) > 0.7
    assert sum(shares) / len(shares) > 0.9
