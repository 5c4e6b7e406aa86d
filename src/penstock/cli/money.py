"""Flags about what a run costs, in money and in carbon: those of `penstock sim` and of `penstock bench`."""

from __future__ import annotations

from typing import Any


def add_arguments(group: Any) -> None:
    group.add_argument(
        "--machine-price", metavar="PRICE", help="tell prices per million tokens: USD an hour, a device's name, or "
        "FILE.toml#NAME",
    )  # fmt: skip
    group.add_argument("--power", metavar="W", help="watts IDLE:LOAD, or a device's name: what the model of energy has")
    group.add_argument("--carbon-intensity", default="world", metavar="G", help="grams of CO2 per kWh (default: world)")
