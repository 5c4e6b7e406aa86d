"""The sampler on a device that works while the host goes on: a step's tokens are chosen before anybody looks at them.

`start` gives the device everything that a step's rows ask for (draws, what the processors change, logprobs), and `read`
brings all of it here at once: the host waits once per step. Candidates of beams, logprobs of several samples and drafts
go the way of `runner.kernel_sampler`, which looks at results on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.core.batch import PromptLogprobs, RowError, Sampled, TokenLogprobs
from penstock.ops.draw_weights import scale_of
from penstock.ops.draws import AskedDraw, Likely, Ranked, StartedDraws, StartingKernel
from penstock.runner.input_batch import Pick
from penstock.runner.kernel_sampler import KernelSampler
from penstock.runner.logprobs import log_sum
from penstock.runner.sampler import DraftNode, SamplerOutput, sick

if TYPE_CHECKING:
    from penstock.runner.logits.grammar_cache import GrammarCache


class Started(NamedTuple):
    """A step whose tokens are being chosen. `followed`: rows of its logits that processors have changed."""

    picks: Sequence[Pick]
    draws: StartedDraws
    followed: frozenset[int]


class DeviceSampler(KernelSampler):
    """`KernelSampler` whose kernel can start."""

    def __init__(self, kernel: StartingKernel, vocab_size: int, grammars: GrammarCache | None = None) -> None:
        super().__init__(kernel, vocab_size, grammars)
        self._starting = kernel

    def sample(self, logits: Any, picks: Sequence[Pick], nodes: Sequence[DraftNode] = ()) -> SamplerOutput:
        """See `Sampler.sample`."""
        if nodes or not picks or not self.starts(picks):
            return super().sample(logits, picks, nodes)
        return self.read(self.start(logits, picks))

    def starts(self, picks: Sequence[Pick]) -> bool:
        """Whether `start` can do all that these ask for."""
        return not any(p.num_candidates or (p.rules.num_logprobs >= 0 and p.num_samples > 1) for p in picks)

    def start(self, logits: Any, picks: Sequence[Pick]) -> Started:
        """Choose tokens, without waiting for any. The processors must know all tokens of the rows that they follow.

        Shapes: logits [R, V], not written to.
        """
        followed = [pick for pick in picks if pick.row >= 0 and self.chain.follows(pick.seq_id)]
        final = logits
        if followed:
            rows = [pick.row for pick in followed]
            changed = logits[rows]
            self.chain.apply(changed, [pick.seq_id for pick in followed])
            final = logits.copy()
            final[rows] = changed
        asked: list[AskedDraw] = []
        likely: list[Likely] = []
        for pick in picks:
            rules = pick.rules
            if pick.row >= 0 and not rules.greedy:
                asked.append(
                    AskedDraw(pick.row, scale_of(rules.temperature), rules.min_p, rules.top_k, rules.top_p, rules.seed,
                         pick.sample_index, pick.position, pick.num_samples)
                )  # fmt: skip
            if pick.row >= 0 and rules.num_logprobs >= 0:
                likely.append(Likely(pick.row, rules.num_logprobs, ids=rules.logprob_ids))
            for j, token in enumerate(pick.prompt_ids.tolist()):
                likely.append(Likely(pick.prompt_row + j, rules.num_prompt_logprobs, token))
        draws = self._starting.start(logits, final, asked, likely)
        return Started(picks, draws, frozenset(pick.row for pick in followed))

    def read(self, started: Started) -> SamplerOutput:
        """What `start` began; waits for it."""
        drawn = started.draws.read()
        tokens, ranked = iter(drawn.tokens), iter(drawn.ranked)
        ended: list[int] = []
        out = SamplerOutput([], [], [], ended)
        fit = np.array(drawn.healthy, np.bool_)
        for pick in started.picks:
            sampled: Sampled | None = None
            if pick.row >= 0:
                chosen = [drawn.best[pick.row]] * pick.num_samples if pick.rules.greedy else next(tokens)
                entries = [_entry(chosen[0], *next(ranked))] if pick.rules.num_logprobs >= 0 else []
                sampled = Sampled(pick.seq_id, chosen, entries)
            prompt = [_entry(token, *next(ranked)) for token in pick.prompt_ids.tolist()]
            problem = sick(fit, pick)
            if problem is None and pick.row in started.followed:
                problem = self.unusable(pick.seq_id, drawn.peaks[pick.row])
                if problem == "":
                    ended.append(pick.seq_id)
                    sampled = problem = None
            if problem is not None:
                out.errors.append(RowError(pick.seq_id, problem))
                continue
            if sampled is not None:
                out.sampled.append(sampled)
            if prompt:
                out.prompt_logprobs.append(PromptLogprobs(pick.seq_id, pick.prompt_start, prompt))
        return out


def _entry(token: int, ranked: Ranked, value: float, top: list[float]) -> TokenLogprobs:
    if not ranked.total > 0:  # of a sick row, which nobody is told of
        return TokenLogprobs(token, 0.0, 0)
    norm = log_sum(ranked.peak, ranked.total)
    return TokenLogprobs(token, value - norm, ranked.ranks[0], ranked.top_ids, [logit - norm for logit in top])
