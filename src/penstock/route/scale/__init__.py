"""How many engines there should be: whole numbers alone, so that servers and simulations use one object.

A name may carry knobs, the arguments of the scaler's constructor: `reactive:target=12,down_s=120`.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.base.knobs import knobs
from penstock.base.registry import Registry
from penstock.route.scale.scaler import Scaler

SCALERS: Registry[Callable[..., Scaler], None] = Registry("autoscale")
SCALERS.add("fixed", "penstock.route.scale.scaler:Fixed")
SCALERS.add("reactive", "penstock.route.scale.reactive:Reactive")
SCALERS.add("predictive", "penstock.route.scale.predictive:Predictive")


def make_scaler(text: str) -> Scaler:
    """The scaler called `NAME`, or `NAME:knob=value,knob=value`. Raises ConfigError, naming the choices, for an unknown
    scaler or knob and for a value that makes no sense."""
    kind, _, given = text.partition(":")
    build = SCALERS.get(kind)
    return build(**knobs(build, f"autoscale {kind!r}", SCALERS.what, given))
