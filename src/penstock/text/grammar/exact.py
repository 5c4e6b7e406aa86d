"""Schemas with whole numbers beyond 2^53, which llguidance's JSON schemas would change, as rules in Lark's syntax.

Only what leads to such a number is written as rules; everything else stays a JSON schema within them (`%json`). The
order of properties, and the blanks between parts, are those of the library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from penstock.text.grammar.keywords import COUNTS, NUMBERS, TYPES, refuse, subschemas
from penstock.text.grammar.numbers import bounds, decimals, inexact, integers, within

MAX_RULES = 300
"""The library compiles rule by rule, on the stack."""
_KEY = r'"(?:\\(?:["\\\/bfnrt]|u[a-fA-F0-9]{4})|[^"\\\x00-\x1F\x7F])*"'
_OF = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"},
    "number": set(NUMBERS), "integer": set(NUMBERS), "boolean": set(), "null": set(),
}  # fmt: skip


def rules_of(form: dict[str, Any], path: str, options: Mapping[str, Any], prefix: str) -> tuple[str, str] | None:
    """(an operand in Lark, the rules it needs) of a schema in compiled form; None if it has no such number.

    `options` are llguidance's, with a pattern for blanks; names of rules begin with `prefix`. Raises: InputError where
    such a number stands together with what rules cannot say.
    """
    rules = _Rules(form, options, prefix)
    if not rules.apart(form):
        return None
    operand = rules.write(form, path)
    return operand, "\n".join(rules.lines) + "\n"


class _Rules:
    def __init__(self, form: dict[str, Any], options: Mapping[str, Any], prefix: str) -> None:
        self._definitions: dict[str, Any] = form.get("$defs", {})
        self._options = options
        self._prefix = prefix
        self._names: dict[str, str] = {}
        self._blank = f"{prefix}blank"
        self._apart: set[str] = set()
        self.lines = [f"{self._blank}: {prefix.upper()}BLANK?",
                      f"{prefix.upper()}BLANK: /{options['whitespace_pattern']}/"]  # fmt: skip
        self._pending: list[tuple[str, str]] = []
        self._find_apart()

    def apart(self, schema: Any) -> bool:
        """Whether a schema leads to a number that has to be written as a rule."""
        if not isinstance(schema, Mapping):
            return False
        if inexact(schema) or _name(schema) in self._apart:
            return True
        return any(self.apart(part) for _, part in subschemas(_bare(schema), ""))

    def _find_apart(self) -> None:
        """The definitions that lead to such numbers, by those that refer to them."""
        from_: dict[str, list[str]] = {}
        todo = []
        for name, schema in self._definitions.items():
            inner = [schema]
            while inner:
                at = inner.pop()
                if not isinstance(at, Mapping):
                    continue
                if inexact(at):
                    todo.append(name)
                from_.setdefault(_name(at), []).append(name)
                inner += [part for _, part in subschemas(_bare(at), "")]
        while todo:
            name = todo.pop()
            if name not in self._apart:
                self._apart.add(name)
                todo += from_.get(name, [])

    def write(self, schema: Any, path: str) -> str:
        """The operand for a schema, with all rules that it needs."""
        out = self.operand(schema, path)
        while self._pending:
            name, at = self._pending.pop()
            self.lines.append(f"{self._names[name]}: {self.operand(self._definitions[name], at)}")
        return out

    def operand(self, schema: Any, path: str) -> str:
        if not self.apart(schema):
            return self._json(schema)
        path = schema.get("$comment", path)
        schema = _bare(schema)
        for key in ("$ref", "anyOf", "allOf", "oneOf"):
            if key not in schema:
                continue
            if len(schema) > 1 or key == "oneOf" or (key == "allOf" and len(schema[key]) > 1):
                self._refuse(path, key)
            if key == "$ref":
                return self._definition(_name(schema), path)
            parts = [self.operand(part, f"{path}.{key}[{n}]") for n, part in enumerate(schema[key])]
            return f"({' | '.join(parts)})"
        if "enum" in schema or "const" in schema:
            return self._values(schema, path)
        return self._typed(schema, path)

    def _rule(self, body: str) -> str:
        name = f"{self._prefix}{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _json(self, schema: Any) -> str:
        schema = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
        needed: dict[str, Any] = {}
        todo = [schema]
        while todo:
            at = todo.pop()
            name = _name(at)
            if name and name not in needed:
                needed[name] = self._definitions[name]
                todo.append(needed[name])
            if isinstance(at, Mapping):
                todo += [part for _, part in subschemas(_bare(at), "")]
        more = {"$defs": needed} if needed else {}
        return "%json " + json.dumps({**_bare(schema), **more, "x-guidance": self._options}, allow_nan=False)

    def _definition(self, name: str, path: str) -> str:
        if name not in self._names:
            self._names[name] = f"{self._prefix}def{name}"
            if len(self._names) + len(self.lines) > MAX_RULES:
                self._too_many(path)
            self._pending.append((name, path))
        return self._names[name]

    def _values(self, schema: Mapping[str, Any], path: str) -> str:
        for key in schema:
            if key in ("multipleOf", "pattern", "format") or key not in ("enum", "const", "type", *NUMBERS):
                self._refuse(path, key)
        kinds = schema.get("type", TYPES)
        kept = [
            value
            for value in schema.get("enum", [schema.get("const")])
            if _is_of(value, [kinds] if isinstance(kinds, str) else kinds) and within(value, schema)
            and ("const" not in schema or value == schema["const"])
        ]  # fmt: skip
        if not kept:
            refuse(path, "nothing satisfies it")
        rest = [value for value in kept if not inexact({"const": value})]
        parts = [self._value(value) for value in kept if inexact({"const": value})]
        if rest:
            parts.append(self._json({"enum": rest}))
        return f"({' | '.join(parts)})"

    def _value(self, value: Any) -> str:
        if isinstance(value, list):
            return self._list([self._value(item) for item in value])
        if isinstance(value, Mapping):
            return self._braces([self._pair(json.dumps(json.dumps(k)), self._value(v)) for k, v in value.items()])
        return json.dumps(json.dumps(value, allow_nan=False))

    def _typed(self, schema: Mapping[str, Any], path: str) -> str:
        said = schema.get("type", TYPES)
        kinds = [said] if isinstance(said, str) else list(said)
        if "number" in kinds and "integer" in kinds:
            kinds.remove("integer")
        parts, plain = [], []
        for kind in kinds:
            mine = {key: value for key, value in schema.items() if key in _OF[kind]}
            if not self.apart({"type": kind, **mine}):
                plain.append(kind)
            elif kind == "object":
                parts.append(self._object(mine, path))
            elif kind == "array":
                parts.append(self._array(mine, path))
            else:
                parts.append(self._number(kind, mine, path))
        if plain:
            words = set().union(*(_OF[kind] for kind in plain))
            parts.append(self._json({"type": plain, **{k: v for k, v in schema.items() if k in words}}))
        return f"({' | '.join(parts)})"

    def _number(self, kind: str, schema: Mapping[str, Any], path: str) -> str:
        if "multipleOf" in schema:
            self._refuse(path, "multipleOf")
        low, high = bounds(schema)
        found = integers(low, high) + (decimals(low, high) if kind == "number" else [])
        if not found:
            refuse(path, "nothing satisfies it: its bounds exclude each other")
        return f"/{'|'.join(found)}/"

    def _array(self, schema: Mapping[str, Any], path: str) -> str:
        first, item = schema.get("prefixItems", []), schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if item is False:
            most = len(first) if most is None else min(most, len(first))
        if most is not None and least > most:
            refuse(path, "nothing satisfies it: its bounds exclude each other")
        first = first[:most]
        comma = f'{self._blank} "," {self._blank}'
        parts = [self.operand(part, f"{path}.prefixItems[{n}]") for n, part in enumerate(first)]
        if most is None or most > len(first):
            rest = self._rule(self.operand(item, f"{path}.items"))
            if not parts:
                parts = [rest]
            high = "" if most is None else most - len(parts)
            tail = f"({comma} {rest}){{{max(0, least - len(parts))},{high}}}" if high != 0 else ""
        else:
            tail = ""
        for n in range(len(parts) - 1, 0, -1):
            tail = f"({comma} {parts[n]} {tail}){'' if n < least else '?'}"
        inner = f"({parts[0]} {tail} {self._blank}){'' if least else '?'}" if parts else ""
        return f'"[" {self._blank} {inner} "]"'

    def _object(self, schema: Mapping[str, Any], path: str) -> str:
        for key in schema:
            if key in COUNTS or key == "patternProperties":
                self._refuse(path, key)
        rest, required = schema.get("additionalProperties", True), schema.get("required", [])
        parts: dict[str, Any] = {**schema.get("properties", {})}
        parts |= {name: rest for name in required if name not in parts}
        pairs: list[tuple[str, bool]] = []
        for name, part in parts.items():
            if part is not False:
                value = self._rule(self.operand(part, f"{path}.properties.{name}"))
                pairs.append((self._pair(json.dumps(json.dumps(name)), value), name in required))
            elif name in required:
                refuse(f"{path}.properties.{name}", "nothing satisfies it, and it is required")
            if len(self.lines) > MAX_RULES:
                self._too_many(path)
        other = None
        if rest is not False:
            value = self._rule(self.operand(rest, f"{path}.additionalProperties"))
            other = self._pair(self._other_name(list(parts)), value)
        return self._members(pairs, other)

    def _members(self, pairs: list[tuple[str, bool]], other: str | None) -> str:
        """Members in their order: those that must be, those that may be, any number of others."""
        comma = f'{self._blank} "," {self._blank}'
        after = self._rule(f"({comma} {other})*") if other else ""
        start = f"({other} {after})?" if other else ""  # if no member has come before
        for pair, must in reversed(pairs):
            first = f"{pair} {after}"
            start = first if must else f"({first} | {self._rule(start)})" if start else f"({first})?"
            after = self._rule(f"({comma} {pair}){'' if must else '?'} {after}")
        return f'"{{" {self._blank} {start} {self._blank} "}}"'

    def _other_name(self, taken: list[str]) -> str:
        name = f"{self._prefix.upper()}KEY{len(self.lines)}"
        literals = "|".join(_literal(json.dumps(one)) for one in taken)
        self.lines.append(f"{name}: /{_KEY}/" + (f" & ~/{literals}/" if taken else ""))
        return name

    def _pair(self, name: str, value: str) -> str:
        return f'{name} {self._blank} ":" {self._blank} {value}'

    def _list(self, items: list[str]) -> str:
        return f'"[" {self._blank} {self._commas(items)} {self._blank} "]"'

    def _braces(self, members: list[str]) -> str:
        return f'"{{" {self._blank} {self._commas(members)} {self._blank} "}}"'

    def _commas(self, parts: list[str]) -> str:
        return f' {self._blank} "," {self._blank} '.join(parts)

    def _too_many(self, path: str) -> NoReturn:
        refuse(path, f"too many schemas lead to whole numbers beyond 2^53: at most {MAX_RULES} rules are possible")

    def _refuse(self, path: str, key: str) -> NoReturn:
        why = "cannot be enforced together with whole numbers beyond 2^53 in what it holds or bounds"
        refuse(f"{path}.{key}", f"{why}; write them in a schema of their own, below properties, items or anyOf")


def _bare(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in ("$comment", "$defs")}


def _name(schema: Any) -> str:
    return str(schema["$ref"]).rpartition("/")[2] if isinstance(schema, Mapping) and "$ref" in schema else ""


def _literal(text: str) -> str:
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def _is_of(value: Any, kinds: list[str]) -> bool:
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean") in kinds
    if isinstance(value, int | float):
        return "number" in kinds or ("integer" in kinds and value == int(value))
    kind = "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
    return kind in kinds
