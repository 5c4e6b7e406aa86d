"""What tokens cost: the price of the machine for the time it was there, shared out among what it delivered.

    cost                  = price per hour x span / 3600
    input share           = seconds of steps that prompts owe / seconds of all steps (`sched.costs`)
    price per 1 M input   = cost x input share / input tokens x 10^6;  of output: the other share / output tokens
    cost efficiency       = output tokens per unit of money

Idle time is paid for as well, in the same shares: a machine that waits makes its tokens dear. Prices are declared, in
the table below or in a file of the user's own; none of them is asked of anybody.

Source: the cost per token of the surveys' "price" metric; the split by phases is that of Splitwise, arXiv 2311.18677.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from penstock.base.errors import ConfigError

EXAMPLE = '[my-server]\nper_hour = 0.35\ncurrency = "EUR"\nsource = "the bill of March"'


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one machine. `source`: where the figure comes from, in words."""

    per_hour: float
    currency: str = "USD"
    source: str


_LIST = "the middle of on-demand list prices that were told early in 2026"
PRICES = {
    "h200": Price(per_hour=4.0, source=f"{_LIST}, 3.50 to 4.50 USD an hour; yours differ"),
    "h100-sxm": Price(per_hour=3.2, source=f"{_LIST}, 2.49 to 3.99 USD an hour; yours differ"),
    "a100-80g": Price(per_hour=2.0, source=f"{_LIST}, 1.49 to 2.49 USD an hour; yours differ"),
    "l4": Price(per_hour=0.8, source="assumption: no list was looked up; give your own"),
    "cpu-2core": Price(per_hour=0.1, source="assumption: 0.05 USD for an hour of a core; give your own"),
}
"""By name of the device (`plan.devices`)."""


def find_price(given: str) -> Price:
    """`0.35` (USD an hour), a name of PRICES, or FILE.toml with a table for each machine, FILE.toml#NAME for one.

    Raises ConfigError.
    """
    try:
        per_hour = float(given)
    except ValueError:
        pass
    else:
        return _checked(Price(per_hour=per_hour, source="given on the command line"), given)
    if given in PRICES:
        return PRICES[given]
    path, _, name = given.partition("#")
    if not path.endswith(".toml"):
        raise _wrong(f"{given!r} is no number (USD an hour), no FILE.toml, and none of {', '.join(PRICES)}")
    table = read_prices(Path(path))
    if not name and len(table) == 1:
        (name,) = table
    if name not in table:
        raise _wrong(f"{path} has no machine {name!r}; write {path}#NAME with one of {', '.join(table)}")
    return table[name]


def read_prices(path: Path) -> dict[str, Price]:
    """Machines by name. Raises ConfigError."""
    try:
        found = msgspec.convert(tomllib.loads(path.read_text("utf-8")), dict[str, Price])
    except OSError as error:
        raise _wrong(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, msgspec.ValidationError) as error:
        raise _wrong(f"{path} is no table of prices such as {EXAMPLE!r}: {error}") from None
    if not found:
        raise _wrong(f"{path} has no machine; write for example {EXAMPLE!r}")
    return {name: _checked(price, name) for name, price in found.items()}


def _checked(price: Price, name: str) -> Price:
    if not 0 < price.per_hour < 1e6:
        raise _wrong(f"{name}: a price must be above 0 and below a million an hour, not {price.per_hour:g}")
    return price


def _wrong(sentence: str) -> ConfigError:
    return ConfigError(f"machine_price: {sentence}", field="machine_price")


def cost(
    price: Price, span_s: float, phases_s: tuple[float, float] | None, num_input: int, num_output: int
) -> dict[str, Any]:
    """Figures of a run of `span_s` seconds that read and made so many tokens, in `price.currency`.

    `phases_s`: seconds of steps that prompts and decoding owe; None if nobody knows: input and output then cost alike.
    None where there is nothing to share among.
    """
    whole = price.per_hour * span_s / 3600
    split = phases_s is not None and sum(phases_s) > 0
    tokens = num_input + num_output
    share = phases_s[0] / sum(phases_s) if split and phases_s is not None else num_input / tokens if tokens else 0.0

    def per_million(amount: float, num: int) -> float | None:
        return amount / num * 1e6 if num else None

    return {
        "currency": price.currency, "per_hour": price.per_hour, "price_source": price.source, "cost": whole,
        "input_share": share, "split_by": "seconds of prefill and decode" if split else "tokens",
        "per_million_input": per_million(whole * share, num_input),
        "per_million_output": per_million(whole * (1 - share), num_output),
        "per_million_tokens": per_million(whole, tokens),
        "output_tokens_per_unit": num_output / whole if whole > 0 else None,
    }  # fmt: skip
