"""Tables for terminals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]] = (), *, title: str | None = None, left: int = 1,
    box: bool = False, head: bool = True, wrap: bool = True,
) -> Table:  # fmt: skip
    """The first `left` columns flush left, numbers flush right; `box`: lines around it. Texts may be rich's markup."""
    from rich.box import HEAVY_HEAD
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=HEAVY_HEAD if box else None, show_header=head)
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i < left else "right", overflow="fold", no_wrap=not wrap)
    for row in rows:
        made.add_row(*row)
    return made
