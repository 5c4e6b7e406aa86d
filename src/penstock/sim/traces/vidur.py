"""Vidur's processed traces: prompt and output lengths without times.

Source: Agrawal et al., Vidur, arXiv 2405.05465; github.com/microsoft/vidur, data/processed_traces.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.sim.traces import TraceOptions
from penstock.sim.traces.reading import columns, num_lines, requests, tokens
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
        broken = Broken(options.skip_broken)

        def source() -> Iterator[TimedRequest]:
            return requests(path, parse, broken, header=HEADER)

        total = num_lines(path)
        return Workload(
            path.stem,
            f"lengths of {path.name}",
            source,
            num_requests=None if total is None else max(0, total - 1),
            has_times=False,
            broken=broken,
        )
