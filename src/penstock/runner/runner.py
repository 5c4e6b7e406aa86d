"""One rank's step, in the order that `core.batch` lays down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from penstock.base.clock import Clock
from penstock.core.batch import SchedulerOutput, StepOutput
from penstock.core.cache_spec import CacheGroup
from penstock.runner.forward import Forward, PoolingForward
from penstock.runner.input_batch import InputBatch
from penstock.runner.pooling import Pooler
from penstock.runner.rows import RowStore
from penstock.runner.sampler import Sampler
from penstock.runner.storage import Storage

if TYPE_CHECKING:
    from penstock.runner.logits.grammar_cache import GrammarCache

_NO_STATES = np.zeros((0, 0), np.float32)


class Runner:
    """Executes steps, one after the other, in one thread.

    `poison` is for tests: fresh memory is NaN, and each step checks that no row writes a page of another.
    """

    def __init__(
        self,
        forward: Forward,
        groups: tuple[CacheGroup, ...],
        num_slabs: Sequence[int],
        block_size: int,
        vocab_size: int,
        *,
        clock: Clock,
        host_slabs: Sequence[int] | None = None,
        poison: bool = False,
        storage: type[Storage] = Storage,
        grammars: GrammarCache | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        """`sampler`: another than the reference, with these `grammars`."""
        self.vocab_size = vocab_size
        self.storage = storage(groups, num_slabs, block_size, host_slabs=host_slabs, poison=poison)
        self.rows = RowStore(groups, num_slabs, block_size, vocab_size)
        self.sampler = Sampler(vocab_size, grammars) if sampler is None else sampler
        self.grammars = grammars
        self.pooler = Pooler(self.rows)
        self._batch = InputBatch(self.rows)
        self._forward = forward
        self._clock = clock
        self._strict = poison
        self.spoil: Callable[[npt.NDArray[np.float32]], None] | None = None
        """Changes the logits of every step before anything looks at them: faults for tests."""

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """Run one step. Units: `duration_s` is seconds on the runner's clock, from row changes to the last token.

        Mutates: rows, processors, storage. What fails for one row alone is a RowError of that row; an exception means
        that the rank is broken.
        """
        start_s = self._clock.now()
        self.rows.apply(output)
        self.sampler.chain.track(output)
        self.pooler.forget(output.removed)
        self.storage.apply(output.page_ops)
        if not output.scheduled:
            return StepOutput(output.step, duration_s=self._clock.now() - start_s)
        if self._strict:
            self.rows.check_writes(output.scheduled)
        plan, picks = self._batch.build(output.scheduled)
        wanted = self.pooler.wanted(output.scheduled, plan.query_start_loc)
        if wanted.size:
            assert isinstance(self._forward, PoolingForward), "this model gives no hidden states"
            logits, hidden = self._forward.run_pooling(replace(plan, hidden_indices=wanted), self.storage.planes)
            assert hidden.dtype == np.float32, f"hidden states are {hidden.dtype}"
        else:
            logits, hidden = self._forward.run(plan, self.storage.planes), _NO_STATES
        pooled, failed = self.pooler.fold(hidden)
        if self.spoil is not None:
            self.spoil(logits)
        assert logits.dtype == np.float32, f"logits are {logits.dtype}"
        assert logits.shape == (len(plan.logits_indices), self.vocab_size), f"logits are {logits.shape}"
        sampled, prompt_logprobs, errors, ended = self.sampler.sample(logits, picks)
        duration_s = self._clock.now() - start_s
        counts = None if self.grammars is None else self.grammars.counts()
        return StepOutput(
            output.step, sampled, prompt_logprobs, errors + failed, duration_s, pooled, list(ended), counts
        )
