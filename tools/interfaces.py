"""The tables of registered parts in `docs/interfaces.md`: written from the registries, compared by a test.

python tools/interfaces.py            writes them between their marks
python tools/interfaces.py --check    exit status 1 if the page is not what the registries say
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from penstock.base.registry import Registry
from penstock.eval.tasks import TASKS
from penstock.launch.inventory import REGISTRIES
from penstock.runner.verifiers import VERIFIERS
from penstock.sim.arrivals import ARRIVALS
from penstock.sim.studies import STUDIES
from penstock.sim.traces import WORKLOADS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tools.generated import write_or_check  # noqa: E402

PAGE = ROOT / "docs" / "interfaces.md"
BEGIN, END = "<!-- parts: begin -->", "<!-- parts: end -->"
ALL: tuple[Registry[Any, Any], ...] = (*REGISTRIES, VERIFIERS, TASKS, WORKLOADS, ARRIVALS, STUDIES)


def table() -> str:
    """A line per registry: its names, with what is known of each before it is imported, and where it stands."""
    lines = ["| part | names | file |", "| --- | --- | --- |"]
    for registry in ALL:
        names = ", ".join(_named(registry, name) for name in registry)
        room = Counter(registry.target(name).split(":")[0].rsplit(".", 1)[0] for name in registry).most_common(1)[0][0]
        path = f"src/{room.replace('.', '/')}"
        lines.append(f"| {registry.what} | {names} | [{room.removeprefix('penstock.').replace('.', '/')}](../{path}) |")
    return "\n".join(lines) + "\n"


def _named(registry: Registry[Any, Any], name: str) -> str:
    traits = registry.traits(name)
    if traits is None or traits == "":
        return f"`{name}`"
    if isinstance(traits, str):
        return f"`{name}` ({traits})"
    default = type(traits)()
    fields = getattr(traits, "_fields", None) or traits.__struct_fields__
    told = [
        field if getattr(traits, field) is True else f"{field} {getattr(traits, field)}"
        for field in fields
        if getattr(traits, field) != getattr(default, field)
    ]
    return f"`{name}` ({', '.join(told)})" if told else f"`{name}`"


def written(page: str) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, lambda: written(PAGE.read_text(encoding="utf-8")), sys.argv[1:]))
