"""What /metrics shows."""

from __future__ import annotations

from penstock.server.context import Server


async def install(server: Server) -> None:
    """Add this part to a server that is being built; its engine is ready."""
