"""Which experts tokens get: the operations of one router."""

from __future__ import annotations

import numpy as np

from penstock.core.model_spec import Experts, Router
from penstock.model.emitter import Emitter
from penstock.model.hashes import hashed
from penstock.ops.ref.experts import of_task

_EVEN = Router(score="even", hash="all")


def routes(b: Emitter, p: str, f: Experts, x: str) -> None:
    """Register x -> register routes; `p`: prefix of the layer's weights."""
    r, more = f.router, [b.array(p + "router_scale")] if f.router.expert_scale else []
    if r.tasks:
        table, scale = of_task(f, b.array(p + "router_tasks"), b.vector(p + "router_correction"), *more)
        b.emit("route_listed", (x, "token_ids"), "routes", bound=(f.top_k, _EVEN, table, scale))
        return
    if r.score != "even":
        b.linear(x, "routes", p + "router")
        x = "routes"
    if r.listed:
        table = np.ascontiguousarray(np.sort(b.array(p + "router_table"), axis=-1), np.int32)
    elif r.hash is not None:
        table = hashed(r.hash, b.spec.vocab_size, f.num_experts, f.top_k, b.layer)
    else:
        b.emit("route", (x,), "routes", bound=(f.top_k, r, b.vector(p + "router_correction"), *more))
        return
    b.emit("route_listed", (x, "token_ids"), "routes", bound=(f.top_k, r, table, *more))
