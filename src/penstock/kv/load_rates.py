"""What a load costs and what computing costs, as measured, and which part of a text is read and which computed by that.

Nothing here looks at a clock: seconds are those that steps report (`StepOutput.duration_s` and `read`), which the run's
log has, so that a replay decides the same.
Sources: Cake, Jin et al., arXiv 2410.03065 (both at once); Jiang et al., arXiv 2411.17089 (I/O-aware partial
recomputation: the part to compute by measured rates, here of tokens instead of activations).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from penstock.core.step_shape import StepShape

LOAD_POLICIES = ("auto", "wait", "cake", "split")
READ_HALF_S, COMPUTE_HALF_S = 0.25, 4.0
"""What was measured counts half after so many seconds of reading, or of computing."""
LEAST_TOKENS = 32
"""Steps of fewer tokens say nothing of a prompt's speed."""
GAIN, GAIN_S = 0.95, 0.01
"""A split must take less than this part of the better end's time, and that much less beside."""
CHEAP_S = 1.0
"""A load that takes less is taken while nobody knows what computing costs."""
OPTIMISM = 0.8
"""Each text that is not read makes reading look so much cheaper, so that a store that was slow once is tried again."""


class Choice(NamedTuple):
    """`kind`: none, wait, split or cake. `goal`: with a split, the block up to which the text is computed.
    `seconds`: what it takes by what was measured; 0: nothing was."""

    kind: str
    goal: int = 0
    seconds: float = 0.0


class _Reads:
    """What was read from one tier: bytes, their seconds, and those until a first block comes; None: nobody knows."""

    __slots__ = ("first_s", "num_bytes", "seconds")

    def __init__(self) -> None:
        self.num_bytes = self.seconds = 0.0
        self.first_s: float | None = None


class Places:
    """Where blocks `lead` to `end` of a text would be read from.

    Args:
        tiers: of each of these blocks; below zero: of none.
        queued: bytes that each tier is to read before.
        besides: bytes that are read from it, whichever blocks are.
    """

    __slots__ = ("_behind", "_besides", "_block_bytes", "_queued", "_rates", "end", "lead")

    def __init__(
        self, rates: LoadRates, lead: int, tiers: Sequence[int], block_bytes: int, queued: Mapping[int, int],
        besides: Mapping[int, int],
    ) -> None:  # fmt: skip
        self._rates, self._block_bytes, self._queued, self._besides = rates, block_bytes, queued, besides
        self.lead, self.end = lead, lead + len(tiers)
        self._behind: dict[int, list[int]] = {}
        """By tier: how many blocks of it there are from each block on."""
        for tier in sorted({*tiers, *besides}):
            if tier >= 0:
                self._behind[tier] = [*accumulate((other == tier for other in reversed(tiers)), initial=0)][::-1]

    @property
    def known(self) -> bool:
        """Each of the tiers has been read."""
        return all(self._rates.bytes_s(tier) > 0 for tier in self._behind)

    def seconds(self, start: int, end: int, *, begun: bool = False) -> float:
        """To read blocks `start` to `end`, what waits before them included; tiers are read at once. `begun`: some
        have come, so nothing waits before the rest."""
        longest = 0.0
        for tier, behind in self._behind.items():
            num = behind[max(0, start - self.lead)] - behind[max(0, end - self.lead)]
            if num_bytes := num * self._block_bytes + self._besides.get(tier, 0):
                num_bytes += 0 if begun else self._queued.get(tier, 0)
                longest = max(longest, self._rates.load_s(num_bytes, tier, begun=begun))
        return longest


