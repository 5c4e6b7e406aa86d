"""Names that users of other engines type and that mean nothing, or something else, here.

They are never ignored in silence: a value that asks for what Penstock does anyway is accepted, any other is refused
with one sentence that says what to do instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Foreign:
    """`harmless` values are accepted without effect. `switch`: the flag takes no value. `flags`: extra spellings."""

    why: str
    harmless: tuple[Any, ...] = (None,)
    switch: bool = False
    flags: tuple[str, ...] = ()

    def refuses(self, value: Any) -> bool:
        # `1 == True` in Python, so types are compared too.
        return not any(type(value) is type(ok) and value == ok for ok in self.harmless)


REMOVED: dict[str, Foreign] = {
    "best_of": Foreign("best_of is gone; ask for n samples and keep the one with the highest cumulative_logprob"),
    "tensor_parallel_size": Foreign(
        "running one model on several devices isn't in this version; use 1", (None, 1), flags=("-tp",)
    ),
    "pipeline_parallel_size": Foreign(
        "running one model on several devices isn't in this version; use 1", (None, 1), flags=("-pp",)
    ),
    "data_parallel_size": Foreign("running several replicas isn't in this version; use 1", (None, 1), flags=("-dp",)),
    "trust_remote_code": Foreign(
        "Penstock never runs code that comes with a model; leave trust_remote_code away", (None, False), switch=True
    ),
    "enable_lora": Foreign(
        "LoRA adapters aren't in this version; merge the adapter into the weights", (None, False), switch=True
    ),
    "cpu_offload_gb": Foreign("weights already live in main memory; leave cpu_offload_gb away", (None, 0, 0.0)),
    "enforce_eager": Foreign(
        "this version captures no graphs, so enforce_eager can only be true", (None, True), switch=True
    ),
    # Flags that vLLM's users type for `serve`: accepted where they ask for what happens anyway.
    "enable_prompt_tokens_details": Foreign(
        "cached tokens are always in usage; leave it away", (None, True), switch=True
    ),
    "enable_force_include_usage": Foreign(
        "streams carry usage when stream_options asks for it; leave it away", (None, False), switch=True
    ),
    "enable_request_id_headers": Foreign("answers always carry x-request-id; leave it away", (None, True), switch=True),
    "enable_server_load_tracking": Foreign("/load is always there; leave it away", (None, True), switch=True),
    "enable_ssl_refresh": Foreign("changed certificates are always taken up; leave it away", (None, True), switch=True),
    "disable_uvicorn_access_log": Foreign(
        "there is no access log, but one line per finished request; --no-request-log leaves that away",
        (None, True),
        switch=True,
    ),
    "disable_log_requests": Foreign(
        "requests are never logged with their text; --no-request-log leaves their lines away", (None, True), switch=True
    ),
    "enable_log_requests": Foreign(
        "prompts are never written to a log; --request-log writes one line per request without its text",
        (None, False),
        switch=True,
    ),
    "uvicorn_log_level": Foreign("use penstock --log-level LEVEL serve ..."),
    "api_server_count": Foreign("one process serves the API; use 1", (None, 1)),
    "headless": Foreign("an engine without a server isn't in this version", (None, False), switch=True),
    "middleware": Foreign("Penstock runs no code that it does not ship; put a proxy in front"),
    "tokenizer_mode": Foreign("the tokenizer is read as its files say; use auto", (None, "auto")),
    "load_format": Foreign("the format is found by looking at the files; use auto", (None, "auto")),
    "config_format": Foreign("the format is found by looking at the files; use auto", (None, "auto")),
    "model_impl": Foreign("there is one implementation of every model; use auto", (None, "auto")),
    "runner": Foreign("one engine generates and embeds; use auto", (None, "auto", "generate")),
    "download_dir": Foreign("models are kept where HF_HOME says; set that environment variable"),
    "hf_token": Foreign("set the environment variable HF_TOKEN instead: command lines are visible to everybody"),
    "distributed_executor_backend": Foreign("running one model on several devices isn't in this version"),
    "kv_transfer_config": Foreign("moving KV between machines isn't in this version"),
    "kv_events_config": Foreign("a stream of cache events isn't in this version"),
    "guided_decoding_backend": Foreign(
        "structured output is always done by llguidance; leave it away", (None, "auto", "guidance")
    ),
    "structured_outputs_config": Foreign("structured output is always on; see --grammar-timeout"),
    "enable_sleep_mode": Foreign("sleeping isn't in this version", (None, False), switch=True),
    "calculate_kv_scales": Foreign("KV is not quantised in this version", (None, False), switch=True),
    "override_attention_dtype": Foreign("attention computes in float32; leave it away"),
    "stream_interval": Foreign("every step's tokens are sent; use 1", (None, 1)),
    "watermark": Foreign("admission counts what running requests will need; leave it away", (None, 0, 0.0)),
}

RENAMED: dict[str, str] = {
    "model_path": "model",
    "model_name_or_path": "model",
    "tokenizer_path": "tokenizer",
    "context_length": "max_model_len",
    "n_ctx": "max_model_len",
    "ctx_size": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "max_prefill_tokens": "max_num_batched_tokens",
    "page_size": "block_size",
    "mem_fraction_static": "gpu_memory_utilization",
    "schedule_policy": "scheduling_policy",
    "radix_eviction_policy": "eviction",
    "disable_radix_cache": "enable_prefix_caching, in the opposite sense",
    "random_seed": "seed",
    "max_queued_requests": "max_num_queued_reqs",
    "served_model_names": "served_model_name",
}
"""Other engines' names -> ours. Not accepted as aliases: the meanings are close, not equal."""
