"""What a device can do at most, as plain data, and where each figure comes from.

Figures are of data sheets or of measurements that are named; whatever is neither is marked as an estimate. None of
them says what an engine reaches: `plan.measured` fits that.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from penstock.base.errors import ConfigError
from penstock.core.cache_spec import DTYPE_BYTES


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peak rates of one device. Units: FLOP/s, bytes/s, bytes, seconds as named.

    `flops_per_s` has an entry per dtype the device can compute with (dense, without sparsity). `memory_bytes` None:
    that of the machine Penstock runs on. `host_copy_bytes_per_s`: one way. `step_overhead_s` is paid by every step,
    `layer_overhead_s` for each of its layers besides. `widens_halves`: computes in float32 only, so 16-bit weights are
    widened whenever they are used. `sources`: field name -> where its figure comes from.
    """

    name: str
    flops_per_s: dict[str, float]
    read_bytes_per_s: float
    memory_bytes: int | None = None
    host_copy_bytes_per_s: float
    step_overhead_s: float
    layer_overhead_s: float = 0.0
    widens_halves: bool = False
    sources: dict[str, str] = {}

    @property
    def is_accelerator(self) -> bool:
        """It has a memory of its own, that is: beside the machine's."""
        return self.memory_bytes is not None and not self.name.startswith("cpu")

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s with this dtype. Raises ConfigError naming the dtypes there are."""
        try:
            return self.flops_per_s[dtype]
        except KeyError:
            known = ", ".join(self.flops_per_s)
            raise ConfigError(
                f"the device {self.name} has no figure for dtype {dtype}; use one of: {known}", field="dtype"
            ) from None


_TERA, _GIGA = 1e12, 1e9
_GPU_OVERHEAD_S = 2e-4
_GPU_OVERHEAD = "estimate: one graph launch, sampling and the way back of the token ids"


def _gpu(
    name: str, sheet: str, *, half: float, single: float, read: float, memory: int, link: float, link_name: str
) -> Device:
    """A GPU out of its data sheet. TFLOP/s (dense), GB/s; `memory` in MiB as the driver tells it, below the sheet's."""
    flops = {"bfloat16": half * _TERA, "float16": half * _TERA, "float32": single * _TERA}
    return Device(
        name=name,
        flops_per_s=flops,
        read_bytes_per_s=read * _GIGA,
        memory_bytes=memory * 1024**2,
        host_copy_bytes_per_s=link * _GIGA,
        step_overhead_s=_GPU_OVERHEAD_S,
        sources={
            "flops_per_s": f"{sheet}: tensor cores without sparsity, float32 without tensor cores",
            "read_bytes_per_s": f"{sheet}: GPU memory bandwidth",
            "memory_bytes": f"the driver (nvidia-smi): {memory} MiB in all",
            "host_copy_bytes_per_s": f"{sheet}: {link_name}, half of the figure for both ways",
            "step_overhead_s": _GPU_OVERHEAD,
        },
    )


