"""The processor at hand as a `Device`, for native kernels: what each instruction set reaches, times the cores.

The figures were measured once on other machines of these kinds, so they are right to within a factor of two at best;
`penstock bench roofline` measures. What they must get right is the order: a processor without bfloat16 products takes
nine times as long for a prompt as one that has them, and plans made for the one are useless on the other.
"""

from __future__ import annotations

from penstock.plan.devices import Device

_EPYC5 = "measured on an AMD EPYC (family 26), a product 1024x2048x2048 on two threads, halved"
_EPYC3 = "measured on an AMD EPYC (family 25), a product 512x512x512 on one thread"
_ARM = "estimate, no ARM processor was measured: two multiply-adds of four floats a cycle at 2.5 GHz"
_RATES: dict[str, tuple[dict[str, float], str]] = {
    "avx512bf16": ({"float32": 104e9, "bfloat16": 475e9, "float16": 104e9}, _EPYC5),
    "avx512": ({"float32": 104e9, "bfloat16": 104e9, "float16": 104e9}, f"{_EPYC5}; halves are widened to float32"),
    "avx2": ({"float32": 90e9, "bfloat16": 90e9, "float16": 90e9}, f"{_EPYC3}; halves are widened to float32"),
    "neon-bf16": ({"float32": 40e9, "bfloat16": 80e9, "float16": 40e9}, f"{_ARM}; bfloat16 twice"),
    "neon-dotprod": ({"float32": 40e9, "bfloat16": 40e9, "float16": 40e9}, f"{_ARM}; halves are widened to float32"),
    "neon": ({"float32": 20e9, "bfloat16": 20e9, "float16": 20e9}, f"{_ARM}, halved; halves are widened to float32"),
    "base": ({"float32": 15e9, "bfloat16": 15e9, "float16": 15e9}, "estimate: a sixth of avx2"),
}
_ONE_CORE_READS, _SOCKET_READS = 23e9, 46e9


def native_device(isa: str, num_cores: int) -> Device:
    """`num_cores` cores of this machine with the library for `isa` (`pst_isa_name`); an unknown one counts as base."""
    flops, source = _RATES.get(isa, _RATES["base"])
    read = min(_ONE_CORE_READS * num_cores, max(_SOCKET_READS, _ONE_CORE_READS * num_cores / 4))
    return Device(
        name=f"native-{isa}-{num_cores}",
        flops_per_s={dtype: rate * num_cores for dtype, rate in flops.items()},
        read_bytes_per_s=read,
        host_copy_bytes_per_s=read / 2,
        step_overhead_s=2e-4,
        sources={
            "flops_per_s": f"{source}; times {num_cores} cores",
            "read_bytes_per_s": "46 GB/s for two threads of an AMD EPYC (family 26), measured; else scaled: estimate",
            "memory_bytes": "what this machine has",
            "host_copy_bytes_per_s": "estimate: a copy reads and writes",
            "step_overhead_s": "estimate: the scheduler, the binding and the sampler",
        },
    )
