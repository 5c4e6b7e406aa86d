"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Looks for stop strings in text that arrives in deltas, and holds back what might become one.

    Which one wins: the occurrence that *ends* first, and among those that end together the longest. The result hence
    depends on the text alone, not on how it is cut into deltas (vLLM takes the first string of the list that occurs
    after a token; both agree unless one token completes two stop strings). The text is cut where the occurrence
    begins, or where it ends with `include_stop`.

    `min_tokens`: text of the first `min_tokens` tokens cannot complete a stop string; an occurrence that begins in it
    and ends later counts. Give `feed` the text of one token at a time while that matters.

    Costs: one step per character and stop string; the caller bounds number and length of strings (`text.validate`).
    Source: the failure function of Knuth, Morris & Pratt, SIAM J. Comput. 6 (1977).
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False, min_tokens: int = 0) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = list(dict.fromkeys(stops))
        self._include = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._fail = [_failure(stop) for stop in self._stops]
        self._state = [0] * len(self._stops)
        """Length of the longest prefix of each stop string that the text ends with."""
        self._held = ""
        self.hit: str | None = None

    def feed(self, delta: str, num_tokens: int = 1) -> tuple[str, str | None]:
        """(text that may be shown now, the stop string found or None). After a hit nothing is ever shown again."""
        if self.hit is not None:
            return "", self.hit
        if not self._stops:
            return delta, None
        self._num_tokens += num_tokens
        may_end = self._num_tokens > self._min_tokens
        best: tuple[int, int] | None = None
        for n, stop in enumerate(self._stops):
            end = self._advance(n, delta, len(delta) if best is None else best[0], may_end)
            if end is not None and (best is None or (end, -len(stop)) < (best[0], -len(self._stops[best[1]]))):
                best = end, n
        text = self._held + delta
        if best is not None:
            end, n = best
            self.hit = self._stops[n]
            cut = len(self._held) + end - (0 if self._include else len(self.hit))
            self._held = ""
            return text[:cut], self.hit
        keep = len(text) - max(self._state)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """What was held back; for a text that ended without a stop string."""
        held, self._held = self._held, ""
        return "" if self.hit is not None else held

    def _advance(self, n: int, delta: str, limit: int, may_end: bool) -> int | None:
        """Carry stop string `n` over delta[:limit]; where its first occurrence ends, if one does."""
        stop, fail, state = self._stops[n], self._fail[n], self._state[n]
        at = 0
        while at < limit:
            if state == 0:
                at = delta.find(stop[0], at, limit)
                if at < 0:
                    break
                state = 1
            else:
                while state and stop[state] != delta[at]:
                    state = fail[state - 1]
                if stop[state] == delta[at]:
                    state += 1
            at += 1
            if state == len(stop):
                if may_end:
                    self._state[n] = state
                    return at
                state = fail[state - 1]
        self._state[n] = state
        return None


def _failure(stop: str) -> list[int]:
    """`out[i]`: length of the longest proper prefix of stop[:i+1] that it also ends with."""
    out = [0] * len(stop)
    k = 0
    for i in range(1, len(stop)):
        while k and stop[i] != stop[k]:
            k = out[k - 1]
        if stop[i] == stop[k]:
            k += 1
        out[i] = k
    return out
