"""`kv_events_config`, parsed: where other processes hear which blocks of KV this engine keeps."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass

from penstock.base.errors import ConfigError
from penstock.config.setting import Section, setting, settings_of


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig(Section):
    """The keys of `kv_events_config`: vLLM's (`KVEventsConfig` of its configuration), and the last three of ours."""

    enable_kv_cache_events: bool = setting(False, "Whether events are published at all.")
    publisher: str = setting("zmq", "zmq: over ZeroMQ. null: to nobody.", choices=("zmq", "null"))
    endpoint: str = setting("tcp://127.0.0.1:5557", "Address that is bound for subscribers (PUB).")
    replay_endpoint: str | None = setting(None, "Address that is bound for those who missed batches (ROUTER).")
    buffer_steps: int = setting(10_000, "Newest batches that are kept for replay.", minimum=1)
    hwm: int = setting(100_000, "Batches that wait for one slow subscriber before it misses some.", minimum=1)
    max_queue_size: int = setting(100_000, "Batches that wait to be sent before some are dropped.", minimum=1)
    topic: str = setting("", "First frame of every message, for subscribers to ask for.", allow_empty=True)
    include_token_ids: bool = setting(
        False, "Also tell the tokens of stored blocks, which are the texts of requests: needed by routers that name "
        "blocks themselves.",
    )  # fmt: skip
    encoding: str = setting(
        "map", "How an event is written. array: as vLLM did up to 0.23. map: as it has since.",
        choices=("array", "map"),
    )  # fmt: skip
    allow_remote: bool = setting(False, "Also bind addresses that other machines can reach.")


def parse_kv_events(given: str | None) -> KVEventsConfig | None:
    """None if nothing is to be published. Raises: ConfigError."""
    if given is None:
        return None

    def wrong(why: str) -> ConfigError:
        return ConfigError(f"kv_events_config: {why}", field="kv_events_config")

    try:
        found = json.loads(given)
    except ValueError as error:
        raise wrong(f'is not JSON: {error}; for example {{"enable_kv_cache_events": true}}') from None
    if not isinstance(found, dict):
        raise wrong('must be an object, as {"enable_kv_cache_events": true}')
    known = [item.name for item in settings_of(KVEventsConfig)]
    for name in found:
        if name not in known:
            raise wrong(f"{name}: unknown; known: {', '.join(known)}")
    try:
        config = KVEventsConfig(**found)
    except ConfigError as error:
        raise wrong(str(error)) from None
    if not config.enable_kv_cache_events or config.publisher == "null":
        return None
    for name in ("endpoint", "replay_endpoint"):
        address = getattr(config, name)
        if address is not None and (problem := _problem(address, remote=config.allow_remote)):
            raise wrong(f"{name}: {address!r} {problem}")
    if config.replay_endpoint == config.endpoint:
        raise wrong(f"replay_endpoint: {config.endpoint!r} is the endpoint itself; give it an address of its own")
    return config


def _problem(address: str, *, remote: bool) -> str:
    """What is wrong with an address to bind; "" if nothing is."""
    kind, _, rest = address.partition("://")
    if kind == "ipc" and rest:
        return ""
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        return "is no address to bind; use one such as tcp://127.0.0.1:5557 or ipc:///run/user/1000/kv-events"
    if remote or _is_loopback(host):
        return ""
    return (
        f"can be reached from other machines; use tcp://127.0.0.1:{port}, or say allow_remote: true if everybody who "
        "can reach it may know what is cached"
    )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
