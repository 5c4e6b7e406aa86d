"""JSON objects from strangers: bounded size, no key given twice, every failure one ModelError sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.base.errors import ModelError
from penstock.formats.files import decode, quoted, read_whole

CONFIG_LIMIT_BYTES = 32 * 1024 * 1024


class _DuplicateKeyError(ValueError):
    pass


def parse_json_object(data: bytes, what: str) -> dict[str, Any]:
    """UTF-8 JSON -> dict. `what` names the source in messages.

    Raises ModelError if it is not JSON, not an object, nested too deeply, or names a key twice: readers disagree on
    which of the two values counts.
    """
    text = decode(data, what)
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except _DuplicateKeyError as error:
        raise ModelError(f"{what} gives the key {error} twice") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{what} is not JSON: {error.msg} at line {error.lineno}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of brackets
        raise ModelError(f"{what} is not JSON that can be read: it is nested too deeply or a number is too long") from (
            error
        )
    if not isinstance(value, dict):
        raise ModelError(f"{what} must hold a JSON object, not {json_type(value)}")
    return value


def read_json_object(path: Path, limit_bytes: int = CONFIG_LIMIT_BYTES) -> dict[str, Any]:
    """`parse_json_object` of a file of at most `limit_bytes`. Raises ModelError."""
    return parse_json_object(read_whole(path, limit_bytes), quoted(path))


def json_type(value: object) -> str:
    """What JSON calls the type of a parsed value, with an article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(quoted(key))
            seen.add(key)
    return out
