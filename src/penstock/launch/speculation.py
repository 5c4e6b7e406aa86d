"""Speculation put together: who drafts, and who decides how much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig, SpeculativeConfig
from penstock.core.protocols import DraftController, Drafter, StepTimer
from penstock.drafters import DRAFTERS, branches
from penstock.drafters.bench import DraftBench, DraftModel, Target
from penstock.launch.bundled import bundled_heads
from penstock.runner.rows import RowStore
from penstock.runner.sampler import Sampler
from penstock.runner.storage import Storage
from penstock.runner.verifiers import VERIFIERS
from penstock.runner.verify import Verifying
from penstock.sched.drafts import DRAFT_CONTROLLERS


class DraftMeans(NamedTuple):
    """What a drafter may be made of: draft models, the model itself, and text -> ids of the model."""

    models: Sequence[DraftModel] = ()
    target: Target | None = None
    encode: Callable[[str], list[int]] | None = None


def make_drafter(
    config: EngineConfig, rows: RowStore, storage: Storage, sampler: Sampler, means: DraftMeans
) -> Drafter | None:
    """None without `speculative_config`. Raises: ConfigError."""
    wanted = config.speculation
    if wanted is None:
        return None
    if wanted.heads is not None and not Path(wanted.heads).exists():
        wanted = replace(wanted, heads=str(bundled_heads(wanted.heads) or wanted.heads))
    bench = DraftBench(
        config=wanted, vocab_size=rows.vocab_size, rows=rows, storage=storage, sampler=sampler,
        models=means.models, target=means.target, encode=means.encode,
    )  # fmt: skip
    made: Drafter = DRAFTERS.get(wanted.method)(bench)
    return made


def make_verifier(config: EngineConfig, sampler: Sampler) -> Verifying | None:
    """The one that `speculative_config` names; None: the rank's own. Raises: ConfigError."""
    wanted = config.speculation
    if wanted is None or wanted.verifier == "match":
        return None
    if wanted.verifier == "speculative-sampling" and wanted.tree != "chain":
        raise ConfigError(
            f"speculative_config: verifier speculative-sampling follows one path, and tree is {wanted.tree}; "
            "choose tree chain, or verifier multi-step",
            field="speculative_config",
        )
    made: Verifying = VERIFIERS.get(wanted.verifier)(sampler, wanted)
    return made


def make_controller(config: EngineConfig, timer: StepTimer | None = None) -> DraftController | None:
    """None without `speculative_config`. `timer` predicts steps."""
    wanted = config.speculation
    if wanted is None:
        return None
    make = DRAFT_CONTROLLERS.get(wanted.controller)
    made: DraftController
    if wanted.controller == "fixed":
        made = make(num_drafts(wanted), wanted.max_depth, max_batch=wanted.disable_by_batch_size)
    else:
        made = make(num_drafts(wanted), wanted.max_depth, timer=timer, branching=branches(wanted))
    return made


def num_drafts(config: SpeculativeConfig) -> int:
    """Drafts for one sequence in one step, at most."""
    return config.num_speculative_tokens or DRAFTERS.traits(config.method).num_drafts
