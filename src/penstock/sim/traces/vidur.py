"""Vidur's processed traces: prompt and output lengths without times.

Source: Agrawal et al., Vidur, arXiv 2405.05465; github.com/microsoft/vidur, data/processed_traces.
"""

from __future__ import annotations

from pathlib import Path

from penstock.sim.traces import TraceOptions
from penstock.sim.traces.reading import columns, read_table, tokens
from penstock.sim.workload import Broken, TimedRequest, Workload

HEADER = "num_prefill_tokens,num_decode_tokens"


def parse(text: str) -> TimedRequest:
    """One line. Raises ValueError."""
    prompt, output = columns(text, 2)[:2]
    return TimedRequest(0.0, tokens(prompt, "num_prefill_tokens"), tokens(output, "num_decode_tokens"))


class Vidur:
    name = "vidur"
    about = "lengths only; needs an arrival process"

    def recognises(self, path: Path, head: bytes) -> bool:
        return head.startswith(HEADER.encode())

    def open(self, path: Path, options: TraceOptions) -> Workload:
        about = f"lengths of {path.name}"
        return read_table(path, HEADER, lambda: parse, about, Broken(options.skip_broken), has_times=False)
