"""Operations by Triton's kernels, and the fused ones that a graph has for them.

An operation takes its kernel where the kernel can, and torch's form where it cannot: both say the same, and `counts`
says which it was. Shape letters are those of `ops.table`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.backends.gpu.cache_ops import CACHE_OPS
from penstock.backends.gpu.held import product_why_not
from penstock.backends.gpu.kernels import activation, inputs, norm, products, rope, routes, row_products, word_products
from penstock.backends.gpu.placed import Matrix, StoredTensor
from penstock.backends.gpu.step import TorchStep
from penstock.core.cache_spec import run_name
from penstock.core.kv_codec import scales_name
from penstock.core.router import Router
from penstock.ops.ref.experts import Routes
from penstock.ops.table import Op, OpTable

_NARROW = (torch.bfloat16, torch.float16)
_FEW = 4
"""Rows that are multiplied with codes one by one, while the weights are in the device's cache."""
_SEVERAL = 64
"""Rows up to which a product takes words as they are."""
_PLANES = {torch.float32, torch.float16, torch.bfloat16, torch.int8}


class Summed(NamedTuple):
    """What `add_rms_norm` and `add_layer_norm` give: the sum x + y, and its norm."""

    total: Tensor
    normed: Tensor


class KernelTable(OpTable):
    """`base` with operations by kernels in place of its own, and those that `fused.fuse_for_kernels` makes.

    `counts`: calls by the kernels, by launcher, and by torch as "torch NAME", for tests and benchmarks. `invariant`:
    products have one order of their sums and one tile, so that a row's bits do not depend on its company.
    """

    def __init__(self, base: OpTable, *, invariant: bool = False) -> None:
        names = ("embed", "linear", "rms_norm", "layer_norm", "activate_gated", "columns", "route")
        own: dict[str, Op] = {name: getattr(self, name) for name in names}
        super().__init__("triton", {**base, **own}, batch_invariant=invariant or base.batch_invariant)
        self._base, self._invariant = base, invariant
        self._fused: dict[str, Op] = {name: getattr(self, name) for name in FUSED}
        self.counts: Counter[str] = Counter()

    def __getitem__(self, name: str) -> Op:
        return self._fused[name] if name in self._fused else super().__getitem__(name)

    def _torch(self, name: str, *args: Any) -> Any:
        self.counts[f"torch {name}"] += 1
        return self._base[name](*args)

    def embed(self, token_ids: Tensor, weight: Matrix, part: str = "", vocab_size: int = 0) -> Tensor:
        if part or isinstance(weight, StoredTensor) or weight.stride(1) != 1:
            return self._torch("embed", token_ids, weight, part, vocab_size)  # type: ignore[no-any-return]
        self.counts["embed"] += 1
        return inputs.embed(token_ids, weight)

    # -- products --------------------------------------------------------------------------------------------------

    def linear(
        self, x: Tensor, weight: Matrix, bias: Tensor | None = None, narrow: str | None = None
    ) -> Tensor:  # fmt: skip
        """Codes are decoded on the way where `held.product_why_not` has nothing against it. `narrow`: the type of what
        comes out; None: float32."""
        into = _type(narrow)
        if isinstance(weight, StoredTensor):
            return self._coded(x, weight, bias, into)
        if self._invariant:
            self.counts["product_fixed"] += 1
            return products.product_fixed(_rows(x), weight, bias, into=into)
        if len(x) == 1 and weight.dtype in _NARROW:
            self.counts["product_row"] += 1
            return row_products.product_row(_rows(x), weight, bias, into=into)
        if x.is_cuda and weight.dtype in _NARROW:
            self.counts["torch linear"] += 1
            out = _product(x.to(weight.dtype), weight, into)
            return out if bias is None else (out + bias).to(into)
        return self._torch("linear", x.float(), weight, bias).to(into)  # type: ignore[no-any-return]

    def _coded(self, x: Tensor, weight: StoredTensor, bias: Tensor | None, into: torch.dtype) -> Tensor:
        form = weight.format
        if product_why_not(form, weight.shape) is not None:
            return self._torch("linear", x.float(), weight, bias).to(into)  # type: ignore[no-any-return]
        bits, scales = 4 if weight.paired else 8, weight.scales
        how: dict[str, Any] = {"zeros_are": form.zeros_are, "offset": form.offset, "code": form.code, "into": into}
        few = len(x) == 1 or (len(x) <= _FEW and row_products.are_words(weight.codes, bits, form.code))
        if few and not self._invariant and row_products.fits(weight.shape[1], scales.shape[1], bits):
            self.counts["coded_row"] += 1
            return row_products.coded_row(_rows(x), weight.codes, scales, weight.zeros, bias, bits=bits, **how)
        if bits == 4 and len(x) <= _SEVERAL and not self._invariant and word_products.fits(
            weight.codes, weight.shape[1], scales.shape[1], form.code
        ):  # fmt: skip
            self.counts["product_words"] += 1
            return word_products.product_words(_rows(x), weight.codes, scales, weight.zeros, bias, offset=form.offset,
                                               zeros_are=form.zeros_are, into=into)  # fmt: skip
        self.counts[f"product_int{bits}"] += 1
        product: Callable[..., Tensor] = products.product_int4 if weight.paired else products.product_int8
        return product(_rows(x), weight.codes, scales, zeros=weight.zeros, bias=bias,
                       columns=64 if self._invariant else None, **how)  # fmt: skip

    @staticmethod
    def columns(x: Tensor, start: int, stop: int) -> Tensor:
        """Rows keep their distance: kernels take it as it is."""
        return x[:, start:stop]

    # -- norms -----------------------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, narrow: str | None = None) -> Tensor:
        """Over the last axis: of hidden states, and of every head."""
        if weight is not None and weight.ndim > 1:
            return self._torch("rms_norm", x.float(), weight, eps).to(_type(narrow))  # type: ignore[no-any-return]
        self.counts["rms_norm"] += 1
        rows = x.reshape(-1, x.shape[-1])
        return norm.rms_norm(rows, weight, eps, into=_type(narrow))[1].reshape(x.shape)

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, narrow: str | None = None
    ) -> Tensor:  # fmt: skip
        if any(w is not None and w.ndim > 1 for w in (weight, bias)):
            out: Tensor = self._torch("layer_norm", x.float(), weight, bias, eps)
            return out.to(_type(narrow))
        self.counts["layer_norm"] += 1
        rows = x.reshape(-1, x.shape[-1])
        return norm.layer_norm(rows, weight, bias, eps, into=_type(narrow))[1].reshape(x.shape)

    def add_rms_norm(
        self, x: Tensor, y: Tensor, weight: Tensor | None, eps: float, narrow: str | None = None
    ) -> Summed:  # fmt: skip
        """The sum is float32."""
        self.counts["add_rms_norm"] += 1
        return Summed(*norm.rms_norm(_wide(x, y), weight, eps, _rows(y), into=_type(narrow)))

    def add_layer_norm(
        self, x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, narrow: str | None = None,
    ) -> Summed:  # fmt: skip
        self.counts["add_layer_norm"] += 1
        return Summed(*norm.layer_norm(_wide(x, y), weight, bias, eps, _rows(y), into=_type(narrow)))

    @staticmethod
    def part(both: Summed, which: int) -> Tensor:
        """0: the sum; 1: its norm."""
        return both[which]

    # -- the rest --------------------------------------------------------------------------------------------------

    def activate_gated(self, gate: Tensor, up: Tensor, name: str, limit: float | None = None) -> Tensor:
        if name not in activation.ACTIVATIONS:
            out: Tensor = self._torch("activate_gated", gate.float(), up.float(), name, limit)
            return out.to(gate.dtype)
        self.counts["activate_gated"] += 1
        return activation.activate_gated(_rows(gate), _rows(up), name, limit)

    def route(
        self, logits: Tensor, top_k: int, router: Router, correction: Tensor | None = None,
        expert_scale: Tensor | None = None,
    ) -> Routes:  # fmt: skip
        if router.score not in routes.SCORES or router.groups > 1:
            out: Routes = self._torch("route", logits, top_k, router, correction, expert_scale)
            return out
        self.counts["route"] += 1
        found: Any = routes.route(
            logits, top_k, score=router.score, chosen_only=router.chosen_only, renormalize=router.renormalize,
            factor=router.scale, correction=correction, expert_scale=expert_scale,
        )  # fmt: skip
        return Routes(*found)

    def rope_write(
        self, step: TorchStep, q: Tensor, k: Tensor, v: Tensor, angles: Tensor, group: int, layer: int,
        names: tuple[str, str], interleaved: bool, first: int,
    ) -> Tensor:  # fmt: skip
        """`rope` of q and of k, and `write_kv` of k and v. Mutates: the planes `names`."""
        if angles.ndim != 3 or not _writes(step, group, names):
            self.counts["torch rope_write"] += 1
            kind = q.dtype
            q, k, v = q.float(), k.float(), v.float()
            turned: Tensor = self._base["rope"](q, angles, interleaved, first)
            CACHE_OPS["write_kv"](step, self._base["rope"](k, angles, interleaved, first), v, group, layer, names)
            return turned.to(kind)
        self.counts["rope_write"] += 1
        pages, offsets = step.slots_of(group)
        if "rope_rows" not in step.memo:  # the angles' own rows: they were looked up by position
            step.memo["rope_rows"] = torch.arange(len(q), dtype=torch.int32, device=q.device)
        keys, values = (step.tensor(group, name) for name in names)
        beside = {name: step.tensor(group, name) for name in (scales_name(n, "int8") for n in names)
                  if name in step.planes[group]}  # fmt: skip
        key_scales, value_scales = (beside.get(scales_name(name, "int8")) for name in names)
        return rope.rope_write(
            q, k, v, step.memo["rope_rows"], angles, keys, values, pages[layer], offsets, interleaved=interleaved,
            first=first, key_scales=key_scales, value_scales=value_scales,
        )  # fmt: skip


