"""How fast the engine gets on, measured: what predictions of waiting times rest on."""

from __future__ import annotations

from penstock.core.messages import EngineSnapshot

ALPHA = 0.3
MIN_INTERVAL_S = 0.05
MIN_PREFILL_TOKENS = 32


class Pace:
    """Generated tokens per second by how many sequences ran (in powers of two), prompt tokens per second, lengths.

    What has not been seen is judged in favour of the client: without a measurement nothing takes time, and from few
    sequences to many the speed is taken to grow in proportion, until it is seen how it does.
    """

    def __init__(self) -> None:
        self._last: EngineSnapshot | None = None
        self._decode: dict[int, float] = {}
        self._prefill_per_s = 0.0
        self._mean_tokens = 0.0

    def observe(self, now: EngineSnapshot) -> None:
        """Take in a snapshot; the same one twice does no harm."""
        last = self._last
        if last is not None and now.step < last.step:
            last = None  # another engine
        if last is not None and now.time_s - last.time_s < MIN_INTERVAL_S:
            return
        self._last = now
        if last is None or last.num_running + last.num_waiting == 0 or now.step == last.step:
            return  # it had nothing to do: the interval says nothing
        seconds = now.time_s - last.time_s
        sampled = now.counters.get("num_sampled_tokens", 0.0) - last.counters.get("num_sampled_tokens", 0.0)
        scheduled = now.counters.get("num_scheduled_tokens", 0.0) - last.counters.get("num_scheduled_tokens", 0.0)
        running = (now.num_running + last.num_running) // 2
        if running and sampled > 0:
            bucket = running.bit_length() - 1
            self._decode[bucket] = _mixed(self._decode.get(bucket, 0.0), sampled / seconds)
        prefilled = scheduled - sampled
        if prefilled >= MIN_PREFILL_TOKENS:
            self._prefill_per_s = _mixed(self._prefill_per_s, prefilled / seconds)

    def finished(self, num_tokens: float) -> None:
        """A sequence has ended with so many generated tokens."""
        self._mean_tokens = _mixed(self._mean_tokens, num_tokens)

    def prefill_s(self, num_tokens: float) -> float:
        """Seconds to compute so many prompt tokens."""
        return num_tokens / self._prefill_per_s if self._prefill_per_s > 0 else 0.0

    def endings_s(self, num_sequences: float, num_running: int) -> float:
        """Seconds until so many sequences have ended while `num_running` run."""
        rate = self.decode_per_s(num_running)
        return num_sequences * self._mean_tokens / rate if rate > 0 else 0.0

    def decode_per_s(self, num_running: int) -> float:
        """Generated tokens per second of so many sequences together; 0 if unknown."""
        bucket = max(1, num_running).bit_length() - 1
        below = [b for b in self._decode if b <= bucket]
        if not below:
            return 0.0
        known = max(below)
        return self._decode[known] * float(1 << (bucket - known))


def _mixed(old: float, new: float) -> float:
    return new if old == 0 else old + ALPHA * (new - old)
