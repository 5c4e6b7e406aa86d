"""What the machine has drawn since the server was ready: read from its counters, or modelled, as the label says.

A server on a GPU has no model unless watts are given: counters of a processor do not see it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.base.errors import ConfigError
from penstock.measure.energy import EnergyMeter, find_meter

if TYPE_CHECKING:
    from penstock.base.clock import Clock
    from penstock.config import ServeConfig
    from penstock.server.context import Server

EVERY_S = 20.0
"""Counters wrap around within minutes."""


class EnergyUse:
    """Reads `meter` when somebody scrapes, and before its counters wrap. Units: joules, seconds."""

    def __init__(self, meter: EnergyMeter, server: Server, clock: Clock) -> None:
        self.meter = meter
        self._server, self._clock = server, clock
        self._began_s, self._before_s = clock.now(), 0.0
        self._before_s = self._busy_s()

    def joules(self) -> float:
        return self.meter.joules(self._clock.now() - self._began_s, self._busy_s() - self._before_s)

    def _busy_s(self) -> float:
        """Seconds of steps, of all models."""
        stats = [one.parts["stats"] for one in self._server.each if "stats" in one.parts]
        return float(sum(s.counter("prefill_s") + s.counter("decode_s") for s in stats))


def check_power(config: ServeConfig) -> EnergyMeter | None:
    """The meter that a server of these settings has; None: a GPU without watts. Raises ConfigError."""
    given = config.server.power_watts
    if given is None and config.engine.execution.device.startswith("cuda"):
        return None
    try:
        return find_meter(given)
    except ConfigError as error:
        raise ConfigError(f"power_watts: {str(error).removeprefix('power: ')}", field="power_watts") from None


async def install(server: Server) -> None:
    """Of several models' servers the first has it: the machine is one."""
    meter: EnergyMeter | None = server.parts.pop("energy_meter", None)
    if meter is None:
        return
    use = server.parts["energy"] = EnergyUse(meter, server, server.service.clock)

    async def keep_reading() -> None:
        while True:
            use.joules()
            await asyncio.sleep(EVERY_S)

    server.closers.append(asyncio.create_task(keep_reading()).cancel)
