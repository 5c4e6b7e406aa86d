"""What metrics and the page say of each of several engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.engine.membership import ReplicaFacts, facts_of

if TYPE_CHECKING:
    from penstock.server.context import Server

Value = Callable[[ReplicaFacts], float]
STATES = ("starting", "ready", "restarting", "away", "asleep", "stopped", "failed")
REPLICA_GAUGES: tuple[tuple[str, str, Value], ...] = (
    ("replica_up", "Whether the engine works.", lambda one: one.state == "ready"),
    ("replica_draining", "Whether it is given nothing new.", lambda one: one.draining),
    ("replica_requests", "Requests that it has.", lambda one: one.requests),
    ("replica_running", "Of them, those that run.", lambda one: one.running),
    ("replica_waiting", "Of them, those that wait in the engine.", lambda one: one.waiting),
    ("replica_waiting_tokens", "Tokens that those have to be computed.", lambda one: one.waiting_tokens),
    ("replica_kv_used_blocks", "Blocks that running requests hold.", lambda one: one.kv_used),
    ("replica_kv_blocks", "Blocks of its KV memory.", lambda one: one.kv_total),
)
REPLICA_COUNTERS: tuple[tuple[str, str, Value], ...] = (
    ("replica_restarts", "Times that it had to be started again.", lambda one: one.restarts),
    ("replica_generation_tokens", "Tokens that it has generated.", lambda one: one.generated_tokens),
    ("replica_prefix_query_tokens", "Tokens of its prompts.", lambda one: one.query_tokens),
    ("replica_prefix_hit_tokens", "Of them, those that it had cached.", lambda one: one.hit_tokens),
)
_FOR_OPERATORS = ("pid", "reason", "version")


def facts_of_all(server: Server) -> list[ReplicaFacts]:
    """Of all engines, those that are starting among them."""
    group = server.parts.get("replicas")
    if group is not None:
        return list(group.describe())
    client = server.client
    return [facts_of(replica, client.clock.now()) for replica in client.replicas]


def replicas_shown(server: Server) -> list[dict[str, Any]]:
    """For everybody who may see the page; empty where there is one engine, for good."""
    if server.client.placing is None:
        return []
    shown = [msgspec.structs.asdict(one) for one in facts_of_all(server)]
    for one in shown:
        one["host"] = one["host"].partition(" (")[0]  # its address is for operators
    return [{name: value for name, value in one.items() if name not in _FOR_OPERATORS} for one in shown]
