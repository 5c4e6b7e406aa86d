"""Energy: read from the processor's own counters where that is allowed, else by a model that says it is one.

*rapl*: the kernel's powercap files count the microjoules of every processor package, and of memory where it is told
apart: of the whole machine, whoever uses it. They wrap around and must be read now and then. *model*: a device takes
`idle_w` all the time and (`load_w` - `idle_w`) more while steps run. Carbon is energy times the carbon intensity of the
grid, which is data or given.

Sources: Linux, Documentation/power/powercap; Patel et al., POLCA, arXiv 2308.12908 (power of inference between idle
and its limit); Faiz et al., LLMCarbon, arXiv 2309.14393 (power x time x intensity).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from penstock.base.errors import ConfigError

POWERCAP = Path("/sys/class/powercap")
JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class Power:
    """Watts of a device that does nothing, and of one that works. `source`: where they come from, in words."""

    idle_w: float
    load_w: float
    source: str


_IDLE = "idle: estimate, a tenth of it"
CORE_W = (1.2, 4.2)
"""Of one core. AMD EPYC 9655 data sheet: 400 W for 96 cores; idle is an estimate."""
POWERS = {
    "h200": Power(70, 700, f"NVIDIA H200 data sheet (SXM): 700 W at most; {_IDLE}"),
    "h100-sxm": Power(70, 700, f"NVIDIA H100 data sheet (SXM): 700 W at most; {_IDLE}"),
    "a100-80g": Power(40, 400, f"NVIDIA A100 data sheet (80 GB SXM): 400 W at most; {_IDLE}"),
    "l4": Power(7, 72, f"NVIDIA L4 data sheet: 72 W at most; {_IDLE}"),
    "cpu-2core": Power(2 * CORE_W[0], 2 * CORE_W[1], "AMD EPYC 9655 data sheet: 400 W for 96 cores; idle: estimate"),
}
"""By name of the device (`plan.devices`). Peaks of data sheets: what is drawn at work is less."""
CARBON = {"world": (480.0, "Ember, Global Electricity Review 2024: the world's mean of 2023")}
"""Grams of CO2 equivalent per kWh, and the source."""


def core_power(num_cores: int) -> Power:
    """Of so many cores of a server's processor, without memory, fans and losses."""
    return Power(num_cores * CORE_W[0], num_cores * CORE_W[1], f"estimate: {num_cores} cores at {CORE_W[1]} W, idle "
                 f"{CORE_W[0]} W (AMD EPYC 9655 data sheet: 400 W for 96 cores)")  # fmt: skip


def find_power(given: str) -> Power:
    """`IDLE:LOAD` in watts, or a name of POWERS. Raises ConfigError."""
    if given in POWERS:
        return POWERS[given]
    idle, found, load = given.partition(":")
    try:
        power = Power(float(idle), float(load), "given")
    except ValueError:
        power = Power(0, -1, "")
    if not found or not 0 <= power.idle_w <= power.load_w < 1e7:
        raise ConfigError(
            f"power: {given!r} is not IDLE:LOAD in watts, such as 30:120, and none of {', '.join(POWERS)}",
            field="power",
        )
    return power


def find_carbon(given: str) -> tuple[float, str]:
    """(grams of CO2 per kWh, source) of a number, or of a name of CARBON. Raises ConfigError."""
    if given in CARBON:
        return CARBON[given]
    try:
        grams = float(given)
    except ValueError:
        grams = -1.0
    if not 0 <= grams < 1e5:
        raise ConfigError(
            f"carbon_intensity: {given!r} is no number of grams per kWh and none of {', '.join(CARBON)}",
            field="carbon_intensity",
        )
    return grams, "given"


def modelled_j(power: Power, elapsed_s: float, busy_s: float) -> float:
    """Joules of so many seconds, in `busy_s` of which steps ran."""
    return power.idle_w * elapsed_s + (power.load_w - power.idle_w) * min(busy_s, elapsed_s)


class EnergyMeter(Protocol):
    """`source`: "rapl" or "model"; `about`: what it is made of, in words."""

    source: str

    @property
    def about(self) -> str: ...

    def joules(self, elapsed_s: float, busy_s: float) -> float:
        """Since it was made: `elapsed_s` seconds, in `busy_s` of which steps ran."""
        ...


@dataclass
class ModelMeter:
    """By `modelled_j`."""

    power: Power
    source: str = "model"

    @property
    def about(self) -> str:
        return f"{self.power.idle_w:g} W idle, {self.power.load_w:g} W at work ({self.power.source})"

    def joules(self, elapsed_s: float, busy_s: float) -> float:
        return modelled_j(self.power, elapsed_s, busy_s)


@dataclass
class _Zone:
    """One counter: microjoules, from 0 to `range_uj`, then from 0 again."""

    path: Path
    range_uj: int
    last_uj: int
    total_uj: int = 0

    def read(self) -> int:
        now_uj = int(self.path.read_text())
        self.total_uj += now_uj - self.last_uj if now_uj >= self.last_uj else now_uj + self.range_uj - self.last_uj
        self.last_uj = now_uj
        return self.total_uj


@dataclass
class RaplMeter:
    """The sum of all packages and their memory. Must be read more often than a counter wraps: every minute will do."""

    zones: list[_Zone] = field(default_factory=list)
    source: str = "rapl"
    about: str = "the counters of the processor's packages and memory: the whole machine"

    @classmethod
    def find(cls, root: Path = POWERCAP) -> RaplMeter | None:
        """None if there are no counters, or this process may not read them (most systems allow root only)."""
        zones = []
        for folder in sorted(root.glob("*-rapl:*")) if root.is_dir() else ():
            try:
                name = (folder / "name").read_text().strip()
                if not name.startswith("package") and name != "dram":
                    continue  # core and uncore are parts of a package, psys has all of them
                path = folder / "energy_uj"
                zones.append(_Zone(path, int((folder / "max_energy_range_uj").read_text()), int(path.read_text())))
            except (OSError, ValueError):
                continue
        return cls(zones) if zones else None

    def joules(self, elapsed_s: float, busy_s: float) -> float:
        """The arguments are not looked at."""
        return sum(zone.read() for zone in self.zones) / 1e6


def find_meter(given: str | None, root: Path = POWERCAP) -> EnergyMeter:
    """What `given` names (see `find_power`); without it the counters, else the model of this machine's cores.

    Raises ConfigError.
    """
    if given is not None and given != "rapl":
        return ModelMeter(find_power(given))
    meter = RaplMeter.find(root)
    if meter is not None:
        return meter
    if given == "rapl":
        raise ConfigError(
            f"power: rapl cannot be read here: there is no counter below {root} that this user may read; leave power "
            "out, or give IDLE:LOAD in watts", field="power",
        )  # fmt: skip
    return ModelMeter(core_power(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1))


def energy(
    joules: float, source: str, about: str, num_input: int, num_output: int, carbon: tuple[float, str]
) -> dict[str, Any]:
    """Figures of a run: joules, and grams of CO2, in all and per token; None without tokens. `source`: rapl, model."""
    grams = joules / JOULES_PER_KWH * carbon[0]
    tokens = num_input + num_output

    def per(amount: float, num: int) -> float | None:
        return amount / num if num else None

    return {
        "joules": joules, "energy_source": source, "energy_about": about,
        "joules_per_output_token": per(joules, num_output), "joules_per_token": per(joules, tokens),
        "grams_co2": grams, "grams_co2_per_output_token": per(grams, num_output),
        "carbon_g_per_kwh": carbon[0], "carbon_source": carbon[1],
    }  # fmt: skip
