"""Alibaba's trace of an image generation service: its times and tenants; the lengths are the user's own.

Images have no output tokens, so only who came when is taken. Source: alibaba/clusterdata, cluster-trace-v2026-GenAI.
"""

from __future__ import annotations

from pathlib import Path

from penstock.sim.traces import TraceOptions
from penstock.sim.traces.reading import Parse, Stopwatch, columns, read_table
from penstock.sim.workload import Broken, TimedRequest, Workload

HEADER = "gmt_create,predict_type"
_TENANT = 4


class Alibaba:
    name = "alibaba"
    about = "times and tenants; lengths are given by --prompt and --output"

    def recognises(self, path: Path, head: bytes) -> bool:
        return head.startswith(HEADER.encode())

    def open(self, path: Path, options: TraceOptions) -> Workload:
        prompt, output = options.num_prompt, options.num_output

        def parser() -> Parse:
            watch = Stopwatch()

            def parse(text: str) -> TimedRequest:
                cells = columns(text, _TENANT + 1)
                return TimedRequest(watch.seconds(cells[0]), prompt, output, tenant=cells[_TENANT][:64])

            return parse

        about = f"times and tenants of {path.name}; {prompt} prompt, {output} output tokens each"
        return read_table(path, HEADER, parser, about, Broken(options.skip_broken))
