"""A mock of FlashInfer: its two wrappers of paged caches, with the arguments of version 0.2 and later, as its
documentation has them. They check what they are given as its kernels would need it, and compute naively."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KINDS = (torch.float16, torch.bfloat16)


def _int32(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.dtype == torch.int32
        assert x.ndim == 1


class _Paged:
    """What both wrappers share. `plan` comes before `run`, and each run has the plan's shapes."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        self._plan: dict[str, Any] | None = None

    def _keep(
        self, qo_indptr: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *, sm_scale: float | None, window_left: int,
        logits_soft_cap: float | None, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        _int32(qo_indptr, indptr, indices, last_page_len)
        assert len(qo_indptr) == len(indptr) == len(last_page_len) + 1
        assert (indptr.diff() > 0).all(), "a request without pages"
        assert indptr[-1] == len(indices)
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        assert num_qo_heads % num_kv_heads == 0
        assert q_data_type in KINDS
        assert kv_data_type in KINDS
        assert window_left >= -1
        own = dict(locals())
        self._plan = {name: own[name] for name in own if name != "self"}

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        """q [T, H, D]; keys and values [pages, page size, kv heads, D] each."""
        p = self._plan
        assert p is not None, "run without plan"
        k_cache, v_cache = paged_kv_cache
        shape = (p["page_size"], p["num_kv_heads"], p["head_dim"])
        assert q.shape == (int(p["qo_indptr"][-1]), p["num_qo_heads"], p["head_dim"])
        assert q.is_contiguous()
        assert q.dtype == p["q_data_type"]
        for cache in (k_cache, v_cache):
            assert cache.shape[1:] == shape
            assert cache.dtype == p["kv_data_type"]
            assert cache.stride(-1) == 1
        assert k_cache.stride() == v_cache.stride()
        assert ((p["indices"] >= 0) & (p["indices"] < len(k_cache))).all(), "a page that is not there"
        rows = []
        for b in range(len(p["last_page_len"])):
            lo, hi = p["qo_indptr"][b : b + 2].tolist()
            first, last = p["indptr"][b : b + 2].tolist()
            pages = p["indices"][first:last].long()
            n = (last - first - 1) * p["page_size"] + int(p["last_page_len"][b])
            k, v = (cache[pages].reshape(-1, *shape[1:])[:n].double() for cache in (k_cache, v_cache))
            for i, t in enumerate(range(lo, hi)):
                end = n - (hi - lo) + i + 1
                begin = 0 if p["window_left"] < 0 else max(0, end - 1 - p["window_left"])
                assert end > 0
                x = q[t].double().reshape(shape[1], -1, shape[2])
                s = torch.einsum("ghd,ngd->ghn", x, k[begin:end]) * (p["sm_scale"] or shape[2] ** -0.5)
                if p["logits_soft_cap"]:
                    s = torch.tanh(s / p["logits_soft_cap"]) * p["logits_soft_cap"]
                rows.append(torch.einsum("ghn,ngd->ghd", torch.softmax(s, -1), v[begin:end]).reshape(q.shape[1:]))
        return torch.stack(rows).to(q.dtype)


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool = False,
        sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16, kv_data_type: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        assert causal
        self._keep(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim_qk, page_size, sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type, kv_data_type=kv_data_type or q_data_type,
        )  # fmt: skip


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, sm_scale: float | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        one_each = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._keep(
            one_each, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap, q_data_type=q_data_type,
            kv_data_type=kv_data_type or q_data_type,
        )  # fmt: skip
