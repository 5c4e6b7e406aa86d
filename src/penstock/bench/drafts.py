"""What a server's /metrics say of its drafts, Penstock's or vLLM's: the same names."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from penstock.bench.http import CallError, HttpClient
from penstock.core.acceptance import Acceptance

_LINE = re.compile(r"^(vllm|penstock):spec_decode_(\w+?)_total(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_OURS = {"steps": "num_spec_steps", "compared_seconds": "spec_compared_s", "plain_seconds": "spec_plain_s"}


async def scrape(client: HttpClient) -> Acceptance | None:
    """Since the server began, over all its engines; None if it does not draft, or does not say."""
    try:
        reply = await client.call("GET", "/metrics")
    except CallError:
        return None
    return read(reply.body.decode("utf-8", "replace")) if reply.status == 200 else None


def read(text: str) -> Acceptance | None:
    """The same from Prometheus' text format."""
    found: Counter[str] = Counter()
    for vendor, name, labels, value in _LINE.findall(text):
        theirs = name.startswith("num_")  # what vLLM has too is read under its names
        if theirs != (vendor == "vllm"):
            continue
        position = _POSITION.search(labels)
        if name == "num_accepted_tokens_per_pos" and position is not None:
            name = f"num_accepted_at_{position[1]}"
        found[_OURS.get(name, name)] += float(value)  # type: ignore[assignment]  # a Counter of floats
    if "num_drafts" not in found:
        return None
    seconds = {"draft_s": found["draft_seconds"], "spec_step_s": found["draft_seconds"] + found["verify_seconds"]}
    return Acceptance.of(dict(found) | seconds)


def since(before: Acceptance | None, after: Acceptance | None) -> dict[str, Any]:
    """The figures of the time between; nothing if the server does not draft."""
    return {} if after is None else (after - (before or Acceptance())).figures()
