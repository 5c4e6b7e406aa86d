"""Any schedule of the rank's inputs gives the oracle's tokens: random chunks, company, pages, forks, preemptions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.core.batch import AddedRow, Appended, Fork, ScheduledRow, SchedulerOutput, TableUpdate
from penstock.core.page_ops import PageOp
from penstock.core.sampling import TokenRules
from tests.unit.runner.test_runner_step import S, V, make, oracle_next, zero_slabs


class Driver:
    """A careless scheduler's essence: random chunks, random company, forks with copied tails, preemption, any page."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.runner = make(num_slabs=(60, 12))
        self.free: list[list[int]] = [list(range(60)), list(range(12))]
        self.rows: dict[int, dict[str, Any]] = {}
        self.lists: dict[str, list[Any]] = {}
        self.next_id = 0
        self.num_checked = 0

    def take(self, group: int) -> int:
        return self.free[group].pop(int(self.rng.integers(len(self.free[group]))))

    def put(self, name: str, item: Any) -> None:
        self.lists.setdefault(name, []).append(item)

    def own(self, seq_id: int) -> None:
        """Zeroed blocks for every known token."""
        row = self.rows[seq_id]
        if not row["slot"]:
            row["slot"] = [self.take(1)]
            self.lists.setdefault("page_ops", []).extend(zero_slabs(1, row["slot"], 1))
            self.put("tables", TableUpdate(seq_id, 1, 0, row["slot"]))
        had = len(row["slabs"])
        while len(row["slabs"]) * S < len(row["tokens"]):
            row["slabs"].append(self.take(0))
        if row["slabs"][had:]:
            self.lists.setdefault("page_ops", []).extend(zero_slabs(0, row["slabs"][had:], 2))
            self.put("tables", TableUpdate(seq_id, 0, had, row["slabs"][had:]))

    def admit(self, tokens: list[int], prompt_len: int, seq_id: int, rules: TokenRules, index: int) -> None:
        self.rows[seq_id] = {
            "tokens": tokens, "prompt_len": prompt_len, "rules": rules, "index": index,
            "done": 0, "slabs": [], "slot": [],
        }  # fmt: skip
        self.put("added", AddedRow(seq_id, index, list(tokens), prompt_len, rules))

    def release(self, seq_id: int) -> dict[str, Any]:
        row = self.rows.pop(seq_id)
        self.put("removed", seq_id)
        self.free[0] += row["slabs"]
        self.free[1] += row["slot"]
        return row

    def fork(self, seq_id: int) -> None:
        """A child with copies of the parent's blocks and state, which is where the parent stands now."""
        parent, child = self.rows[seq_id], self.next_id
        self.next_id += 1
        self.put("forked", Fork(seq_id, child, parent["index"] + 1))
        row = {**parent, "tokens": list(parent["tokens"]), "index": parent["index"] + 1}
        row["slabs"], row["slot"] = [self.take(0) for _ in parent["slabs"]], [self.take(1)]
        ops = self.lists.setdefault("page_ops", [])
        ops += [PageOp(0, a * 2, b * 2, 2) for a, b in zip(parent["slabs"], row["slabs"], strict=True)]
        ops.append(PageOp(1, parent["slot"][0], row["slot"][0], 1))
        self.put("tables", TableUpdate(child, 0, 0, row["slabs"]))
        self.put("tables", TableUpdate(child, 1, 0, row["slot"]))
        self.rows[child] = row

    def step(self, number: int) -> None:
        self.change()
        jobs = []
        for seq_id in self.rng.permutation(list(self.rows)).tolist()[: int(self.rng.integers(1, 6))]:
            row = self.rows[seq_id]
            self.own(seq_id)
            lag = len(row["tokens"]) - row["done"]
            n = int(self.rng.integers(1, lag + 1))
            jobs.append(ScheduledRow(seq_id, row["done"], n, int(n == lag)))
            row["done"] += n
        out = self.runner.execute(SchedulerOutput(number, scheduled=jobs, **self.lists))
        self.lists = {}
        assert out.errors == []
        assert [s.seq_id for s in out.sampled] == [j.seq_id for j in jobs if j.num_samples]
        for sampled in out.sampled:
            row = self.rows[sampled.seq_id]
            assert sampled.token_ids == [oracle_next(row["tokens"], row["rules"], row["index"])]
            self.num_checked += 1
            row["tokens"].append(sampled.token_ids[0])
            self.put("appended", Appended(sampled.seq_id, sampled.token_ids))

    def change(self) -> None:
        """Forks see rows as the rank has them: before this step's appended tokens, which the child gets too."""
        pending = {a.seq_id: a for a in self.lists.get("appended", [])}
        started = [i for i, row in self.rows.items() if row["done"]]
        if started and len(self.rows) < 5 and self.rng.random() < 0.3:
            seq_id = int(self.rng.choice(started))
            self.fork(seq_id)
            if seq_id in pending:
                self.put("appended", Appended(self.next_id - 1, pending[seq_id].token_ids))
        if started and self.rng.random() < 0.25:
            seq_id = int(self.rng.choice(started))
            row = self.release(seq_id)
            self.lists["appended"] = [a for a in self.lists.get("appended", []) if a.seq_id != seq_id]
            # What a removed fork's child copies is still there: page ops of one step run in order, zeroes come later.
            self.lists["tables"] = [t for t in self.lists.get("tables", []) if t.seq_id != seq_id]
            if len(row["tokens"]) < 24:
                self.admit(row["tokens"], row["prompt_len"], seq_id, row["rules"], row["index"])
        if len(self.rows) < 4 or not self.rows:
            length = int(self.rng.integers(1, 14))
            rules = TokenRules(temperature=float(self.rng.choice([0.0, 1.0])), seed=int(self.rng.integers(1 << 62)))
            tokens = [int(t) for t in self.rng.integers(0, V, length)]
            self.admit(tokens, length, self.next_id, rules, 0)
            self.next_id += 1


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_gives_the_oracles_tokens(seed: int) -> None:
    driver = Driver(seed)
    for number in range(80):
        driver.step(number)
    assert driver.num_checked > 60
    assert driver.next_id >= 8
