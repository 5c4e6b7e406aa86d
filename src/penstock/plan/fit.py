"""How many sequences of which length fit. Every answer is `resolve`'s own: it is asked, not imitated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.config.selection import Keeping
from penstock.core.backend import REFERENCE, BackendTraits
from penstock.core.machine import Machine
from penstock.core.model_spec import ModelSpec
from penstock.plan.drafts import NamedSpec
from penstock.plan.memory import asking_for_all, largest
from penstock.plan.resolve import Plan, resolve, sizes_of, tokens_in_flight
from penstock.plan.weights import NO_CODES, StoredFormats


class Fit:
    """What a model, a machine and settings leave room for. Units: tokens, sequences, bytes.

    `num_seqs` sequences of `context` tokens *fit* if `resolve` accepts `max_num_seqs=num_seqs` with
    `max_model_len=context` and hands out blocks for all of them at full length: nobody is ever preempted. Where
    the settings leave open how much memory KV may take, that is as much as can be asked for. Raises CapacityError (or
    ConfigError) if not even one sequence of one token fits.
    """

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, machine: Machine, drafts: Sequence[NamedSpec] = (),
        keeping: Keeping | None = None, stored: StoredFormats = NO_CODES, traits: BackendTraits = REFERENCE,
    ) -> None:  # fmt: skip
        self._config = asking_for_all(config)
        self._spec = spec
        self._machine = machine
        self._drafts = tuple(drafts)
        self._keeping, self._stored, self._traits = keeping, stored, traits
        self.base = self.resolved(1, 1)

    def resolved(self, num_seqs: int | None, context: int) -> Plan:
        """`resolve` for so many sequences (None: it decides) of that length. Raises ConfigError, CapacityError."""
        config = replace(
            self._config,
            model=replace(self._config.model, max_model_len=context),
            scheduler=replace(self._config.scheduler, max_num_seqs=num_seqs),
        )
        return resolve(config, self._spec, self._machine, self._drafts, self._keeping, self._stored, self._traits)

    def kv_bytes(self, num_seqs: int, context: int) -> int:
        """Blocks and states of so many full-length sequences."""
        step_tokens = tokens_in_flight(self._config, context, self.base.max_num_batched_tokens)
        sizes = sizes_of(self._config, self.base.groups, step_tokens, self._keeping)
        return num_seqs * (sizes.num_bytes(sizes.blocks(context), 1, context) + sizes.state_bytes)

    def fits(self, num_seqs: int, context: int) -> bool:
        try:
            plan = self.resolved(num_seqs, context)
        except ConfigError:
            return False
        sizes = sizes_of(self._config, plan.groups, plan.step_tokens, self._keeping)
        need = sizes.per_group(sizes.blocks(context), 1, sizes.most_blocks(context))
        return all(have >= num_seqs * each for have, each in zip(plan.num_slabs, need, strict=True))

    def most_seqs(self, context: int) -> int:
        """The largest number of sequences of this length that fit at once; 0 if not even one does."""
        return largest(lambda n: self.fits(n, context), 0, self._most_imaginable(context))

    def longest_context(self, num_seqs: int = 1) -> int:
        """The longest context that so many sequences can have at once, up to what the model was made for; else 0."""
        return largest(lambda n: self.fits(num_seqs, n), 0, self._spec.max_position)

    def _most_imaginable(self, context: int) -> int:
        return self._machine.available_bytes // max(1, self.kv_bytes(1, context)) + 1
