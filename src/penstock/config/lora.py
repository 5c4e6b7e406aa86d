"""The settings of adapters. Names are vLLM's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.base.errors import ConfigError
from penstock.config.setting import Section, setting
from penstock.core.block_codec import HIDDEN

_KEYS = {"name", "path", "base_model_name"}


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section):
    """Adapters: how many, how large, in how much memory."""

    enable_lora: bool = setting(
        False, "Serve low-rank adapters (PEFT folders) over the model, several in one step. lora_modules sets it."
    )
    max_loras: int = setting(
        8, "Adapters of the requests that run at once; requests of further ones wait.", minimum=1, maximum=1024
    )
    max_lora_rank: int = setting(64, "Largest rank of an adapter.", minimum=1, maximum=512)
    max_cpu_loras: int | None = setting(
        None,
        "Adapters that are kept in memory, at least max_loras; the one used longest ago goes, and is read again when "
        "it is needed. By default four times max_loras.",
        minimum=1,
        maximum=4096,
    )
    lora_memory: float | None = setting(
        None,
        "GiB of memory of their own for the numbers of adapters. By default they lie in blocks of the KV memory, which "
        "both share; where that cannot be (docs/concepts/adapters.md), 1.",
        above=0.0,
    )
    finetune_root: str | None = setting(
        None, "Folder of fine-tuning jobs (/v1/fine_tuning/jobs): the engine trains adapters in the time that requests "
        "leave, on the CPU, with torch, and the server serves them. Sets enable_lora. None: nothing is trained."
    )  # fmt: skip
    finetune_share: float = setting(
        0.05, "Of the time of steps of requests, the part that training may take besides; idle time is all its own.",
        minimum=0.0, maximum=1.0,
    )  # fmt: skip

    lora_merge_threshold: float | None = setting(
        None,
        "From which share of the last 32 steps having one adapter alone on that is merged into a copy of the weights "
        "(float32; sums are rounded otherwise then, within 1e-4). By default never.",
        above=0.0,
        maximum=1.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras: {self.max_cpu_loras} adapters in memory are fewer than the max_loras {self.max_loras} "
                "that may run at once; raise it, or lower max_loras",
                field="max_cpu_loras",
            )

    @property
    def in_memory(self) -> int:
        """Adapters that are kept."""
        return 4 * self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    @property
    def max_bytes(self) -> int:
        """Of memory of their own, if they have that."""
        return int((self.lora_memory or 1.0) * 2**30)

    @property
    def largest(self) -> int | None:
        """Bytes of one adapter; None: as many as fit into the KV memory."""
        return None if self.lora_memory is None else self.max_bytes


def check_lora(lora: LoraConfig, offload_format: str, *, moving: bool = False) -> None:
    """Raises: ConfigError for what does not go with adapters. `moving`: layers of weights, or experts,
    come and go."""
    if not lora.enable_lora:
        return
    if moving:
        raise ConfigError(
            "enable_lora: weights that are read while others compute (weight_memory_bytes, expert_memory_bytes, "
            "packed_weights streamed) are read for one program, and steps with adapters run another; leave one of the "
            "two away",
            field="enable_lora",
        )
    if offload_format == HIDDEN:
        raise ConfigError(
            "enable_lora: kv_offload_format hidden makes keys and values again with the model's own products, and "
            "adapters change those; use plain",
            field="enable_lora",
        )


class NamedAdapter(NamedTuple):
    """By which name clients call the adapter in a folder."""

    name: str
    path: str


def parse_modules(text: str | None) -> list[NamedAdapter]:
    """`name=path` with spaces between several, or vLLM's JSON: {"name": ..., "path": ...}, or a list of these.

    Raises: ConfigError.
    """
    found: list[NamedAdapter] = []
    rest = (text or "").strip()
    while rest:
        if rest[0] in "{[":
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except ValueError as error:
                raise _wrong(f"is no JSON: {error}") from None
            found += [_of_object(item) for item in (value if isinstance(value, list) else [value])]
            rest = rest[end:].strip()
            continue
        word, _, rest = rest.partition(" ")
        name, _, path = word.partition("=")
        if not name or not path:
            raise _wrong(f"has {word!r}; name=path is needed")
        found.append(NamedAdapter(name, path))
        rest = rest.strip()
    names = [item.name for item in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise _wrong(f"names {twice!r} twice")
    return found


def _of_object(item: Any) -> NamedAdapter:
    if not isinstance(item, dict) or set(item) - _KEYS or not all(isinstance(v, str) for v in item.values()):
        raise _wrong(f"has {item!r}; an object with name and path is needed")
    if not item.get("name") or not item.get("path"):
        raise _wrong("has an object without name or path")
    return NamedAdapter(item["name"], item["path"])


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"lora_modules: {what}", field="lora_modules")


def inside(root: str, path: str) -> Path:
    """The folder `path`, relative to `root` or below it, once all links are followed. Raises: ConfigError."""
    top = Path(root).resolve()
    found = (top / path).resolve()
    parts = [found, *((found / name).resolve() for name in ("adapter_config.json", "adapter_model.safetensors"))]
    if not all(part.is_relative_to(top) for part in parts):
        raise ConfigError("lora_path: it leads out of the folder that lora_root names", field="lora_path")
    return found
