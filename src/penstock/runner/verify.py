"""The one verifier: which drafts are what the model says itself, and which token follows them.

Sample and match: behind every token of the path the model's own token is chosen, greedily or with the draw that belongs
to its position (`runner.sampler`), from logits that the processors have changed as if the path had been generated one
by one. A draft is accepted if it is that token. So the tokens are those of decoding without drafts, for every rule,
seed and drafter; only their number per step changes.

Sources: Leviathan et al., arXiv 2211.17192 (verifying a chain); Miao et al., SpecInfer, arXiv 2305.09781, section 4.3
(VerifyGreedy on trees). Sampling with the position's own draw instead of rejection: docs/concepts/the-step.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from penstock.core.batch import RowError, TokenLogprobs, Verified
from penstock.core.draft import ROOT, UNKNOWN, Outcome
from penstock.runner.drafted import DraftedRow
from penstock.runner.logprobs import RowLogprobs
from penstock.runner.sampler import F32, SICK, DraftNode, Sampler, sick_at


class VerifyOutput(NamedTuple):
    """In the order of the drafts; `ended`: rows that are complete behind what was accepted."""

    verified: list[Verified]
    outcomes: list[Outcome]
    errors: list[RowError]
    ended: list[int]


Walked = tuple[list[int], list[int], list[int], str | None]
"""Tokens, accepted drafts, `Outcome.choices`, and what is wrong behind them (None: nothing; "": the row ended)."""


class Verifying(Protocol):
    """What a step asks of a verifier. Others than the default: `runner.verifiers`."""

    def nodes(self, drafted_rows: Sequence[DraftedRow]) -> list[DraftNode]:
        """Nodes whose own tokens, as the sampler chooses them, shall be given to `verify`."""
        ...

    def verify(self, logits: F32, drafted_rows: Sequence[DraftedRow], choices: Sequence[int]) -> VerifyOutput:
        """`choices`: the tokens of `nodes(drafts)`. Shapes: logits [R, V], not written to."""
        ...


class Verifier:
    """Walks each tree from its root. `sampler.chain` must stand behind the newest known token of every row."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def nodes(self, drafted_rows: Sequence[DraftedRow]) -> list[DraftNode]:
        """The nodes whose tokens can be chosen all at once: those of rows that no processor follows."""
        wanted: list[DraftNode] = []
        for drafted in drafted_rows:
            if not self._sampler.chain.follows(drafted.seq_id):
                rules, index = drafted.rules, drafted.sample_index
                wanted.append(DraftNode(drafted.row, rules, index, drafted.position))
                for i, depth in enumerate(drafted.tree.depths()):
                    wanted.append(DraftNode(drafted.row + 1 + i, rules, index, drafted.position + depth))
        return wanted

    def verify(self, logits: F32, drafted_rows: Sequence[DraftedRow], choices: Sequence[int]) -> VerifyOutput:
        """`choices`: the tokens of `nodes(drafts)`. Shapes: logits [R, V], not written to."""
        out = VerifyOutput([], [], [], [])
        at = 0
        for drafted in drafted_rows:
            count = 1 + len(drafted.tree.token_ids)
            if self._sampler.chain.follows(drafted.seq_id):
                tokens, path, found, problem = self._walk_followed(drafted, logits)
            else:
                found = list(choices[at : at + count])
                at += count
                tokens, path, problem = _walk(drafted, found)
            put(out, drafted, logits, (tokens, path, found, problem))
        return out

    def _walk_followed(self, drafted: DraftedRow, logits: F32) -> Walked:
        """The same one token at a time, the processors going along; they stand where they stood in the end."""
        chain, tree = self._sampler.chain, drafted.tree
        tokens: list[int] = []
        path: list[int] = []
        choices = [UNKNOWN] * (1 + len(tree.token_ids))
        here, problem = ROOT, None
        while True:
            node = DraftNode(drafted.row + 1 + here, drafted.rules, drafted.sample_index, drafted.position + len(path))
            choice = self._sampler.choose_followed(drafted.seq_id, logits[node.row], node)
            if isinstance(choice, str):
                problem = choice
                break
            choices[here + 1] = choice
            tokens.append(choice)
            child = tree.child(here, choice)
            if child is None:
                break
            chain.advance(drafted.seq_id, [choice])
            path.append(child)
            here = child
        chain.rollback(drafted.seq_id, len(path))
        return tokens, path, choices, problem


def put(out: VerifyOutput, drafted: DraftedRow, logits: F32, walked: Walked) -> None:
    """Mutates: `out`, which gets what a row's walk has found."""
    tokens, path, choices, problem = walked
    if problem is not None:
        if problem:
            out.errors.append(RowError(drafted.seq_id, problem))
        else:
            out.ended.append(drafted.seq_id)
    entries = _logprobs(drafted, logits, tokens, path)
    count, whole = len(drafted.tree.token_ids), problem is None
    out.verified.append(Verified(drafted.seq_id, tokens, count, 1 + len(path), entries, whole))
    out.outcomes.append(Outcome(drafted.seq_id, drafted.tree, path, choices))


def _walk(drafted: DraftedRow, choices: Sequence[int]) -> tuple[list[int], list[int], str | None]:
    """The tokens, the accepted drafts, and what is wrong behind them, if anything."""
    tokens: list[int] = []
    path: list[int] = []
    here: int | None = ROOT
    while here is not None:
        choice = choices[here + 1]
        if choice == SICK:
            return tokens, path, sick_at(drafted.position + len(path))
        tokens.append(choice)
        here = drafted.tree.child(here, choice)
        if here is not None:
            path.append(here)
    return tokens, path, None


def _logprobs(drafted: DraftedRow, logits: F32, tokens: list[int], path: list[int]) -> list[TokenLogprobs]:
    """Raw ones, of each token from the logits it was chosen from."""
    if drafted.rules.num_logprobs < 0:
        return []
    rows = [drafted.row, *(drafted.row + 1 + i for i in path)]
    return [
        RowLogprobs(np.asarray(logits[row]), drafted.rules.num_logprobs, drafted.rules.logprob_ids).entry(token)
        for row, token in zip(rows, tokens, strict=False)
    ]
