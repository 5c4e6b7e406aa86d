"""What every Drafter promises. Registering one enrols it; one that needs a model or a file needs a line in `GIVEN`."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import pytest

from penstock.config import SpeculativeConfig
from penstock.core.batch import AddedRow, Appended, Fork, ScheduledRow, SchedulerOutput
from penstock.core.draft import DraftJob, DraftTree, Outcome, trimmed
from penstock.core.protocols import Drafter
from penstock.core.sampling import TokenRules
from penstock.drafters import DRAFTERS
from penstock.drafters.bench import DraftBench
from penstock.drafters.datastore import fingerprint, write
from penstock.runner.rows import RowStore
from penstock.sched.drafts.fixed import FixedDrafts
from tests.drafting import job
from tests.engine.fake_model import VOCAB
from tests.engine.harness import Knobs, fake_engine, request, run
from tests.engine.naive import fake_logits, generate


def encode(text: str) -> list[int]:
    return [ord(c) % VOCAB for c in text]


def a_function(tokens: list[int], count: int) -> list[list[int]]:
    """Wrong in every way that a function can be."""
    if tokens[-1] % 7 == 0:
        raise RuntimeError("no")
    return [[tokens[-1], *tokens[:count]], [tokens[0]] * 99, [tokens[-1], VOCAB + 3], [-5]][tokens[-1] % 3 :]


def _datastore(folder: Path) -> dict[str, Any]:
    rng = random.Random(8)
    texts = [[rng.randrange(VOCAB) for _ in range(40)] * 2 for _ in range(20)]
    texts += [[(3 * i) % 5 + 1 for i in range(60)]]
    write(folder / "store", texts, VOCAB, fingerprint(encode))
    return {"datastore": str(folder / "store")}


GIVEN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "ngram": lambda folder: {},
    "reference": lambda folder: {},
    "suffix": lambda folder: {"suffix_decoding_max_cached_requests": 4},
    "rest": _datastore,
    "function": lambda folder: {"function": f"{__name__}:a_function"},
    "jacobi": lambda folder: {},
    "gauss-seidel": lambda folder: {"window": 5},
    "lookahead": lambda folder: {},
}
"""Settings of the drafters that need no model."""

NEED_HELP = {"function": "says what it likes; the runner trims it"}
"""Drafters whose proposals may break rules, and why."""


OWN_TESTS = {
    "draft-model": "engine/test_draft_model.py", "draft_model": "engine/test_draft_model.py",
    "specinfer": "engine/test_draft_model.py", "early-exit": "engine/test_self_draft.py",
    "self-draft": "engine/test_self_draft.py", "medusa": "engine/test_medusa.py",
    "eagle": "engine/test_eagle.py", "mtp": "engine/test_mtp.py",
}  # fmt: skip
"""Drafters that run a model, and where they are held to the same laws."""


@pytest.fixture(params=sorted(GIVEN))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_drafter_is_enrolled() -> None:
    """A new one belongs into GIVEN, or has tests of its own."""
    assert sorted([*GIVEN, *OWN_TESTS]) == DRAFTERS.names()
    folder = Path(__file__).resolve().parents[1]
    assert all((folder / path).is_file() for path in OWN_TESTS.values())


def make(name: str, folder: Path, runner: Any = None) -> Drafter:
    rows = RowStore((), (), 4, VOCAB) if runner is None else runner.rows
    storage: Any = None if runner is None else runner.storage
    config = SpeculativeConfig(method=name, **GIVEN[name](folder))
    made: Drafter = DRAFTERS.get(name)(
        DraftBench(config=config, vocab_size=VOCAB, rows=rows, storage=storage, encode=encode)
    )
    return made


class Life:
    """Rows that come, draft, are preempted, forked, rolled back and go: what a rank would tell a drafter."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rows: dict[int, tuple[list[int], int]] = {}
        self.away: dict[int, tuple[list[int], int]] = {}
        self.next_id = 0

    def token(self) -> int:
        """Few different ones, so that text repeats itself."""
        return self.rng.choice([1, 2, 3, 1, 2, 3, 4, 5, self.rng.randrange(VOCAB)])

    def events(self) -> SchedulerOutput:
        rng = self.rng
        forked, removed, added, appended = [], [], [], []
        for seq_id in list(self.rows):
            tokens, prompt_len = self.rows[seq_id]
            if rng.random() < 0.05:
                forked.append(Fork(seq_id, self.next_id, 1))
                self.rows[self.next_id] = (list(tokens), prompt_len)
                self.next_id += 1
            if rng.random() < 0.1:
                removed.append(seq_id)
                gone = self.rows.pop(seq_id)
                if rng.random() < 0.4:
                    self.away[seq_id] = gone
        held = [seq_id for seq_id in self.away if seq_id not in removed and rng.random() < 0.5]
        for seq_id in held:
            self.rows[seq_id] = self.away.pop(seq_id)
        for _ in range(rng.randrange(3) if len(self.rows) < 6 else 0):
            held.append(self.next_id)
            count = rng.randint(1, 12)
            self.rows[self.next_id] = ([self.token() for _ in range(count)], count)
            self.next_id += 1
        added = [AddedRow(i, 0, list(self.rows[i][0]), self.rows[i][1], TokenRules()) for i in held]
        for seq_id, (tokens, prompt_len) in self.rows.items():
            if seq_id not in held and rng.random() < 0.8:
                back = rng.randint(0, len(tokens) - prompt_len) if rng.random() < 0.1 else 0
                new = [self.token() for _ in range(rng.randint(1, 4))]
                del tokens[len(tokens) - back :]
                tokens += new
                appended.append(Appended(seq_id, new, back))
        scheduled = [ScheduledRow(i, len(t) - 1, 1, 1, num_drafts=4, draft_depth=4) for i, (t, _) in self.rows.items()]
        return SchedulerOutput(0, forked=forked, removed=removed, added=added, appended=appended, scheduled=scheduled)

    def jobs(self) -> list[DraftJob]:
        rng = self.rng
        return [
            job(
                tokens, prompt_len, seq_id=seq_id, num_nodes=rng.choice([1, 2, 5, 16, 63]),
                max_depth=rng.choice([1, 3, 20, 63]), chain_only=rng.random() < 0.3,
                rules=TokenRules(reference=[1, 2, 3, 1, 2, 4] if seq_id % 3 == 0 else []),
            )
            for seq_id, (tokens, prompt_len) in self.rows.items()
            if rng.random() < 0.9
        ]  # fmt: skip

    def outcome(self, j: DraftJob, tree: DraftTree) -> Outcome:
        rng = self.rng
        count = len(tree.token_ids)
        choices = [self.token() for _ in range(count + 1)]
        if rng.random() < 0.2:
            choices = [t if i == 0 or rng.random() < 0.5 else -1 for i, t in enumerate(choices)]
        path: list[int] = []
        here: int | None = -1
        while here is not None:
            here = tree.child(here, choices[here + 1])
            if here is not None:
                path.append(here)
        return Outcome(j.seq_id, tree, path, choices)

    def end(self) -> SchedulerOutput:
        removed = list(self.rows)
        self.rows.clear()
        self.away.clear()
        return SchedulerOutput(0, removed=removed)


