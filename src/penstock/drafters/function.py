"""Your own function as a drafter: whatever it returns, no token changes. See docs/guides/add-a-drafter.md.

`function` names it, as `module:name`. It is called with the tokens so far (a list of ids) and how many drafts there
is room for, and returns the tokens that it expects next: a list of ids, or a list of such lists, likeliest first. If it
has an attribute `text` that is true, it returns text instead, or a list of texts: what a retriever finds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from operator import index
from typing import Any

from penstock.base.errors import ConfigError
from penstock.core.batch import SchedulerOutput
from penstock.core.draft import NO_DRAFT, DraftJob, DraftTree, Outcome
from penstock.drafters.bench import DraftBench
from penstock.drafters.trie import Trie

_LOG = logging.getLogger("penstock")


class FunctionDrafter:
    """`encode`: text -> ids, for a function that returns text."""

    name = "function"
    wants_hidden = False

    def __init__(self, function: Callable[[list[int], int], Any], encode: Callable[[str], list[int]] | None) -> None:
        self._function, self._encode = function, encode
        self._failed = False

    def track(self, output: SchedulerOutput) -> None:
        """Functions are given all they may look at."""

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        return [self._ask(job) for job in jobs]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Functions are not told."""

    def _ask(self, job: DraftJob) -> DraftTree:
        """What the function says; nothing if it fails, which the log says once."""
        try:
            paths = self._paths(self._function(job.tokens.tolist(), min(job.num_nodes, job.max_depth)))
            trie = Trie(job.num_nodes, job.max_depth)
            for path in paths[:1] if job.chain_only else paths:
                trie.add(path)
            return trie.tree()
        except Exception:
            if not self._failed:
                _LOG.exception("the drafter function failed; no drafts where it does, and this is said only once")
                self._failed = True
            return NO_DRAFT

    def _paths(self, said: Any) -> list[list[int]]:
        if said is None:
            return []
        if self._encode is not None:
            texts = [said] if isinstance(said, str) else list(said)
            return [self._encode(text) for text in texts if text]
        items = list(said)
        nested = items and not hasattr(items[0], "__index__")
        return [[index(token) for token in path] for path in items] if nested else [[index(token) for token in items]]


def make(bench: DraftBench) -> FunctionDrafter:
    function = _load(bench.config.function)
    text = bool(getattr(function, "text", False))
    if text and bench.encode is None:
        raise _refused(f"{bench.config.function!r} returns text, but this model has no tokenizer")
    return FunctionDrafter(function, bench.encode if text else None)


def _load(name: str | None) -> Callable[[list[int], int], Any]:
    if not name:
        raise _refused("the method function needs one; name it as module:name")
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise _refused(f"{name!r} is not of the form module:name")
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ImportError as error:
        raise _refused(f"{module!r} cannot be imported: {error}; put its folder on PYTHONPATH") from None
    except AttributeError as error:
        raise _refused(f"{name!r} does not exist: {error}") from None
    except Exception as error:
        raise _refused(f"{module!r} fails when it is imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise _refused(f"{name!r} cannot be called: it is of type {type(found).__name__}")
    called: Callable[[list[int], int], Any] = found
    return called


def _refused(why: str) -> ConfigError:
    return ConfigError(f"speculative_config: function: {why}", field="speculative_config")
