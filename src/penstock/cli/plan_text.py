"""Tables and numbers as `penstock plan` prints them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def text_table(title: str, *columns: str) -> Table:
    """Columns are right-aligned, except for the first one and those written with a leading "<"."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        left = i == 0 or column.startswith("<")
        table.add_column(column.removeprefix("<"), justify="left" if left else "right", overflow="fold")
    return table


def size_text(num_bytes: int) -> str:
    for unit, size in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if num_bytes >= size:
            return f"{three_digits(num_bytes / size)} {unit}"
    return f"{num_bytes} B"


def metric_text(rate: float) -> str:
    """With the unit's prefix: 989e12 is "989 T"."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= size:
            return f"{rate / size:g} {prefix}"
    return f"{rate:g} "


def short_text(count: int) -> str:
    """Three digits and a prefix; small counts as they are."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{three_digits(count / size)} {prefix}"
    return f"{count:,}"


def three_digits(value: float) -> str:
    """Three digits that count."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def time_text(seconds: float) -> str:
    if seconds >= 1:
        return f"{three_digits(seconds)} s"
    return (
        f"{three_digits(seconds * 1e3)} ms" if seconds >= 1e-4 or not seconds else f"{three_digits(seconds * 1e6)} us"
    )
