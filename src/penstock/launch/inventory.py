"""Every registered implementation of every protocol, and whether it can be used here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.backends import BACKENDS
from penstock.backends.native.experts import ORDERS, PREDICTORS
from penstock.base.registry import Registry
from penstock.compress import CONTEXT_TRANSFORMS
from penstock.core.kv_codec import KV_CODECS
from penstock.drafters import DRAFTERS
from penstock.executor import EXECUTORS
from penstock.families.quantization import METHODS
from penstock.families.registry import FAMILIES
from penstock.kv import KV_MANAGERS
from penstock.kv.checkpoints import CHECKPOINT_RULES
from penstock.kv.eviction import EVICTION_POLICIES
from penstock.kv.prefix import PREFIX_CACHES
from penstock.kv.tiers import BLOCK_TIERS
from penstock.model.hashes import HASHES
from penstock.ops.attention import ATTENTION_BACKENDS
from penstock.runner.logits import LOGITS_PROCESSORS
from penstock.runner.tiers import PAGE_STORES
from penstock.sched.drafts import DRAFT_CONTROLLERS
from penstock.sched.policy import POLICIES
from penstock.select import KV_SELECTORS
from penstock.weights.stored import STORED_FORMATS

REGISTRIES: tuple[Registry[Any, Any], ...] = (
    FAMILIES,
    METHODS,
    KV_MANAGERS,
    PREFIX_CACHES,
    EVICTION_POLICIES,
    CHECKPOINT_RULES,
    BLOCK_TIERS,
    PAGE_STORES,
    POLICIES,
    BACKENDS,
    ATTENTION_BACKENDS,
    LOGITS_PROCESSORS,
    EXECUTORS,
    DRAFTERS,
    DRAFT_CONTROLLERS,
    CONTEXT_TRANSFORMS,
    KV_SELECTORS,
    KV_CODECS,
    STORED_FORMATS,
    HASHES,
    ORDERS,
    PREDICTORS,
)


@dataclass(frozen=True)
class Part:
    """`problem` is None for a part that can be used, else the reason why not."""

    kind: str
    name: str
    problem: str | None


def inventory() -> list[Part]:
    """Import every registered implementation and report what failed."""
    parts = []
    for registry in REGISTRIES:
        for name in registry:
            try:
                registry.get(name)
            except Exception as error:  # whatever keeps a part from importing is what doctor is asked to report
                parts.append(Part(registry.what, name, f"{type(error).__name__}: {error}"))
            else:
                parts.append(Part(registry.what, name, None))
    return parts
