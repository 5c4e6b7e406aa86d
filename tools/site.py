"""The documentation as a site that needs no network: staged from docs/, built by zensical, and checked.

    python tools/site.py            build/site/html  (needs zensical: pip install 'penstock[docs]'; `make docs` does it)
    python tools/site.py --stage    build/site/docs only, the Markdown that the site is made of

On GitHub the pages stand as they are: they link to sources, and README.md lies outside of docs/. A site has only what
is staged for it. So links are turned round to where their targets stand there; a file of the repository that a page
links to becomes a page with its text; docs/catalogue.tsv becomes a table. What is built must hold: every link and
anchor leads somewhere, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUT = ROOT / "build" / "site"
CONFIG = ROOT / "zensical.toml"
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "releases.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "docs/catalogue.tsv": "catalogue.md",
}
"""Where what stands elsewhere, or is no Markdown, becomes a page."""
ASSETS = ("assets", "images")
_SHIM = "https://unpkg.com/iframe-worker/shim"
"""Loaded by zensical's pages for a search without a server; docs/assets has it."""
_CODE = re.compile(r"(^[ ]*```.*?^[ ]*```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_GROUPS = {
    "A": "Scheduling and batching", "B": "KV memory", "C": "Execution", "D": "Decoding", "E": "Compression of weights",
    "F": "Compression of keys and values", "G": "Long context", "H": "Parallel runs and disaggregation", "I": "Cloud",
    "J": "Applications", "K": "Metrics, workloads and data sets", "L": "Frameworks",
}  # fmt: skip


class Staging:
    """One run. `pages`: path from the repository's root -> its page; `sources` collects what else is linked."""

    def __init__(self, out: Path) -> None:
        self.out = out
        found = sorted(p.relative_to(ROOT).as_posix() for p in DOCS.rglob("*.md"))
        self.pages = {path: path.removeprefix("docs/") for path in found} | MOVED
        self.sources: set[str] = set()

    def run(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        for folder in ASSETS:
            shutil.copytree(DOCS / folder, self.out / folder)
        for path, page in self.pages.items():
            text = catalogue() if path.endswith(".tsv") else (ROOT / path).read_text(encoding="utf-8")
            self._write(page, self.turned(text, path, page))
        for path in sorted(self.sources):
            self._write(_source_page(path), _source_html(path))

    def turned(self, text: str, path: str, page: str) -> str:
        """The text of the page with its links leading to staged files, and pages that it only names linked as well."""
        parts = _CODE.split(text)
        parts[::2] = [_LINK.sub(lambda m: f"]({self._target(m[1], path, page)})", part) for part in parts[::2]]
        for i in range(1, len(parts), 2):
            named = self.pages.get(parts[i].strip("`"))
            if named is not None and named != page and not parts[i - 1].endswith("["):
                parts[i] = f"[{parts[i]}]({_relative(named, page)})"
        return "".join(parts)

    def _target(self, link: str, path: str, page: str) -> str:
        name, _, anchor = link.partition("#")
        if not name or re.match(r"[a-z]+:", link):
            return link
        there = os.path.normpath(os.path.join(os.path.dirname(path), name))
        if there.startswith(tuple(f"docs/{folder}/" for folder in ASSETS)):
            staged = there.removeprefix("docs/")
        elif there in self.pages:
            staged = self.pages[there]
        elif (ROOT / there).exists() and not there.startswith(".."):
            self.sources.add(there)
            staged = _source_page(there)
        else:
            raise SystemExit(f"{path} links to {link}, which is not in the repository")
        return _relative(staged, page) + (f"#{anchor}" if anchor else "")

    def _write(self, page: str, text: str) -> None:
        where = self.out / page
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text, encoding="utf-8")


