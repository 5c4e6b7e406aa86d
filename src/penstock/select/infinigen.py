"""InfiniGen: nothing is forgotten; what a layer will read is chosen, and can be fetched, while the layer before runs.

Source: Lee et al., InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV Cache Management,
arXiv 2406.19707. See `model.rehearsal` for how. Each kv head reads as many tokens as lie within `reach` of the largest
rehearsed score in the mean of all, at most the budget. Below a `rank` of 1 the leading components
of turned heads are rehearsed, and `profile` names the file of turns (tools/rehearsal_turns.py writes it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from penstock.base.bf16 import F32
from penstock.base.errors import ConfigError
from penstock.config.selection import SelectionConfig
from penstock.core.mixers.attention import Attention
from penstock.core.model_spec import ModelSpec
from penstock.core.selection import TokenReads, num_components
from penstock.formats.files import quoted
from penstock.select.bench import SelectionBench
from penstock.select.quest import Quest


class Infinigen(Quest):
    """See the module and `core.selection.KVSelector`."""

    name = "infinigen"


def make(bench: SelectionBench) -> Infinigen:
    return Infinigen()


def token_reads(config: SelectionConfig) -> TokenReads:
    """What the model's attention is built with (`model.emitter.Reading.tokens`)."""
    budget, o = config.budget, config.options
    return TokenReads(budget.tokens, budget.share, o.recent, max(1, o.dense_layers), o.reach, o.rank)


def turns_of(config: SelectionConfig, spec: ModelSpec, fingerprint: Callable[[], str]) -> Sequence[F32] | None:
    """[G, D, R] of every layer, out of the profile; None if keys are rehearsed as they are. Raises: ConfigError."""
    options = config.options
    if options.rank == 1.0:
        return None
    if options.profile is None:
        raise _wrong(
            "rank below 1 wants the turns of this model's heads; write them with tools/rehearsal_turns.py and name the "
            'file, as in {"rank": 0.5, "profile": "turns.npz"}, or use rank 1'
        )
    try:
        with np.load(Path(options.profile), allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        raise _wrong(f"{quoted(options.profile)} cannot be read ({error}); name a file of turns") from error
    if str(found.get("fingerprint")) != fingerprint():
        raise _wrong(f"{quoted(options.profile)} has the turns of another model; write them for this one")
    turns = [found.get(f"layers.{n}") for n in range(len(spec.layers))]
    out: list[F32] = []
    for layer, turn in zip(spec.layers, turns, strict=True):
        m = layer.mixer
        assert isinstance(m, Attention), "plan.keeping has looked"
        shape = (m.num_kv_heads, m.head_dim, m.head_dim)
        if turn is None or turn.shape != shape or turn.dtype != np.float32 or not np.isfinite(turn).all():
            raise _wrong(f"{quoted(options.profile)} does not hold a turn {list(shape)} of every layer; write it again")
        out.append(np.ascontiguousarray(turn[:, :, : num_components(options.rank, m.head_dim)]))
    return out


def _wrong(why: str) -> ConfigError:
    return ConfigError(f"kv_selector_config: profile: {why}", field="kv_selector_config")
