"""Quantised Hugging Face folders: one file per method, of what its configuration says and which tensors are whose.

`METHODS`: quant_method of a quantization_config -> who reads it, a function of `Settings` that gives a `Method`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.base.registry import Registry
from penstock.families.quantization.method import Method
from penstock.families.quantization.settings import Settings

METHODS: Registry[Callable[[Settings], Method], None] = Registry("quantisation method")
METHODS.add("auto-round", "penstock.families.quantization.auto_round:read")
METHODS.add("awq", "penstock.families.quantization.awq:read")
METHODS.add("bitnet", "penstock.families.quantization.bitnet:read")
METHODS.add("bitsandbytes", "penstock.families.quantization.bitsandbytes:read")
METHODS.add("compressed-tensors", "penstock.families.quantization.compressed:read")
METHODS.add("fbgemm_fp8", "penstock.families.quantization.fp8:read_fbgemm")
METHODS.add("fp8", "penstock.families.quantization.fp8:read")
METHODS.add("gptq", "penstock.families.quantization.gptq:read")
METHODS.add("hqq", "penstock.families.quantization.hqq:read")
METHODS.add("modelopt", "penstock.families.quantization.modelopt:read")
METHODS.add("mxfp4", "penstock.families.quantization.mxfp4:read")
_ALIASES = {"intel/auto-round": "auto-round", "modelopt_fp4": "modelopt", "modelopt_mixed": "modelopt"}


def read_method(given: Mapping[str, object], where: str) -> Method | None:
    """None for a method that none of these is. Raises UnsupportedError for a kind that is not read, by its field."""
    name = given.get("quant_method") or ("modelopt" if given.get("quant_algo") else None)
    known = _ALIASES.get(name, name) if isinstance(name, str) else None
    if known is None or known not in METHODS.names():
        return None
    return METHODS.get(known)(Settings(known, given, where))
