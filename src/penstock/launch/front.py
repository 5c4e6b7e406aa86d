"""What a front end opens of a model: tokenizer and chat template, no weights. The engine runs elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import EngineConfig
from penstock.core.messages import EngineInfo
from penstock.families.registry import open_model
from penstock.launch.hub import local_path
from penstock.launch.names import check_names
from penstock.launch.progress import loading
from penstock.launch.tokenizer import load_tokenizer, named_tokenizer
from penstock.text.defaults import Wanted
from penstock.text.limits import Limits
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.launch.adapters import AdapterBook


@dataclass(frozen=True)
class Front:
    """`no_tokenizer`: why there is none, if there is none. `generation_config`: the model's own defaults; `sampling`:
    the settings about them; `family`: of its architecture; `adapters`: None if it serves
    none."""

    path: Path
    tokenizer: Tokenizer | None
    chat_template: str | None
    named_templates: dict[str, str]
    no_tokenizer: str
    generation_config: dict[str, object]
    sampling: Wanted
    family: str = ""
    adapters: AdapterBook | None = None


def open_front(config: EngineConfig) -> Front:
    """Raises: ModelError, UnsupportedError, ConfigError."""
    return begin_front(config)()


def begin_front(config: EngineConfig) -> Callable[[], Front]:
    """Look at what can be wrong, before an engine is started for nothing; the result reads the tokenizer.

    A large vocabulary takes half a second, in which an engine can begin. Both raise as `open_front`.
    """
    check_names(config)
    with loading("downloading") as download:
        path = local_path(config.model.model, config.model.revision, download)
    checkpoint = open_model(path)
    files = checkpoint.tokenizer
    if config.model.tokenizer is not None:
        files = named_tokenizer(config.model.tokenizer, checkpoint)

    def load() -> Front:
        adapters = None
        if config.lora.enable_lora:
            from penstock.launch.adapters import book_of  # nobody else needs it at the start

            adapters = book_of(config, checkpoint)
        return Front(
            path=Path(path),
            tokenizer=None if config.model.skip_tokenizer_init else load_tokenizer(files, checkpoint.spec),
            chat_template=files.chat_template,
            named_templates=files.named_templates,
            no_tokenizer=files.reason or "it was started with skip_tokenizer_init",
            generation_config=dict(checkpoint.generation_config),
            sampling=Wanted(config.model.generation_config, config.model.repetition_detection),
            family=checkpoint.spec.family,
            adapters=adapters,
        )

    return load


def limits_from(
    info: EngineInfo, *, max_n: int = 16384, max_logprobs: int = 20, max_logprob_entries: int | None = None
) -> Limits:
    """The validator's limits in a front end."""
    return Limits(
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        kv_capacity_tokens=info.kv_capacity_tokens,
        eos_token_ids=tuple(info.eos_token_ids),
        generates=info.generates,
        pooler=info.pooler,
        num_words=info.num_words,
        module_chunk=info.module_chunk,
        module_recompute=info.module_recompute,
        adapter_units=info.adapter_units,
        block_size=info.block_size,
        max_n=max_n,
        max_logprobs=max_logprobs,
        max_logprob_entries=max_logprob_entries,
    )
