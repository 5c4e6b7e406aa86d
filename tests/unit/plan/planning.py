"""Small models and machines to plan for."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from penstock.config import from_kwargs
from penstock.core.machine import Machine
from penstock.core.model_spec import Attention, FeedForward, Latent, Layer, Mixer, ModelSpec, Recurrent, Rope
from penstock.plan import Plan, resolve

MIB, GIB = 1024**2, 1024**3
FULL = Attention(num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(dim=8))
LATENT = Latent(num_heads=4, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8, rope=Rope(dim=4))
SLOT = Recurrent(num_heads=4, key_dim=8, value_dim=8)
SLIDING = Attention(num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(dim=8), window=100)
WIDER = Attention(num_heads=4, num_kv_heads=1, head_dim=8, rope=Rope(dim=8), window=1000)


def model(*mixers: Mixer, **changes: Any) -> ModelSpec:
    layers = tuple(Layer(mixer=m, ffn=FeedForward(width=64)) for m in mixers or (FULL, FULL))
    fields: dict[str, Any] = {"family": "test", "vocab_size": 100, "hidden_size": 32, "layers": layers}
    return ModelSpec(**(fields | {"max_position": 256} | changes))


def machine(available: int = 8 * GIB) -> Machine:
    return Machine(num_cores=2, memory_bytes=available + GIB, available_bytes=available)


def plan(spec: ModelSpec | None = None, box: Machine | None = None, /, **kwargs: Any) -> Plan:
    return resolve(from_kwargs(model="m", **kwargs), spec or model(), box or machine())


def why(p: Plan, name: str) -> str:
    return next(d.why for d in p.decisions if d.name == name)


def decided(p: Plan) -> dict[str, Any]:
    assert len({d.name for d in p.decisions}) == len(p.decisions), "one decision per name"
    return {d.name: d.value for d in p.decisions}


MIXERS = st.lists(st.sampled_from([FULL, LATENT, SLOT, SLIDING, WIDER]), min_size=1, max_size=5)
