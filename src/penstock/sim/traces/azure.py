"""Azure LLM inference traces of 2023 (and others with the same three columns).

Source: Patel et al., Splitwise, arXiv 2311.18677; github.com/Azure/AzurePublicDataset.
"""

from __future__ import annotations

from pathlib import Path

from penstock.sim.traces import TraceOptions
from penstock.sim.traces.reading import Parse, Stopwatch, columns, read_table, tokens
from penstock.sim.workload import Broken, TimedRequest, Workload

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


class Azure:
    name = "azure2023"
    about = "time, prompt tokens, output tokens"

    def recognises(self, path: Path, head: bytes) -> bool:
        return head.lstrip(b"\xef\xbb\xbf").startswith(HEADER.encode())

    def open(self, path: Path, options: TraceOptions) -> Workload:
        def parser() -> Parse:
            watch = Stopwatch()

            def parse(text: str) -> TimedRequest:
                time, prompt, output = columns(text, 3)[:3]
                num_prompt, num_output = tokens(prompt, "ContextTokens"), tokens(output, "GeneratedTokens")
                return TimedRequest(watch.seconds(time), num_prompt, num_output)

            return parse

        about = f"Azure LLM inference trace {path.name}"
        return read_table(path, HEADER, parser, about, Broken(options.skip_broken))