_MEASURED = "measured on two cores of an AMD EPYC (family 26, AVX512-BF16)"
_ALL = (
    _gpu("h200", "NVIDIA H200 data sheet (SXM)", half=989, single=67, read=4800, memory=143771, link=64,
         link_name="PCIe Gen5 128 GB/s"),
    _gpu("h100-sxm", "NVIDIA H100 data sheet (SXM)", half=989, single=67, read=3350, memory=81559, link=64,
         link_name="PCIe Gen5 128 GB/s"),
    _gpu("a100-80g", "NVIDIA A100 data sheet (80 GB SXM)", half=312, single=19.5, read=2039, memory=81920, link=32,
         link_name="PCIe Gen4 64 GB/s"),
    _gpu("l4", "NVIDIA L4 data sheet", half=121, single=30.3, read=300, memory=23034, link=32,
         link_name="PCIe Gen4 64 GB/s"),
    Device(
        name="cpu-2core",
        flops_per_s={"float32": 209e9, "bfloat16": 951e9, "float16": 209e9},
        read_bytes_per_s=46e9,
        memory_bytes=23 * 1024**3,
        host_copy_bytes_per_s=20e9,
        step_overhead_s=2e-4,
        sources={
            "flops_per_s": f"{_MEASURED}: a product 1024x2048x2048; float16 is computed as float32",
            "read_bytes_per_s": f"{_MEASURED}: median of 36 reads by two threads, 46 (30 to 69) GB/s",
            "memory_bytes": "the same machine's usable memory",
            "host_copy_bytes_per_s": "estimate: a copy reads and writes",
            "step_overhead_s": "estimate: about 200 native calls and the scheduler",
        },
    ),
    Device(
        name="cpu-ref",
        flops_per_s={"float32": 17e9, "bfloat16": 11e9, "float16": 1.6e9},
        read_bytes_per_s=35e9,
        host_copy_bytes_per_s=10e9,
        step_overhead_s=1e-4,
        layer_overhead_s=1e-4,
        widens_halves=True,
        sources={
            "flops_per_s": f"{_MEASURED}, one thread: rows one after the other, each reading all weights again; "
            "with matrices that stay in the caches it is up to 2.5 times as fast",
            "read_bytes_per_s": f"{_MEASURED}, one thread: a product of one row with a matrix larger than the caches",
            "memory_bytes": "what this machine has",
            "host_copy_bytes_per_s": "estimate: memory to memory",
            "step_overhead_s": f"{_MEASURED}, rounded: a model of 0.26 M parameters, whose products take no time",
            "layer_overhead_s": "as step_overhead_s: some 20 numpy calls per layer",
        },
    ),
)  # fmt: skip
PRESETS: dict[str, Device] = {device.name: device for device in _ALL}
"""`cpu-2core`: what native kernels could use of a small machine. `cpu-ref`: the numpy reference operations."""


def device_preset(name: str) -> Device:
    """The device called `name`. Raises ConfigError listing the names."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(
            f"unknown device {name!r}; choose one of: {', '.join(sorted(PRESETS))}, or name a .toml or .json file",
            field="device",
        ) from None


def read_device(path: str | Path) -> Device:
    """A device from a TOML or JSON file with the fields of `Device`.

    Raises ConfigError if the file cannot be read, or a field is missing, unknown, of the wrong type or not positive.
    """
    what = f"device file {str(path)!r}"
    try:
        data = Path(path).read_bytes()
        values: Any = msgspec.json.decode(data) if str(path).endswith(".json") else tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}", field="device") from None
    except (msgspec.DecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        kind = "JSON" if str(path).endswith(".json") else "TOML"
        raise ConfigError(f"{what} is not {kind}: {error}", field="device") from None
    return device_from(values, what)


def device_from(values: Mapping[str, Any], what: str = "device") -> Device:
    """A checked device from plain data; `what` names it in messages. Raises ConfigError as `read_device`."""
    try:
        device = msgspec.convert(values, Device)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what}: {error}", field="device") from None
    numbers: dict[str, float | None] = {f"flops_per_s.{dtype}": rate for dtype, rate in device.flops_per_s.items()}
    for name in ("read_bytes_per_s", "memory_bytes", "host_copy_bytes_per_s"):
        numbers[name] = getattr(device, name)
    for name, value in numbers.items():
        if value is not None and not (isfinite(value) and value > 0):
            raise ConfigError(f"{what}: {name} must be a number above 0, not {value}", field="device")
    for name in ("step_overhead_s", "layer_overhead_s"):
        value = getattr(device, name)
        if not (isfinite(value) and value >= 0):
            raise ConfigError(f"{what}: {name} must be at least 0, not {value}", field="device")
    unknown = [dtype for dtype in device.flops_per_s if dtype not in DTYPE_BYTES]
    if unknown or not device.flops_per_s:
        named = f"names the dtype {unknown[0]!r}" if unknown else "names no dtype"
        raise ConfigError(f"{what}: flops_per_s {named}; known ones: {', '.join(DTYPE_BYTES)}", field="device")
    return device


def find_device(name: str) -> Device:
    """A preset by name, or the device of a file if the name ends in .toml or .json. Raises ConfigError."""
    return read_device(name) if name.endswith((".toml", ".json")) else device_preset(name)
