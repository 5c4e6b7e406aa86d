"""Logging set-up of the command line. The library itself only ever calls `logging.getLogger("penstock...")`."""

from __future__ import annotations

import logging
import os


def setup(level: str | None = None, default: str = "warning") -> None:
    """Send Penstock's log lines to stderr. `level` beats PENSTOCK_LOG_LEVEL beats `default`."""
    name = (level or os.environ.get("PENSTOCK_LOG_LEVEL") or default).upper()
    logging.basicConfig(level=getattr(logging, name, logging.WARNING), format="%(levelname)s %(name)s: %(message)s")
