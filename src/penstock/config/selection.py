"""`kv_selector`, `kv_budget` and `kv_selector_config`, parsed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import NamedTuple

from penstock.base.errors import ConfigError
from penstock.config.setting import Section, setting, settings_of
from penstock.core.selection import Drops, Watches


@dataclass(frozen=True)
class Budget:
    """Tokens that a line of a sequence may keep: `tokens`, or `share` (0 < share <= 1) of those there are."""

    tokens: int | None = None
    share: float = 1.0

    def of(self, num_tokens: int) -> int:
        """Out of `num_tokens`, at least 1. A share is rounded up."""
        if self.tokens is not None:
            return min(self.tokens, num_tokens)
        return max(1, math.ceil(self.share * num_tokens - 1e-9))


@dataclass(frozen=True, kw_only=True)
class SelectionOptions(Section):
    """The keys of `kv_selector_config`. Those that name a selector mean nothing to others."""

    sinks: int = setting(4, "First tokens that always stay; they count.", minimum=0)
    recent: int = setting(32, "Last tokens that always stay; they count.", minimum=1)
    interval: int = setting(64, "Behind the prompt: tokens from one selection to the next.", minimum=1)
    prompt_interval: int = setting(
        0, "Selections within the prompt, at multiples of so many tokens; 0: only at its end.", minimum=0
    )
    observe: int = setting(
        32, "snapkv, pyramidkv, adakv, alisa, fastgen: last tokens whose attention decides.", minimum=1, maximum=512
    )
    pool: int = setting(5, "snapkv, pyramidkv, adakv: neighbours over which attention is smoothed.", minimum=1)
    heavy: float = setting(0.5, "h2o, alisa: share of the budget that heavy hitters get.", minimum=0.0, maximum=1.0)
    history: int = setting(256, "scissorhands: tokens whose attention is counted.", minimum=1)
    threshold: float = setting(
        0.95, "fastgen: share of the attention that a head's policy has to recover.", above=0.0, maximum=1.0
    )
    frequent: float = setting(
        0.3, "fastgen: share of the context that a policy with frequent tokens keeps of them.", minimum=0.0, maximum=1.0
    )
    local: float = setting(
        0.3, "fastgen: share of the context that a policy with local tokens keeps of them.", minimum=0.0, maximum=1.0
    )
    slope: float = setting(2.0, "pyramidkv: the lowest layer's budget over the mean one's.", minimum=1.0, maximum=2.0)
    floor: float = setting(
        0.2, "adakv: share of the budget that every head gets before heads compete.", minimum=0.0, maximum=1.0
    )
    middle: float = setting(
        0.5, "leankv: share of the budget that holds tokens at half the bits, two in the room of one.", minimum=0.0,
        maximum=1.0,
    )  # fmt: skip
    dense_layers: int = setting(
        2, "quest, infinigen: first layers that read everything; infinigen: 1 at least.", minimum=0
    )
    reach: float = setting(4.0, "infinigen: how far below the largest score tokens are read, in nats.", minimum=0.0)
    rank: float = setting(
        1.0, "infinigen: share of the keys' components that are rehearsed; below 1 it needs a profile.",
        above=0.0, maximum=1.0,
    )  # fmt: skip
    profile: str | None = setting(
        None, "retrieval: file with each head's score; infinigen: with the turns of heads, as penstock writes them."
    )
    heads: float = setting(0.25, "retrieval: share of heads that keep everything.", minimum=0.0, maximum=1.0)
    keep: str = setting(
        "retrieval", "retrieval: which heads keep everything.", choices=("retrieval", "streaming", "random")
    )
    seed: int = setting(0, "random, and retrieval with keep random: what is kept by chance.", minimum=0)


@dataclass(frozen=True)
class SelectionConfig:
    """What is kept of every sequence's cache: the selector called `method`, its budget and its options.

    Selection takes place at fixed positions of a sequence, so that what it forgets does not depend on who else is
    served: at the end of its prompt, every `interval` tokens behind it and, with a `prompt_interval`, at its multiples
    within the prompt.
    """

    method: str
    budget: Budget
    options: SelectionOptions

    def next_position(self, position: int, prompt_len: int) -> int:
        """Where the first selection behind `position` takes place: once so many tokens are computed."""
        o = self.options
        if position >= prompt_len:
            return prompt_len + ((position - prompt_len) // o.interval + 1) * o.interval
        if o.prompt_interval:
            return min(prompt_len, (position // o.prompt_interval + 1) * o.prompt_interval)
        return prompt_len


class Keeping(NamedTuple):
    """What memory must know of an engine's selector: its traits (see `core.selection.KVSelector`) and its settings."""

    config: SelectionConfig
    drops: Drops
    watches: Watches
    per_head: bool
    cache_positions: bool
    always: bool = False
    aside: bool = False
    halves: bool = False
    ahead: bool = False


def parse_budget(text: str) -> Budget:
    """`512` or `25%`. Raises: ConfigError."""

    def wrong(why: str) -> ConfigError:
        return ConfigError(f"kv_budget: {text!r} {why}", field="kv_budget")

    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        value = float(number) if percent else int(number)
    except ValueError:
        raise wrong("is neither a number of tokens (512) nor a share of the context (25%)") from None
    if not math.isfinite(value) or value <= 0:
        raise wrong("keeps nothing; use at least one token, or more than 0%")
    if percent and value > 100:
        raise wrong("is more than there is; use at most 100%")
    return Budget(share=value / 100) if percent else Budget(tokens=int(value))


def parse_selection(method: str, budget: str, given: str | None) -> SelectionConfig | None:
    """None without a selector. Raises: ConfigError, naming the setting, for what makes no sense."""
    parsed = parse_budget(budget)
    if method == "none":
        if given is not None:
            raise ConfigError(
                "kv_selector_config: there is no kv_selector whose options these could be; name one, or leave them out",
                field="kv_selector_config",
            )
        return None
    if "," in method or "+" in method:
        raise ConfigError(
            f"kv_selector: {method!r} names several; a cache can be cut down by one selector only, choose one",
            field="kv_selector",
        )
    options = _options(given)
    if parsed.tokens is not None and parsed.tokens <= options.sinks:
        raise ConfigError(
            f"kv_budget: {parsed.tokens} tokens are not more than the {options.sinks} sinks that are always kept; "
            f"use at least {options.sinks + 1}, or fewer sinks in kv_selector_config",
            field="kv_budget",
        )
    return SelectionConfig(method, parsed, options)


def _options(given: str | None) -> SelectionOptions:
    if given is None:
        return SelectionOptions()

    def wrong(why: str) -> ConfigError:
        return ConfigError(f"kv_selector_config: {why}", field="kv_selector_config")

    try:
        found = json.loads(given)
    except ValueError as error:
        raise wrong(f'is not JSON: {error}; for example {{"sinks": 4}}') from None
    if not isinstance(found, dict):
        raise wrong('must be an object, as {"sinks": 4}')
    known = [item.name for item in settings_of(SelectionOptions)]
    for name in found:
        if name not in known:
            raise wrong(f"{name}: unknown; known: {', '.join(known)}")
    try:
        return SelectionOptions(**found)
    except ConfigError as error:
        raise wrong(str(error)) from None
