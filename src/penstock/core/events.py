"""Why things are as they are: decisions at start-up and counters while running."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec


class Decision(msgspec.Struct, frozen=True):
    """A value that Penstock chose, and why. `--explain` prints them."""

    name: str
    value: Any
    why: str


@dataclass
class EngineStats:
    """Counters since start. Units: tokens, blocks or steps as named."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_sampled_tokens: int = 0
    num_prefix_queries_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_recomputed_tokens: int = 0
    num_forks: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_errors: int = 0
    peak_running: int = 0
    num_grammar_hits: int = 0
    num_grammar_misses: int = 0
    grammar_bytes: int = 0
