"""A small classifier of length buckets over what a prompt's tokens are, trained while requests end.

Softmax regression over hashed features: tokens, pairs of neighbours, the last tokens by their place, how long the
prompt is and what max_tokens says. One update per ended request, and some of earlier ones again. S3 fine-tunes
DistilBERT for this. That is 66 million parameters beside each prompt, on the cores that the model itself needs here, in
an engine of two of them longer than a step; this is some hundred products, and learns from the first answers on instead
of from a data set. What it cannot do is understand: a prompt of new words is told by its length.
Sources: Jin et al., S3, arXiv 2306.06000, section 3 (buckets, training on what was mispredicted); Weinberger et al.,
2009, arXiv 0902.2206 (hashing); Duchi et al., AdaGrad, 2011.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ModelError
from penstock.core.lengths import bucket_end, bucket_of
from penstock.core.request import Request
from penstock.formats.files import quoted, read_exactly
from penstock.formats.safetensors import read_safetensors
from penstock.formats.safetensors_out import write_safetensors
from penstock.lengths import refused

BUCKETS = 20
"""The last one holds all that is longer than 16,384 tokens."""
WIDTH = 1 << 14
HEAD, TAIL, PLACES = 64, 192, 8
"""Tokens of a prompt that are looked at: its first, its last, and of those the last ones by their place."""
RATE = 0.3
AGAIN = 3
"""Earlier examples per new one."""
KEPT = 512
VERSION = 1
"""Of the file: `weights` and `squares`, float32 [WIDTH, BUCKETS], and `lengths`, int64 [version, requests learned]."""

Features = npt.NDArray[np.int64]
Example = tuple[Features, int]


def features(prompt: Seq[int], max_tokens: int) -> Features:
    """Places [n] in the table, each once, n <= about 550."""
    ids = np.asarray(prompt, np.int64)
    ids = np.concatenate([ids[:HEAD], ids[max(HEAD, len(ids) - TAIL) :]])
    last = ids[-PLACES:]
    kinds = [
        3 * ids,
        (ids[:-1] * 1_000_003 + ids[1:]) * 3 + 1,
        ((last * PLACES + np.arange(len(last))) * 7 + 5) * 3 + 2,
        np.array([-1 - bucket_of(len(prompt)), -101 - bucket_of(max_tokens), -301], np.int64),
    ]
    keys = np.concatenate(kinds).astype(np.uint64)
    keys ^= keys >> np.uint64(31)
    keys *= np.uint64(0x9E3779B97F4A7C15)
    return np.unique((keys >> np.uint64(64 - 14)).astype(np.int64))


class LearnedPredictor:
    """Args:
    file: a table that `penstock lengths` wrote; "": it begins knowing nothing.
    quantile: of the predicted distribution, that is told, (0, 1].
    least: requests that must have ended before anything is told; a table from a file knows at once.
    """

    name = "learned"

    def __init__(self, file: str = "", quantile: float = 0.6, least: int = 16) -> None:
        if not (0 < quantile <= 1 and least >= 1):
            raise refused("learned needs a quantile above 0 and at most 1, and least 1 or more")
        self._quantile, self._least = quantile, least
        self._weights = np.zeros((WIDTH, BUCKETS), np.float32)
        self._squares = np.full((WIDTH, BUCKETS), 1e-2, np.float32)
        self._kept: list[Example] = []
        self._rng = np.random.default_rng(0)
        self.num_learned = 0
        if file:
            self._read(Path(file))

    def question(self, request: Request) -> Request | None:
        return None

    def predict(self, request: Request, answer: Seq[int]) -> int:
        if self.num_learned < self._least:
            return 0
        shares = np.cumsum(self._expect(features(request.prompt_token_ids, request.max_tokens)))
        bucket = int(np.searchsorted(shares, self._quantile * shares[-1]))
        return min(bucket_end(bucket), request.max_tokens)

    def learn(self, request: Request, num_generated: int) -> None:
        self.train([(request.prompt_token_ids, request.max_tokens, num_generated)])

    def train(self, examples: Iterable[tuple[Seq[int], int, int]]) -> None:
        """(prompt, max_tokens, tokens generated) of requests that have ended, in order."""
        for prompt, max_tokens, length in examples:
            new = (features(prompt, max_tokens), min(bucket_of(length), BUCKETS - 1))
            self._update(new)
            if self._kept:
                for i in self._rng.integers(len(self._kept), size=AGAIN).tolist():
                    self._update(self._kept[i])
            if len(self._kept) < KEPT:
                self._kept.append(new)
            else:
                self._kept[self.num_learned % KEPT] = new
            self.num_learned += 1

    def save(self, path: Path) -> None:
        """Raises OSError."""
        counts = np.array([VERSION, self.num_learned], np.int64)
        write_safetensors(path, {"lengths": counts, "weights": self._weights, "squares": self._squares})

    def _read(self, path: Path) -> None:
        try:
            found = read_safetensors(path)
            shapes = {name: (ref.dtype, ref.shape) for name, ref in found.items()}
            table = ("F32", (WIDTH, BUCKETS))
            if shapes != {"lengths": ("I64", (2,)), "weights": table, "squares": table}:
                raise refused(f"learned: {quoted(path)} is no table of lengths; make one with `penstock lengths`")
            data = {name: read_exactly(path, ref.offset, ref.nbytes) for name, ref in found.items()}
        except (ModelError, OSError) as error:
            raise refused(f"learned: {error}") from None
        version, learned = np.frombuffer(data["lengths"], "<i8").tolist()
        tables = [np.frombuffer(data[name], "<f4").reshape(WIDTH, BUCKETS).copy() for name in ("weights", "squares")]
        if version != VERSION or learned < 0 or not all(np.isfinite(x).all() for x in tables) or tables[1].min() <= 0:
            raise refused(f"learned: {quoted(path)} is damaged or of another version; make it with `penstock lengths`")
        self._weights, self._squares = tables
        self.num_learned = max(self._least, learned)

    def _expect(self, places: Features) -> npt.NDArray[np.float32]:
        """Probabilities [BUCKETS]."""
        scores = self._weights[places].sum(axis=0) / np.float32(np.sqrt(len(places)))
        odds: npt.NDArray[np.float32] = np.exp(scores - scores.max())
        odds /= odds.sum()
        return odds

    def _update(self, example: Example) -> None:
        places, bucket = example
        step = self._expect(places)
        step[bucket] -= 1
        step /= np.float32(np.sqrt(len(places)))
        self._squares[places] += step * step
        self._weights[places] -= np.float32(RATE) * step / np.sqrt(self._squares[places])
