"""The OpenAPI document of all routes and the page that shows it, made of the structs that bodies are read into.

The contract for a module of `server/routes`: beside `ROUTES` it may have

    DOCS: dict[tuple[str, str], tuple[str, type | None, type | None]]
    DOCS = {("POST", "/v1/completions"): ("What it does, in one line", RequestStruct, ResponseStruct)}

with the path as OpenAPI writes it (`{id}`, without starlette's converters). None stands for no JSON body, or for an
answer of another kind. Routes without an entry are listed without shapes.
"""

from __future__ import annotations

import html
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

    @cached_property
    def page(self) -> str:
        return page(self.document)


def document(modules: Iterable[ModuleType], version: str) -> dict[str, Any]:
    """OpenAPI 3.1."""
    found = [(route, method, docs) for module in modules for route, method, docs in _operations(module)]
    kinds = [kind for _, _, entry in found if entry is not None for kind in entry[1:] if kind is not None]
    kinds = list(dict.fromkeys([*kinds, Error, OllamaError]))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    shapes = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for path, method, entry in found:
        if not path.startswith(_HIDDEN):
            paths.setdefault(path, {})[method.lower()] = _operation(path, method, entry, shapes)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": version},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operations(module: ModuleType) -> Iterable[tuple[str, str, tuple[str, type | None, type | None] | None]]:
    docs: Docs = getattr(module, "DOCS", {})
    for route in module.ROUTES:
        if isinstance(route, Route):
            path = _CONVERTER.sub(r"{\1}", route.path)
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield path, method, docs.get((method, path))


def _operation(
    path: str, method: str, entry: tuple[str, type | None, type | None] | None, shapes: dict[type, Any]
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
        out["requestBody"] = {"required": True, "content": {"application/json": {"schema": shapes[asks]}}}
    if path in _OPEN:
        out["security"] = []
    return out


# -- the page --------------------------------------------------------------------------------------------------------

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.5rem}h2{font:600 1rem ui-monospace,monospace;margin:0}summary{cursor:pointer;padding:.5rem 0}
details{border-top:1px solid #ddd}details>div{padding:0 0 1rem 1rem}
b.m{display:inline-block;min-width:4.5rem;color:#06c}
table{border-collapse:collapse;margin:.3rem 0 1rem}
td,th{text-align:left;vertical-align:top;padding:.15rem .8rem .15rem 0}
td{border-top:1px solid #eee}code{font:13px ui-monospace,monospace}.t{color:#666}p{margin:.4rem 0}h3{font-size:.95rem}
@media(prefers-color-scheme:dark){body{background:#16181b;color:#ddd}details,td{border-color:#333}b.m{color:#6af}
.t{color:#999}a{color:#8bf}}
"""


def page(document: dict[str, Any]) -> str:
    """All operations on one page that loads nothing from anywhere."""
    info, schemas = document["info"], document["components"]["schemas"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{info['title']} API</title><style>{_STYLE}</style>",
        f"<h1>{info['title']} {html.escape(info['version'])}: the API</h1>",
        "<p>The same as a document for machines: <a href='openapi.json'>openapi.json</a>. With keys, every path but "
        "/health and /ready needs <code>Authorization: Bearer KEY</code>. Errors have OpenAI's shape, "
        '<code>{"error": {"message", "type", "param", "code"}}</code>.</p>',
    ]
    used: list[str] = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            title = f"<b class=m>{method.upper()}</b>{html.escape(path)}"
            summary = html.escape(operation["summary"])
            parts.append(f"<details><summary><h2 style='display:inline'>{title}</h2> {summary}</summary><div>")
            body = operation.get("requestBody")
            if body is not None:
                parts.append("<h3>Body</h3>" + _fields(body["content"]["application/json"]["schema"], schemas, used))
            answer = operation["responses"]["200"].get("content", {}).get("application/json")
            if answer is not None:
                parts.append("<h3>Answer</h3>" + _fields(answer["schema"], schemas, used))
            parts.append("</div></details>")
    parts.append("<h1>Shapes</h1>")
    shown: set[str] = set()
    while used:
        name = used.pop(0)
        if name not in shown:
            shown.add(name)
            parts.append(f"<details id='{html.escape(name)}' open><summary><h2 style='display:inline'>{name}</h2>")
            parts.append(f"</summary><div>{_table(schemas[name], used)}</div></details>")
    return "".join(parts) + "</html>\n"


def _fields(schema: dict[str, Any], schemas: dict[str, Any], used: list[str]) -> str:
    name = schema.get("$ref", "").rpartition("/")[2]
    return _table(schemas[name], used) if name in schemas else f"<p>{_type(schema, used)}</p>"


def _table(schema: dict[str, Any], used: list[str]) -> str:
    about = f"<p>{html.escape(schema['description'])}</p>" if schema.get("description") else ""
    required = set(schema.get("required", ()))
    rows = []
    for name, field in schema.get("properties", {}).items():
        note = "required" if name in required else ""
        if field.get("default") is not None:
            note = f"default {html.escape(str(field['default']))}"
        rows.append(f"<tr><td><code>{html.escape(name)}</code><td>{_type(field, used)}<td class=t>{note}")
    if not rows:
        return about + f"<p>{_type(schema, used)}</p>"
    return about + "<table><tr><th>field<th>type<th>" + "".join(rows) + "</table>"


def _type(schema: dict[str, Any], used: list[str]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        used.append(name)
        return f"<a href='#{html.escape(name)}'>{html.escape(name)}</a>"
    if "anyOf" in schema:
        kinds = [_type(one, used) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return " | ".join(f"<code>{html.escape(str(one))}</code>" for one in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}), used)}"
    return html.escape(kind if isinstance(kind, str) else " or ".join(kind))
