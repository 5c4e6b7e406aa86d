"""A small vocabulary, walks through grammars, and an independent reading of JSON schemas. For tests."""

from __future__ import annotations

import datetime
import ipaddress
import math
import random
import re
import uuid
from collections.abc import Mapping
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

import numpy as np

from penstock.core.sampling import TokenRules
from penstock.runner.logits.grammar import Grammar
from penstock.runner.logits.grammar_cache import GrammarCache
from penstock.text.grammar.compile import Compiler, Vocabulary

END = 0
TOKENS = [
    b"<end>", *(bytes([b]) for b in range(0x20, 0x7F)), b"\n", b'": ', b'", "', b"true", b"false", b"null", b'{"',
    b"ab", b"}}", b"\xc3", b"\xa9", b"12",
]  # fmt: skip
VOCABULARY = Vocabulary(TOKENS, [END], [END])
WHOLE = {"int32": (-(2**31), 2**31 - 1), "uint8": (0, 255), "int64": (-(2**63), 2**63 - 1)}
_CLOSERS = [TOKENS.index(t) for t in (b'"', b"}", b"]", b":", b"}}")]


def fresh_cache(max_bytes: int = 64 << 20) -> GrammarCache:
    return GrammarCache(lambda: Compiler(VOCABULARY), max_bytes, end_ids=lambda: frozenset({END}))


def walk(grammar: str, seed: int, cache: GrammarCache, *, most: int = 400, threaded: bool = False) -> bytes | None:
    """Some output of a grammar, by random tokens; None if it has not ended after `most` of them."""
    rng = random.Random(seed)
    processor = Grammar(len(TOKENS), cache, threaded=threaded)
    assert processor.add(1, TokenRules(grammar=grammar, stop_ids=[END]), [5], [])
    out = b""
    for _ in range(most):
        logits = np.zeros((1, len(TOKENS)), np.float32)
        processor.apply(logits, [1])
        allowed = np.flatnonzero(np.isfinite(logits[0])).tolist()
        assert allowed, f"nothing follows {out!r}: {processor.exhausted(1)}"
        if allowed == [END] or (END in allowed and rng.random() < 0.3):
            return out
        near = [t for t in allowed if t in _CLOSERS]
        token = rng.choice(near if near and rng.random() < 0.5 else [t for t in allowed if t != END])
        out += TOKENS[token]
        processor.advance(1, [token])
    return None


def conforms(value: Any, schema: Any, root: Any) -> bool:
    """Whether a JSON value is an instance of a schema: the specification (draft 2020-12), keyword by keyword."""
    if isinstance(schema, bool):
        return schema
    return all(_keyword(key, value, schema, root) for key in schema)


def _keyword(key: str, value: Any, schema: Mapping[str, Any], root: Any) -> bool:
    want = schema[key]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match key:
        case "$ref":
            found = root
            for part in want.split("/")[1:]:
                found = found[unquote(part).replace("~1", "/").replace("~0", "~")]
            return conforms(value, found, root)
        case "not":
            return not conforms(value, want, root)
        case "if":
            branch = "then" if conforms(value, want, root) else "else"
            return conforms(value, schema.get(branch, True), root)
        case "type":
            if schema.get("nullable") and value is None:
                return True
            return any(_is(value, t) for t in (want if isinstance(want, list) else [want]))
        case "const":
            return same(value, want)
        case "enum":
            return any(same(value, w) for w in want)
        case "allOf":
            return all(conforms(value, s, root) for s in want)
        case "anyOf":
            return any(conforms(value, s, root) for s in want)
        case "oneOf":
            return sum(conforms(value, s, root) for s in want) == 1
        case "minimum":
            return not number or value >= want
        case "maximum":
            return not number or value <= want
        case "exclusiveMinimum":
            return not number or value > (schema.get("minimum", -math.inf) if isinstance(want, bool) else want)
        case "exclusiveMaximum":
            return not number or value < want
        case "format" if want in WHOLE:
            return not number or WHOLE[want][0] <= value <= WHOLE[want][1]
        case "multipleOf":
            return not number or (Fraction(str(value)) / Fraction(str(want))).denominator == 1
    if isinstance(value, str):
        return _of_text(key, value, want)
    if isinstance(value, list):
        return _of_list(key, value, schema, root)
    if isinstance(value, dict):
        return _of_object(key, value, schema, root)
    return True


def _of_text(key: str, value: str, want: Any) -> bool:
    match key:
        case "minLength":
            return len(value) >= want
        case "maxLength":
            return len(value) <= want
        case "pattern":
            return re.search(want, value) is not None
        case "format":
            return _format(want, value)
    return True


def _of_list(key: str, value: list[Any], schema: Mapping[str, Any], root: Any) -> bool:
    want = schema[key]
    match key:
        case "minItems":
            return len(value) >= want
        case "maxItems":
            return len(value) <= want
        case "items" if isinstance(want, list):
            return all(conforms(v, s, root) for v, s in zip(value, want, strict=False))
        case "additionalItems":
            return all(conforms(v, want, root) for v in value[len(schema["items"]) :])
        case "prefixItems":
            return all(conforms(v, s, root) for v, s in zip(value, want, strict=False))
        case "items":
            return all(conforms(v, want, root) for v in value[len(schema.get("prefixItems", [])) :])
    return True


def _of_object(key: str, value: dict[str, Any], schema: Mapping[str, Any], root: Any) -> bool:
    want = schema[key]
    match key:
        case "properties":
            return all(conforms(value[k], s, root) for k, s in want.items() if k in value)
        case "patternProperties":
            return all(conforms(v, s, root) for k, v in value.items() for p, s in want.items() if re.search(p, k))
        case "additionalProperties":
            known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
            rest = [v for k, v in value.items() if k not in known and not any(re.search(p, k) for p in patterns)]
            return all(conforms(v, want, root) for v in rest)
        case "required":
            return all(k in value for k in want)
        case "propertyNames":
            return all(conforms(k, want, root) for k in value)
        case "dependentRequired":
            return all(name in value for k, names in want.items() if k in value for name in names)
        case "dependentSchemas":
            return all(conforms(value, s, root) for k, s in want.items() if k in value)
        case "unevaluatedProperties":  # where nothing else evaluates
            return want or set(value) <= set(schema.get("properties", {}))
        case "minProperties":
            return len(value) >= want
        case "maxProperties":
            return len(value) <= want
    return True


def same(a: Any, b: Any) -> bool:
    """Equal as JSON: 1 is 1.0, and neither is true."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return kind == "number" or (math.isfinite(value) and value == int(value))


def _format(name: str, text: str) -> bool:
    try:
        match name:
            case "uuid":
                return str(uuid.UUID(text)) == text.lower()
            case "ipv4":
                return str(ipaddress.IPv4Address(text)) == text
            case "ipv6":
                return bool(ipaddress.IPv6Address(text))
            case "date":
                return re.fullmatch(r"\d{4}-\d\d-\d\d", text) is not None and 1 <= int(text[5:7]) <= 12
            case "date-time":
                return bool(datetime.datetime.fromisoformat(text[:10])) and text[10] in "Tt"
            case "email":
                return "@" in text[1:-1]
            case "uri":
                return ":" in text
    except (ValueError, IndexError):
        return False
    return True
