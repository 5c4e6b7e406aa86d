"""The OpenAPI document of all routes, made of the structs that bodies are read into.

The contract for a module of `server/routes`: beside `ROUTES` it may have

    DOCS: dict[tuple[str, str], tuple[str, type | None, type | None]]
    DOCS = {("POST", "/v1/completions"): ("What it does, in one line", RequestStruct, ResponseStruct)}

with the path as OpenAPI writes it (`{id}`, without starlette's converters). None stands for no JSON body, or for an
answer of another kind. Routes without an entry are listed without shapes. It may also have

    EXAMPLES: dict[str, dict[str, Any]] = {"/v1/completions": {"prompt": "Once upon a time", "max_tokens": 16}}

with bodies that work as they are on any model: what the page of the interface fills in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from types import ModuleType
from typing import Any

import msgspec
from starlette.routing import Route

from penstock.server.schema.ollama import OllamaError
from penstock.server.schema.openai import Error

_REF = "#/components/schemas/{name}"
_CONVERTER = re.compile(r"\{([^:}]+):[^}]*\}")
_PARAMETER = re.compile(r"\{([^}]+)\}")
_OPEN = ("/health", "/ready")
"""Paths that never need a key."""
_HIDDEN = ("/internal/",)
_OLLAMA = "/api/"

Docs = dict[tuple[str, str], tuple[str, type | None, type | None]]


class Documentation:
    """Of one list of modules; made when it is first asked for."""

    def __init__(self, modules: Iterable[ModuleType], version: str) -> None:
        self._modules = tuple(modules)
        self._version = version

    @cached_property
    def document(self) -> dict[str, Any]:
        return document(self._modules, self._version)


def document(modules: Iterable[ModuleType], version: str) -> dict[str, Any]:
    """OpenAPI 3.1. A path's tag is the module that it stands in."""
    modules = tuple(modules)
    found = [(module, *operation) for module in modules for operation in _operations(module)]
    examples = {path: body for module in modules for path, body in getattr(module, "EXAMPLES", {}).items()}
    kinds = [kind for _, _, _, entry in found if entry is not None for kind in entry[1:] if kind is not None]
    kinds = list(dict.fromkeys([*kinds, Error, OllamaError]))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    shapes = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for module, path, method, entry in found:
        if not path.startswith(_HIDDEN):
            made = _operation(path, method, entry, shapes, examples.get(path))
            paths.setdefault(path, {})[method.lower()] = {"tags": [_name(module)]} | made
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": version},
        "tags": [{"name": _name(module)} for module in modules],
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def _operations(module: ModuleType) -> Iterable[tuple[str, str, tuple[str, type | None, type | None] | None]]:
    docs: Docs = getattr(module, "DOCS", {})
    for route in module.ROUTES:
        if isinstance(route, Route):
            path = _CONVERTER.sub(r"{\1}", route.path)
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield path, method, docs.get((method, path))


def _operation(
    path: str,
    method: str,
    entry: tuple[str, type | None, type | None] | None,
    shapes: dict[type, Any],
    example: dict[str, Any] | None,
) -> dict[str, Any]:
    summary, asks, answers = entry or ("", None, None)
    good: dict[str, Any] = {"description": "The answer"}
    if answers is not None:
        good["content"] = {"application/json": {"schema": shapes[answers]}}
        if asks is not None and "stream" in {f.name for f in msgspec.structs.fields(asks)}:
            lines = "application/x-ndjson" if path.startswith(_OLLAMA) else "text/event-stream"
            good["content"][lines] = {"schema": {"type": "string"}}
    error = shapes[OllamaError if path.startswith(_OLLAMA) else Error]
    bad = {"description": "What is wrong", "content": {"application/json": {"schema": error}}}
    out: dict[str, Any] = {"summary": summary, "responses": {"200": good, "default": bad}}
    names = _PARAMETER.findall(path)
    if names:
        out["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if asks is not None:
        body = {"schema": shapes[asks]} | ({"example": example} if example else {})
        out["requestBody"] = {"required": True, "content": {"application/json": body}}
    if path in _OPEN:
        out["security"] = []
    return out
