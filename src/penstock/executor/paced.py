"""A rank that computes nothing and answers at the pace of a device: made-up tokens, on the machine's clock.

Server, processes, routers and scheduler are the ones that serve, so clients, limits and several engines can be tried
where the device is not. Source of the idea: Vidur, arXiv 2405.05465, section 4 (predict only the device).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from penstock.base.clock import Clock, VirtualClock
from penstock.base.errors import InputError, UnsupportedError
from penstock.core.batch import (
    Pooled,
    PromptLogprobs,
    Sampled,
    ScheduledRow,
    SchedulerOutput,
    StepOutput,
    TokenLogprobs,
)
from penstock.core.protocols import StepTimer
from penstock.core.weight_swap import WeightFacts
from penstock.executor.rank import Rank
from penstock.executor.sim import SimExecutor

_FIRST, _NUM = 300, 1000
"""Ids that are told: whole words in most vocabularies, and no special tokens."""


class _ByPosition(SimExecutor):
    """Tokens follow from the position alone, so that a request that goes on with another engine goes on the same."""

    ids: Sequence[int] = ()

    def _token(self, seq_id: int, position: int) -> int:
        return self.ids[position * 40503 % len(self.ids)]


class PacedRank(Rank):
    """`timer`: seconds of a step; a step ends no sooner, counted from when it began. `page_bytes`: see `SimExecutor`.
    `never`: ids that are not told (ends of sequences). `vector_bytes`: of a pooled vector, which is zeros.

    Log-probabilities are 0. There are no grammars and no other weights.
    """

    packed_file = ""

    def __init__(
        self, timer: StepTimer, clock: Clock, *, vocab_size: int, page_bytes: Sequence[int], never: Collection[int],
        vector_bytes: int,
    ) -> None:  # fmt: skip
        self._clock, self._virtual = clock, VirtualClock()
        self._sim = _ByPosition(timer, self._virtual, vocab_size=vocab_size, page_bytes=page_bytes)
        first = min(_FIRST, vocab_size // 2)
        ids = [i for i in range(first, min(first + _NUM, vocab_size)) if i not in never]
        self._sim.ids = ids or list(range(vocab_size))
        self._vector = bytes(vector_bytes)
        self._prompt_len: dict[int, int] = {}
        self._tells: set[int] = set()
        """Sequences whose log-probabilities are asked for."""

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """Returns when the step would have ended."""
        began_s, before_s = self._clock.now(), self._virtual.now()
        self._know(output)
        self._sim.submit(output)
        result = self._sim.collect()
        told = msgspec.structs.replace(
            result,
            sampled=[self._with_logprobs(sampled) for sampled in result.sampled],
            prompt_logprobs=[self._of_prompt(row) for row in output.scheduled if row.prompt_logprobs_from >= 0],
            pooled=[Pooled(row.seq_id, self._vector) for row in output.scheduled if row.pooling],
        )
        self._clock.wait_until(began_s + self._virtual.now() - before_s)
        return told

    def _know(self, output: SchedulerOutput) -> None:
        for fork in output.forked:
            self._prompt_len[fork.child_id] = self._prompt_len[fork.parent_id]
            if fork.parent_id in self._tells:
                self._tells.add(fork.child_id)
        self._tells.difference_update(output.removed)
        for seq_id in output.removed:
            self._prompt_len.pop(seq_id, None)
        self._prompt_len.update((row.seq_id, row.prompt_len) for row in output.added)
        self._tells.update(row.seq_id for row in output.added if row.rules.num_logprobs >= 0)

    def _of_prompt(self, row: ScheduledRow) -> PromptLogprobs:
        """Each position tells of the token behind it; the last one's is no prompt token."""
        first = max(row.start, row.prompt_logprobs_from)
        end = min(row.start + row.num_tokens, self._prompt_len[row.seq_id] - 1)
        return PromptLogprobs(row.seq_id, first + 1, [self._sure(0)] * max(0, end - first))

    def _with_logprobs(self, sampled: Sampled) -> Sampled:
        if sampled.seq_id not in self._tells:
            return sampled
        return msgspec.structs.replace(sampled, logprobs=[self._sure(token) for token in sampled.token_ids])

    @staticmethod
    def _sure(token: int) -> TokenLogprobs:
        return TokenLogprobs(token, 0.0, 1)

    def back(self, num_slabs: Sequence[int]) -> None:
        return

    def holds(self, grammar: str) -> bool:
        return True

    def prepare(self, grammar: str, param: str) -> None:
        raise InputError(
            f"{param}: this engine's device is simulated, so its tokens are made up and follow no grammar; leave it "
            "away",
            param=param,
        )

    def spoil(self, step: int) -> None:
        raise UnsupportedError("a simulated device has no logits to spoil")

    def watch(self, progress: int) -> None:
        return

    def ready_weights(self, path: str) -> WeightFacts:
        raise UnsupportedError("a simulated device has no weights to swap")

    def switched(self) -> Rank:
        return self
