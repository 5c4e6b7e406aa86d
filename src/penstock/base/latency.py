"""Limits of latency as people write them: `ttft=500ms,tpot=0.1`."""

from __future__ import annotations

from penstock.base.errors import InputError


def latency_limits(text: str, what: str) -> dict[str, float]:
    """{"ttft_s": 0.5, "tpot_s": 0.1}, of those that are named. Raises InputError, of the parameter `slo`; `what` is
    where the text was given."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        number, scale = (value[:-2], 1e-3) if value.endswith("ms") else (value.removesuffix("s"), 1.0)
        try:
            seconds = float(number) * scale
        except ValueError:
            seconds = 0.0
        if name not in ("ttft", "tpot") or not 0 < seconds < 1e9:
            raise InputError(
                f"{what}: {part.strip()!r} must be ttft=X or tpot=X, with X seconds or as 500ms", param="slo"
            )
        found[f"{name}_s"] = seconds
    return found
