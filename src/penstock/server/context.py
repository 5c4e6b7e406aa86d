"""The parts of a running server that routes reach through `request.app.state.server`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.server.transport.slices import Slices

if TYPE_CHECKING:
    from penstock.config.server import ServerConfig
    from penstock.engine.frontend import EngineClient
    from penstock.server.adapters import Adapters
    from penstock.server.service import Service
    from penstock.server.several.models import Models


@dataclass
class Server:
    """Everything the routes need; one per process, made by `server.build`."""

    config: ServerConfig
    client: EngineClient
    service: Service
    model_name: str
    created: int
    aliases: list[str] = field(default_factory=list)
    adapters: Adapters | None = None
    """By name; None: the server has none."""
    draining: bool = False
    closers: list[Callable[[], Any]] = field(default_factory=list)
    """Called (and awaited, if awaitable) when the server ends, last first."""
    on_refused: list[Callable[[Any, int, Any], None]] = field(default_factory=list)
    """Called with (ASGI scope, status, WireError or None) when an error is answered: metrics and logs."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Parts with a home of their own: "admission", "metrics", "keys", "store", "files", "batches", "grammars"."""
    slices: Slices = field(default_factory=Slices)
    """Turns for work that would keep the event loop too long."""
    speculates: bool = False
    """Whether the engine drafts: requests and metrics then tell of it."""
    warm_grammars: bool = False
    """Whether a grammar compiler is started before the first grammar comes."""
    models: Models | None = None
    """Which of several models are in memory, and when they leave; None: the one there is stays."""
    first: Server | None = None
    """The one of which this is a further model; None: it is the first. Keys, files and responses are the first's."""
    others: list[Server] = field(default_factory=list)
    """The further models of the first one."""

    @property
    def each(self) -> list[Server]:
        """It and all further models."""
        return [self, *self.others]

    @property
    def names(self) -> list[str]:
        """By which requests call its model now, adapters among them."""
        return [self.model_name, *self.aliases, *(() if self.adapters is None else self.adapters.names)]

    @property
    def weight_version(self) -> str | None:
        """Of the weights in force; None where nobody wants to know."""
        return self.client.weight_version if self.client.tells_weights else None
