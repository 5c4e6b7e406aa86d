"""Who decides how much to guess. See `core.protocols.DraftController`."""

from __future__ import annotations

from penstock.base.registry import Registry

DRAFT_CONTROLLERS = Registry("draft controller")
DRAFT_CONTROLLERS.add("fixed", "penstock.sched.drafts.fixed:FixedDrafts")
DRAFT_CONTROLLERS.add("adaptive", "penstock.sched.drafts.adaptive:AdaptiveDrafts")
