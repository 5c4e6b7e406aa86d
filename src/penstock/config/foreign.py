"""Names that users of vLLM, SGLang, llama.cpp, Ollama and TGI type: as flags, keywords, TOML keys, environment names.

None is passed over in silence. One that means the same as a setting of ours is taken for it, with a word (`ALIASES`).
Of the others, a value that asks for what Penstock does anyway is accepted, one that only tunes machinery that is not
here is left unused with a word, and any other is refused with a sentence that says what to do instead (`FOREIGN`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class SameName:
    """Another engine's name for `ours`. `opposite`: of a switch, in the other sense. `unset`: values that mean what is
    meant here when nothing is given. `flags`: extra spellings."""

    ours: str
    flags: tuple[str, ...] = ()
    opposite: bool = False
    unset: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Foreign:
    """`harmless` values are accepted without effect. `switch`: the flag takes no value. `flags`: extra spellings.

    `unused`: every value is accepted, with `why` as a warning.
    """

    why: str
    harmless: tuple[Any, ...] = (None,)
    switch: bool = False
    flags: tuple[str, ...] = ()
    unused: bool = False

    def refuses(self, value: Any) -> bool:
        # `1 == True` in Python, so types are compared too.
        return not any(type(value) is type(ok) and value == ok for ok in self.harmless)


ALIASES: dict[str, SameName] = {
    # SGLang, transformers
    "model_path": SameName("model", ("-m",)),
    "model_name_or_path": SameName("model"),
    "tokenizer_path": SameName("tokenizer"),
    "context_length": SameName("max_model_len"),
    "max_running_requests": SameName("max_num_seqs"),
    "max_queued_requests": SameName("max_num_queued_reqs"),
    "page_size": SameName("block_size"),
    "schedule_policy": SameName("scheduling_policy"),
    "radix_eviction_policy": SameName("eviction"),
    "disable_cuda_graph": SameName("enforce_eager"),
    "cuda_graph_bs": SameName("cudagraph_capture_sizes"),
    "cuda_graph_sizes": SameName("cudagraph_capture_sizes"),
    "disable_radix_cache": SameName("enable_prefix_caching", opposite=True),
    "disable_cascade_attn": SameName("cascade_attention", opposite=True),
    "random_seed": SameName("seed"),
    "served_model_names": SameName("served_model_name"),
    "lora_paths": SameName("lora_modules"),
    "max_loras_per_batch": SameName("max_loras"),
    # llama.cpp: `-c` is what its slots share, which is what one conversation gets with its usual single slot.
    "offload_prefetch_step": SameName("weight_prefetch"),
    "hf_repo": SameName("model", ("-hf", "-hfr")),
    "ctx_size": SameName("max_model_len", ("-c",), unset=(0,)),
    "n_ctx": SameName("max_model_len", unset=(0,)),
    "parallel": SameName("max_num_seqs", ("-np",), unset=(-1,)),
    "n_threads": SameName("threads", ("-t",), unset=(-1, 0)),
    "alias": SameName("served_model_name", ("-a",)),
    "cache_prompt": SameName("enable_prefix_caching"),
    "rope_freq_base": SameName("rope_theta", unset=(0,)),
    "api_prefix": SameName("root_path"),
    "ssl_key_file": SameName("ssl_keyfile"),
    "ssl_cert_file": SameName("ssl_certfile"),
    "chat_template_file": SameName("chat_template"),
    # TGI
    "model_id": SameName("model"),
    "hostname": SameName("host"),
    "max_batch_size": SameName("max_num_seqs"),
    "num_shard": SameName("tensor_parallel_size"),
    # vLLM's short forms, SGLang
    "tp": SameName("tensor_parallel_size", ("-tp",)),
    "tp_size": SameName("tensor_parallel_size"),
    "ep": SameName("enable_expert_parallel", ("-ep",)),
    "decode_context_parallel_size": SameName("context_parallel_size", ("-dcp",)),
    "cp_size": SameName("context_parallel_size"),
    "pp": SameName("pipeline_parallel_size", ("-pp",)),
    "pp_size": SameName("pipeline_parallel_size"),
    "dp": SameName("data_parallel_size", ("-dp",)),
    "dp_size": SameName("data_parallel_size"),
    "dpl": SameName("data_parallel_size_local", ("-dpl",)),
    "dpr": SameName("data_parallel_start_rank", ("-dpr",)),
    "dpa": SameName("data_parallel_address", ("-dpa",)),
    "dpp": SameName("data_parallel_rpc_port", ("-dpp",)),
    "cors_allow_origin": SameName("allowed_origins"),
}
"""Names whose meaning is the same, not only close."""

FOREIGN: dict[str, Foreign] = {}


def _add(why: str, names: str, *harmless: Any, switch: bool = False, unused: bool = False) -> None:
    """`names`: with blanks between them; extra flags behind each, with strokes. Mutates FOREIGN."""
    one = Foreign(why, (None, *harmless), switch, (), unused)
    for name, *flags in (entry.split("/") for entry in names.split()):
        FOREIGN[name] = replace(one, flags=tuple(flags))


# --- close to a setting, but not equal to it
_add("it counts weights as well; gpu_memory_utilization counts what weights leave", "mem_fraction_static "
     "cuda_memory_fraction")  # fmt: skip
_add("max_num_batched_tokens is the budget of a step, decodes included", "chunked_prefill_size max_prefill_tokens "
     "batch_size/-b n_batch max_batch_prefill_tokens")  # fmt: skip
_add("prompt and output share max_model_len; there is no limit for prompts alone", "max_input_length max_input_tokens")
_add(
    "for the longest request (TGI) it is max_model_len; for the KV memory (SGLang) kv_cache_memory_bytes or "
    "num_gpu_blocks_override",
    "max_total_tokens",
)
_add("the size of the KV memory is kv_cache_memory_bytes or num_gpu_blocks_override", "max_batch_total_tokens")
_add("max_num_seqs run at once, max_num_queued_reqs wait", "max_concurrent_requests")
_add("it is one setting here: kv_cache_dtype, for example int8 (q8_0), int4 (q4_0) or float16 (f16)",
     "cache_type_k/-ctk cache_type_v/-ctv type_k type_v", "f16", "auto")  # fmt: skip
_add("use swap_space in GiB with enable_hierarchical_cache; for a disk, kv_offload, for example disk:FOLDER,20GiB",
     "kv_offloading_size kv_offloading_backend hicache_size hicache_ratio hicache_write_policy hicache_storage_backend "
     "cache_ram/-cram")  # fmt: skip
_add("use slot_checkpoint_tokens: how far apart states are kept", "ctx_checkpoints swa_checkpoints")
_add(
    'use speculative_config, for example {"method": "ngram", "num_speculative_tokens": 5}',
    "spec_method spec_model spec_tokens speculative_algorithm speculative_draft_model_path speculative_num_steps "
    "speculative_eagle_topk speculative_num_draft_tokens speculative_adaptive spec_type model_draft/-md draft_max "
    "draft_min draft_p_min speculate",
)  # fmt: skip
_add("use rope_scaling", "rope_freq_scale rope_scale rope_factor yarn_orig_ctx yarn_ext_factor", 0, 1)
_add("use scheduling_policy priority", "enable_priority_scheduling", False, switch=True)
_add("use generation_config: auto takes the model's own sampling defaults", "sampling_defaults", "model")
_add("use generation_config, or name them in each request", "override_generation_config preferred_sampling_params")
_add("it is temperature in requests, --temperature with run and chat", "temp")
_add("it is repetition_penalty in requests, --repetition-penalty with run", "repeat_penalty repeat_last_n")
_add("it is max_tokens in requests, --max-tokens with run and chat", "predict/-n n_predict")
_add("use files_dir", "file_storage_path")
_add("it is a TOML file here: api_keys_file, with one table [name] for each key", "api_key_file")
_add("use max_body_bytes", "payload_limit")
_add("use max_n", "max_best_of")
_add("use shutdown_timeout", "graceful_termination_timeout")
_add("use request_timeout", "timeout/-to")
_add("use allowed_origins; methods and headers are those that the routes know", "allowed_methods allowed_headers")
_add("use penstock --log-level LEVEL COMMAND", "uvicorn_log_level log_verbosity/-lv")
_add("use penstock --log-level debug COMMAND, or --stats with run", "verbose/-v", False, switch=True)
_add("ask for it in a request: response_format or structured_outputs", "json_schema grammar grammar_file")

# --- not in this version
_add("the ranks of tensor_parallel_size share experts out, as enable_expert_parallel says; use that", "ep_size "
     "expert_parallel_size", 1)  # fmt: skip
_add("running one model on several devices isn't in this version; use 1", "prefill_context_parallel_size", 1)
_add(
    "running one model on several devices isn't in this version; leave it away",
    "all2all_backend moe_backend "
    "nccl_port split_mode/-sm tensor_split/-ts main_gpu/-mg base_gpu_id device_ids",
)  # fmt: skip
_add("running one model on several devices isn't in this version; leave it away",
     "enable_eplb sharded", False, switch=True)  # fmt: skip
_add("adapters are PEFT folders, named with lora_modules: name=path", "lora lora_adapters lora_scaled")
_add("images and sound aren't in this version; leave it away", "mmproj mmproj_url limit_mm_per_prompt "
     "mm_processor_kwargs allowed_media_domains allowed_local_media_path")  # fmt: skip
_add("moving KV between machines isn't in this version", "kv_transfer_config")
_add("prefill and decode run in one engine in this version", "disaggregation_mode", "null")
_add("/sleep and /wake_up are there for whoever has the admin key; leave it away", "enable_sleep_mode", False,
     switch=True)  # fmt: skip
_add("how long a model stays is keep_alive: seconds, 5m, or -1 for ever", "keepalive sleep_idle_seconds", -1)
_add("use master_addr and master_port", "dist_init_addr")
_add("name further models with --model NAME=PATH or in tables [models.NAME]; models_memory bounds what they take",
     "models_dir models_preset models_max", 1)  # fmt: skip
_add("best_of is gone; ask for n samples and keep the one with the highest cumulative_logprob", "best_of")
_add("attention computes in float32; leave it away", "override_attention_dtype")
_add("the checkpoint's configuration is taken as it is; rope_scaling, rope_theta and max_model_len may be changed",
     "hf_overrides json_model_override_args")  # fmt: skip
_add("profiling is done from outside, or with penstock bench; leave it away", "profiler_config")
_add("scales of keys and values are made as tokens come; leave it away", "calculate_kv_scales", switch=True,
     unused=True)  # fmt: skip

# --- never
_add("Penstock never runs code that comes with a model; leave it away", "trust_remote_code", False, switch=True)
_add("Penstock never runs code that comes with a model; leave it away", "code_revision")
_add("what stands between clients and routes is Penstock's own; put a proxy in front", "middleware")
_add("prompts are never written to a log; request_log writes one line per request without its text",
     "enable_log_requests log_requests enable_log_outputs", False, switch=True)  # fmt: skip
_add("prompts are never written to a log; leave it away", "max_log_len log_requests_level log_prompts_dir")
_add("set the environment variable HF_TOKEN instead: command lines are visible to everybody", "hf_token")
_add("models are kept where HF_HOME says; set that environment variable", "download_dir huggingface_hub_cache")
_add("no bytes leave this machine unasked; there is nothing to switch off", "usage_stats", "off")

# --- happens anyway, or is chosen by looking
_add("weight_memory_bytes says how many bytes of weights stay in memory; the other layers come from the disk",
     "cpu_offload_gb", 0, 0.0)  # fmt: skip
_add("weight_memory_bytes says how many bytes of weights stay in memory", "offload_group_size "
     "offload_num_in_group", -1, 0, 1)  # fmt: skip
_add("memory_bytes is one budget, which a search shares out between weights, keys and values; the rest is on the disk",
     "percent")  # fmt: skip
_add("cached tokens are always in usage; leave it away", "enable_prompt_tokens_details enable_cache_report", True,
     switch=True)  # fmt: skip
_add("streams carry usage when stream_options asks for it; leave it away", "enable_force_include_usage", False,
     switch=True)  # fmt: skip
_add("answers always carry x-request-id; leave it away", "enable_request_id_headers", True, switch=True)
_add("it is always there; leave it away", "enable_server_load_tracking enable_metrics metrics slots props jinja "
     "enable_prefill_logprobs", True, switch=True)  # fmt: skip
_add("every server embeds; leave it away", "embedding/--embeddings is_embedding", True, switch=True)
_add("changed certificates are always taken up; leave it away", "enable_ssl_refresh", True, switch=True)
_add("there is no access log, but one line per finished request; --no-request-log leaves that away",
     "disable_uvicorn_access_log", True, switch=True)  # fmt: skip
_add("requests are never logged with their text; --no-request-log leaves their lines away", "disable_log_requests",
     True, switch=True)  # fmt: skip
_add("batches are always formed anew in each step; leave it away", "cont_batching/-cb enable_mixed_chunk", True,
     switch=True)  # fmt: skip
_add("equal input always gives equal output; leave it away", "enable_deterministic_inference", True, switch=True)
_add("the page comes with the server, at /", "webui", True, switch=True)
_add("one process serves the API; use 1", "api_server_count tokenizer_worker_num", 1)
_add("the tokenizer is read as its files say; use auto", "tokenizer_mode", "auto")
_add("it is found by looking at the files; use auto", "load_format config_format", "auto")
_add("there is one implementation of every model; use auto", "model_impl", "auto")
_add("one engine generates and embeds; use auto", "runner convert", "auto", "generate", "none")
_add("structured output is always done by llguidance; leave it away", "guided_decoding_backend grammar_backend", "auto",
     "guidance", "llguidance")  # fmt: skip
_add("structured output is always on; see grammar_timeout", "structured_outputs_config")
_add("logprobs are those of the model before any processor; use raw_logprobs", "logprobs_mode", "raw_logprobs")
_add("contents go to a template as it reads them; use auto", "chat_template_content_format", "auto")
_add("name it in requests: chat_template_kwargs", "default_chat_template_kwargs")
_add("every step's tokens are sent; use 1", "stream_interval", 1)
_add("admission counts what running requests will need; leave it away", "watermark", 0, 0.0)

# --- tunes machinery that is not here: the model runs as well without
_add("this version computes on the CPU, with all layers in main memory", "n_gpu_layers/-ngl/--gpu-layers "
     "gpu_layers_draft/-ngld", 0, unused=True)  # fmt: skip
_add(
    "attention is always computed block by block, as flash attention does", "flash_attn/-fa", "auto", "on", unused=True
)
_add("a step is not cut any further than max_num_batched_tokens", "ubatch_size/-ub n_ubatch", unused=True)
_add("threads is for prompts and for generated tokens alike", "threads_batch/-tb n_threads_batch", -1, unused=True)
_add("packed_weights says how weights are held", "mlock mmap use_mlock use_mmap", switch=True, unused=True)
_add("what is compiled at the start follows from the model", "compilation_config/-cc optimization_level/-O "
     "max_seq_len_to_capture", unused=True)  # fmt: skip
_add("use cudagraph_capture_sizes", "cuda_graph_max_bs max_cudagraph_capture_size cuda_graphs")
_add("what is compiled at the start follows from the model", "enable_torch_compile disable_custom_all_reduce "
     "disable_custom_kernels", switch=True, unused=True)  # fmt: skip
_add("depth and executor decide how far a step runs ahead", "async_scheduling disable_overlap_schedule", switch=True,
     unused=True)  # fmt: skip
_add("the order in which sequences are served is scheduling_policy's", "waiting_served_ratio max_waiting_tokens "
     "num_scheduler_steps", unused=True)  # fmt: skip
_add("tokens of blocks are compared, so that no hash can collide", "prefix_caching_hash_algo", unused=True)
_add("there is one sampler", "sampling_backend", unused=True)
_add("a stuck engine leaves its stacks in the log file and is replaced", "crash_dump_folder", unused=True)
_add("there is no warm-up to skip", "skip_server_warmup warmup", switch=True, unused=True)
_add("threads are as many as cores; pin the process with taskset or numactl", "numa", unused=True)

_FP8 = "8-bit floats aren't in this version; int8 takes as many bytes"
_STORED = "how a checkpoint is quantised is read from its files; leave quantization away"
_ROUNDS = "isn't in this version; int8-w8a8 or int4-w4a8 round the weights as they are loaded"
_KERNELS = "names kernels of GPUs; leave attention_backend away"
VALUES: dict[str, dict[str, str]] = {
    "kv_cache_dtype": dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"), _FP8)
    | {"q8_0": "use int8", "q5_0": "use int4 or int8", "q5_1": "use int4 or int8", "q4_0": "use int4"}
    | {"q4_1": "use int4", "iq4_nl": "use int4", "fp4": "use int4", "fp4_e2m1": "use int4", "f16": "use float16"}
    | {"f32": "use float32"},
    "quantization": dict.fromkeys(
        ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf", "modelopt", "mxfp4", "marlin"),
        _STORED,
    )
    | dict.fromkeys(("fp8", "bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4", "torchao", "w8a8_int8"), _ROUNDS),
    "attention_backend": dict.fromkeys(
        ("flash_attn", "triton", "triton_attn", "xformers", "torch_sdpa", "torch_native", "fa3", "fa4",
         "flashmla", "cutlass_mla", "trtllm_mha", "trtllm_mla", "cpu_attn", "intel_amx"), _KERNELS
    ),
    "scheduling_policy": {"lpm": "use cache-aware", "dfs-weight": "use cache-aware"},
    "generation_config": {"model": "use auto", "openai": "use vllm"},
    "dtype": dict.fromkeys(("fp8", "int8", "int4"), "weights are rounded with quantization, for example int8-w8a8"),
}  # fmt: skip
"""Setting -> what other engines' users give it, in small letters -> what to do instead."""

ENVIRONMENT: dict[str, str] = {"VLLM_API_KEY": "api_key", "VLLM_BATCH_INVARIANT": "batch_invariant"}
"""Other engines' environment variables that count as ours, where ours are not set."""
