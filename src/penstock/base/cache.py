"""Where Penstock keeps what it can make anew."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder(name: str) -> Path:
    """The folder `name` below PENSTOCK_CACHE, else below penstock in XDG_CACHE_HOME or ~/.cache. It need not exist."""
    own = os.environ.get("PENSTOCK_CACHE")
    if own:
        return Path(own) / name
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        cache = Path(tempfile.gettempdir()) / f"cache-{os.geteuid()}"
    return Path(cache) / "penstock" / name
