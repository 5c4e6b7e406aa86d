"""The head for multi-token prediction that ships in a model's checkpoint drafts, one token after the other.

The hidden state h behind token i and the embedding of token i + 1 are a pair; a decoder layer turns pairs into what the
model's output matrix reads the token i + 2 from. That is a draft, and with the layer's own result in place of h it is
the next pair. All hidden states are those behind a final norm, as the model's own are.

The layer keeps keys and values of a cache group of its own. *Slot* i holds the pair of token i and of the hidden state
before it, so that it follows from the tokens that the page is found by in the prefix cache. Pairs of a prompt are run
with the prompt. Where a hidden state has never been seen (before the first token, behind a prompt's part that was
cached, of steps without drafts), zeros stand in for it: that costs drafts, no token.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2; several drafts by one head: Li et al., EAGLE, arXiv 2401.15077,
section 3.1, as vLLM and SGLang run these heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.core.batch import SchedulerOutput
from penstock.core.draft import NO_DRAFT, DraftJob, DraftTree, Outcome
from penstock.core.model_spec import Norm
from penstock.drafters.bench import DraftBench, DraftModel, Target
from penstock.drafters.choose import F32, Chooser, Sprout, softmax
from penstock.drafters.expanders import KAry
from penstock.drafters.filled import Filled
from penstock.drafters.forward import Ahead, DraftForward
from penstock.drafters.heads import heads_problem
from penstock.drafters.per_row import PerRow
from penstock.model.forward import HeadForward
from penstock.ops.plan import I32
from penstock.ops.ref.product import as_float32

CATCH_UP = 2048
"""Tokens at most that one step runs because nothing has been run for them yet."""
_CHAIN = KAry(1)


class Seen(NamedTuple):
    """Hidden states [n, E] behind tokens start ... start + n - 1 of a sequence."""

    start: int
    hidden: F32


class _Run(NamedTuple):
    """Pairs of one sequence to be run: of tokens start, start + 1, ... and the hidden states before them [n, E]."""

    seq_id: int
    start: int
    tokens: I32
    hidden: F32


class MtpDrafter(PerRow[Seen]):
    """Chosen drafts, no drawn ones, as of other heads: verifiers that draw take them for what they are.

    `states`: what was seen last of each row. A row that has decoded without drafts drafts again one step later.
    """

    name = "mtp"
    wants_hidden = True

    def __init__(self, head: DraftModel, target: Target, forward: HeadForward, bench: DraftBench) -> None:
        super().__init__()
        assert bench.sampler is not None, "a rank has a sampler"
        assert head.spec is not None, "the launch says what its models compute"
        assert head.spec.pair is not None, "a head reads pairs"
        self._pair, self._table, self._max_len = head.spec.pair, head.weights["embed"], head.max_len
        self._norms = tuple(_vectors(head, name) for name in ("token_norm", "hidden_norm"))
        self._embeddings, self._scale = target.embeddings, np.float32(target.spec.embed_scale)
        self._target, self._storage = forward, bench.storage
        self._block = DraftForward(head.forward, bench.rows, bench.storage)
        self._filled = Filled(head.groups, bench.rows, bench.storage)
        self._chooser = Chooser(bench.sampler, bench.vocab_size)
        self._rows = bench.rows
        self._proposed: dict[int, Sprout] = {}
        self.num_pairs = 0
        """That the head was run on."""

    def track(self, output: SchedulerOutput) -> None:
        super().track(output)
        self._filled.track(output.page_ops)

    def read(self, runs: Sequence[tuple[int, int, F32]]) -> None:
        """See `core.protocols.PromptDrafter`."""
        work = []
        for seq_id, start, hidden in runs:
            end = min(start + len(hidden), self._max_len)
            # A step that is done again, as where a recurrent state has seen a wrong draft, finds some pairs there.
            done = self._filled.num_tokens(seq_id, end)
            if done < end and start - done <= CATCH_UP:
                before, first = self._before(seq_id, done, end), max(done, start + 1)
                before[first - done :] = hidden[first - 1 - start : end - 1 - start]
                work.append(_Run(seq_id, done, self._rows[seq_id].tokens[done:end], before))
            self.states[seq_id] = Seen(start + len(hidden) - 1, hidden[-1:].copy())
        with np.errstate(all="ignore"):
            self._run(work)
        for run in work:
            self._filled.fill(run.seq_id, run.start, run.start + len(run.tokens))

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        self._proposed.clear()
        sprouts = [sprout for job in jobs if (sprout := self._sprout(job)) is not None]
        with np.errstate(all="ignore"):  # what is not finite leads to no draft, and must not stop the others
            hidden = self._catch_up(sprouts)
            growing = [sprout for sprout in sprouts if sprout.job.seq_id in hidden]
            states: F32 = np.array([hidden[sprout.job.seq_id] for sprout in growing], np.float32)
            while growing:
                self._grow(growing, states)
                going = [i for i, sprout in enumerate(growing) if sprout.front]
                growing = [growing[i] for i in going]
                if growing:
                    states = self._step(growing, states[going])
        self._proposed = {sprout.job.seq_id: sprout for sprout in sprouts if sprout.candidates}
        return [self._tree(self._proposed.get(job.seq_id)) for job in jobs]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Slots of accepted drafts were run with the head's own states: they run again with the model's."""
        for outcome in outcomes:
            assert outcome.hidden is not None, "the rank gives hidden states to who wants them"
            sprout = self._proposed.pop(outcome.seq_id, None)
            if sprout is not None:
                self._chooser.learn(sprout, outcome)
            hidden = outcome.hidden[[0, *(i + 1 for i in outcome.path)]]
            # Verified drafts are known to the rows one step later.
            self.states[outcome.seq_id] = Seen(self._rows[outcome.seq_id].num_tokens - 1, hidden)

    # -- running ------------------------------------------------------------------------------------------------------

    def _sprout(self, job: DraftJob) -> Sprout | None:
        root, seen = len(job.tokens) - 1, self.states.get(job.seq_id)
        depth = min(job.max_depth, job.num_nodes, self._max_len - root)
        if depth <= 0 or seen is None or seen.start + len(seen.hidden) != root:
            return None
        return Sprout(job, depth, depth) if np.isfinite(seen.hidden[-1]).all() else None

    def _before(self, seq_id: int, start: int, end: int) -> F32:
        """Hidden states before tokens start ... end - 1, zeros for those that nobody has seen: [end - start, E]."""
        out = np.zeros((end - start, self._table.shape[1] // 2), np.float32)
        seen = self.states.get(seq_id)
        if seen is not None:
            first, last = max(start - 1, seen.start), min(end - 1, seen.start + len(seen.hidden))
            if first < last:
                out[first + 1 - start : last + 1 - start] = seen.hidden[first - seen.start : last - seen.start]
        return out

    def _catch_up(self, sprouts: Sequence[Sprout]) -> dict[int, F32]:
        """The head's state behind the newest known token of the sequences that have been caught up with: [E] each."""
        left, work, whole = CATCH_UP, [], []
        for sprout in sprouts:
            job, end = sprout.job, len(sprout.job.tokens)
            done = self._filled.num_tokens(job.seq_id, end - 1)
            count = min(end - done, left)
            if count:
                before = self._before(job.seq_id, done, done + count)
                work.append(_Run(job.seq_id, done, job.tokens[done : done + count], before))
                whole.append(done + count == end)
                left -= count
        found = self._run(work)
        for run in work:
            self._filled.fill(run.seq_id, run.start, run.start + len(run.tokens))
        return {run.seq_id: state for run, state, ends in zip(work, found, whole, strict=True) if ends}

    def _step(self, sprouts: Sequence[Sprout], states: F32) -> F32:
        """The head's states behind the newest drafts. Shapes: states [J, E], those before them."""
        return self._run([
            _Run(
                sprout.job.seq_id, len(sprout.job.tokens) + len(sprout.candidates) - 1,
                np.array([sprout.candidates[-1].token_id], np.int32), states[i : i + 1],
            )
            for i, sprout in enumerate(sprouts)
        ])  # fmt: skip

    def _run(self, work: Sequence[_Run]) -> F32:
        """The states behind the last pair of each: [J, E]. As many pairs at once as the table holds."""
        out = np.zeros((len(work), self._table.shape[1] // 2), np.float32)
        batch: list[Ahead] = []
        owners: list[int] = []
        filled = 0

        def flush() -> None:
            nonlocal filled
            out[owners] = self._block.states(batch)
            batch.clear()
            owners.clear()
            filled = 0

        for j, run in enumerate(work):
            at = 0
            while at < len(run.tokens):
                if filled == len(self._table) or j in owners:
                    flush()
                count = min(len(run.tokens) - at, len(self._table) - filled)
                part = slice(at, at + count)
                self._write(filled, run.tokens[part], run.hidden[part])
                batch.append(Ahead(run.seq_id, run.start + at, np.arange(filled, filled + count, dtype=np.int32)))
                owners.append(j)
                filled, at = filled + count, at + count
        if batch:
            flush()
        return out

    def _write(self, first: int, tokens: I32, hidden: F32) -> None:
        """Put pairs into the table, from row `first` on."""
        parts = [
            _normed(x, self._pair.norm, weight)
            for x, weight in zip(
                (self._embeddings(tokens.astype(np.int64)) * self._scale, hidden), self._norms, strict=True
            )
        ]
        rows = self._table[first : first + len(tokens)]
        np.concatenate(parts[::-1] if self._pair.hidden_first else parts, axis=1, out=rows)
        self.num_pairs += len(tokens)

    def _grow(self, sprouts: Sequence[Sprout], states: F32) -> None:
        """Give every sprout its next draft. Shapes: states [J, E]. Mutates: the sprouts."""
        logits = self._target.run_head(np.ascontiguousarray(states), self._storage.planes)
        final = self._chooser.final(sprouts, np.split(logits, len(sprouts)))
        choices = self._chooser.tokens(sprouts, final)
        probs = softmax(final, [1.0 if s.job.rules.greedy else s.job.rules.temperature for s in sprouts])
        for i, sprout in enumerate(sprouts):
            _CHAIN.grow(sprout, probs[i : i + 1], choices[i : i + 1])

    @staticmethod
    def _tree(sprout: Sprout | None) -> DraftTree:
        if sprout is None:
            return NO_DRAFT
        return DraftTree(sprout.token_ids, sprout.parents, [candidate.prob for candidate in sprout.candidates])


def _vectors(head: DraftModel, name: str) -> tuple[F32, F32]:
    """A norm's weights and bias."""
    bias = head.weights.get(f"{name}.bias")
    weight = as_float32(head.weights[name])
    return weight, np.zeros_like(weight) if bias is None else as_float32(bias)


def _normed(x: F32, norm: Norm, weight: tuple[F32, F32]) -> F32:
    if norm.kind == "layer":
        x = x - x.mean(axis=1, keepdims=True)
    out: F32 = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + np.float32(norm.eps))
    return out * (weight[0] + np.float32(norm.offset)) + weight[1]


def make(bench: DraftBench) -> MtpDrafter:
    """Raises: ConfigError for a model that gives no hidden states, and for a tree."""
    target = bench.target
    if target is None or not isinstance(target.forward, HeadForward):
        raise heads_problem("method mtp needs a model that gives hidden states, which this one does not")
    if bench.config.tree != "chain":
        raise heads_problem(f"method mtp drafts chains, and tree is {bench.config.tree}; leave tree away")
    assert len(bench.models) == 1, "the launch has opened the head"
    return MtpDrafter(bench.models[0], target, target.forward, bench)
