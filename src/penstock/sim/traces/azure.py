"""Azure LLM inference traces of 2023 (and others with the same three columns).

Source: Patel et al., Splitwise, arXiv 2311.18677; github.com/Azure/AzurePublicDataset.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.sim.traces import TraceOptions
from penstock.sim.traces.reading import Stopwatch, columns, num_lines, requests, tokens
from penstock.sim.workload import Broken, TimedRequest, Workload

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


class Azure:
    name = "azure2023"
    about = "time, prompt tokens, output tokens"

    def recognises(self, path: Path, head: bytes) -> bool:
        return head.lstrip(b"\xef\xbb\xbf").startswith(HEADER.encode())

    def open(self, path: Path, options: TraceOptions) -> Workload:
        broken = Broken(options.skip_broken)

        def source() -> Iterator[TimedRequest]:
            watch = Stopwatch()

            def parse(text: str) -> TimedRequest:
                time, prompt, output = columns(text, 3)[:3]
                num_prompt, num_output = tokens(prompt, "ContextTokens"), tokens(output, "GeneratedTokens")
                return TimedRequest(watch.seconds(time), num_prompt, num_output)

            return requests(path, parse, broken, header=HEADER)

        total = num_lines(path)
        return Workload(
            path.stem,
            f"Azure LLM inference trace {path.name}",
            source,
            num_requests=None if total is None else max(0, total - 1),
            broken=broken,
        )
