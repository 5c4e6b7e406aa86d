"""Heads that retrieve keep everything; the others keep sinks and recent tokens.

Sources: Tang et al., RazorAttention, arXiv 2407.15891; Xiao et al., DuoAttention, arXiv 2410.10819; Fu et al., HeadKV,
arXiv 2410.19258. A few heads find facts wherever they stand (Wu et al., Retrieval Head, arXiv 2404.15574); all others
look at sinks and neighbours. Which are which is a property of the model, measured once: a profile of a score per layer
and kv head (`tools/retrieval_heads.py` writes it).

By their score, heads keep everything, at most the share `heads` of them, and as many as fit in budget x lines when all
others have sinks and `recent` tokens; what is left over makes the others' windows longer, all alike. `keep` turns the
profile round (`streaming`: the heads with the lowest scores keep everything) or ignores it (`random`): controls.
RazorAttention's compensation token, DuoAttention's training and HeadKV's choice of tokens within a head are not there.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ConfigError, ModelError
from penstock.core.model_spec import Attention, Latent, Layer, ModelSpec
from penstock.core.selection import KVLine, Selecting
from penstock.formats.files import quoted
from penstock.formats.json_file import read_json_object
from penstock.select.bench import SelectionBench
from penstock.select.slots import I32, I64, TokenSelector, allot, always, slots

PROFILE = "retrieval_heads.json"
"""The name of a profile that lies in a bundled model's folder."""
_BUNDLED = Path(__file__).resolve().parents[1] / "bundled"
_LIMIT_BYTES = 4 << 20
Scores = list[list[float]]
"""Layer by layer, what each of its kv heads scored; nothing for a layer without."""


class Retrieval(TokenSelector):
    """See the module. `scores` is None where chance decides."""

    name = "retrieval"

    def __init__(self, bench: SelectionBench, scores: Scores | None) -> None:
        super().__init__(bench)
        self._scores = scores

    def select(self, at: Selecting, lines: Seq[KVLine]) -> list[I32]:
        """See `KVSelector.select`."""
        lengths = np.array([len(line) for line in lines], np.int64)
        total = at.budget * len(lines)
        if lengths.sum() <= total:
            return [np.arange(n, dtype=np.int32) for n in lengths]
        sure = [always(line, at, self.options) for line in lines]
        least = np.array([mask.sum() for mask in sure], np.int64)
        left = total - int(least.sum())
        more = np.zeros(len(lines), np.int64)
        for i in self._ranked(lines)[: round(self.options.heads * len(lines))]:
            if lengths[i] - least[i] > left:
                break
            more[i] = lengths[i] - least[i]
            left -= int(more[i])
        more += allot(left, np.ones(len(lines)), lengths - least - more)
        return [slots(_newest(mask, int(count))) for mask, count in zip(sure, more, strict=True)]

    def _ranked(self, lines: Seq[KVLine]) -> I64:
        """Indices of lines, those that shall keep everything first."""
        if self._scores is None:
            return np.random.Generator(np.random.Philox(self.options.seed)).permutation(len(lines))
        points = np.array([self._scores[line.layer][line.head] for line in lines])
        return np.argsort(points if self.options.keep == "streaming" else -points, kind="stable")


def _newest(kept: npt.NDArray[np.bool_], count: int) -> npt.NDArray[np.bool_]:
    """`kept` and the `count` newest of the others."""
    out = kept.copy()
    out[np.flatnonzero(~kept)[::-1][:count]] = True
    return out


def make(bench: SelectionBench) -> Retrieval:
    """Raises: ConfigError if there is no profile of this model."""
    options = bench.config.options
    scores = None if options.keep == "random" else profile_of(options.profile, bench.spec, bench.fingerprint)
    return Retrieval(bench, scores)


def profile_of(path: str | None, spec: ModelSpec, fingerprint: Callable[[], str]) -> Scores:
    """The scores in the file `path`; by default in that of a bundled model with these weights. Raises: ConfigError."""
    own = fingerprint()
    if path is not None:
        found = _read(Path(path))
        if found.get("fingerprint") != own:
            raise _wrong(
                f"{quoted(path)} is the profile of another model (weights {quoted(found.get('fingerprint'))}, these "
                f"are {own}); measure this one with tools/retrieval_heads.py"
            )
        return _checked(found.get("scores"), spec, path)
    for file in sorted(_BUNDLED.glob(f"*/{PROFILE}")):
        found = _read(file)
        if found.get("fingerprint") == own:
            return _checked(found.get("scores"), spec, str(file))
    raise _wrong(
        f"there is none for this model (weights {own}); measure one with tools/retrieval_heads.py and name the file, "
        'as in {"profile": "heads.json"}'
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, _LIMIT_BYTES)
    except ModelError as error:
        raise _wrong(f"{error}; name a file that tools/retrieval_heads.py has written") from error


def _checked(scores: Any, spec: ModelSpec, path: str) -> Scores:
    shape = [_lines_of(layer) for layer in spec.layers]
    rows = scores if isinstance(scores, list) else []
    if [len(row) if isinstance(row, list) else -1 for row in rows] != shape:
        raise _wrong(f"{quoted(path)} does not hold a list of scores per layer, one for each kv head of this model")
    for row in rows:
        for x in row:
            if isinstance(x, bool) or not isinstance(x, int | float) or not 0 <= x <= 1:
                raise _wrong(f"{quoted(path)} holds {quoted(x)} for a score; scores are numbers from 0 to 1")
    return [[float(x) for x in row] for row in rows]


def _lines_of(layer: Layer) -> int:
    """A latent is one line, whatever heads read it."""
    if isinstance(layer.mixer, Attention):
        return layer.mixer.num_kv_heads
    return int(isinstance(layer.mixer, Latent))


def _wrong(why: str) -> ConfigError:
    return ConfigError(f"kv_selector_config: profile: {why}", field="kv_selector_config")
