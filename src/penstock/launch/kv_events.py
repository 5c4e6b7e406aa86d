"""The publisher of KV events that the settings name: made before weights are read, fed by the engine."""

from __future__ import annotations

import secrets
import weakref

from penstock.config import EngineConfig
from penstock.config.kv_events import parse_kv_events
from penstock.core.events import Decision
from penstock.core.kv_events import KVEvent
from penstock.engine.core import EngineCore
from penstock.engine.publisher import EventPublisher
from penstock.kv.events import EventSettings

SECRET_BYTES = 32


class KVEvents:
    """A publisher, which ends with the engine that follows. `settings`: for the books. Without a store names of blocks
    mean nothing to another process."""

    def __init__(self, publisher: EventPublisher, settings: EventSettings) -> None:
        self.settings = settings
        self._publisher = publisher
        self.close = weakref.finalize(self, publisher.close)
        """Once, and at the end of the process if not before: what waits is sent, and addresses are free again."""

    def follow(self, core: EngineCore) -> None:
        """From now on what `core` records is published; at once, that it has nothing yet."""
        core.tell_events = self.publish
        core.publish()

    def publish(self, events: list[KVEvent]) -> bool:
        """See `EventPublisher.publish`."""
        return self._publisher.publish(events)


def open_events(config: EngineConfig) -> KVEvents | None:
    """What `kv_events_config` asks for, if it asks for anything. Raises ConfigError."""
    said = parse_kv_events(config.cache.kv_events_config)
    if said is None:
        return None
    return KVEvents(EventPublisher(said), EventSettings(secrets.token_bytes(SECRET_BYTES), said.include_token_ids))


def events_decision(config: EngineConfig) -> tuple[Decision, ...]:
    """Who can hear what."""
    said = parse_kv_events(config.cache.kv_events_config)
    if said is None:
        return ()
    told = "names of blocks with their tokens" if said.include_token_ids else "names of blocks without their tokens"
    replay = "no replay" if said.replay_endpoint is None else f"replay at {said.replay_endpoint}"
    return (Decision("kv_events", said.endpoint, f"{told}; {replay}"),)
