"""How well a model expects a text: negative log-likelihood, teacher-forced, in windows.

Conditions, so that two figures can be compared: the text is encoded once, with the tokens that the tokenizer puts
around a text. It is read in windows of `window` tokens that begin every `stride` tokens, each from an empty cache; if
the text begins with a beginning-of-sequence token, so does every window. Each token is counted once, in the first
window that reaches it, so all but the first `window` tokens see at least `window - stride` tokens before them. A first
token that nothing stands before is not counted, nor are its bytes.

Definitions: perplexity is exp(nats / tokens); bits per byte is nats / ln 2 / bytes of UTF-8, which does not depend on
the tokenizer. Intervals: percentile bootstrap over windows (Efron, 1979), whose tokens stand together, seed fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.base.errors import EngineError, InputError
from penstock.eval.scorer import Scorer
from penstock.text.tokenizer import Tokenizer

F64 = npt.NDArray[np.float64]
_ROWS = 64  # rows in float64 at a time: 64 x 128k x 8 bytes are 67 MB
_RESAMPLES = 2000
_MOST_LOGITS_BYTES = 256 << 20
Interval = tuple[float, float]


@dataclass(frozen=True)
class Window:
    """Tokens to read; those from index `first` (at least 1) on are counted."""

    token_ids: tuple[int, ...]
    first: int

    @property
    def num_counted(self) -> int:
        return len(self.token_ids) - self.first


@dataclass(frozen=True)
class Passage:
    """A text, ready to be read. `num_bytes` of UTF-8 are what the counted tokens spell."""

    windows: tuple[Window, ...]
    num_bytes: int
    window: int
    stride: int

    @property
    def num_tokens(self) -> int:
        """How many are counted."""
        return sum(w.num_counted for w in self.windows)


@dataclass(frozen=True)
class Score:
    """Nats of each window's counted tokens, and the passage they are of."""

    nats: F64
    passage: Passage

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.nats.sum()) / self.passage.num_tokens)

    @property
    def bits_per_byte(self) -> float:
        return float(self.nats.sum()) / math.log(2) / self.passage.num_bytes

    def interval(self) -> Interval | None:
        """95 % of the perplexity; None for fewer than two windows."""
        nats, tokens = resampled(self.nats, counted(self.passage))
        return None if len(self.nats) < 2 else spread(np.exp(nats / tokens))

    def difference(self, other: Score) -> Interval | None:
        """95 % of this perplexity minus the other's, on the same windows, drawn together."""
        assert self.passage is other.passage, "only the same windows can be paired"
        own, theirs, tokens = resampled(self.nats, other.nats, counted(self.passage))
        return None if len(self.nats) < 2 else spread(np.exp(own / tokens) - np.exp(theirs / tokens))


def counted(passage: Passage) -> F64:
    """Tokens counted in each window."""
    return np.array([w.num_counted for w in passage.windows], np.float64)


def resampled(*per_window: F64) -> tuple[F64, ...]:
    """Sums [2000] over windows drawn with replacement, the same draws for every array."""
    n = len(per_window[0])
    draws = np.random.default_rng(0).integers(n, size=(_RESAMPLES, n))
    return tuple(values[draws].sum(axis=1) for values in per_window)


def spread(values: F64) -> Interval:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def passage(
    text: str, tokenizer: Tokenizer, scorer: Scorer, *, window: int | None = None, stride: int | None = None,
    max_tokens: int | None = None,
) -> Passage:  # fmt: skip
    """The text cut into windows; of a text of more than `max_tokens` tokens only the beginning.

    `window`: by default the model's length, at most 512 (so that there are windows to draw from), and so many that
    their logits take 256 MiB at most. `stride`: by default half a window. Raises InputError.
    """
    room = min(512, scorer.max_len, max(2, _MOST_LOGITS_BYTES // (4 * scorer.vocab_size)))
    window = room if window is None else window
    if not 2 <= window <= scorer.max_len:
        raise InputError(f"window: must be 2 to {scorer.max_len}, not {window}", param="window")
    stride = max(1, window // 2) if stride is None else stride
    if not 1 <= stride < window:
        raise InputError(f"stride: must be 1 to {window - 1}, less than the window, not {stride}", param="stride")
    text = beginning(text, tokenizer, max_tokens)
    ids = tokenizer.encode(text)
    if len(ids) < 2:
        raise InputError(f"text: {len(ids)} tokens are too few to measure anything", param="text")
    starts_itself = ids[0] == tokenizer.bos_id
    skipped = 0 if starts_itself else len(tokenizer.decode(ids[:1]).encode())
    windows = cut(ids, window, stride, ids[0] if starts_itself else None)
    return Passage(windows, max(1, len(text.encode()) - skipped), window, stride)


def beginning(text: str, tokenizer: Tokenizer, max_tokens: int | None) -> str:
    """The longest beginning found whose tokens are at most `max_tokens`: cut as text, so its bytes are known."""
    if max_tokens is None:
        return text
    if max_tokens < 2:
        raise InputError(f"max_tokens: must be at least 2, not {max_tokens}", param="max_tokens")
    text = text[: max_tokens * 64]  # no need to encode a library
    while (num_tokens := len(tokenizer.encode(text))) > max_tokens:
        text = text[: min(len(text) - 1, len(text) * max_tokens // num_tokens)]
    return text


def cut(ids: Sequence[int], window: int, stride: int, bos: int | None) -> tuple[Window, ...]:
    """Windows over `ids`, every one but the first with `bos` put before it, within its length."""
    windows: list[Window] = []
    done, start = 1, 0  # tokens before `done` are counted, or cannot be
    while done < len(ids):
        head = (bos,) if bos is not None and start > 0 else ()
        part = (*head, *ids[start : start + window - len(head)])
        windows.append(Window(part, done - start + len(head)))
        done = start + len(part) - len(head)
        # The next one begins where something stands before what it counts, and late enough to count something.
        start = max(min(start + stride, done - 1), done + 1 - window + (bos is not None))
    return tuple(windows)


def log_probs(logits: F32) -> F64:
    """Of every token, natural logarithm: [T, V] -> [T, V]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


def token_nats(logits: F32, window: Window) -> F64:
    """What each counted token of a window costs. Raises EngineError for logits that are not numbers."""
    rows = logits[window.first - 1 : len(window.token_ids) - 1]
    targets = np.array(window.token_ids[window.first :])
    out = np.empty(len(targets))
    for lo in range(0, len(targets), _ROWS):
        part = targets[lo : lo + _ROWS]
        out[lo : lo + _ROWS] = -log_probs(rows[lo : lo + _ROWS])[np.arange(len(part)), part]
    if not np.isfinite(out).all():
        raise EngineError("the model gave logits that are not finite")
    return out


def score(scorer: Scorer, passage: Passage, advance: Callable[[], None] = lambda: None) -> Score:
    """Read all windows; `advance` is called after each. Raises EngineError."""
    nats = []
    for window in passage.windows:
        nats.append(token_nats(scorer.logits(window.token_ids), window).sum())
        advance()
    return Score(np.array(nats), passage)
