"""A small model that reads prompts to say how surprising their tokens are: the compressor of `prompt_compression`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ConfigError, EngineError, ModelError, UnsupportedError
from penstock.config import EngineConfig, from_kwargs
from penstock.core.cache_spec import group_layers
from penstock.core.model_spec import cache_spec
from penstock.families.registry import open_model
from penstock.launch.backend import choose_ops, measuring_backend, traits_of
from penstock.launch.hub import local_path
from penstock.launch.tokenizer import load_tokenizer
from penstock.model.forward import Forward
from penstock.ops.plan import GroupPlan, StepPlan
from penstock.plan.probe import probe
from penstock.plan.resolve import resolve
from penstock.runner.assemble import DecoderModel
from penstock.runner.storage import Storage
from penstock.text.tokenizer import Tokenizer
from penstock.weights.load import load_weights

F64 = npt.NDArray[np.float64]
_BLOCK = 32
_STEP_TOKENS = 256
MAX_WINDOW = 4096
"""Tokens that a compressor sees at once, at most: a larger context of its own would take memory nobody asked for."""


class PromptReader:
    """Implements `core.protocols.TokenReader` on a KV cache for one text. One thread at a time.

    What the cache holds of the last text is used again as far as the next one begins alike, so results are those of a
    reading from the beginning up to the rounding of differently cut steps; `reset` before each job makes them a
    function of the job alone.

    Attributes:
        window: tokens seen at once; a longer text is read in windows that begin every half of that.
        tokenizer: the model's own; None if it came without one.
        num_bytes: of weights and cache.
    """

    def __init__(self, name: str, ops: str = "auto", *, threads: int = 1) -> None:
        """Raises ConfigError, field `prompt_compressor`, for a model that cannot be had or used."""
        try:
            checkpoint = open_model(local_path(name))
            config, _ = choose_ops(_config(name, ops), checkpoint.spec)
            plan = resolve(config, checkpoint.spec, probe(), stored=checkpoint.stored, traits=traits_of(config))
            self.tokenizer: Tokenizer | None = load_tokenizer(checkpoint.tokenizer, checkpoint.spec)
            weights = load_weights(checkpoint.weights, checkpoint.spec, plan.held)
        except (ModelError, UnsupportedError, ConfigError) as error:
            raise ConfigError(
                f"prompt_compressor: {name!r} cannot be used: {error}", field="prompt_compressor"
            ) from None
        spec = checkpoint.spec
        groups = group_layers([cache_spec(layer, plan.kv_dtype) for layer in spec.layers])
        if not all(group.spec.per_token for group in groups):
            raise ConfigError(
                f"prompt_compressor: {name!r} has recurrent layers, which cannot go back in a text; choose a model "
                "with attention only",
                field="prompt_compressor",
            )
        self.name = name
        self.vocab_size = spec.vocab_size
        self.window = min(plan.max_model_len, MAX_WINDOW)
        backend = measuring_backend(config, threads)
        model = DecoderModel(spec=spec, weights=weights, groups=groups, max_model_len=self.window)
        self._forward: Forward = model.on(backend, max_tokens=_STEP_TOKENS)
        blocks = -(-self.window // _BLOCK)
        self._groups = tuple(
            GroupPlan(len(g.layers), _BLOCK, (np.arange(blocks, dtype=np.int32)[None],)) for g in groups
        )
        self._storage = Storage(groups, [blocks] * len(groups), _BLOCK)
        self.num_bytes = sum(w.nbytes for w in weights.values()) + self._storage.num_bytes
        self._bos = spec.bos_token_id
        self._held: list[int] = []
        self._check: Callable[[], None] = lambda: None

    def reset(self, check: Callable[[], None] = lambda: None) -> None:
        """A new job. `check` is called before every step, and may raise to end it."""
        self._held, self._check = [], check

    def nats(self, prefix: Sequence[int], ids: Sequence[int]) -> F64:
        text = [*prefix, *ids]
        piece = max(1, min(_STEP_TOKENS, self.window // 4))
        parts = [self._read(text, lo, min(lo + piece, len(text))) for lo in range(len(prefix), len(text), piece)]
        return np.concatenate(parts) if parts else np.empty(0)

    def _read(self, text: Sequence[int], lo: int, hi: int) -> F64:
        """Nats of text[lo:hi]."""
        head = [] if self._bos is None else [self._bos]
        if text[: len(head)] == head:
            head = []
        half = max(1, self.window // 2)
        begin = max(0, -(-(hi + 1 - self.window) // half)) * half  # 1: room for `head`, whether there is one or not
        head = head if begin == 0 or self._bos is None else [self._bos]
        seen = [*head, *text[begin:hi]]
        first = lo - begin + len(head)  # where text[lo] stands in `seen`
        same = next((n for n, (a, b) in enumerate(zip(self._held, seen, strict=False)) if a != b),
                    min(len(self._held), len(seen)))  # fmt: skip
        start = min(same, max(0, first - 1))  # the row before the first token asked for is needed
        self._held = self._held[:start]
        out = np.empty(hi - lo)
        if first == 0:
            out[0] = np.log(self.vocab_size)
        for at in range(start, len(seen), _STEP_TOKENS):
            self._check()
            part = seen[at : at + _STEP_TOKENS]
            logits = self._step(part, at)
            self._held += part
            self._take(out, logits, seen, at, first)
        return out

    def _step(self, ids: Sequence[int], start: int) -> npt.NDArray[np.float32]:
        rows = np.arange(len(ids), dtype=np.int32)
        bounds, lens = np.array([0, len(ids)], np.int32), np.array([start + len(ids)], np.int32)
        plan = StepPlan(np.asarray(ids, np.int32), rows + np.int32(start), bounds, lens, rows, self._groups)
        return self._forward.run(plan, self._storage.planes)

    @staticmethod
    def _take(out: F64, logits: npt.NDArray[np.float32], seen: Sequence[int], at: int, first: int) -> None:
        """Row r of `logits` [T, V] tells of seen[at + r + 1]; those from `first` on go to `out`."""
        low = max(at, first - 1)
        high = min(at + len(logits), len(seen) - 1)
        if low >= high:
            return
        rows = logits[low - at : high - at].astype(np.float64)
        top = rows.max(axis=1)
        chosen = rows[np.arange(high - low), np.asarray(seen[low + 1 : high + 1])]
        found = np.log(np.exp(rows - top[:, None]).sum(axis=1)) + top - chosen
        if not np.isfinite(found).all():
            raise EngineError("the compressor gave logits that are not finite")
        out[low + 1 - first : high + 1 - first] = found


def _config(name: str, ops: str) -> EngineConfig:
    config = from_kwargs(model=name)
    return replace(config, execution=replace(config.execution, ops=ops))
