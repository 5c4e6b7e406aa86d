"""From the settings to a KV selector."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from penstock.config import EngineConfig
from penstock.config.selection import Keeping
from penstock.core.model_spec import ModelSpec
from penstock.core.selection import KVSelector
from penstock.model.emitter import Reading
from penstock.runner.rows import RowStore
from penstock.runner.storage import Storage
from penstock.select import KV_SELECTORS
from penstock.select.bench import SelectionBench
from penstock.select.infinigen import token_reads, turns_of
from penstock.select.quest import page_reads

if TYPE_CHECKING:
    from penstock.runner.selecting import RowSelections
    from penstock.text.tokenizer import Tokenizer


class TokenKinds(NamedTuple):
    """What tokens look like, for selectors that keep some for it."""

    is_special: Callable[[int], bool] = lambda token: False
    is_punctuation: Callable[[int], bool] = lambda token: False


NO_KINDS = TokenKinds()


def kinds_of(tokenizer: Tokenizer | None) -> TokenKinds:
    """No token is anything without a tokenizer."""
    if tokenizer is None or tokenizer.table is None:
        return NO_KINDS
    special, table = frozenset(tokenizer.special_ids), tokenizer.table

    def is_punctuation(token: int) -> bool:
        text = table[token].decode("utf-8", "ignore").strip()
        return bool(text) and not any(c.isalnum() for c in text)

    return TokenKinds(special.__contains__, is_punctuation)


def keeping_of(config: EngineConfig) -> Keeping | None:
    """What memory must know of the selector; None: everything is kept. Raises: ConfigError for an unknown one."""
    selection = config.selection
    if selection is None:
        return None
    return Keeping(selection, *KV_SELECTORS.traits(selection.method))


def reading_of(
    keeping: Keeping | None, spec: ModelSpec, fingerprint: Callable[[], str], *, hidden: bool = False,
    moves: bool = False,
) -> Reading:  # fmt: skip
    """What the model has to do otherwise for it. `hidden`: see `Reading`; `moves`: texts may stand anywhere.

    Raises: ConfigError for a profile that is not this model's.
    """
    if keeping is None:
        return Reading(raw_keys=moves, hidden=hidden)
    if keeping.ahead:
        return Reading(tokens=token_reads(keeping.config), turns=turns_of(keeping.config, spec, fingerprint))
    if keeping.drops == "nothing":
        return Reading(pages=page_reads(keeping.config))
    return Reading(raw_keys=keeping.cache_positions, observe=keeping.drops == "tokens" and keeping.watches != "nothing")


def make_selector(
    config: EngineConfig, spec: ModelSpec, kinds: TokenKinds, fingerprint: Callable[[], str]
) -> KVSelector | None:
    """Raises: ConfigError for options that do not fit this model (a profile of another one)."""
    selection = config.selection
    if selection is None:
        return None
    made: KVSelector = KV_SELECTORS.get(selection.method)(SelectionBench(selection, spec, *kinds, fingerprint))
    return made


def make_selections(
    selector: KVSelector, spec: ModelSpec, keeping: Keeping, rows: RowStore, storage: Storage
) -> RowSelections | None:
    """`selector` chooses what these rows keep; None if it does not drop tokens."""
    if selector.drops != "tokens":
        return None
    from penstock.runner.selecting import RowSelections  # nobody else needs it at the start

    return RowSelections(selector, spec, rows, storage, observe=keeping.config.options.observe)
