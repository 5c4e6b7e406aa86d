"""Adapters found, checked and named, and how a rank reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from msgspec.structs import replace

from penstock.base.bf16 import F32
from penstock.base.errors import ConfigError, InputError, ModelError
from penstock.config import EngineConfig
from penstock.config.lora import LoraConfig, parse_modules
from penstock.core.adapter import AdapterRef, LoRARequest
from penstock.core.matrix_format import is_kept, parse_scheme
from penstock.families.checkpoint import Checkpoint, stored_shapes
from penstock.formats.peft import CONFIG_NAME, WEIGHTS_NAME
from penstock.launch.backend import ON_CPU
from penstock.model.adapted import adaptable
from penstock.ops.adapters import LowRank
from penstock.ops.stored import StoredMatrix
from penstock.weights.adapters import Sites, adapter_facts, load_adapter, model_sites
from penstock.weights.load import read_codes, read_weight

Load = Callable[[AdapterRef], Mapping[str, LowRank]]


class AdapterBook:
    """Adapters of one model. Reading one that has been read is two looks at its files."""

    def __init__(
        self, checkpoint: Checkpoint, lora: LoraConfig, quantization: str = "none", *, codes: bool = True
    ) -> None:
        """`codes`: adapters of codes can run."""
        self._checkpoint, self._lora, self._scheme = checkpoint, lora, parse_scheme(quantization)
        self._codes = codes
        self._known: dict[tuple[str, tuple[tuple[int, int], ...]], AdapterRef] = {}

    @property
    def rounds(self) -> bool:
        """Whether the model's numbers become codes here."""
        return self._scheme.weight_bits > 0

    @cached_property
    def sites(self) -> Sites:
        spec = self._checkpoint.spec
        found = model_sites(self._checkpoint.weights, spec, adaptable(spec))
        if not self.rounds:
            return found
        rounded = self._scheme.format
        return {m: [s if is_kept(s.weight) else s._replace(format=rounded) for s in own] for m, own in found.items()}

    def read(self, path: str | Path) -> AdapterRef:
        """The adapter in a folder, all of it checked. Raises: ModelError, UnsupportedError."""
        folder = Path(path).resolve()
        try:
            stats = [(folder / name).stat() for name in (CONFIG_NAME, WEIGHTS_NAME)]
        except OSError:
            stats = []
        key = str(folder), tuple((s.st_mtime_ns, s.st_size) for s in stats)
        if stats and key in self._known:
            return self._known[key]
        lora = self._lora
        facts = adapter_facts(
            folder, self.sites, max_rank=lora.max_lora_rank, max_bytes=lora.largest, codes=self._codes
        )
        ref = AdapterRef(facts.hash, str(folder), facts.num_bytes, num_units=facts.num_units)
        self._known[key] = ref
        return ref


def book_of(config: EngineConfig, checkpoint: Checkpoint) -> AdapterBook | None:
    """None: the engine serves no adapters."""
    if not config.lora.enable_lora:
        return None
    codes = config.execution.device in ON_CPU and config.execution.ops != "torch"
    return AdapterBook(checkpoint, config.lora, config.model.quantization, codes=codes)


def read_modules(book: AdapterBook, text: str | None) -> dict[str, AdapterRef]:
    """By name, those of `lora_modules`. Raises: ConfigError."""
    found = {}
    for name, path in parse_modules(text):
        try:
            found[name] = book.read(path)
        except ModelError as error:
            raise ConfigError(f"lora_modules: {name}: {error}", field="lora_modules") from None
    return found


def adapter_loader(config: EngineConfig, checkpoint: Checkpoint) -> Load | None:
    """For a rank; None: it has no adapters."""
    book = book_of(config, checkpoint)
    if book is None:
        return None
    shapes, lora = stored_shapes(checkpoint.spec), config.lora

    def base(name: str) -> F32:
        return read_weight(checkpoint.weights[name], shapes[name])

    def codes(name: str) -> StoredMatrix | None:
        ref = checkpoint.weights[name]
        return None if ref.stored is None or book.rounds else read_codes(ref, shapes[name])

    def load(ref: AdapterRef) -> Mapping[str, LowRank]:
        return load_adapter(
            Path(ref.path), book.sites, base, hash=ref.hash, max_rank=lora.max_lora_rank, max_bytes=lora.largest,
            codes=codes,
        )  # fmt: skip

    return load


def requested(
    book: AdapterBook | None, asked: LoRARequest | None, param: str = "lora_request"
) -> AdapterRef | None:  # fmt: skip
    """The adapter of an offline request. Raises: InputError."""
    if asked is None:
        return None
    if book is None:
        raise InputError(f"{param}: this engine serves no adapters; start it with enable_lora", param=param)
    try:
        return replace(book.read(asked.lora_path), name=asked.lora_name)
    except ModelError as error:
        raise InputError(f"{param}: {error}", param=param) from None
