"""Pages and drawings from templates: whatever is put into one is escaped, and a page loads nothing and runs nothing."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jinja2 import Environment


class Cell(NamedTuple):
    """A cell of a page's table that is more than its text: `kind` is its class, `title` shows when it is pointed at."""

    text: object
    kind: str = ""
    title: str = ""
    style: str = ""


def render(template: str, **values: object) -> str:
    """One of the files in `templates`, filled: markup, which other templates take as it is.

    Raises jinja2.UndefinedError for a value that is missing.
    """
    return _markup(_templates().get_template(template).render(values))


def part(name: str, *values: object) -> str:
    """One of the macros of parts.html, drawn."""
    return _markup(getattr(_templates().get_template("parts.html").module, name)(*values))


def _markup(text: str) -> str:
    from markupsafe import Markup

    return Markup(text)


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here: no command starts with it

    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters["at"] = "{:.1f}".format
    return made
