"""The heads for multi-token prediction that ship in a model's checkpoint draft, one token after the other.

The hidden state h behind token i and the embedding of token i + 1 are a pair; a decoder layer turns pairs into what the
model's output matrix reads the token i + 2 from. That is a draft, and with the layer's own result in place of h it is
the next pair, which the next head reads; behind the last head it is the last one again. All hidden states are those
behind a final norm, as the model's own are.

Each head keeps keys and values of cache groups of its own. *Slot* i of a head holds the pair of token i and of the
state before it: the first head's of the model's, another's of what the head before it made of slot i - 1. So slots
follow from the tokens that the page is found by in the prefix cache. Pairs of a prompt are run with the prompt. Where a
state has never been seen (before the first token, behind a prompt's part that was cached, of steps without drafts),
zeros stand in for it: that costs drafts, no token.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2; several drafts by one head: Li et al., EAGLE, arXiv 2401.15077,
section 3.1, as vLLM and SGLang run these heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from penstock.core.batch import SchedulerOutput
from penstock.core.draft import NO_DRAFT, DraftJob, DraftTree, Outcome
from penstock.drafters.bench import DraftBench, Target
from penstock.drafters.choose import F32, Chooser, Sprout, softmax
from penstock.drafters.expanders import KAry
from penstock.drafters.filled import Filled
from penstock.drafters.heads import heads_problem
from penstock.drafters.mtp_head import HeadPairs, PairHead
from penstock.drafters.per_row import PerRow
from penstock.model.forward import HeadForward

CATCH_UP = 2048
"""Tokens at most that one step runs because nothing has been run for them yet."""
_CHAIN = KAry(1)


class Seen(NamedTuple):
    """States [n, E] behind tokens start ... start + n - 1 of a sequence."""

    start: int
    states: F32

    def before(self, start: int, end: int) -> F32:
        """Those before tokens start ... end - 1, zeros for those that nobody has seen: [end - start, E]."""
        out = np.zeros((end - start, self.states.shape[1]), np.float32)
        first, last = max(start - 1, self.start), min(end - 1, self.start + len(self.states))
        if first < last:
            out[first + 1 - start : last + 1 - start] = self.states[first - self.start : last - self.start]
        return out


class Chain(NamedTuple):
    """A sequence's drafts while they grow. `ends` [K, E]: what each head says behind the newest known token; `trail`
    [n, E]: what the head that drafted last says behind it and behind the drafts that it has run, the newest last."""

    sprout: Sprout
    ends: F32
    trail: F32


class MtpDrafter(PerRow[tuple[Seen, ...]]):
    """Chosen drafts, no drawn ones, as of other heads: verifiers that draw take them for what they are.

    `states`: what was seen last of each row: of the model, and of each head but the last. A row that has decoded
    without drafts drafts again one step later.
    """

    name = "mtp"
    wants_hidden = True

    def __init__(self, target: Target, forward: HeadForward, bench: DraftBench) -> None:
        super().__init__()
        assert bench.sampler is not None, "a rank has a sampler"
        several = len(bench.models) > 1
        self.heads = [PairHead(model, target, bench, every=several) for model in bench.models]
        self._target, self._rows, self._planes = forward, bench.rows, bench.storage.planes
        # Every head runs the same tokens, so one count says what is there of all.
        groups = list(chain.from_iterable(model.groups for model in bench.models))
        self._filled = Filled(groups, bench.rows, bench.storage)
        self._max_len = min(model.max_len for model in bench.models)
        nothing = np.zeros((0, target.spec.hidden_size), np.float32)
        self._unseen = (Seen(0, nothing),) * len(self.heads)
        self._chooser = Chooser(bench.sampler, bench.vocab_size)
        self._proposed: dict[int, Sprout] = {}
        self.num_pairs = 0
        """That heads were run on."""

    def track(self, output: SchedulerOutput) -> None:
        super().track(output)
        self._filled.track(output.page_ops)

    def read(self, runs: Sequence[tuple[int, int, F32]]) -> None:
        """See `core.protocols.PromptDrafter`."""
        work = []
        for seq_id, start, hidden in runs:
            seen = self.states.get(seq_id, self._unseen)
            end = min(start + len(hidden), self._max_len)
            # A step that is done again, as where a recurrent state has seen a wrong draft, finds some pairs there.
            done = self._filled.num_tokens(seq_id, end)
            if done < end and start - done <= CATCH_UP:
                before, first = seen[0].before(done, end), max(done, start + 1)
                before[first - done :] = hidden[first - 1 - start : end - 1 - start]
                work.append(HeadPairs(seq_id, done, self._rows[seq_id].tokens[done:end], before))
            self.states[seq_id] = (Seen(start + len(hidden) - 1, hidden[-1:].copy()), *seen[1:])
        with np.errstate(all="ignore"):
            self._through(work)

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        self._proposed.clear()
        sprouts = [sprout for job in jobs if (sprout := self._sprout(job)) is not None]
        with np.errstate(all="ignore"):  # what is not finite leads to no draft, and must not stop the others
            ends = self._catch_up(sprouts)
            growing = [
                Chain(sprout, found, found[:1])
                for sprout in sprouts
                if (found := ends.get(sprout.job.seq_id)) is not None
            ]
            while growing:
                self._grow(growing)
                growing = self._step([one for one in growing if one.sprout.front])
        self._proposed = {sprout.job.seq_id: sprout for sprout in sprouts if sprout.candidates}
        return [self._tree(self._proposed.get(job.seq_id)) for job in jobs]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Slots of accepted drafts were run with the heads' own states: they run again with the model's."""
        for outcome in outcomes:
            assert outcome.hidden is not None, "the rank gives hidden states to who wants them"
            sprout = self._proposed.pop(outcome.seq_id, None)
            if sprout is not None:
                self._chooser.learn(sprout, outcome)
            hidden = outcome.hidden[[0, *(i + 1 for i in outcome.path)]]
            # Verified drafts are known to the rows one step later.
            newest = Seen(self._rows[outcome.seq_id].num_tokens - 1, hidden)
            self.states[outcome.seq_id] = (newest, *self.states.get(outcome.seq_id, self._unseen)[1:])

    # -- running ------------------------------------------------------------------------------------------------------

    def _sprout(self, job: DraftJob) -> Sprout | None:
        root, seen = len(job.tokens) - 1, self.states.get(job.seq_id, self._unseen)[0]
        depth = min(job.max_depth, job.num_nodes, self._max_len - root)
        if depth <= 0 or not len(seen.states) or seen.start + len(seen.states) != root:
            return None
        return Sprout(job, depth, depth) if np.isfinite(seen.states[-1]).all() else None

    def _catch_up(self, sprouts: Sequence[Sprout]) -> dict[int, F32]:
        """What each head says behind the newest known token of the sequences that have been caught up with: [K, E]."""
        left, work, whole = CATCH_UP, [], []
        for sprout in sprouts:
            job, end = sprout.job, len(sprout.job.tokens)
            done = self._filled.num_tokens(job.seq_id, end - 1)
            count = min(end - done, left)
            if count:
                before = self.states[job.seq_id][0].before(done, done + count)
                work.append(HeadPairs(job.seq_id, done, job.tokens[done : done + count], before))
                whole.append(done + count == end)
                left -= count
        found = self._through(work)
        return {run.seq_id: found[:, j] for j, (run, ends) in enumerate(zip(work, whole, strict=True)) if ends}

    def _through(self, work: Sequence[HeadPairs]) -> F32:
        """Run pairs of known tokens through one head after the other: the states behind the last of each, [K, J, E].

        Each reads what the one before says of the tokens before. Mutates: what was seen of the heads, what is filled.
        """
        ends = np.zeros((len(self.heads), len(work), self._unseen[0].states.shape[1]), np.float32)
        runs = list(work)
        for k, head in enumerate(self.heads):
            found = self._run(head, runs)
            ends[k] = [states[-1] for states in found] if found else ends[k]
            if k + 1 == len(self.heads):
                break
            for j, (run, states) in enumerate(zip(runs, found, strict=True)):
                levels = list(self.states.get(run.seq_id, self._unseen))
                before = levels[k + 1].before(run.start, run.start + len(states))
                before[1:] = states[:-1]
                levels[k + 1] = Seen(run.start + len(states) - 1, states[-1:].copy())
                self.states[run.seq_id] = tuple(levels)
                runs[j] = run._replace(before=before)
        for run in work:
            self._filled.fill(run.seq_id, run.start, run.start + len(run.tokens))
        return ends

    def _step(self, chains: Sequence[Chain]) -> list[Chain]:
        """The chains with what is said behind their newest drafts. All of them have as many.

        Draft d + 1 comes from head d, if there are so many: it has not run the drafts so far. Else from the last again.
        """
        if not chains:
            return []
        d = len(chains[0].sprout.candidates)
        fresh = d < len(self.heads)
        runs = []
        for one in chains:
            tokens = np.array(one.sprout.token_ids if fresh else one.sprout.token_ids[-1:], np.int32)
            start = len(one.sprout.job.tokens) + d - len(tokens)
            runs.append(HeadPairs(one.sprout.job.seq_id, start, tokens, one.trail[-len(tokens) :]))
        found = self._run(self.heads[min(d, len(self.heads) - 1)], runs)
        out = []
        for one, states in zip(chains, found, strict=True):
            out.append(one._replace(trail=np.concatenate([one.ends[d : d + 1], states]) if fresh else states[-1:]))
        return out

    def _run(self, head: PairHead, runs: Sequence[HeadPairs]) -> list[F32]:
        self.num_pairs += sum(len(run.tokens) for run in runs)
        return head.run(runs)

    def _grow(self, chains: Sequence[Chain]) -> None:
        """Give every chain its next draft. Mutates: the sprouts."""
        sprouts = [one.sprout for one in chains]
        states: F32 = np.ascontiguousarray([one.trail[-1] for one in chains], np.float32)
        logits = self._target.run_head(states, self._planes)
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


def make(bench: DraftBench) -> MtpDrafter:
    """Raises: ConfigError for a model that gives no hidden states, and for a tree."""
    target = bench.target
    if target is None or not isinstance(target.forward, HeadForward):
        raise heads_problem("method mtp needs a model that gives hidden states, which this one does not")
    if bench.config.tree != "chain":
        raise heads_problem(f"method mtp drafts chains, and tree is {bench.config.tree}; leave tree away")
    assert bench.models, "the launch has opened the heads"
    return MtpDrafter(target, target.forward, bench)
