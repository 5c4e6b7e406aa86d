"""`kv_events_config`: what it may say, and what is refused in a sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.config.kv_events import KVEventsConfig, parse_kv_events


def parsed(**said: Any) -> KVEventsConfig | None:
    return parse_kv_events(json.dumps(said))


def test_off_unless_it_is_asked_for() -> None:
    assert parse_kv_events(None) is None
    assert parsed() is None
    assert parsed(endpoint="tcp://127.0.0.1:1") is None
    assert parsed(enable_kv_cache_events=True, publisher="null") is None
    config = parsed(enable_kv_cache_events=True)
    assert config is not None
    assert not config.include_token_ids
    assert config.endpoint == "tcp://127.0.0.1:5557"
    assert config.replay_endpoint is None


def test_all_names_of_vllm_are_taken() -> None:
    said = {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "ipc:///tmp/x", "buffer_steps": 5, "hwm": 6,
        "replay_endpoint": "tcp://[::1]:5558", "max_queue_size": 7, "topic": "kv-events",
    }  # fmt: skip
    config = from_kwargs(model="m", kv_events_config=said)
    assert config.cache.kv_events_config is not None
    found = parse_kv_events(config.cache.kv_events_config)
    assert found is not None
    assert {name: getattr(found, name) for name in said} == said


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5557", "tcp://localhost:1", "tcp://[::1]:65535",
                                     "tcp://127.9.8.7:80", "ipc:///run/x", "ipc://@abstract"])  # fmt: skip
def test_addresses_of_this_machine_are_bound(address: str) -> None:
    assert parsed(enable_kv_cache_events=True, endpoint=address) is not None
    assert parsed(enable_kv_cache_events=True, replay_endpoint=address, endpoint="ipc://elsewhere") is not None


@pytest.mark.parametrize("address", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://192.168.0.5:5557", "tcp://[::]:5557",
                                     "tcp://example.org:5557", "tcp://127.0.0.1.example.org:5557"])  # fmt: skip
@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_addresses_for_others_have_to_be_asked_for(address: str, field: str) -> None:
    said = {"enable_kv_cache_events": True, field: address}
    with pytest.raises(ConfigError, match=rf"{field}: .* use tcp://127.0.0.1:5557, or say allow_remote: true") as error:
        parsed(**said)
    assert error.value.field == "kv_events_config"
    if field == "endpoint":
        assert parsed(**said, allow_remote=True) is not None


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"endpoint": "5557"}, "is no address to bind; use one such as"),
        ({"endpoint": "udp://127.0.0.1:5557"}, "is no address to bind"),
        ({"endpoint": "tcp://127.0.0.1"}, "is no address to bind"),
        ({"endpoint": "tcp://127.0.0.1:0"}, "is no address to bind"),
        ({"endpoint": "tcp://127.0.0.1:65536"}, "is no address to bind"),
        ({"endpoint": "ipc://"}, "is no address to bind"),
        ({"endpoint": "inproc://x"}, "is no address to bind"),
        ({"replay_endpoint": "tcp://127.0.0.1:5557"}, "is the endpoint itself"),
        ({"publisher": "kafka"}, "publisher: must be one of zmq, null"),
        ({"encoding": "json"}, "encoding: must be one of array, map"),
        ({"buffer_steps": 0}, "buffer_steps: must be at least 1"),
        ({"hwm": 0}, "hwm: must be at least 1"),
        ({"max_queue_size": -1}, "max_queue_size: must be at least 1"),
        ({"include_token_ids": "yes"}, "include_token_ids: must be"),
        ({"port": 5557}, "port: unknown; known: enable_kv_cache_events, publisher, endpoint"),
    ],
)
def test_what_makes_no_sense_is_refused(said: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        parsed(enable_kv_cache_events=True, **said)
    assert str(error.value).startswith("kv_events_config: ")


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:5557", "[1]", "{"])
def test_it_is_an_object(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_events_config: "):
        parse_kv_events(text)
