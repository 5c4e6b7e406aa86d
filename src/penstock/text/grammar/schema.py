"""JSON schemas of clients, checked, and rewritten as llguidance enforces them. What would be ignored is refused.

Rewriting resolves references within the document in which they are written (`references`), leaves out what only
describes, says older and newer words in the terms of the compiler (`keywords`, `negation`), and puts every schema that
is referred to into one flat table of definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from penstock.base.errors import InputError
from penstock.text.grammar import keywords as words
from penstock.text.grammar.finite import has_instances
from penstock.text.grammar.keywords import LISTS, ONE, TABLES, refuse, show, subschemas
from penstock.text.grammar.modern import Keyword, bind_names, modern
from penstock.text.grammar.negation import CannotDenyError, Denier
from penstock.text.grammar.references import TOOL, Place, References, Resource, has_address

MAX_SCHEMA_CHARS = 1 << 20
MAX_DEPTH = 64
MAX_SUBSCHEMAS = 10_000
MAX_FOLLOWED = 8
"""Definitions that are made within one another, because something asks what they say."""
MAX_ENUM = 10_000
"""Values of all `enum`s together."""

_DEFINITION = "#/$defs/"


def json_schema_check(schema: Any, path: str, *, lenient: bool = False) -> None:
    """Refuse what would not be enforced. `path` is how the client calls the schema; errors name the place below it.

    `lenient` passes over keywords that cannot be enforced.
    Looks at the schema only: what cannot be compiled, patterns for example, is found by compiling. Fetches nothing.
    Raises: InputError.
    """
    compiled_form(schema, path, lenient=lenient)


def compiled_form(schema: Any, path: str, *, lenient: bool = False) -> dict[str, Any]:
    """The schema as llguidance takes it: its keywords only, references only to `#/$defs/...` of the root.

    Schemas that have moved say in `$comment` where they were. Raises: InputError, as `json_schema_check`.
    """
    if not isinstance(schema, Mapping):
        refuse(path, f"must be a JSON schema (an object), not {show(schema)}")
    try:
        return _Rewriting(schema, path, lenient).run()
    except RecursionError:
        refuse(path, "is nested too deeply, or its references are")


def as_tool(schema: Mapping[str, Any], path: str, *, lenient: bool) -> dict[str, Any]:
    """A schema of arguments, to be part of another document: a resource of its own, so its references stay in it."""
    address = {} if has_address(schema) else {"$id": "tool:"}
    return {**schema, **address, TOOL: {"path": path, "lenient": lenient}}


class _TooMuchError(InputError):
    """Refused in any case."""


class _Rewriting:
    def __init__(self, root: Mapping[str, Any], path: str, lenient: bool) -> None:
        self._references = References(root, path)
        self._path = path
        self._lenient = lenient
        self._num_schemas = 0
        self._num_values = 0
        self._definitions: dict[str, Any] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._pending: dict[str, tuple[Place, bool]] = {}
        self._written: dict[int, str] = {}
        """Where references were written, by the id of what they have become."""
        self._denier = Denier(self._follow)
        self._num_following = 0

    def run(self) -> dict[str, Any]:
        root = self._references.root
        out = self._schema(Place(root.schema, self._path, root), 0)
        assert isinstance(out, dict)
        while self._pending:
            self._define(next(iter(self._pending)))
        self._loops()
        form = {**out, "$defs": self._definitions} if self._definitions else out
        if not has_instances(form):
            refuse(self._path, "nothing satisfies it: what it requires leads back to itself without end")
        return form

    def _define(self, name: str) -> Any:
        place, lenient = self._pending.pop(name)
        before, self._lenient = self._lenient, lenient
        found = self._schema(place, 0)
        self._lenient = before
        if isinstance(found, dict):
            found.setdefault("$comment", place.path)
        self._definitions[name] = found
        return found

    def _follow(self, ref: str) -> Any:
        """The compiled form of what a reference of the compiled form names."""
        name = ref.removeprefix(_DEFINITION)
        if name in self._pending and self._num_following < MAX_FOLLOWED:
            self._num_following += 1
            try:
                return self._define(name)
            finally:
                self._num_following -= 1
        if name not in self._definitions:  # it is being made
            raise CannotDenyError
        return self._definitions[name]

    def _schema(self, at: Place, depth: int) -> dict[str, Any] | bool:
        schema, path = at.schema, at.path
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            if self._lenient:
                return True
            refuse(path, f"must be a JSON schema (an object, true or false), not {show(schema)}")
        self._num_schemas += 1
        if depth > MAX_DEPTH:
            _too_much(path, f"lies deeper than {MAX_DEPTH} levels")
        if self._num_schemas > MAX_SUBSCHEMAS:
            _too_much(path, f"the schema has more than {MAX_SUBSCHEMAS} schemas in it")
        before, out = self._lenient, {}
        resource = self._references.inside(at)
        if isinstance(schema.get(TOOL), Mapping):
            self._lenient, path = schema[TOOL].get("lenient") is True, resource.path
            out["$comment"] = path
        for entry in modern(schema, path):
            try:
                self._keyword(out, entry, resource, depth)
            except _TooMuchError:
                raise
            except InputError:
                if not self._lenient:
                    raise
                if entry.key in LISTS or entry.key in TABLES or entry.key in ONE:
                    out.pop(entry.key, None)
        self._lenient = before
        return out

    def _keyword(self, out: dict[str, Any], entry: Keyword, resource: Resource, depth: int) -> None:
        key, value, path = entry

        def schema(item: Any, where: str = path) -> dict[str, Any] | bool:
            return self._schema(Place(item, where, resource), depth + 1)

        if key in words.COUNTS:
            out[key] = words.count(value, path)
        elif key in words.NUMBERS:
            out[key] = words.number(key, value, path)
        elif key in ONE:
            out[key] = schema(value)
        elif key in LISTS:
            if not isinstance(value, list) or not value:
                refuse(path, f"must be a list of at least one schema, not {show(value)}")
            parts = [schema(item, f"{path}[{n}]") for n, item in enumerate(value)]
            if key == "oneOf" and (self._lenient or len(value) == 1):
                key, parts = "allOf", [{"anyOf": parts}]
            out.setdefault(key, []).extend(parts)
        elif key in TABLES:
            out[key] = self._table(key, value, path, schema)
        elif key == "pattern":
            words.pattern(value, path, lenient=self._lenient)
            out[key] = value
        elif key == "$ref":
            out[key] = self._reference(value, path, resource)
            self._written[id(out)] = path
        elif key == "also":
            out.setdefault("allOf", []).append(schema(value))
        elif key == "not" and isinstance(value, Mapping) and set(value) == {"not"}:
            out.setdefault("allOf", []).append(schema(value["not"], f"{path}.not"))
        elif key == "not":
            out.setdefault("allOf", []).append(self._denied(schema(value), path))
        elif key == "if":
            self._if(out, value, path, resource, depth)
        elif key == "propertyNames":
            try:
                bind_names(out, schema(value), self._follow, path)
            except CannotDenyError:
                refuse(path, f"cannot be enforced; {words.HINTS[key]}")
        else:
            self._plain(out, key, value, path)

    def _table(self, key: str, value: Any, path: str, schema: Callable[[Any, str], Any]) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            refuse(path, f"must be an object of schemas, not {show(value)}")
        if len(value) > words.MAX_PROPERTIES:
            _too_much(path, f"has {len(value)} entries; at most {words.MAX_PROPERTIES} are possible")
        if key == "patternProperties":
            for pattern in value:
                words.pattern(pattern, f"{path}.{pattern}", lenient=self._lenient)
        return {name: schema(item, f"{path}.{name}") for name, item in value.items()}

    def _plain(self, out: dict[str, Any], key: str, value: Any, path: str) -> None:
        if key == "type":
            listed = value if isinstance(value, list) else [value]
            if not listed or not all(isinstance(t, str) and t in words.TYPES for t in listed):
                refuse(path, f"is {show(value)}; the types are {', '.join(words.TYPES)}, or a list of them")
        elif key == "enum":
            if not isinstance(value, list) or not value:
                refuse(path, f"must be a list of at least one value, not {show(value)}")
            self._num_values += len(value)
            if self._num_values > MAX_ENUM:
                _too_much(
                    path, f"the schema has {self._num_values} enum values or more; at most {MAX_ENUM} are possible"
                )
        elif key == "required":
            words.names(value, path)
        elif key == "format":
            if not isinstance(value, str):
                refuse(path, f"must be a text, not {show(value)}")
            if value in words.INTEGER_FORMATS:
                low, high = words.INTEGER_FORMATS[value]
                if "number" in out.get("type", "number"):  # fractions too: bounds that survive as texts
                    low, high = max(low, -words.EVEN), min(high, words.EVEN)
                out["minimum"] = max(out.get("minimum", low), low)
                out["maximum"] = min(out.get("maximum", high), high)
            if value not in words.FORMATS:
                return
        elif key != "const":
            hint = f"; {words.HINTS[key]}" if key in words.HINTS else ""
            refuse(path, f"the keyword {show(key)} is not supported{hint}")
        out[key] = value

    def _reference(self, ref: Any, path: str, resource: Resource) -> str:
        found = self._references.find(ref, resource) if isinstance(ref, str) else None
        if found is None:
            why = "names nothing in this schema; references have the form #/$defs/name, and nothing is ever fetched"
            refuse(path, f"{show(ref)} {why}")
        if not isinstance(found.schema, Mapping | bool):
            refuse(path, f"{show(ref)} is not a schema")
        key = (id(found.schema), id(found.resource.schema))
        if key not in self._names:
            self._names[key] = str(len(self._names))
            self._pending[self._names[key]] = (found, self._lenient)
        return _DEFINITION + self._names[key]

    def _denied(self, part: Any, path: str) -> Any:
        try:
            out = self._denier.denied(part)
        except CannotDenyError:
            refuse(path, f"cannot be enforced; {words.HINTS[path.rpartition('.')[2]]}")
        self._denier.approximate.add(id(out))
        return out

    def _if(self, out: dict[str, Any], value: Any, path: str, resource: Resource, depth: int) -> None:
        def schema(item: Any, where: str) -> dict[str, Any] | bool:
            return self._schema(Place(item, where, resource), depth + 1)

        condition = schema(value[0], path)
        stem = path.removesuffix("if")
        then, other = schema(value[1], f"{stem}then"), schema(value[2], f"{stem}else")
        parts = [{"allOf": [condition, then]}, {"allOf": [self._denied(condition, path), other]}]
        self._denier.approximate.add(id(parts[1]))
        out.setdefault("allOf", []).append({"anyOf": parts})

    def _loops(self) -> None:
        """Raises: InputError if what is said of a value leads back to itself, and so says nothing."""
        edges = {name: self._said(schema) for name, schema in self._definitions.items()}
        done: set[str] = set()
        for start in edges:
            path, todo = {start: None}, [iter(edges[start])] if start not in done else []
            while todo:
                step = next(todo[-1], None)
                if step is None:
                    todo.pop()
                    done.add(path.popitem()[0])
                elif step[0] in path:
                    refuse(step[1], "the reference leads back to itself, so it says nothing")
                elif step[0] not in done:
                    path[step[0]] = None
                    todo.append(iter(edges[step[0]]))

    def _said(self, schema: Any) -> list[tuple[str, str]]:
        """(name, where it was written) of the definitions that say something of the same value."""
        if not isinstance(schema, dict):
            return []
        found = [
            pair for key in ("allOf", "anyOf", "oneOf") for item in schema.get(key, ()) for pair in self._said(item)
        ]
        if "$ref" in schema:
            found.append((schema["$ref"].removeprefix(_DEFINITION), self._written[id(schema)]))
        return found


def _too_much(path: str, why: str) -> NoReturn:
    try:
        refuse(path, why)
    except InputError as error:
        raise _TooMuchError(str(error), param=error.param) from None


def locate(schema: Any, path: str, fails: Callable[[Any], str | None]) -> str:
    """The path of the smallest part that `fails` on its own for the same reason as the whole (`fails` returns it)."""
    reason, found = fails(schema), path
    definitions = dict(schema.get("$defs", {})) if isinstance(schema, Mapping) else {}
    shared = {"$defs": dict(definitions)}
    while isinstance(schema, Mapping):
        parts = list(subschemas({key: value for key, value in schema.items() if key != "$defs"}, found))
        if "$ref" in schema:
            parts.append((found, definitions.pop(schema["$ref"].removeprefix(_DEFINITION), None)))
        for below, item in parts:
            if isinstance(item, Mapping) and fails({**shared, **item}) == reason:
                schema, found = item, str(item.get("$comment", below))
                break
        else:
            break
    return found
