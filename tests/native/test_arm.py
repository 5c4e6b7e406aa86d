"""The libraries for aarch64: which there are, that they compile, and what is known of such a processor.

What they compute is for `make test-arm`, under an emulator.
"""

from __future__ import annotations
