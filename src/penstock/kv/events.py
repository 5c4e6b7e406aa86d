"""What enters and leaves the prefix cache, its tier and the store, as events for whoever routes requests.

Integers only. Without a recorder nothing is kept and nothing is named. It knows of a block on the device what the
prefix cache calls it: its slabs, one per group with blocks, which are its own as long as it is there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.core import page_ops
from penstock.core.adapter import number_of
from penstock.core.kv_events import DEVICE, DISK, HOST, REMOTE, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from penstock.kv.block_names import BlockNames
from penstock.kv.block_texts import BlockTexts, TextRun
from penstock.kv.store_index import NAME_BYTES, hash_of

if TYPE_CHECKING:
    from penstock.core.sequence import Sequence as Seq
    from penstock.kv.block_names import BlockNames
    from penstock.kv.store_index import StoreIndex

Slabs = tuple[int, ...]
_BLOCK = re.compile(rf"/([0-9a-f]{{{2 * NAME_BYTES}}})-[0-9a-f]+\Z")


MEDIA = {page_ops.DISK: DISK, page_ops.REMOTE: REMOTE}
"""By tier."""


class EventSettings(NamedTuple):
    """`secret`: of the names, where no store has one. `include_token_ids`: tell what blocks hold."""

    secret: bytes
    include_token_ids: bool = False


class EventRecorder:
    """A part of the KV manager. `stores`: whose changes are told, too, by medium."""

    def __init__(self, names: BlockNames, *, include_token_ids: bool, stores: Mapping[str, StoreIndex]) -> None:
        self._names = names
        self._texts = BlockTexts() if include_token_ids else None
        self._stores = {medium: (index, Counter[int]()) for medium, index in stores.items()}
        for index in stores.values():
            index.keeps_changes = True
        self._device: dict[Slabs, int] = {}
        self._host: dict[Slabs, int] = {}
        self._adapters: dict[int, tuple[int, str]] = {}
        self._places: Counter[int] = Counter()
        """Of blocks with an adapter: its number and name, and in how many media they are."""
        self._events: list[KVEvent] = [AllBlocksCleared()]  # whoever followed another engine here starts afresh

    @property
    def named_with(self) -> dict[str, Any]:
        """What whoever names the same blocks has to know, as `core.messages.EngineInfo` has it."""
        return {"block_secret": self._names.secret, "block_fingerprint": self._names.fingerprint}

    def entered(self, seq: Seq, first: int, blocks: Sequence[Slabs]) -> None:
        """Blocks of `seq` from number `first` on are in the prefix cache now. Mutates: the names its cursor knows."""
        end = first + len(blocks)
        names = self._names.of(seq, end)
        hashes = [hash_of(name) for name in names[first:end]]
        self._device.update(zip(blocks, hashes, strict=True))
        if (adapter := seq.request.rules.adapter) is not None:
            self._adapters.update(dict.fromkeys(hashes, (number_of(adapter), adapter.name)))
        parent = hash_of(names[first - 1]) if first else None
        if self._texts is None:
            self._tell(TextRun(hashes, parent, []), DEVICE)
            return
        size = self._names.block_size
        run = TextRun(hashes, parent, seq.token_ids[first * size : end * size].tolist())
        self._tell(run, DEVICE)
        unknown = [name for name in hashes if not self._texts.knows(name)]
        self._texts.learn(run)
        for medium, (_, held) in self._stores.items():
            if found := [name for name in unknown if name in held]:  # told before without tokens, which nobody knew
                self._stored(found, medium)

    def left(self, blocks: Iterable[Slabs]) -> None:
        """The prefix cache has let go of blocks on the device."""
        self._removed(_forgotten(self._device, blocks), DEVICE)

    def copied(self, blocks: Iterable[Slabs], copies: Iterable[Slabs]) -> None:
        """What the prefix cache has on the device as `blocks` it has in the tier as `copies`, too."""
        hashes = [self._device[block] for block in blocks]
        self._host.update(zip(copies, hashes, strict=True))
        self._stored(hashes, HOST)

    def dropped(self, copies: Iterable[Slabs]) -> None:
        """The prefix cache has let go of blocks in the tier."""
        self._removed(_forgotten(self._host, copies), HOST)

    def emptied(self) -> None:
        """The prefix cache is about to forget everything; what a store holds stays."""
        if not self._stores:
            self._events = [AllBlocksCleared()]  # whatever was told before in this step is void
            self._texts = None if self._texts is None else BlockTexts()
            self._adapters.clear()
            self._places.clear()
        else:
            self._removed(list(self._device.values()), DEVICE)
            self._removed(list(self._host.values()), HOST)
        self._device.clear()
        self._host.clear()

    def take(self) -> list[KVEvent]:
        """What has changed since this was last asked, in order."""
        for medium, (index, held) in self._stores.items():
            for came, changes in groupby(index.take_changes(), key=itemgetter(1)):
                hashes = self._in_store(path for path, _ in changes)
                if came:
                    self._stored(list(_more(held, hashes)), medium)
                else:
                    self._removed(list(_fewer(held, hashes)), medium)
        events, self._events = self._events, []
        return events

    def _in_store(self, paths: Iterable[str]) -> Iterator[int]:
        """Of those of this model: `FINGERPRINT/TENANT/NAME-NUMBER`. States are none, and anything may lie there."""
        mine = f"{self._names.fingerprint}/"
        found = (_BLOCK.search(path) for path in paths if path.startswith(mine))
        return (hash_of(bytes.fromhex(match[1])) for match in found if match is not None)

    def _stored(self, hashes: list[int], medium: str) -> None:
        """Somewhere else than on the device. With their texts where those are known and to be told."""
        if self._texts is not None:
            self._texts.placed(hashes)
            for run in self._texts.runs(hashes):
                self._tell(run, medium)
            hashes = [name for name in hashes if not self._texts.knows(name)]
        if hashes:
            self._tell(TextRun(hashes, None, []), medium)

    def _tell(self, run: TextRun, medium: str) -> None:
        size = self._names.block_size
        if not self._adapters:
            self._events.append(BlockStored(run.hashes, run.parent, run.tokens, size, None, medium, None))
            return
        # Blocks that are told with their parent or tokens are of one text, and so of one adapter.
        for adapter, each in groupby(run.hashes, self._adapters.get):
            hashes, (number, name) = list(each), adapter or (None, None)
            self._events.append(BlockStored(hashes, run.parent, run.tokens, size, number, medium, name))
            if adapter is not None:
                self._places.update(hashes)

    def _removed(self, hashes: list[int], medium: str) -> None:
        if not hashes:
            return
        for name in hashes if self._adapters else ():
            self._places[name] -= 1
            if self._places[name] <= 0:
                del self._places[name]
                self._adapters.pop(name, None)
        if self._texts is not None:
            self._texts.removed(hashes)
            if not self._stores:
                self._texts.forget()
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes.extend(hashes)
        else:
            self._events.append(BlockRemoved(hashes, medium))


def _more(held: Counter[int], hashes: Iterable[int]) -> Iterator[int]:
    """Those that were not in a store. Mutates: how often blocks are there: tenants may have the same one."""
    for name in hashes:
        held[name] += 1
        if held[name] == 1:
            yield name


def _fewer(held: Counter[int], hashes: Iterable[int]) -> Iterator[int]:
    """Those that are in it no more. Mutates: as `_more`."""
    for name in hashes:
        held[name] -= 1
        if not held[name]:
            del held[name]
            yield name


def _forgotten(known: dict[Slabs, int], blocks: Iterable[Slabs]) -> list[int]:
    """What was known by `blocks`, which is not known any more; nothing of those that `emptied` has told of."""
    return [known.pop(block) for block in blocks if block in known]