def live(drafter: Drafter, life: Life, steps: int) -> list[DraftTree]:
    """All proposals, as they come."""
    out: list[DraftTree] = []
    for _ in range(steps):
        drafter.track(life.events())
        jobs = life.jobs()
        trees = drafter.propose(jobs)
        assert len(trees) == len(jobs)
        kept = [trimmed(tree, j, VOCAB) for tree, j in zip(trees, jobs, strict=True)]
        for j, tree, good in zip(jobs, trees, kept, strict=True):
            if drafter.name not in NEED_HELP:
                assert good is tree, (j, tree)
            assert len(good.token_ids) == len(good.parents) <= j.num_nodes
            assert all(parent < i for i, parent in enumerate(good.parents))
            assert max([0, *good.depths()]) <= j.max_depth
            assert good.is_chain or not j.chain_only
            assert not len(tree.probs) or len(tree.probs) == len(tree.token_ids)
        out += kept
        drafter.observe([life.outcome(j, tree) for j, tree in zip(jobs, kept, strict=True)])
    return out


def test_it_has_a_name_and_says_what_it_wants(name: str, tmp_path: Path) -> None:
    drafter = make(name, tmp_path)
    assert drafter.name == name
    assert drafter.wants_hidden is False


@pytest.mark.parametrize("seed", range(2))
def test_proposals_keep_to_what_was_asked(name: str, tmp_path: Path, seed: int) -> None:
    trees = live(make(name, tmp_path), Life(seed), 100)
    assert sum(bool(tree.token_ids) for tree in trees) > len(trees) / 20, "it hardly ever drafts"


