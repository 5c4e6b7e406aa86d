"""Alibaba's trace of an image generation service: its times and tenants; the lengths are the user's own.

Images have no output tokens, so only who came when is taken. Source: alibaba/clusterdata, cluster-trace-v2026-GenAI.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.sim.traces import TraceOptions
from penstock.sim.traces.reading import Stopwatch, columns, num_lines, requests
from penstock.sim.workload import Broken, TimedRequest, Workload

HEADER = "gmt_create,predict_type"
_TENANT = 4


class Alibaba:
    name = "alibaba"
    about = "times and tenants; lengths are given by --prompt and --output"

    def recognises(self, path: Path, head: bytes) -> bool:
        return head.startswith(HEADER.encode())

    def open(self, path: Path, options: TraceOptions) -> Workload:
        broken = Broken(options.skip_broken)

        def source() -> Iterator[TimedRequest]:
            watch = Stopwatch()

            def parse(text: str) -> TimedRequest:
                cells = columns(text, _TENANT + 1)
                return TimedRequest(
                    watch.seconds(cells[0]), options.num_prompt, options.num_output, tenant=cells[_TENANT][:64]
                )

            return requests(path, parse, broken, header=HEADER)

        total = num_lines(path)
        return Workload(
            path.stem,
            f"times and tenants of {path.name}; {options.num_prompt} prompt, {options.num_output} output tokens each",
            source,
            num_requests=None if total is None else max(0, total - 1),
            broken=broken,
        )
