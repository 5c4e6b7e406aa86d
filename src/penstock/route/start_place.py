"""Where a model starts soonest: on the machine whose memory or disk has it, unless too much waits there.

Source: ServerlessLLM, Fu et al., OSDI 2024, section 6.1: the time to load is q + n / b, with q what waits in the
machine's queue, n the bytes, and b the rate of the slowest tier that they pass, since tiers work at the same time on
parts that follow each other.

Whole numbers alone: bytes, bytes/s, microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class StartNode:
    """A machine, as whoever places models sees it.

    Attributes:
        number: which one.
        rates: bytes/s out of each tier, the nearest first: memory, disk, remote.
        held: model -> the nearest tier that has it; a model that is not named lies in the farthest.
        free_bytes: of memory for another model.
        queued_us: until what it loads already is there.
        ready_us: what a start takes beside the load.
    """

    number: int
    rates: tuple[int, ...]
    held: Mapping[str, int] = field(default_factory=dict)
    free_bytes: int = 1 << 62
    queued_us: int = 0
    ready_us: int = 0

    def load_us(self, model: str, num_bytes: int) -> int:
        """From the first byte to the last."""
        tier = self.held.get(model, len(self.rates) - 1)
        return -(-num_bytes * 1_000_000 // min(self.rates[: tier + 1]))

    def start_us(self, model: str, num_bytes: int) -> int:
        """From now until an engine is ready."""
        return self.queued_us + self.load_us(model, num_bytes) + self.ready_us

    def given(self, model: str, num_bytes: int) -> StartNode:
        """The same machine with this load in its queue, and the model in its memory behind it."""
        return replace(
            self, queued_us=self.queued_us + self.load_us(model, num_bytes), held={**self.held, model: 0},
            free_bytes=self.free_bytes - num_bytes,
        )  # fmt: skip

    def passed(self, time_us: int) -> StartNode:
        """The same machine so much later."""
        return replace(self, queued_us=max(0, self.queued_us - time_us))


def place(nodes: Sequence[StartNode], model: str, num_bytes: int) -> StartNode | None:
    """The machine with the earliest estimated start, of several the lowest number; None if none has the memory."""
    fitting = [node for node in nodes if node.free_bytes >= num_bytes]
    return min(fitting, key=lambda node: (node.start_us(model, num_bytes), node.number), default=None)
