"""Speculation's numbers, defined once: from the engine's counters to what /metrics, logs, the page and benchmarks say.

`docs/concepts/speculation.md` has the same definitions in words. Sources: Leviathan et al., arXiv 2211.17192, section 3
(acceptance, speed-up); names of counters: vLLM's `v1/spec_decode/metrics.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

_AT = "num_accepted_at_"


@dataclass(frozen=True)
class Acceptance:
    """Of an engine since start, or of a part of its time if the counters are differences. Units: tokens, seconds.

    A *draft* is one sequence's drafts in one step, if there were any. Every figure is None where it would divide by 0.

    Attributes:
        num_steps: steps in which a sequence had room for drafts; `step_s`: how long they took, `draft_s` of it the
            drafters.
        compared_s, plain_s: see `speedup`.
        accepted_at: [depth - 1]: drafts that were accepted at that depth.
    """

    num_drafts: float = 0.0
    num_draft_tokens: float = 0.0
    num_accepted_tokens: float = 0.0
    num_steps: float = 0.0
    draft_s: float = 0.0
    step_s: float = 0.0
    compared_s: float = 0.0
    plain_s: float = 0.0
    accepted_at: tuple[float, ...] = ()

    @classmethod
    def of(cls, counters: Mapping[str, float]) -> Acceptance:
        """`counters`: `core.events.EngineStats.counters()`, or sums or differences of them."""
        depths = sorted(int(name.removeprefix(_AT)) for name in counters if name.startswith(_AT))
        deepest = depths[-1] + 1 if depths else 0
        return cls(
            num_drafts=counters.get("num_drafts", 0.0),
            num_draft_tokens=counters.get("num_draft_tokens", 0.0),
            num_accepted_tokens=counters.get("num_accepted_tokens", 0.0),
            num_steps=counters.get("num_spec_steps", 0.0),
            draft_s=counters.get("draft_s", 0.0),
            step_s=counters.get("spec_step_s", 0.0),
            compared_s=counters.get("spec_compared_s", 0.0),
            plain_s=counters.get("spec_plain_s", 0.0),
            accepted_at=tuple(counters.get(f"{_AT}{d}", 0.0) for d in range(deepest)),
        )

    def __sub__(self, before: Acceptance) -> Acceptance:
        """What has come since `before`."""
        depths = zip_longest(self.accepted_at, before.accepted_at, fillvalue=0.0)
        return Acceptance(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
            self.num_steps - before.num_steps,
            self.draft_s - before.draft_s,
            self.step_s - before.step_s,
            self.compared_s - before.compared_s,
            self.plain_s - before.plain_s,
            tuple(a - b for a, b in depths),
        )

    @property
    def rate(self) -> float | None:
        """Accepted drafts per draft. A tree drafts several tokens for one place, and at most one can be right."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def mean_length(self) -> float | None:
        """Tokens that a draft's step yields: the accepted ones, and the one that the model adds to them."""
        more = _ratio(self.num_accepted_tokens, self.num_drafts)
        return None if more is None else 1.0 + more

    @property
    def per_position(self) -> tuple[float, ...]:
        """[depth - 1]: share of the drafts whose draft at that depth was accepted; it falls with depth."""
        return tuple(n / self.num_drafts for n in self.accepted_at) if self.num_drafts else ()

    @property
    def verify_s(self) -> float:
        """Seconds of the steps with room for drafts that the drafters did not take."""
        return max(0.0, self.step_s - self.draft_s)

    @property
    def draft_share(self) -> float | None:
        return _ratio(self.draft_s, self.step_s)

    @property
    def verify_share(self) -> float | None:
        return _ratio(self.verify_s, self.step_s)

    @property
    def speedup(self) -> float | None:
        """Effective speed-up of steps that draft, estimated while running (`engine.gain`): the seconds that plain steps
        with as many sequences would have taken for their tokens, over theirs. None until both kinds have run."""
        return _ratio(self.plain_s, self.compared_s)

    def figures(self) -> dict[str, Any]:
        """For JSON. Names and units of what vLLM's benchmark writes too are vLLM's: its rates are percentages."""
        return {
            "spec_decode_num_drafts": int(self.num_drafts),
            "spec_decode_draft_tokens": int(self.num_draft_tokens),
            "spec_decode_accepted_tokens": int(self.num_accepted_tokens),
            "spec_decode_acceptance_rate": None if self.rate is None else 100.0 * self.rate,
            "spec_decode_acceptance_length": self.mean_length,
            "spec_decode_per_position_acceptance_rates": list(self.per_position),
            "spec_decode_draft_share": self.draft_share,
            "spec_decode_verify_share": self.verify_share,
            "spec_decode_speedup": self.speedup,
        }


def _ratio(a: float, b: float) -> float | None:
    return a / b if b > 0 else None
