"""Heads on the model's last hidden state that draft the tokens after the next, each for a distance of its own.

Head k reads the hidden state h that the newest token was chosen from, and drafts the k-th token behind the newest:
softmax(W h_k), where h_k is h behind the head's residual blocks x + silu(A x + b), and W is the model's own output
matrix. The heads' best tokens are combined into a tree, the likeliest paths first.

Source: Cai et al., Medusa, arXiv 2401.10774 (heads, and a tree of their best tokens; there each head has an output
matrix of its own, and the tree is fixed). `tools/train/heads.py` trains them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.batch import SchedulerOutput
from penstock.core.draft import NO_DRAFT, ROOT, DraftJob, DraftTree, Outcome
from penstock.drafters.bench import DraftBench
from penstock.drafters.heads import DraftHeads, heads_problem, read_heads
from penstock.model.forward import HeadForward
from penstock.runner.storage import Storage

F32 = npt.NDArray[np.float32]
WIDTH = 8
"""Drafts that are looked at per head."""


class _Seen(NamedTuple):
    """The hidden state that the newest token was chosen from, and how many tokens there are with that one."""

    hidden: F32
    num_tokens: int


class MedusaDrafter:
    """Remembers one hidden state per sequence. Right after a prompt there is none yet, and nothing is drafted."""

    name = "medusa"
    wants_hidden = True

    def __init__(self, heads: DraftHeads, forward: HeadForward, storage: Storage) -> None:
        self._heads, self._forward, self._storage = heads, forward, storage
        self._seen: dict[int, _Seen] = {}
        self._known: dict[int, int] = {}

    def track(self, output: SchedulerOutput) -> None:
        for seq_id in output.removed:
            self._seen.pop(seq_id, None)
            self._known.pop(seq_id, None)

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        self._known.update((job.seq_id, len(job.tokens)) for job in jobs)
        ready = [job for job in jobs if self._is_ready(job)]
        if not ready:
            return [NO_DRAFT] * len(jobs)
        hidden = self._heads(np.stack([self._seen[job.seq_id].hidden for job in ready]))
        count, num_heads, width = hidden.shape
        logits = self._forward.run_head(hidden.reshape(-1, width), self._storage.planes)
        ids, probs = best_tokens(logits, WIDTH)
        trees = {
            job.seq_id: best_paths(ids[at : at + num_heads], probs[at : at + num_heads], job)
            for job, at in zip(ready, range(0, count * num_heads, num_heads), strict=True)
        }
        return [trees.get(job.seq_id, NO_DRAFT) for job in jobs]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            assert outcome.hidden is not None, "the rank gives hidden states to who wants them"
            last = outcome.path[-1] + 1 if outcome.path else 0
            after = self._known[outcome.seq_id] + len(outcome.path) + 1
            self._seen[outcome.seq_id] = _Seen(outcome.hidden[last].copy(), after)

    def _is_ready(self, job: DraftJob) -> bool:
        seen = self._seen.get(job.seq_id)
        return seen is not None and seen.num_tokens == len(job.tokens) and bool(np.isfinite(seen.hidden).all())


def best_tokens(logits: F32, width: int) -> tuple[npt.NDArray[np.int64], F32]:
    """The likeliest tokens of each row, best first, and their probabilities. Shapes: [R, V] -> [R, width] each."""
    width = min(width, logits.shape[1])
    ids = np.argpartition(-logits, width - 1, axis=1)[:, :width]
    found = np.take_along_axis(logits, ids, 1)
    order = np.argsort(-found, axis=1, kind="stable")
    ids, found = np.take_along_axis(ids, order, 1), np.take_along_axis(found, order, 1)
    top = found[:, :1]
    probs = np.exp(found - top) / np.exp(logits - top).sum(1, keepdims=True)
    return ids, probs


def best_paths(ids: npt.NDArray[np.int64], probs: F32, job: DraftJob) -> DraftTree:
    """The nodes whose paths are likeliest if heads err independently of each other. Shapes: ids, probs [K, width].

    A path's likelihood falls from node to node and from the best to the next best token of a head, so that taking the
    best of what is open now finds the best `num_nodes` nodes.
    """
    depth, width = min(len(ids), job.max_depth), 1 if job.chain_only else ids.shape[1]
    tokens: list[int] = []
    parents: list[int] = []
    own: list[float] = []
    # (-likelihood, depth, rank, parent, likelihood of the parent's path): ties to the shallower and the better ranked.
    open_nodes = [(-float(probs[0, 0]), 0, 0, ROOT, 1.0)] if depth else []
    while open_nodes and len(tokens) < job.num_nodes:
        value, level, rank, parent, above = heapq.heappop(open_nodes)
        tokens.append(int(ids[level, rank]))
        parents.append(parent)
        own.append(float(probs[level, rank]))
        if rank + 1 < width:
            heapq.heappush(open_nodes, (-above * float(probs[level, rank + 1]), level, rank + 1, parent, above))
        if level + 1 < depth:
            first = float(probs[level + 1, 0])
            heapq.heappush(open_nodes, (value * first, level + 1, 0, len(tokens) - 1, -value))
    return DraftTree(tokens, parents, own)


def make(bench: DraftBench) -> MedusaDrafter:
    """Raises: ConfigError for heads that are missing, unsound, or trained on another model."""
    target = bench.target
    if target is None or not isinstance(target.forward, HeadForward):
        raise heads_problem("method medusa needs a model that gives hidden states, which this one does not")
    if bench.config.heads is None:
        raise heads_problem("method medusa needs heads: the folder of the trained heads")
    heads, _ = read_heads(Path(bench.config.heads), "medusa", target.spec.hidden_size, target.fingerprint())
    return MedusaDrafter(heads, target.forward, bench.storage)
