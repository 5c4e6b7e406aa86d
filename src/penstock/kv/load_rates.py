"""What a load costs and what computing costs, as measured, and which part of a text is read and which computed by that.

Nothing here looks at a clock: seconds are those that steps report (`StepOutput.duration_s` and `read`), which the run's
log has, so that a replay decides the same.
Sources: Cake, Jin et al., arXiv 2410.03065 (both at once); Jiang et al., arXiv 2411.17089 (I/O-aware partial
recomputation: the part to compute by measured rates, here of tokens instead of activations).
"""

from __future__ import annotations

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


class LoadRates:
    """Attributes:
    elapsed_s: seconds of all steps so far: time, as far as decisions know it.
    forced: for measurements: the part of a text's blocks that is computed, whatever was measured.
    """

    __slots__ = ("_bytes", "_first_s", "_fit", "_read_s", "elapsed_s", "forced")

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self.forced: float | None = None
        self._bytes = self._read_s = 0.0
        self._first_s: float | None = None
        self._fit = [0.0] * 5
        """Sums over steps of tokens * tokens, tokens * pairs, pairs * pairs, tokens * seconds, pairs * seconds."""

    def read(self, num_bytes: int, seconds: float, first_s: float = 0.0) -> None:
        """`BlockFiles.took`."""
        if first_s > 0:
            self._first_s = first_s if self._first_s is None else (self._first_s + first_s) / 2
        if seconds > 0:
            kept = 0.5 ** (seconds / READ_HALF_S)
            self._bytes, self._read_s = self._bytes * kept + num_bytes, self._read_s * kept + seconds

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long."""
        self.elapsed_s += seconds
        tokens, pairs = shape.num_tokens, shape.num_pairs
        if tokens - shape.num_rows + 1 >= LEAST_TOKENS and seconds > 0:
            kept = 0.5 ** (seconds / COMPUTE_HALF_S)
            seen = (tokens * tokens, tokens * pairs, pairs * pairs, tokens * seconds, pairs * seconds)
            self._fit = [old * kept + new for old, new in zip(self._fit, seen, strict=True)]

    @property
    def known(self) -> bool:
        """Both have been measured."""
        return self._read_s > 0 and self._fit[0] > 0

    @property
    def bytes_s(self) -> float:
        """Bytes that are read per second; 0: nobody knows."""
        return self._bytes / self._read_s if self._read_s else 0.0

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

    def load_s(self, num_bytes: float) -> float:
        """Seconds until so many bytes have been read, what waits before them included."""
        first_s = self._first_s or 0.0
        return first_s + num_bytes * self._read_s / self._bytes if self._bytes else float("inf")

    def choose(
        self, policy: str, first: int, lead: int, end: int, size: int, block_bytes: int, queued: int, *, both: bool
    ) -> Choice:
        """What to do with blocks `first` to `end` of a text, of which those from `lead` on are in the store.

        `size`: tokens of a block; `queued`: bytes that are to be read before; `both`: texts can be read and computed at
        once. Units: blocks, bytes.
        """
        if policy == "wait" or not (both or policy == "auto"):
            return Choice("wait")
        if both and self.forced is not None:
            goal = max(lead, first + round(self.forced * (end - first)))
            return Choice("none" if goal >= end else "split" if goal > first else "wait", goal)
        if policy == "cake" or not self.known:
            cheap = policy != "cake" and lead == first and self.load_s((end - first) * block_bytes + queued) < CHEAP_S
            return Choice("wait" if cheap or not both else "cake", lead)

        def load(goal: int) -> float:
            return self.load_s((end - goal) * block_bytes + queued)

        def compute(goal: int) -> float:
            return self.compute_s(first * size, goal * size)

        wait_s = load(first) if lead == first else float("inf")
        none_s = compute(end)
        if both:
            low, high = lead, end - 1  # the first block at which computing takes as long as reading the rest
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if compute(middle) >= load(middle) else (middle + 1, high)
            goal = min((max(lead, low - 1), low), key=lambda g: max(compute(g), load(g)))
            split_s = max(compute(goal), load(goal))
            least = min(wait_s, none_s)
            if goal > first and (policy == "split" or split_s < GAIN * least - GAIN_S):
                return Choice("split", goal, split_s)
        if policy == "split" or wait_s <= none_s:
            return Choice("wait", 0, wait_s)
        return Choice("none", 0, none_s)

    def declined(self) -> None:
        """A text was computed that could have been read."""
        if self.forced is None:
            self._read_s *= OPTIMISM