def test_the_same_history_gives_the_same_drafts(name: str, tmp_path: Path) -> None:
    first, second = (live(make(name, tmp_path), Life(5), 80) for _ in range(2))
    assert [(t.token_ids, t.parents) for t in first] == [(t.token_ids, t.parents) for t in second]


def test_a_row_s_company_changes_nothing_of_its_own(name: str, tmp_path: Path) -> None:
    """What is drafted for a row without history depends on its tokens alone, among how many it may stand."""
    rng = random.Random(6)
    rows = [[rng.choice([1, 2, 3, 4]) for _ in range(rng.randint(3, 30))] for _ in range(6)]
    jobs = [job(tokens, 2, seq_id=i, num_nodes=12) for i, tokens in enumerate(rows)]
    together = make(name, tmp_path).propose(jobs)
    alone = [make(name, tmp_path).propose([j])[0] for j in jobs]
    assert [(t.token_ids, t.parents) for t in together] == [(t.token_ids, t.parents) for t in alone]


def size_of(thing: object) -> int:
    """Bytes of all that can be reached, code and modules left out."""
    seen: set[int] = set()
    todo, total = [thing], 0
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type | ModuleType | FunctionType | MethodType):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        todo += gc.get_referents(item)
    return total


def test_rows_that_are_gone_leave_nothing_behind(name: str, tmp_path: Path) -> None:
    """After many rows a drafter is as large as after a few; what it keeps of ended requests is bounded by settings."""
    drafter = make(name, tmp_path)
    life = Life(7)
    sizes = []
    for _ in range(6):
        live(drafter, life, 50)
        drafter.track(life.end())
        sizes.append(size_of(drafter))
    assert life.next_id > 100
    bound = 4 * 400 * 60 * 8 if name == "suffix" else 4096  # dicts that have shrunk keep some room
    assert max(sizes[1:]) <= sizes[0] + bound, sizes
    assert not getattr(drafter, "states", None)
    assert not getattr(drafter, "rows", None)


RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.2, "seed": 6, "top_k": 5, "top_p": 0.9, "n": 2},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
    {"temperature": 0.8, "seed": 7, "min_tokens": 6, "stop_ids": [2], "bad_sequences": [[4, 6]]},
    {},
]


@pytest.mark.parametrize(("slots", "windows"), [(False, ()), (True, ()), (False, (None, 6))])
@pytest.mark.sampled
def test_no_token_changes(name: str, tmp_path: Path, slots: bool, windows: tuple[int | None, ...]) -> None:
    """Greedy and sampled rows, forks and followed rows in one batch that is short of memory."""
    k = Knobs(budget=48, num_blocks=30, block_size=4, num_drafts=8)
    core, _ = fake_engine(k, slots=slots, windows=windows, drafter=object(), drafts=FixedDrafts(8, 8))
    runner = core.executor.runner  # type: ignore[attr-defined]
    drafter = runner.drafter = make(name, tmp_path, runner)
    told: list[list[int]] = []
    for again in range(2):  # the second time, outputs of the first may be remembered
        requests = [
            request([3 + i, 4, 5, 3 + i, 4], max_tokens=20, eos=[2] if i % 2 else [], **rules)
            for i, rules in enumerate(RULES)
        ]
        got = run(core, requests, limit=2000)
        for r in requests:
            for index in range(r.n):
                assert got[r.request_id].tokens[index] == generate(fake_logits, r, index)[0], (again, r)
        told += [got[r.request_id].tokens[0] for r in requests]
    assert runner.drafter is drafter, "it has failed"
    assert core.stats.num_preemptions > 0
    assert core.stats.num_draft_tokens > 0
    assert told[: len(RULES)] == told[len(RULES) :]
