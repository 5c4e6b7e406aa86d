"""Memory of this process that nobody uses."""

from __future__ import annotations

import ctypes
import gc


def trim() -> None:
    """Collect garbage and give what the C allocator holds free back to the system (glibc; elsewhere it stays).

    For the end of a start: reading a large tokenizer leaves about 20 MB behind. Takes a few hundredths of a second.
    """
    gc.collect()
    give_back()


def give_back() -> None:
    """What the C allocator holds free goes back to the system; nothing is collected. Other threads run meanwhile."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):  # another C library
        return
