"""Kernels in Triton, a file per kind: each has launchers on tensors, and an oracle that it is compared with.

Importing this package imports neither torch nor Triton: `KERNELS` is for documentation, benchmarks and doctors.
"""

from __future__ import annotations

from typing import NamedTuple


class KernelEntry(NamedTuple):
    """`launcher` and `oracle` are "module:function"; `exact`: results are the oracle's bit for bit.

    `test`: the file that compares the two in Triton's interpreter.
    """

    name: str
    launcher: str
    oracle: str
    test: str
    exact: bool = False


_HERE, _TESTS = "penstock.backends.gpu.kernels", "tests/gpu/kernels"
_INPUTS = f"{_TESTS}/test_inputs.py"
_ATTENTION, _POINTWISE, _PRODUCTS, _EXPERTS, _SAMPLE = (
    f"{_TESTS}/test_{name}.py" for name in ("attention", "pointwise", "products", "experts", "sample")
)

KERNELS = (
    KernelEntry("attention_decode", f"{_HERE}.attention_decode:attend_tokens",
                "penstock.ops.ref.attention.rows:RowBackend.attend", _ATTENTION),
    KernelEntry("attention_prefill", f"{_HERE}.attention_prefill:attend_rows",
                "penstock.ops.ref.attention.rows:RowBackend.attend", _ATTENTION),
    KernelEntry("token_places", f"{_HERE}.inputs:token_places", "penstock.ops.step:Step.token_pages", _INPUTS, True),
    KernelEntry("embed", f"{_HERE}.inputs:embed", "penstock.ops.ref.product:embed", _INPUTS, True),
    KernelEntry("rms_norm", f"{_HERE}.norm:rms_norm", "penstock.ops.ref.norm:rms_norm", _POINTWISE),
    KernelEntry("layer_norm", f"{_HERE}.norm:layer_norm", "penstock.ops.ref.norm:layer_norm", _POINTWISE),
    KernelEntry("rope_write", f"{_HERE}.rope:rope_write", "penstock.ops.ref.rotary:rope", _POINTWISE),
    KernelEntry("activate_gated", f"{_HERE}.activation:activate_gated", "penstock.ops.ref.pointwise:activate_gated",
                _POINTWISE),
    KernelEntry("product_int8", f"{_HERE}.products:product_int8", "penstock.ops.ref.product:linear", _PRODUCTS),
    KernelEntry("product_int4", f"{_HERE}.products:product_int4", "penstock.ops.ref.product:linear", _PRODUCTS),
    KernelEntry("product_words", f"{_HERE}.word_products:product_words", "penstock.ops.ref.product:linear", _PRODUCTS),
    KernelEntry("product_fixed", f"{_HERE}.products:product_fixed", "penstock.ops.ref.product:linear", _PRODUCTS),
    KernelEntry("product_row", f"{_HERE}.row_products:product_row", "penstock.ops.ref.product:linear", _PRODUCTS),
    KernelEntry("coded_row", f"{_HERE}.row_products:coded_row", "penstock.ops.ref.product:linear", _PRODUCTS),
    KernelEntry("experts", f"{_HERE}.experts:run_experts", "penstock.ops.ref.experts:experts", _EXPERTS),
    KernelEntry("adapt", f"{_HERE}.adapters:adapt", "penstock.ops.adapters:adapt", f"{_TESTS}/test_adapters.py"),
    KernelEntry("route", f"{_HERE}.routes:route", "penstock.ops.ref.experts:route", _EXPERTS),
    KernelEntry("argmax", f"{_HERE}.sample:argmax", "penstock.runner.sampler:Sampler.sample", _SAMPLE, True),
    KernelEntry("draw", f"{_HERE}.sample:draw", "penstock.runner.sampler:draw", _SAMPLE, True),
)  # fmt: skip
