"""What a rank is told of the memory that it shares with others."""

from __future__ import annotations

import msgspec


class Links(msgspec.Struct, frozen=True):
    """Descriptors in the rank's process, -1 where there is nothing: memory of all ranks, of those of its stage, of the
    channels from the stage before and to the one behind (`parallel.links`)."""

    everyone: int = -1
    stage: int = -1
    before: int = -1
    behind: int = -1

    @property
    def descriptors(self) -> tuple[int, ...]:
        return tuple(fd for fd in (self.everyone, self.stage, self.before, self.behind) if fd >= 0)
