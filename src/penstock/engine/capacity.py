"""How much a request may have, by what an engine says of itself."""

from __future__ import annotations

from penstock.core.messages import EngineInfo


def capacity_of(info: EngineInfo) -> int:
    """Tokens that a request may have, prompt and output."""
    return min(info.max_model_len, info.kv_capacity_tokens or info.max_model_len)
