"""Attention backends: implementations of `core.protocols.AttentionBackend`, by name."""

from __future__ import annotations

from typing import Any

from penstock.base.registry import Registry
from penstock.core.protocols import AttentionBackend

ATTENTION_BACKENDS: Registry[AttentionBackend, None] = Registry("attention")
ATTENTION_BACKENDS.add("ref", "penstock.ops.ref.attention.full:FULL")
ATTENTION_BACKENDS.add("ref-online", "penstock.ops.ref.attention.online:ONLINE")

DEVICE_ATTENTION: Registry[Any, None] = Registry("attention of torch")
"""Classes for tensors, for the backend torch alone: each says `why_not` for a configuration and a model."""
DEVICE_ATTENTION.add("flex", "penstock.backends.gpu.flex_attention:FlexAttention")
DEVICE_ATTENTION.add("flashinfer", "penstock.backends.gpu.flashinfer:FlashInferAttention")
