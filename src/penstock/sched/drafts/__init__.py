"""Who decides how much to draft. See `core.protocols.DraftController`."""

from __future__ import annotations

from collections.abc import Callable

from penstock.base.registry import Registry
from penstock.core.protocols import DraftController

DRAFT_CONTROLLERS: Registry[Callable[..., DraftController], None] = Registry("draft controller")
DRAFT_CONTROLLERS.add("fixed", "penstock.sched.drafts.fixed:FixedDrafts")
DRAFT_CONTROLLERS.add("adaptive", "penstock.sched.drafts.adaptive:AdaptiveDrafts")
