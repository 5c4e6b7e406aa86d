"""Ids of tool calls."""

from __future__ import annotations

import secrets
import string

_ALPHABET = string.ascii_letters + string.digits


def call_id() -> str:
    """OpenAI's shape."""
    return "call_" + secrets.token_hex(12)


def mistral_id() -> str:
    """Nine letters and digits: Mistral's templates refuse anything else when the call comes back."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))
