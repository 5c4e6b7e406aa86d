"""What a request may ask of a model and an engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.base.errors import InputError
from penstock.core.adapter import AdapterRef
from penstock.core.pooler import PoolingSpec


@dataclass(frozen=True)
class Limits:
    """What this engine serves. Units: tokens, characters or entries as named.

    Attributes:
        vocab_size: rows of the model's logits; ids lie in [0, vocab_size).
        max_bad_words_chars: of all of them together, which are tokenized while everybody waits.
        max_model_len: prompt and generated tokens of one sample together.
        kv_capacity_tokens: tokens the whole KV pool holds; None: not the tighter limit.
        eos_token_ids: the model's end-of-sequence ids.
        generates: the model writes text; others read it and give vectors or scores.
        pooler: what the model's files say of its vectors.
        num_words: ids of tokens of the first kind, where a model has kinds of tokens (`ModelSpec.token_types`); token i
            of kind t has the id t * num_words + i, and `vocab_size` counts them all. 0: there is one kind.
        module_chunk, module_recompute: prompts that name no modules are cut into such of so many tokens, whose share of
            tokens is computed again (`Request.recompute`); 0: they are not.
        adapter_units, block_size: of adapters' numbers that a block of KV holds, and its tokens, where adapters lie in
            such, too; 0: they do not.
        max_logprobs: largest `logprobs` and `prompt_logprobs`; -1 is no limit and allows -1 (all) in requests.
        max_prompt_logprob_entries: prompt tokens times entries of each.
        max_logprob_entries: samples times tokens times entries of each; None: as many as are asked for.
    """

    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generates: bool = True
    pooler: PoolingSpec | None = None
    num_words: int = 0
    module_chunk: int = 0
    module_recompute: float = 0.0
    adapter_units: int = 0
    block_size: int = 0
    max_n: int = 16384
    max_logprobs: int = 20
    max_prompt_logprob_entries: int = 2_000_000
    max_logprob_entries: int | None = None
    max_stops: int = 64
    max_stop_chars: int = 4096
    max_stop_token_ids: int = 1024
    max_logit_bias: int = 1024
    max_bad_words: int = 128
    max_bad_word_chars: int = 256
    max_bad_words_chars: int = 8192
    max_beam_width: int = 64

    def beside(self, adapter: AdapterRef | None, param: str = "model") -> Limits:
        """Of a request with this adapter: the KV memory is less what that takes.

        Raises: InputError if nothing is left."""
        if adapter is None or not self.adapter_units or self.kv_capacity_tokens is None:
            return self
        num_blocks = max(1, -(-adapter.num_units // self.adapter_units))
        left = self.kv_capacity_tokens - num_blocks * self.block_size
        if left < min(self.block_size, self.max_model_len):
            raise InputError(
                f"{param}: the adapter {adapter.name[:80]} takes {num_blocks} blocks of KV memory, and of the "
                f"{self.kv_capacity_tokens // self.block_size} that there are none is left for a request; start with "
                "more (kv_cache_memory_bytes), or give adapters memory of their own (lora_memory)",
                param=param,
            )
        return replace(self, kv_capacity_tokens=left)

    @property
    def context(self) -> tuple[int, str]:
        """The tighter of context and KV pool, and how messages begin to say it, in the words by which LiteLLM, opencode
        and others know that a conversation has to be made shorter."""
        name = "this model's maximum context length is"
        if self.kv_capacity_tokens is not None and self.kv_capacity_tokens < self.max_model_len:
            return self.kv_capacity_tokens, f"by the size of the KV cache {name}"
        return self.max_model_len, name
