"""Attention backends: implementations of `core.protocols.AttentionBackend`, by name."""

from __future__ import annotations

from penstock.base.registry import Registry
from penstock.core.protocols import AttentionBackend

ATTENTION_BACKENDS: Registry[AttentionBackend, None] = Registry("attention")
ATTENTION_BACKENDS.add("ref", "penstock.ops.ref.attention.full:FULL")
ATTENTION_BACKENDS.add("ref-online", "penstock.ops.ref.attention.online:ONLINE")
