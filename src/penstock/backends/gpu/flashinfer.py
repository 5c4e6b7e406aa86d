"""Attention by FlashInfer's paged kernels, where that package is installed: a step is planned once per kind of layer.

Its kernels read the pages where they lie: a layer's planes are every `num_layers`-th page of its group, so that one
table of slabs serves all layers. It has never run with this adapter on a GPU; tests call a mock of it.

Source: Ye et al., FlashInfer, arXiv 2501.01005. Shape letters: T tokens, H query heads, G kv heads, D dim of a head.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.backends.gpu.attention import TorchAttention
from penstock.backends.gpu.step import TorchStep
from penstock.base.errors import EngineError
from penstock.config import EngineConfig
from penstock.core.model_spec import Attention, Latent, ModelSpec
from penstock.ops.ref.attention.rows import first_key

MISSING = "FlashInfer is not installed: pip install flashinfer-python"
HEAD_DIMS, BLOCK_SIZES = (64, 128, 256), (16, 32, 64)
KINDS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_WORKSPACE_BYTES = 128 << 20


class FlashInferAttention(TorchAttention):
    """See `TorchAttention`. `counts`: calls of its two kernels, for tests."""

    name = "flashinfer"

    def __init__(self, device: torch.device, module: Any = None, workspace_bytes: int = _WORKSPACE_BYTES) -> None:
        """`module`: FlashInfer, or what stands for it in a test."""
        self.counts = {"decode": 0, "prefill": 0}
        self._module = module if module is not None else import_module("flashinfer")
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
        self._wrappers: dict[Any, Any] = {}
        """By what they are planned for: a wrapper keeps its plan until the next step."""

    @classmethod
    def why_not(cls, config: EngineConfig, spec: ModelSpec) -> str | None:
        """What keeps it from a model with these settings, as an end of a sentence."""
        if not config.execution.device.startswith("cuda"):
            return f"flashinfer runs on GPUs, and device is {config.execution.device}"
        if find_spec("flashinfer") is None:
            return MISSING
        return obstacle(config, spec)

    def attend(
        self, q: Tensor, step: TorchStep, group: int, layer: int, *, keys: tuple[str, ...], value: str, scale: float,
        window: int | None = None, chunk: int | None = None, soft_cap: float | None = None,
        slopes: Tensor | None = None, sinks: Tensor | None = None, rotation: Any = None, kept: Any = None,
        pages: Any = None, chosen: Any = None,
    ) -> Tensor:  # fmt: skip
        where, mask = step.plan.groups[group], step.plan.mask
        others = (chunk, slopes, sinks, rotation, kept, pages, where.dropped)
        if any(x is not None for x in others) or where.lanes > 1 or len(keys) > 1 or (mask is not None and mask.any()):
            raise EngineError("flashinfer was given a context that it has no form for; leave attention_backend away")
        whole = [step.tensor(group, name) for name in (keys[0], value)]
        if not step.bounds[-1]:
            return q.new_zeros((0, q.shape[1], whole[1].shape[-1]))
        shared = all(table.shape[0] == 1 for table in where.tables)
        k, v = (plane[layer :: where.num_layers] for plane in whole) if shared else whole
        kind = k.dtype
        if kind not in KINDS.values():
            raise EngineError(f"flashinfer reads keys and values as float16 or bfloat16, not {kind}")
        key = ("flashinfer", group, -1 if shared else layer, window, soft_cap, scale)
        if key not in step.memo:
            shape = q.shape[1], k.shape[2], k.shape[3]
            step.memo[key] = self._planned(step, key, shape, kind)
        decodes, wrapper = step.memo[key]
        self.counts["decode" if decodes else "prefill"] += 1
        found: Tensor = wrapper.run(q.to(kind).contiguous(), (k, v))
        return found.to(q.dtype)

    def _planned(self, step: TorchStep, key: Any, shape: tuple[int, int, int], kind: torch.dtype) -> tuple[bool, Any]:
        """Whether every sequence has one token, and the wrapper that has planned the step."""
        _, group, layer, window, soft_cap, scale = key
        where, starts = step.plan.groups[group], step.bounds
        live = [b for b in range(step.num_sequences) if starts[b + 1] > starts[b]]
        decodes = len(live) == step.bounds[-1]
        tables: list[Any] = []
        ends: list[int] = []
        for b in live:
            start = int(step.plan.positions[starts[b]])
            end = start + starts[b + 1] - starts[b]
            blocks = slice(first_key(start, window, None) // where.block_size, -(-end // where.block_size))
            tables.append((where.tables[b][0] if layer < 0 else where.pages(b, layer))[blocks])
            ends.append((end - 1) % where.block_size + 1)
        made = (decodes, key[1:])
        if made not in self._wrappers:
            name = "BatchDecodeWithPagedKVCacheWrapper" if decodes else "BatchPrefillWithPagedKVCacheWrapper"
            self._wrappers[made] = getattr(self._module, name)(self._workspace, "NHD")
        wrapper = self._wrappers[made]
        heads, kv_heads, dim = shape
        # What is planned with stays on the host; the pages are read by the kernels.
        indptr, last, indices = (
            torch.from_numpy(np.asarray(x, np.int32))
            for x in (np.cumsum([0, *map(len, tables)]), ends, np.concatenate(tables))
        )
        indices = indices.to(step.device)
        said = {
            "sm_scale": scale, "window_left": -1 if window is None else window - 1, "logits_soft_cap": soft_cap,
            "q_data_type": kind, "kv_data_type": kind,
        }  # fmt: skip
        if decodes:
            wrapper.plan(indptr, indices, last, heads, kv_heads, dim, where.block_size, **said)
        else:
            queries = np.cumsum([0, *(starts[b + 1] - starts[b] for b in live)]).astype(np.int32)
            wrapper.plan(torch.from_numpy(queries), indptr, indices, last, heads, kv_heads, dim,
                         where.block_size, causal=True, **said)  # fmt: skip
        return decodes, wrapper


def obstacle(config: EngineConfig, spec: ModelSpec) -> str | None:
    """What a model or its settings ask that this adapter does not give FlashInfer."""
    size, kind = config.cache.block_size, config.cache.kv_cache_dtype
    if kind == "auto":
        kind = spec.dtype if config.model.dtype == "auto" else config.model.dtype
    if size not in BLOCK_SIZES:
        return f"flashinfer reads blocks of 16, 32 or 64 tokens, and block_size is {size}"
    if kind not in KINDS:
        return f"flashinfer reads float16 or bfloat16, and keys and values are {kind}; set kv_cache_dtype bfloat16"
    if config.selection is not None:
        return "flashinfer reads whole contexts, and a KV selector keeps or reads parts"
    if config.speculation is not None:
        return "flashinfer is not given drafts, which may be trees, and speculative_config asks for them"
    for mixer in (layer.mixer for layer in spec.layers):
        if isinstance(mixer, Latent):
            return "flashinfer is not given latent attention"
        if not isinstance(mixer, Attention):
            continue
        parts = {"sinks": mixer.sinks, "ALiBi": mixer.alibi, "chunks": mixer.chunk}
        for name, there in parts.items():
            if there:
                return f"flashinfer is not given layers with {name}"
        if mixer.head_dim not in HEAD_DIMS:
            return f"flashinfer has heads of 64, 128 or 256 dims, and the model's have {mixer.head_dim}"
    return None
