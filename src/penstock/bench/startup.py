"""How long an engine's process takes to be ready, and what the time goes to: cold and warm, by turns."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.base.errors import EngineError
from penstock.config import EngineConfig
from penstock.core.messages import EngineInfo, Outputs
from penstock.engine.link import Down
from penstock.engine.process_link import ProcessLink
from penstock.launch.hub import local_path
from penstock.ops.native.packed_file import SUFFIX, PackedStore


@dataclass(frozen=True)
class EngineStart:
    """Seconds from the order to the engine's word that it is ready, and its parts."""

    ready_s: float
    parts: tuple[tuple[str, float], ...]
    packed_file: str


@dataclass
class StartTimes:
    """`files`: what was dropped from the system's cache before every cold start; its bytes."""

    files: list[Path]
    num_bytes: int
    first: EngineStart | None = None
    """Which packs, if no start has."""
    cold: list[EngineStart] = field(default_factory=list)
    warm: list[EngineStart] = field(default_factory=list)


class _Alone:
    """A `link.Listener` for an engine that nobody asks anything."""

    info: EngineInfo | None = None

    def on_up(self, info: EngineInfo, epoch: int) -> None:
        self.info = info

    def on_outputs(self, message: Outputs) -> None: ...

    def on_down(self, down: Down) -> tuple[int, ...]:
        return ()

    def on_loading(self, done: int, total: int) -> None: ...

    def refuses(self, info: EngineInfo) -> str:
        return ""


def model_files(config: EngineConfig) -> list[Path]:
    """The model's files, and all packed weights that are kept. Raises ModelError."""
    path = Path(local_path(config.model.model, config.model.revision))
    own = [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if file.is_file()]
    return own + sorted(PackedStore().folder.glob("*" + SUFFIX))


def forget_pages(paths: Sequence[Path]) -> int:
    """Drop files from the system's cache, as if the machine had just been started; the bytes of them all.

    What other processes have mapped stays.
    """
    total = 0
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not written yet cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(file.fileno()).st_size
    return total


async def start_once(config: EngineConfig) -> EngineStart:
    """An engine's process from its beginning to ready, which is ended then. Raises what keeps it from starting."""
    link, listener = ProcessLink(config.as_kwargs()), _Alone()
    began_s = time.perf_counter()
    try:
        await link.start(listener)
        ready_s = time.perf_counter() - began_s
    finally:
        await link.close()
    if listener.info is None:
        raise EngineError("the engine was ready without saying what it is")
    return EngineStart(ready_s, tuple(listener.info.start_parts), listener.info.packed_file)


def measure(
    config: EngineConfig, *, cold: int, warm: int, on_start: Callable[[], None] = lambda: None
) -> StartTimes:  # fmt: skip
    """One start that does not count (it packs, if nobody has), then cold and warm ones by turns. Raises as an engine's
    start."""
    first = asyncio.run(start_once(config))
    on_start()
    files = model_files(config)
    found = StartTimes(files, sum(path.stat().st_size for path in files), first)
    for turn in range(max(cold, warm)):
        if turn < cold:
            forget_pages(files)
            found.cold.append(asyncio.run(start_once(config)))
            on_start()
        if turn < warm:
            if turn < cold:  # what was read past the cache
                asyncio.run(start_once(config))
            found.warm.append(asyncio.run(start_once(config)))
            on_start()
    return found


def medians(starts: Sequence[EngineStart]) -> dict[str, float]:
    """Seconds of every part, in order, and "ready" last: from the order to the word."""
    names = dict.fromkeys(name for start in starts for name, _ in start.parts)
    each = {name: [sum(took_s for part, took_s in start.parts if part == name) for start in starts] for name in names}
    found = {name: statistics.median(values) for name, values in each.items()}
    return found | {"in all": statistics.median(start.ready_s for start in starts)}
