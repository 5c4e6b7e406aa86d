"""The publisher of KV events that the settings name: made before weights are read, fed by the engine."""

from __future__ import annotations

import secrets
import weakref

from penstock.config import EngineConfig
from penstock.config.kv_events import parse_kv_events
from penstock.core.events import Decision
from penstock.core.kv_events import KVEvent
from penstock.engine.block_news import BlockNews
from penstock.engine.core import EngineCore
from penstock.engine.publisher import EventPublisher
from penstock.kv.events import EventSettings
from penstock.plan.resolve import Plan, events_problem

SECRET_BYTES = 32


class FollowedBlocks:
    """For the router of the engine's server: the engine's loop hands on what `news` collects."""

    def __init__(self, secret: bytes, beside: KVEvents | None) -> None:
        told = beside is not None and beside.settings.include_token_ids
        self.settings = EventSettings(secret, told)
        self.news = BlockNews(None if beside is None else beside.publish)

    def follow(self, core: EngineCore) -> None:
        """As `KVEvents.follow`."""
        core.tell_events = self.news
        core.publish()


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


def followed_blocks(secret: bytes, config: EngineConfig, plan: Plan, beside: KVEvents | None) -> FollowedBlocks | None:
    """Nothing where there are no blocks to tell of."""
    if not secret or events_problem(config, plan.groups):
        return None
    return FollowedBlocks(secret, beside)


def events_decision(config: EngineConfig) -> tuple[Decision, ...]:
    """Who can hear what."""
    said = parse_kv_events(config.cache.kv_events_config)
    if said is None:
        return ()
    told = "names of blocks with their tokens" if said.include_token_ids else "names of blocks without their tokens"
    replay = "no replay" if said.replay_endpoint is None else f"replay at {said.replay_endpoint}"
    return (Decision("kv_events", said.endpoint, f"{told}; {replay}"),)
