"""Dynamic SplitFuse: every step runs about the same number of tokens.

Long prompts are cut, short ones put together, so that decodes and prompt chunks add up to a slowly moving target. While
more waits than fits, the target is the token budget and this is stall-free chunked prefill. Below that, first come,
first served computes every prompt at once and then has decode-only steps; here the target sinks to what the load needs
on average, so prompts are spread over the steps: even step times for everybody, for a later first token.
Source: DeepSpeed-FastGen, arXiv 2401.08671, section 3 (dynamic prompt and generation decomposition and composition).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from penstock.base.errors import ConfigError
from penstock.core.sequence import Sequence
from penstock.sched.policy.fcfs import Fcfs


class SplitFuse(Fcfs):
    """Args:
    backlog_steps: prompt tokens to keep in hand, in steps of prefill work: more is steadier, less is quicker.
    gain: share of the way to the wanted target that one step goes, (0, 1].
    min_chunk: prompt tokens per step at least, so that no crowd of decodes can stop prefills.
    """

    name = "splitfuse"

    def __init__(self, backlog_steps: float = 32.0, gain: float = 0.05, min_chunk: int = 16) -> None:
        for knob, ok in (("backlog_steps", backlog_steps >= 1), ("gain", 0 < gain <= 1), ("min_chunk", min_chunk >= 1)):
            if not ok:
                raise ConfigError(f"{knob} of splitfuse is out of range", field=knob)
        self.backlog_steps = backlog_steps
        self.gain = gain
        self.min_chunk = min_chunk
        self._target = 0.0
        self._budget = 0
        """Token budget of a step: the most that was ever left."""
        self._most = 0
        """Tokens that this step may come to."""

    def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        decodes = sum(s.is_decoding for s in running)
        backlog = sum(s.lag for s in running if not s.is_decoding)
        enough = self._budget * self.backlog_steps
        for seq in waiting:
            if backlog >= enough:
                break  # the target is at its limit: a long queue need not be counted
            backlog += seq.num_known
        wanted = decodes + backlog / self.backlog_steps
        if wanted >= self._budget:
            self._target = float(self._budget or wanted)
        else:
            self._target += self.gain * (wanted - self._target)
        self._most = max(round(self._target), decodes + self.min_chunk)
        return super().order(running, waiting)

    def num_tokens(self, seq: Sequence, lag: int, budget_left: int) -> int:
        self._budget = max(self._budget, budget_left)
        if lag == 1:
            return min(1, budget_left)
        room = self._most - (self._budget - budget_left)
        return max(0, min(lag, budget_left, room))
