"""What a server and a host with one of its engines tell each other beside the engine's own words (`core.messages`)."""

from __future__ import annotations

from typing import Any

import msgspec


class BeginEngine(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Start an engine process, and connect it as `group`. `hang_s`: see `engine.process_link`; the host looks after it,
    which has the engine's black box."""

    group: str
    hang_s: float


class EndEngine(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Kill the engine of `group`, however it is. It is told as `EngineEnded`."""

    group: str


class Dismissed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The server will have no engine of this host any more. `problem`: why, in a sentence."""

    problem: str


class HostPulse(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The host lives; sent twice a second. `age_s`: seconds since its engine showed that its loop moves (`Pulse`)."""

    age_s: float


class EngineEnded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine of `group` is gone. `status`: as of `subprocess.Popen`; `suspects`: see `engine.link.Down`;
    `killed_for`: why the host killed it, if it did because of something that it did or did not."""

    group: str
    status: int
    suspects: list[int] = []
    killed_for: str = ""


ToEngineHost = BeginEngine | EndEngine | Dismissed
FromEngineHost = HostPulse | EngineEnded


OWN_SETTINGS = ("model", "tokenizer", "threads", "log_file", "data_parallel_size_local")
"""Settings that each host with engines has of its own; all others are the server's."""
MEETING_SETTINGS = (
    "data_parallel_size", "data_parallel_start_rank", "data_parallel_address", "data_parallel_rpc_port", "max_replicas",
    "ranks_secret_file", "distributed_executor_backend", "revision",
)  # fmt: skip
"""Those that say who is where, or that mean the server alone."""


def settings_there(config: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Those of the server, `config`, as an engine of a host gets them: with its `own`."""
    taken = {name: own[name] for name in OWN_SETTINGS if own.get(name) is not None}
    here_alone = {"max_replicas": None, "data_parallel_start_rank": None, "ranks_secret_file": None}
    return {**config, **here_alone, "data_parallel_address": "127.0.0.1", **taken}


def other_settings(config: dict[str, Any], given: dict[str, Any]) -> str:
    """Which of the settings `given` at a host are otherwise at the server; "": none."""
    for name, value in given.items():
        if name not in OWN_SETTINGS and name not in MEETING_SETTINGS and config.get(name) != value:
            return (
                f"{name} is {value!r} at the host and {config.get(name)!r} at the server; give the same at both, or "
                "leave it away at the host, which then has the server's"
            )
    return ""
