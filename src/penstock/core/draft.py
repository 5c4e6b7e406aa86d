"""What passes between a drafter and the one verifier: what is asked for, what is drafted, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from penstock.core.sampling import TokenRules

ROOT = -1
"""Parent of a draft that follows the newest known token."""
MAX_DRAFTS = 63
"""Drafts for one sequence in one step: a tree has 64 nodes, and the newest known token is its root (`ops.tree`)."""


class DraftJob(NamedTuple):
    """One sequence that may draft.

    Attributes:
        tokens: int32 [num_known] prompt and output so far; a view, valid during the call. The root is the last one.
        prompt_len: how many of them are the prompt.
        num_nodes: drafts at most. max_depth: on one path at most.
        chain_only: only a chain can be verified (a recurrent layer follows one path); more is cut off.
        sample_index, rules: as the sampler has them: `rules.seed` is the request's.
    """

    seq_id: int
    tokens: npt.NDArray[np.int32]
    prompt_len: int
    num_nodes: int
    max_depth: int
    rules: TokenRules
    sample_index: int
    chain_only: bool = False


class DraftTree(NamedTuple):
    """Draft tokens [K] as a tree below the newest known token.

    Attributes:
        token_ids: the drafts.
        parents: parents[i] < i is the draft that draft i follows; ROOT: the newest known token.
        probs: what the drafter thinks of each: probability given its path, [K]; () if it does not know.
        drawn_from: float32 [K, V]: the distribution that each draft was drawn from, for verifiers that need it (those
            that are exact in distribution); None: the draft was chosen, not drawn.
    """

    token_ids: list[int]
    parents: list[int]
    probs: Sequence[float] = ()
    drawn_from: npt.NDArray[np.float32] | None = None

    @property
    def is_chain(self) -> bool:
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    def depths(self) -> list[int]:
        """Of each draft: 1 follows the root directly."""
        out: list[int] = []
        for parent in self.parents:
            out.append(1 if parent == ROOT else out[parent] + 1)
        return out

    def child(self, parent: int, token_id: int) -> int | None:
        """The first draft of `token_id` behind `parent`."""
        for i, (above, token) in enumerate(zip(self.parents, self.token_ids, strict=True)):
            if above == parent and token == token_id:
                return i
        return None


NO_DRAFT = DraftTree([], [])


def chain(token_ids: list[int], probs: list[float] | None = None) -> DraftTree:
    """One draft after the other."""
    return DraftTree(token_ids, list(range(-1, len(token_ids) - 1)), probs or ())


def trimmed(tree: DraftTree, job: DraftJob, vocab_size: int) -> DraftTree:
    """The part of a proposal that can be verified: a draft that breaks a rule is left out with all that follows it.

    Rules: token ids in [0, vocab_size), parents before children, at most `num_nodes` drafts and `max_depth` deep, a
    chain (the first path) where `chain_only` asks for it. Returns `tree` itself if it keeps them all.
    """
    place: dict[int, int] = {ROOT: ROOT}
    depth = {ROOT: 0}
    kept: list[int] = []
    last = ROOT
    for i, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=False)):
        if len(kept) == min(job.num_nodes, MAX_DRAFTS):
            break
        fits = parent < i and parent in place and 0 <= token < vocab_size and depth[parent] < job.max_depth
        if not fits or (job.chain_only and parent != last):
            continue
        place[i], depth[i], last = len(kept), depth[parent] + 1, i
        kept.append(i)
    if len(kept) == len(tree.token_ids) == len(tree.parents):
        return tree
    return DraftTree(
        [tree.token_ids[i] for i in kept],
        [place[tree.parents[i]] for i in kept],
        [tree.probs[i] for i in kept] if len(tree.probs) == len(tree.token_ids) else (),
        None if tree.drawn_from is None else tree.drawn_from[kept],
    )


class Outcome(NamedTuple):
    """What the verifier found out about one sequence's drafts.

    Attributes:
        tree: what was verified.
        path: the accepted drafts, from the root on.
        choices: the model's own token behind the root (entry 0) and behind each draft (entry i + 1); UNKNOWN where
            nobody asked.
        hidden: float32 [1 + K, E] hidden states of the root and of each draft, for drafters that want them.
    """

    seq_id: int
    tree: DraftTree
    path: list[int]
    choices: list[int]
    hidden: npt.NDArray[np.float32] | None = None


UNKNOWN = -1
