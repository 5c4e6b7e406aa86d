"""The libraries that the pages in a browser carry along, taken as they are from npm's packages.

    python tools/vendor.py            # whether every file is the one of the list
    python tools/vendor.py --renew    # fetches the versions below (npm), and writes the files and the list anew

A browser gets nothing from elsewhere, so what a page needs lies beside it. Nothing of a package is run or built: named
files are read from its archive, with its licence. The list, `vendored.json`, says for each where it comes from, under
which licence, and its SHA-256; a test compares.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = "src/penstock/server/page/vendor"
LANGUAGES = "bash c cpp css diff go ini java javascript json markdown python rust sql typescript xml yaml".split()  # noqa: SIM905


@dataclass(frozen=True)
class Package:
    """`files`: path in the package -> path below `folder`. `text`: the licence's file in the package."""

    name: str
    version: str
    licence: str
    text: str
    files: dict[str, str]
    folder: str = PAGE


PACKAGES = (
    Package("marked", "18.2.1", "MIT", "LICENSE", {"lib/marked.esm.js": "marked.js"}),
    Package("dompurify", "3.4.18", "MPL-2.0 OR Apache-2.0", "LICENSE", {"dist/purify.es.mjs": "purify.js"}),
    Package(
        "@highlightjs/cdn-assets", "11.12.0", "BSD-3-Clause", "LICENSE",
        {"es/core.min.js": "highlight/core.js"}
        | {f"es/languages/{name}.min.js": f"highlight/{name}.js" for name in LANGUAGES},
    ),
    Package(
        "swagger-ui-dist", "5.35.0", "Apache-2.0", "LICENSE",
        {"swagger-ui-bundle.js": "swagger-ui.js", "swagger-ui.css": "swagger-ui.css",
         "NOTICE": "NOTICE-swagger-ui-dist.txt", "swagger-ui-bundle.js.LICENSE.txt": "NOTICE-swagger-ui-bundle.txt"},
    ),
    Package("axe-core", "4.14.1", "MPL-2.0", "LICENSE",
            {"axe.min.js": "axe.js", "LICENSE-3RD-PARTY.txt": "NOTICE-axe-core.txt"}, "tests/data/axe"),
)  # fmt: skip


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wrong(folder: Path) -> list[str]:
    """What of a folder is not as its list says."""
    listed = {entry["file"]: entry for entry in json.loads((folder / "vendored.json").read_text("utf-8"))}
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {"vendored.json"}
    found = [f"{name} is not in the list" for name in sorted(there - set(listed))]
    for name, entry in listed.items():
        if name not in there:
            found.append(f"{name} is not there")
        elif digest(folder / name) != entry["sha256"]:
            found.append(f"{name} is not the file of {entry['package']} {entry['version']}")
    return found


def renew(folder: str) -> None:
    """Raises subprocess.CalledProcessError where npm does, KeyError where a package has no such file."""
    listed = []
    for package in (p for p in PACKAGES if p.folder == folder):
        short = package.name.rpartition("/")[2]
        wanted = package.files | {package.text: f"LICENSE-{short}.txt"}
        with tempfile.TemporaryDirectory() as scratch:
            subprocess.run(["npm", "pack", "--silent", f"{package.name}@{package.version}"], cwd=scratch, check=True)
            with tarfile.open(next(Path(scratch).iterdir())) as archive:
                for source, target in wanted.items():
                    member = archive.extractfile("package/" + source)
                    assert member is not None
                    path = ROOT / folder / target
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(member.read())
                    listed.append({
                        "file": target, "package": package.name, "version": package.version,
                        "licence": package.licence, "from": source, "sha256": digest(path),
                    })  # fmt: skip
    text = json.dumps(listed, indent=1) + "\n"
    (ROOT / folder / "vendored.json").write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--renew", action="store_true", help="fetch the versions that stand in this file")
    args = parser.parse_args(argv)
    found = []
    for folder in dict.fromkeys(p.folder for p in PACKAGES):
        if args.renew:
            renew(folder)
        found += wrong(ROOT / folder)
    print("\n".join(found) or "every vendored file is the one of its list")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