FUSED = ("add_rms_norm", "add_layer_norm", "part", "rope_write")


def _type(narrow: str | None) -> torch.dtype:
    found: torch.dtype = torch.float32 if narrow is None else getattr(torch, narrow)
    return found


def _product(x: Tensor, weight: Tensor, into: torch.dtype) -> Tensor:
    """Added in float32, and rounded once."""
    if into == torch.float32:
        return torch.mm(x, weight.t(), out_dtype=into)
    return torch.mm(x, weight.t())


def _wide(x: Tensor, y: Tensor) -> Tensor:
    """x, as float32 if both are narrower: the sum has the wider type."""
    return _rows(x if torch.float32 in (x.dtype, y.dtype) else x.float())


def _rows(x: Tensor) -> Tensor:
    """With the numbers of a row side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _writes(step: TorchStep, group: int, names: tuple[str, str]) -> bool:
    """Whether the kernel writes the group's planes: those of one type, that all heads share, of lines without lanes."""
    where, planes = step.plan.groups[group], step.planes[group]
    if where.lanes > 1 or where.dropped is not None or any(run_name(name, 1) in planes for name in names):
        return False
    kinds = {step.tensor(group, name).dtype for name in names}
    coded = all(scales_name(name, "int8") in planes for name in names)
    return len(kinds) == 1 and kinds <= _PLANES and (kinds == {torch.int8}) == coded
