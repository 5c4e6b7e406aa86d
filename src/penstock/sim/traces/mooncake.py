"""Mooncake traces: times, lengths and the identity of every 512-token block of the prompt.

Equal ids are equal blocks after equal blocks, so what a prefix cache could reuse is known exactly.
Source: Qin et al., Mooncake, arXiv 2407.00079, section 4; github.com/kvcache-ai/Mooncake.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.sim.traces import TraceOptions
from penstock.sim.traces.reading import num_lines, requests, seconds, tokens, whole
from penstock.sim.workload import MAX_BLOCK_ID, MAX_TIME_S, Broken, TimedRequest, Workload

BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    """`timestamp` in milliseconds."""

    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


_decode = msgspec.json.Decoder(_Line).decode


def parse(text: str) -> TimedRequest:
    """One line of JSON. Raises ValueError."""
    try:
        line = _decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"is not a line of a Mooncake trace: {error}") from None
    num_prompt = tokens(line.input_length, "input_length")
    num_blocks = -(-num_prompt // BLOCK_TOKENS)
    if len(line.hash_ids) > num_blocks:
        raise ValueError(f"has {len(line.hash_ids)} hash_ids for {num_prompt} tokens, which are {num_blocks} blocks")
    for block in line.hash_ids:
        whole(block, "hash_ids", 0, MAX_BLOCK_ID)
    return TimedRequest(
        seconds(line.timestamp, "timestamp", MAX_TIME_S * 1e3) / 1e3,
        num_prompt,
        tokens(line.output_length, "output_length"),
        blocks=tuple(line.hash_ids),
    )


class Mooncake:
    name = "mooncake"
    about = "time, lengths and prefix block ids"

    def recognises(self, path: Path, head: bytes) -> bool:
        first = head.lstrip().split(b"\n", 1)[0]
        return first.startswith(b"{") and b'"input_length"' in first and b'"timestamp"' in first

    def open(self, path: Path, options: TraceOptions) -> Workload:
        broken = Broken(options.skip_broken)

        def source() -> Iterator[TimedRequest]:
            return requests(path, parse, broken)

        return Workload(path.stem, f"Mooncake trace {path.name}", source, BLOCK_TOKENS, num_lines(path), broken=broken)
