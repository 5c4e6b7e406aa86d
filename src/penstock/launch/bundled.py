"""Models that come with the package, by name: what to try Penstock with when there is nothing else."""

from __future__ import annotations

from pathlib import Path

DEFAULT = "nano"
NEXT = "penstock serve qwen2.5-coder:0.5b"
"""What to try after it: the smallest model here whose answers are of use."""
_FOLDER = Path(__file__).resolve().parents[1] / "bundled"


def bundled_model(name: str) -> Path | None:
    """The folder of the bundled model called `name`; None if there is none."""
    folder = _FOLDER / name
    known = name.isidentifier() and (folder / "config.json").is_file()
    return folder if known else None


def bundled_heads(name: str) -> Path | None:
    """The folder of the bundled draft heads called `name`, as nano-medusa; None if there are none."""
    folder = _FOLDER / name
    known = name.replace("-", "_").isidentifier() and "-" in name and (folder / "config.json").is_file()
    return folder if known else None


def bundled_names() -> list[str]:
    return sorted(path.name for path in _FOLDER.iterdir() if bundled_model(path.name)) if _FOLDER.is_dir() else []
