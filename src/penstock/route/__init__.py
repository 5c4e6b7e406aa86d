"""Which of several engines a request goes to: whole numbers alone, so that servers and simulations use one object."""

from __future__ import annotations

from penstock.base.registry import Registry
from penstock.route.router import RoutePolicy

ROUTERS: Registry[type[RoutePolicy], None] = Registry("route_policy")
ROUTERS.add("round-robin", "penstock.route.plain:InTurn")
ROUTERS.add("random", "penstock.route.plain:ByChance")
ROUTERS.add("least-requests", "penstock.route.plain:FewestRequests")
ROUTERS.add("least-tokens", "penstock.route.plain:LeastTokens")
ROUTERS.add("least-kv", "penstock.route.plain:LeastKV")
ROUTERS.add("power-of-two", "penstock.route.plain:PowerOfTwo")
ROUTERS.add("length-buckets", "penstock.route.length_buckets:LengthBuckets")
ROUTERS.add("session", "penstock.route.session:Session")
ROUTERS.add("prefix", "penstock.route.prefix:PrefixRoute")
ROUTERS.add("virtual-usage", "penstock.route.virtual_usage:VirtualUsage")