def catalogue() -> str:
    """docs/catalogue.tsv as a page: what works first, then what does not yet."""
    with (DOCS / "catalogue.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    counts = {s: sum(r["status"] == s for r in rows) for s in sorted({r["status"] for r in rows})}
    lines = [
        "# Catalogue", "",
        f"Every serving optimisation that was found published, {len(rows)} rows, and what Penstock has of it: "
        + ", ".join(f"{n} {s}" for s, n in counts.items())
        + ". *works*: built, tested, measured. *simulated*: on the virtual clock. *partial*: a part, which the row "
        "names. What is *absent* is listed at the end of its group, by name only. The same for programs, with "
        "files and tests: `docs/catalogue.tsv`.", "",
    ]  # fmt: skip
    for group in sorted({r["id"][0] for r in rows}):
        mine = [r for r in rows if r["id"][0] == group]
        lines += [f"## {group}: {_GROUPS[group]}", ""]
        if there := [r for r in mine if r["status"] != "absent"]:
            lines += ["| row | what | state | switch | seen |", "| --- | --- | --- | --- | --- |"]
            for r in there:
                switch = f"`{r['switch']}`" if r["switch"].startswith("-") else _cell(r["switch"])
                lines.append(f"| {r['id']} | {_cell(r['name'])} | {r['status']} | {switch} | {_cell(r['measured'])} |")
            lines.append("")
        if rest := [f"{r['id']} {_cell(r['name'])}" for r in mine if r["status"] == "absent"]:
            lines += ["Absent: " + "; ".join(rest) + ".", ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return re.sub(r"([|*_<\[\]`\\])", r"\\\1", text)


def _relative(staged: str, page: str) -> str:
    return os.path.relpath(staged, os.path.dirname(page) or ".")


def _source_page(path: str) -> str:
    return f"source/{path}/index.html" if (ROOT / path).is_dir() else f"source/{path}.html"


def _source_html(path: str) -> str:
    """A file of the repository as a page with line numbers, or a folder as a list of its files."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import TextLexer, get_lexer_for_filename
    from pygments.util import ClassNotFound

    where = ROOT / path
    if where.is_dir():
        text = "\n".join(
            sorted(p.name + "/" * p.is_dir() for p in where.iterdir() if not p.name.startswith((".", "_")))
        )
    else:
        raw = where.read_bytes()
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            text = f"{len(raw):,} bytes that are no text"
    plain = len(text) > 100_000 or where.suffix in ("", ".json", ".jsonl")  # figures need no colours
    try:
        lexer = TextLexer() if plain else get_lexer_for_filename(where.name)
    except ClassNotFound:
        lexer = TextLexer()
    light = HtmlFormatter(style="default", linenos="table", lineanchors="L", anchorlinenos=True)
    return _SOURCE.format(path=path, css=_source_css(light), code=highlight(text, lexer, light))


def _source_css(light: Any) -> str:
    from pygments.formatters import HtmlFormatter

    dark = HtmlFormatter(style="github-dark")
    return f"{light.get_style_defs('.highlight')}\n@media (prefers-color-scheme: dark) {{\n" + (
        f"body {{ background: #0d1117; color: #e6edf3 }}\n{dark.get_style_defs('.highlight')}\n}}"
    )


_SOURCE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{path}</title><style>
body {{ margin: 1rem; font: 0.9rem/1.4 ui-monospace, monospace; overflow-wrap: anywhere }}
.highlight {{ overflow-x: auto }} pre {{ margin: 0 }} .linenos a {{ color: inherit; text-decoration: none }}
:target {{ outline: 2px solid }}
{css}
</style></head><body><h1>{path}</h1>
{code}
</body></html>
"""


def localise(site: Path) -> None:
    """The one script that pages would fetch from elsewhere comes from their own folder."""
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        here = os.path.relpath(site / "assets" / "iframe-worker.js", page.parent)
        page.write_text(text.replace(_SHIM, here), encoding="utf-8")


# -- what was built holds ------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Anchors of a page, and what it links to or loads."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[key] for key in ("id", "name") if key in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next", "alternate"):
            self.loads.append(given.get("href", ""))
        elif "src" in given:
            self.loads.append(given["src"])


def problems(site: Path) -> Iterator[str]:
    """Links, anchors and loads of the built pages that lead nowhere, and loads from elsewhere, a sentence each."""
    pages: dict[Path, _Page] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # it does not know where it is shown
        name = path.relative_to(site)
        for load in page.loads:
            if urlsplit(load).scheme not in ("", "data") or load.startswith("//"):
                yield f"{name} loads {load}"
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            if not there.is_file():
                yield f"{name} links to {link}, which is not there"
            elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].anchors:
                yield f"{name} links to {link}, but there is no such anchor"


def nav_pages(nav: Any) -> Iterator[str]:
    """Paths that a nav of zensical.toml names."""
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(value, str):
                yield value
            else:
                yield from nav_pages(value)


def check_nav(pages: set[str]) -> list[str]:
    """What is wrong with the nav: each page has to be in it once."""
    named = list(nav_pages(tomllib.loads(CONFIG.read_text(encoding="utf-8"))["project"]["nav"]))
    wrong = [f"zensical.toml: nav names {page}, which is no page" for page in named if page not in pages]
    wrong += [f"zensical.toml: nav leaves out {page}" for page in sorted(pages - set(named))]
    return wrong + [
        f"zensical.toml: nav names {page} twice" for page in sorted({p for p in named if named.count(p) > 1})
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", action="store_true", help="only make the Markdown")
    args = parser.parse_args(argv)
    staging = Staging(OUT / "docs")
    staging.run()
    wrong = check_nav(set(staging.pages.values()))
    if not args.stage and not wrong:
        zensical = Path(sys.executable).with_name("zensical")
        if not zensical.exists():
            raise SystemExit("zensical is not installed beside this Python: pip install 'penstock[docs]'")
        status = subprocess.run([zensical, "build", "--clean", "--strict", "-f", str(CONFIG)], cwd=ROOT).returncode
        if status:
            return status
        localise(OUT / "html")
        wrong = list(problems(OUT / "html"))
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    if not wrong and not args.stage:
        print(f"site: {(OUT / 'html' / 'index.html').relative_to(ROOT)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
