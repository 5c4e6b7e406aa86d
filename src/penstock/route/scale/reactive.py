"""As many engines as the requests that are there need: more at once, fewer only after a while.

Source: the rule of Kubernetes' Horizontal Pod Autoscaler (load over target, with a tolerance and a stabilisation
window), on requests in flight as Knative's autoscaler counts them; Llumnix, Sun et al., arXiv 2406.03243, section 4.4.3
scales on a band of load in the same way.
"""

from __future__ import annotations

from penstock.route.scale.scaler import FleetSize, FleetView, Scaler, at_least, bounded


class Reactive(Scaler):
    """`target` requests for each engine.

    Up: as soon as there are more than that, to as many as they need, but not within `up_s` of the last order. Down: by
    one engine, once the requests have fitted in one fewer at `low` percent of the target for `down_s` without a break;
    between both numbers nothing moves.
    """

    def __init__(self, target: int = 8, low: int = 70, up_s: int = 5, down_s: int = 60) -> None:
        for knob, value, least in (("target", target, 1), ("low", low, 1), ("up_s", up_s, 0), ("down_s", down_s, 0)):
            at_least(knob, value, least)
        at_least("100 - low", 100 - low, 0)
        self.target, self._low, self._up_us, self._down_us = target, low, up_s * 1_000_000, down_s * 1_000_000
        self._ordered_us: int | None = None
        self._low_since_us: int | None = None

    def decide(self, view: FleetView) -> FleetSize:
        return self.sized(view, view.requests, f"{view.requests} requests")

    def sized(self, view: FleetView, load: int, what: str) -> FleetSize:
        """For `load` requests in flight."""
        have = view.engines
        needed = bounded(-(-load // self.target), view)
        if needed > have or have < view.least:
            self._low_since_us = None
            if self._ordered_us is not None and view.now_us - self._ordered_us < self._up_us and have >= view.least:
                return FleetSize(have, "more were ordered a moment ago")
            self._ordered_us = view.now_us
            return FleetSize(needed, f"{what} for {have} engines of {self.target}")
        if have > view.most:
            return FleetSize(view.most, "more than there may be")
        if have == view.least or 100 * load > self._low * self.target * (have - 1):
            self._low_since_us = None
            return FleetSize(have)
        if self._low_since_us is None:
            self._low_since_us = view.now_us
        waited_us = view.now_us - self._low_since_us
        if waited_us < self._down_us:
            return FleetSize(have)
        self._low_since_us = view.now_us
        return FleetSize(have - 1, f"{what} for {have} engines of {self.target}, for {waited_us // 1_000_000} s")