class LoadRates:
    """Attributes:
    elapsed_s: seconds of all steps so far: time, as far as decisions know it.
    forced: for measurements: the part of a text's blocks that is computed, whatever was measured.
    """

    __slots__ = ("_fit", "_reads", "elapsed_s", "forced")

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self.forced: float | None = None
        self._reads: dict[int, _Reads] = {}
        self._fit = [0.0] * 5
        """Sums over steps of tokens * tokens, tokens * pairs, pairs * pairs, tokens * seconds, pairs * seconds."""

    def read(self, tier: int, num_bytes: int, seconds: float, first_s: float = 0.0) -> None:
        """`BlockFiles.took`."""
        reads = self._reads.setdefault(tier, _Reads())
        if first_s > 0:
            reads.first_s = first_s if reads.first_s is None else (reads.first_s + first_s) / 2
        if seconds > 0:
            kept = 0.5 ** (seconds / READ_HALF_S)
            reads.num_bytes, reads.seconds = reads.num_bytes * kept + num_bytes, reads.seconds * kept + seconds

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long."""
        self.elapsed_s += seconds
        tokens, pairs = shape.num_tokens, shape.num_pairs
        if tokens - shape.num_rows + 1 >= LEAST_TOKENS and seconds > 0:
            kept = 0.5 ** (seconds / COMPUTE_HALF_S)
            seen = (tokens * tokens, tokens * pairs, pairs * pairs, tokens * seconds, pairs * seconds)
            self._fit = [old * kept + new for old, new in zip(self._fit, seen, strict=True)]

    @property
    def computes(self) -> bool:
        """What computing costs has been measured."""
        return self._fit[0] > 0

    def bytes_s(self, tier: int) -> float:
        """Bytes that are read per second; 0: nobody knows."""
        reads = self._reads.get(tier)
        return reads.num_bytes / reads.seconds if reads is not None and reads.seconds else 0.0

    @property
    def tokens_s(self) -> float:
        """Tokens of prompts that are computed per second, near the start of a text; 0: nobody knows."""
        token_s = self._costs()[0]
        return 1 / token_s if token_s else 0.0

    def _costs(self) -> tuple[float, float]:
        """Seconds per token and per pair of query and key, of at least 0."""
        tt, tp, pp, ts, ps = self._fit
        if tt == 0:
            return 0.0, 0.0
        area = tt * pp - tp * tp
        if area > 1e-3 * tt * pp:
            token_s, pair_s = (ts * pp - ps * tp) / area, (tt * ps - tp * ts) / area
            if token_s > 0 and pair_s > 0:
                return token_s, pair_s
        return ts / tt, 0.0

    def compute_s(self, start: int, end: int) -> float:
        """Seconds to compute tokens `start` to `end` of a text."""
        token_s, pair_s = self._costs()
        return (end - start) * (token_s + pair_s * (start + end + 1) / 2)

    def load_s(self, num_bytes: float, tier: int, *, begun: bool = False) -> float:
        """Seconds until so many bytes have been read, and until the first of them comes unless some have `begun` to."""
        bytes_s, reads = self.bytes_s(tier), self._reads.get(tier)
        if not bytes_s or reads is None:
            return float("inf")
        return num_bytes / bytes_s + (0.0 if begun else reads.first_s or 0.0)

    def meeting(self, places: Places, first: int, low: int, end: int, size: int, *, begun: bool = False) -> int:
        """The block from `low` on up to which computing from block `first` takes about as long as reading the rest."""
        lowest, high = low, end - 1  # the first block at which computing takes as long as reading the rest
        while low < high:
            middle = (low + high) // 2
            late = self.compute_s(first * size, middle * size) >= places.seconds(middle, end, begun=begun)
            low, high = (low, middle) if late else (middle + 1, high)

        def both(goal: int) -> float:
            return max(self.compute_s(first * size, goal * size), places.seconds(goal, end, begun=begun))

        return min((max(lowest, low - 1), low), key=both)

    def choose(self, policy: str, first: int, places: Places, size: int, *, both: bool) -> Choice:
        """What to do with the text behind its first blocks, which are there.

        `size`: tokens of a block; `both`: texts can be read and computed at once. Units: blocks.
        """
        lead, end = places.lead, places.end
        if policy == "wait" or not (both or policy == "auto"):
            return Choice("wait")
        if self.forced is not None:
            goal = max(lead, first + round(self.forced * (end - first)))
            return Choice("none" if goal >= end else "split" if both and goal > first else "wait", goal)
        if policy == "cake" or not (self.computes and places.known):
            cheap = policy != "cake" and lead == first and places.seconds(first, end) < CHEAP_S
            return Choice("wait" if cheap or not both else "cake", lead)

        def compute(goal: int) -> float:
            return self.compute_s(first * size, goal * size)

        wait_s = places.seconds(first, end) if lead == first else float("inf")
        none_s = compute(end)
        if both:
            goal = self.meeting(places, first, lead, end, size)
            split_s = max(compute(goal), places.seconds(goal, end))
            least = min(wait_s, none_s)
            if goal > first and (policy == "split" or split_s < GAIN * least - GAIN_S):
                return Choice("split", goal, split_s)
        if policy == "split" or wait_s <= none_s:
            return Choice("wait", 0, wait_s)
        return Choice("none", 0, none_s)

    def declined(self) -> None:
        """A text was computed that could have been read."""
        if self.forced is None:
            for reads in self._reads.values():
                reads.seconds *= OPTIMISM
