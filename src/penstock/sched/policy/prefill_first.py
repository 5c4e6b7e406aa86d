"""Prefill-first continuous batching: the behaviour before chunked prefill, kept as the measured baseline of row A10.

Whoever still has a prompt to compute is served before anyone decodes, so a long prompt stalls all streams.
Source: the vLLM (v0) default that Sarathi-Serve, arXiv 2403.02310, section 3.1, argues against.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from penstock.core.sequence import Sequence
from penstock.sched.policy.fcfs import Fcfs


class PrefillFirst(Fcfs):
    name = "prefill-first"

    def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        prefills = [s for s in running if not s.is_decoding]
        decodes = [s for s in running if s.is_decoding]
        return prefills + list(waiting) + decodes
