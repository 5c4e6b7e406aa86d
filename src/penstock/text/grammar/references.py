"""References of one JSON schema document: what `$ref` names, by `$id`, `$anchor` and JSON pointers. Fetches nothing.

A schema with an `$id` is a resource of its own, and so is the document: `#...` is looked for in the resource in which
it is written. Sources: JSON Schema Core 2020-12, sections 8.2 and 9.3; RFC 6901; RFC 3986, section 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from penstock.text.grammar.keywords import subschemas

TOOL = "x-penstock-tool"
"""Our own word, on a tool's schema that lies in another document: its {"path", "lenient"} are the client's, ours."""
MAX_INDEXED = 50_000
"""Schemas of a document that may bear names; requests have fewer."""
_MISSING = object()


class Resource(NamedTuple):
    """A schema that has an address, with its place in the client's terms. `document`: the id of the root, or of the
    tool's schema, in which it lies: addresses are looked for there only."""

    uri: str
    schema: Any
    path: str
    document: int


class Place(NamedTuple):
    """A schema, what the client calls it, and the resource in which it lies."""

    schema: Any
    path: str
    resource: Resource


class References:
    """The names in one document."""

    def __init__(self, root: Mapping[str, Any], path: str) -> None:
        self.root = Resource("", root, path, id(root))
        self._resources: dict[tuple[int, str], Resource] = {}
        self._anchors: dict[tuple[int, str], Place] = {}
        self._seen: set[tuple[int, int]] = set()
        self._schemas: set[int] = set()
        todo: list[Place] = [Place(root, path, self.root)]
        while todo and len(self._seen) < MAX_INDEXED:
            at = todo.pop()
            key = (id(at.schema), id(at.resource.schema))  # one object may be part of several
            if not isinstance(at.schema, Mapping) or key in self._seen:
                continue
            self._seen.add(key)
            self._schemas.add(id(at.schema))
            resource = self.inside(at)
            self._resources.setdefault((resource.document, resource.uri), resource)
            for anchor in _anchors(at.schema):
                self._anchors.setdefault((id(resource.schema), anchor), at)
            path = resource.path if resource.schema is at.schema else at.path
            todo += [Place(item, below, resource) for below, item in subschemas(at.schema, path)]

    def inside(self, at: Place) -> Resource:
        """The resource to which what is written in a schema belongs."""
        if not has_address(at.schema):
            return at.resource
        uri, told = _joined(at.resource.uri, at.schema["$id"].rstrip("#")), at.schema.get(TOOL)
        if isinstance(told, Mapping):
            return Resource(uri, at.schema, str(told.get("path", at.path)), id(at.schema))
        return Resource(uri, at.schema, at.path, at.resource.document)

    def find(self, ref: str, resource: Resource) -> Place | None:
        """What `ref`, written in `resource`, names; None if that is nothing in this document."""
        address, fragment = ("", ref[1:]) if ref[:1] == "#" else urldefrag(ref)
        if address:
            uri = _joined(resource.uri, address)
            found = resource if uri == resource.uri else self._resources.get((resource.document, uri))
            if found is None:
                return None
            resource = found
        if fragment[:1] not in ("", "/"):
            return self._anchors.get((id(resource.schema), unquote(fragment)))
        # Pointers in references are percent-encoded; not every program that writes them knows.
        return self._pointed(unquote(fragment), resource) or self._pointed(fragment, resource)

    def _pointed(self, pointer: str, resource: Resource) -> Place | None:
        found, path = resource.schema, resource.path
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if found is not resource.schema and id(found) in self._schemas:
                resource = self.inside(Place(found, path, resource))
            if isinstance(found, Mapping):
                found, path = found.get(name, _MISSING), f"{path}.{name}"
            elif isinstance(found, list) and name.isascii() and name.isdecimal() and int(name[:9]) < len(found):
                found, path = found[int(name)], f"{path}[{name}]"
            else:
                return None
        return None if found is _MISSING else Place(found, path, resource)


def has_address(schema: Mapping[str, Any]) -> bool:
    """Whether an `$id` makes a schema a resource of its own."""
    said = schema.get("$id")
    return isinstance(said, str) and said[:1] not in ("", "#")


def _anchors(schema: Mapping[str, Any]) -> list[str]:
    named = [schema.get("$anchor"), schema.get("$dynamicAnchor")]
    said = schema.get("$id")
    if isinstance(said, str) and said[:1] == "#":  # drafts 6 and 7
        named.append(said[1:])
    return [name for name in named if isinstance(name, str) and name]


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference
