"""Namespaces of tools: functions that a client keeps under a name, as Codex does with those of MCP servers.

The model is shown functions called NAMESPACE__NAME. A call has the two names apart again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.base.errors import InputError
from penstock.server.schema.forms import string_in

Names = tuple[str, str]
"""Namespace and name."""
NO_SPACES: Mapping[str, Names] = {}


def shown_name(item: Mapping[str, Any], where: str) -> str:
    """What the model knows a call's function as. Raises InputError."""
    name, space = string_in(item, "name", where), item.get("namespace")
    return name if space is None else f"{string_in(item, 'namespace', where)}__{name}"


def spread(tools: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], Names | None]]:
    """(path, tool, names if it is within a namespace) of every tool. Raises InputError.

    What a namespace says of itself stands before what its first tool says.
    """
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.get("type") != "namespace":
            yield where, tool, None
            continue
        space, inner, about = string_in(tool, "name", where), tool.get("tools"), tool.get("description")
        if not isinstance(inner, list) or not inner:
            raise InputError(f"{where}.tools must be a list of functions", param=f"{where}.tools")
        for j, given in enumerate(inner):
            at = f"{where}.tools[{j}]"
            if not isinstance(given, dict) or given.get("type") != "function":
                raise InputError(f"{at}.type must be function: a namespace has only these", param=f"{at}.type")
            names = (space, string_in(given, "name", at))
            said = given.get("description")
            if j == 0 and isinstance(about, str) and about and (said is None or isinstance(said, str)):
                said = f"({space}: {about}) {said or ''}".rstrip()
            yield at, {**given, "name": "__".join(names), "description": said}, names
