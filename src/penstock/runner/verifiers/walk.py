"""One row's way through its tree, for verifiers that look at probabilities instead of the model's own token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.base.rng import uniform
from penstock.core.draft import ROOT, UNKNOWN
from penstock.core.sampling import TokenRules
from penstock.runner.drafted import DraftedRow
from penstock.runner.sampler import F32, DraftNode, Sampler, draw, sick_at
from penstock.runner.truncate import truncate
from penstock.runner.verify import Verifier, VerifyOutput, put

F64 = npt.NDArray[np.float64]

OWN_DRAW = 1 << 16
"""Draw ids from here on are the verifier's: a draft must not be judged by a number that it was made with. The j-th
draft behind a token is judged with OWN_DRAW + 1 + j, and what follows the last accepted one drawn with OWN_DRAW."""


def probabilities(logits: F32, rules: TokenRules) -> F64:
    """What a token is drawn from, as probabilities [V]. Shapes: logits [V], processed, at least one finite."""
    ids, weights = truncate(logits, rules)
    p = np.zeros(len(logits))
    p[slice(None) if ids is None else ids] = weights
    p /= p.sum()
    return p


class Walk:
    """It begins at the newest known token. `close` when done: processors stand where they stood.

    Attributes:
        path: drafts from the root to where it stands.
        problem: why no token can be chosen here ("": the row is complete); None: one can.
    """

    def __init__(self, sampler: Sampler, drafted: DraftedRow, logits: F32) -> None:
        self._sampler, self._logits = sampler, logits
        self._followed = sampler.chain.follows(drafted.seq_id)
        self._finals: dict[int, F32 | str] = {}
        self.drafted = drafted
        self.path: list[int] = []
        self.problem: str | None = None
        self._last: int | None = None
        tree = drafted.tree
        self.children: list[list[int]] = [[] for _ in range(1 + len(tree.token_ids))]
        """Of the root (entry 0) and of each draft (entry i + 1)."""
        for i, parent in enumerate(tree.parents):
            self.children[parent + 1].append(i)

    @property
    def here(self) -> int:
        return self.path[-1] if self.path else ROOT

    def final(self) -> F32 | None:
        """Processed logits [V] of the token that follows; None: there can be none, and `problem` says why."""
        here = self.here
        found = self._finals.get(here)
        if found is None:
            found = self._finals[here] = self._processed(self._logits[self.drafted.row + 1 + here])
        self.problem = found if isinstance(found, str) else None
        return None if isinstance(found, str) else found

    def _processed(self, logits: F32) -> F32 | str:
        seq_id = self.drafted.seq_id
        if not np.isfinite(logits.max()):
            return sick_at(self.drafted.position + len(self.path))
        if not self._followed:
            return logits
        copies = logits[None].copy()
        self._sampler.chain.apply(copies, [seq_id])
        problem = self._sampler.unusable(seq_id, float(copies[0].max()))
        return copies[0] if problem is None else problem

    def enter(self, node: int) -> None:
        """Go on to a draft. It may be another than a child of `here` if that one stands for the same tokens."""
        self.path = self._above(node)
        if self._followed:
            self._sampler.chain.advance(self.drafted.seq_id, [self.drafted.tree.token_ids[node]])

    def leave(self) -> None:
        """One draft back."""
        self.path.pop()
        if self._followed:
            self._sampler.chain.rollback(self.drafted.seq_id, 1)

    def uniform(self, which: int) -> float:
        """A number in [0, 1) for the token that follows."""
        drafted = self.drafted
        return uniform(drafted.rules.seed, drafted.sample_index, drafted.position + len(self.path), which)

    def own(self, final: F32) -> int:
        """The model's own token, as decoding without drafts chooses it."""
        drafted = self.drafted
        if drafted.rules.greedy:
            return int(final.argmax())
        return draw(final, drafted.rules, drafted.sample_index, drafted.position + len(self.path), 1)[0]

    def end(self, token: int) -> None:
        """`token` follows, and no draft behind it."""
        self._last = token

    def close(self) -> tuple[list[int], list[int], list[int], str | None]:
        """Tokens, accepted drafts, the token behind each node or UNKNOWN, and the problem behind them, if any."""
        if self._followed:
            self._sampler.chain.rollback(self.drafted.seq_id, len(self.path))
        tokens = [self.drafted.tree.token_ids[i] for i in self.path]
        if self._last is not None:
            tokens.append(self._last)
        choices = [UNKNOWN] * len(self.children)
        for node, token in zip((ROOT, *self.path), tokens, strict=False):
            choices[node + 1] = token
        return tokens, self.path, choices, None if self._last is not None else self.problem

    def _above(self, node: int) -> list[int]:
        path = [node]
        while (parent := self.drafted.tree.parents[path[-1]]) != ROOT:
            path.append(parent)
        return path[::-1]


class Rule(Protocol):
    """How a row's walk goes."""

    matches_greedy: bool
    """Whether greedy rows are verified as `runner.verify` does it: exact in tokens."""

    def go(self, walk: Walk) -> None:
        """Walk to the last accepted draft and name the token that follows it (`end`), if there can be one."""
        ...


class RuleVerifier(Verifier):
    """The default verifier for greedy rows, if the rule leaves them to it, and the rule for the others."""

    def __init__(self, sampler: Sampler, rule: Rule) -> None:
        super().__init__(sampler)
        self.rule = rule

    def nodes(self, drafted_rows: Sequence[DraftedRow]) -> list[DraftNode]:
        return super().nodes([drafted for drafted in drafted_rows if self._matched(drafted)])

    def verify(self, logits: F32, drafted_rows: Sequence[DraftedRow], choices: Sequence[int]) -> VerifyOutput:
        out = VerifyOutput([], [], [], [])
        matched = super().verify(logits, [drafted for drafted in drafted_rows if self._matched(drafted)], choices)
        of_matched = iter(zip(matched.verified, matched.outcomes, strict=True))
        for drafted in drafted_rows:
            if self._matched(drafted):
                verified, outcome = next(of_matched)
                out.verified.append(verified)
                out.outcomes.append(outcome)
                continue
            walk = Walk(self._sampler, drafted, logits)
            self.rule.go(walk)
            put(out, drafted, logits, walk.close())
        out.errors.extend(matched.errors)
        out.ended.extend(matched.ended)
        return out

    def _matched(self, drafted: DraftedRow) -> bool:
        return drafted.rules.greedy and self.rule.matches_greedy
