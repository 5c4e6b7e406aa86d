"""What a run against a server cost, in money, joules and carbon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.measure.cost import Price, cost, find_price
from penstock.measure.energy import ModelMeter, Power, energy, find_carbon, find_power, modelled_j


@dataclass(frozen=True)
class Bill:
    """`price` None: no price is told. `power` None: energy is what the server says. `carbon`: g/kWh and its source."""

    price: Price | None
    power: Power | None
    carbon: tuple[float, str]

    @classmethod
    def of(cls, machine_price: str | None, power: str | None, carbon_intensity: str) -> Bill:
        """From the flags. Raises ConfigError."""
        return cls(
            None if machine_price is None else find_price(machine_price),
            None if power is None else find_power(power),
            find_carbon(carbon_intensity),
        )

    def figures(self, told: dict[str, Any], duration_s: float, num_input: int, num_output: int) -> dict[str, Any]:
        """`cost` and `energy`, None where nothing is known. `told`: `bench.counters.since`.

        Watts that are given go before what the server says; a server that does not tell how long its steps took is
        taken to have worked all the time.
        """
        phases_s = told["phases_s"]
        price = None if self.price is None else cost(self.price, duration_s, phases_s, num_input, num_output)
        used = None
        if self.power is not None:
            busy_s = duration_s if phases_s is None else sum(phases_s)
            joules = modelled_j(self.power, duration_s, busy_s)
            used = energy(joules, "model", ModelMeter(self.power).about, num_input, num_output, self.carbon)
        elif told["energy"] is not None:
            source, joules = told["energy"]
            used = energy(joules, source, "as the server tells", num_input, num_output, self.carbon)
        return {"cost": price, "energy": used, "phases_s": phases_s}
