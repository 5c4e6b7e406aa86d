"""What a room of the server asks of one above it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from penstock.base.errors import RefusedError
from penstock.core.request import Request
from penstock.server.call import Call, Tenant

if TYPE_CHECKING:
    from penstock.base.clock import Clock
    from penstock.config.server import ServerConfig
    from penstock.engine.stream import Stream


class Admission(Protocol):
    """Decides at arrival whether a request will be served. Called in the event loop; must not block."""

    def admit(self, call: Call, request: Request) -> Callable[[], None]:
        """What to call when the request has ended. Raises RefusedError (429 or 503, with `retry_after_s`)."""
        ...

    def follow(self, request: Request, stream: Stream) -> None:
        """The stream of a request that was admitted."""
        ...

    def hold(self, tenant: Tenant) -> Callable[[], None]:
        """Before a long text is encoded; what to call when it is. Raises RefusedError (429)."""
        ...

    def tokens_left(self, tenant: Tenant) -> int | None:
        """Tokens that a request of this tenant may come to now; None: no limit."""
        ...

    def too_costly(self, tenant: Tenant, num_tokens: int) -> RefusedError:
        """The refusal (429) of a request that comes to more."""
        ...


class Serving(Protocol):
    """What bounds work before admission: a Service."""

    config: ServerConfig
    clock: Clock
    admission: Admission
    draining: bool

    def shutting_down(self) -> RefusedError: ...
