"""Logits processors, in the order in which they are applied.

The whole way from logits to a token: raw logprobs are taken first; then the processors below (masks, bias, penalties);
then temperature, min-p, top-k and top-p (`runner.truncate`); then the draw (`runner.sampler`).

To add one: a file with a class behind `core.protocols.LogitsProcessor` whose constructor takes the vocabulary's size,
and a line at the right place here. The conformance suite then runs it.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.base.registry import Registry
from penstock.core.protocols import LogitsProcessor

LOGITS_PROCESSORS: Registry[Callable[..., LogitsProcessor], None] = Registry("logits processor")

_IN_ORDER = (
    ("allowed_ids", "penstock.runner.logits.allowed_ids:AllowedIds"),
    ("bad_words", "penstock.runner.logits.bad_words:BadWords"),
    ("grammar", "penstock.runner.logits.grammar:Grammar"),
    ("min_tokens", "penstock.runner.logits.min_tokens:MinTokens"),
    ("logit_bias", "penstock.runner.logits.logit_bias:LogitBias"),
    ("repetition_penalty", "penstock.runner.logits.repetition_penalty:RepetitionPenalty"),
    ("count_penalties", "penstock.runner.logits.count_penalties:CountPenalties"),
)

for _name, _target in _IN_ORDER:
    LOGITS_PROCESSORS.add(_name, _target)

ORDER: tuple[str, ...] = tuple(name for name, _ in _IN_ORDER)
"""Names of all processors, first applied first."""
