"""The settings of an engine, frozen, by concern. Names are vLLM's wherever vLLM has one.

A setting that is None or "auto" is decided by `plan.resolve`, which also says why. Names of policies, caches, backends
and executors are plain text here: the registries in upper layers know which exist.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.base.errors import ConfigError
from penstock.config.graphs import parse_sizes
from penstock.config.kv_events import parse_kv_events
from penstock.config.lora import LoraConfig, check_lora
from penstock.config.positions import parse_rope_scaling
from penstock.config.ranks import check_ranks, check_replicas
from penstock.config.selection import SelectionConfig, parse_selection
from penstock.config.setting import Section, Setting, setting, settings_of
from penstock.config.simulated import check_simulated
from penstock.config.speculative import SpeculativeConfig, parse_speculative
from penstock.core.block_codec import BLOCK_CODECS, HIDDEN, PLAIN
from penstock.core.kv_format import parse_kv_format

_KV_SIZES = ("kv_cache_memory_bytes", "num_gpu_blocks_override", "gpu_memory_utilization")
DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Which model, and how its numbers are held."""

    model: str = field(
        metadata={"help": "Name, folder or file of the model, or its id on the Hugging Face Hub (org/name/x.gguf)."}
    )
    revision: str | None = setting(None, "Branch, tag or commit of a model that is named by its id.")
    tokenizer: str | None = setting(None, "Folder or file of the tokenizer; by default the model's own.")
    dtype: str = setting(
        "auto",
        "Type of weights and activations. auto: float32 for float32 checkpoints and for half-precision ones whose "
        "widened weights take at most half of the available memory; otherwise the checkpoint's own.",
        choices=DTYPES,
    )
    quantization: str = setting(
        "none",
        "What native kernels round weights to. none: nothing. int8-w8a8, int4-w4a8: integer products, rows have 8 "
        "bits, too. int8-wo, int4-wo: weights only, on torch as well. A scale for how many inputs: int4-w4a8:128 (else "
        "64), int8-wo:32 (else all).",
    )
    activation_quantization: str = setting(
        "int8",
        "What native kernels round activations to before products with codes of a checkpoint. int8: 8 bits with a "
        "scale per 32 inputs (64 or 128 where weights have such groups). none: no rounding to integers; slower.",
        choices=("int8", "none"),
    )
    max_model_len: int | None = setting(
        None,
        "Longest sequence, prompt and output together, in tokens; by default what the model was made for.",
        minimum=1,
    )
    rope_scaling: str | None = setting(
        None,
        'Other rotary positions than the checkpoint\'s, as a JSON object: {"rope_type": "yarn", "factor": 4.0}. Kinds: '
        "default, linear, ntk, dynamic, llama3, yarn, longrope. The longest context becomes factor times as long.",
        takes_object=True,
    )
    rope_theta: float | None = setting(None, "Another base of rotary frequencies than the checkpoint's.", above=0.0)
    skip_tokenizer_init: bool = setting(False, "Load no tokenizer: prompts and outputs are token ids only.")
    seed: int = setting(0, "Seed from which requests that bring none get theirs.", minimum=0, maximum=2**64 - 1)
    generation_config: str = setting(
        "auto",
        "Sampling defaults where a request names none. auto: those of the model's generation_config.json or GGUF file, "
        "or mild ones of Penstock's (temperature 0.7, top_p 0.95, min_p 0.05) where it gives none; vllm: OpenAI's "
        "neutral ones.",
        choices=("auto", "vllm"),
    )
    repetition_detection: str | None = setting(
        None,
        "End outputs that run in circles, where a request names nothing else, as a JSON object with vLLM's names: "
        '{"max_pattern_size": 64, "min_count": 8} ends one whose newest tokens are a pattern of up to 64 tokens, 8 '
        "times in a row.",
        takes_object=True,
    )
    prompt_compressor: str = setting(
        "pico",
        "Model that reads the prompts of requests with prompt_compression; it needs the served model's tokens. pico "
        "comes with Penstock and is loaded when a request first asks; any other is loaded at the start. none: no such "
        "requests are taken.",
    )


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Section):
    """KV memory: how much, in what pieces, and what is kept for reuse."""

    block_size: int = setting(32, "Tokens per KV block.", minimum=1)
    kv_cache_memory_bytes: int | None = setting(
        None, "Bytes for KV blocks and recurrent states, at most; all are taken only if they are used.", minimum=1
    )
    num_gpu_blocks_override: int | None = setting(
        None,
        "Number of KV blocks, instead of a number computed from memory (vLLM's name; here: of main memory).",
        minimum=1,
    )
    gpu_memory_utilization: float | None = setting(
        None,
        "Fraction of main memory left after weights and reserve that KV may take (vLLM's name). By default: enough for "
        "max_num_seqs sequences of 2048 tokens, at most a quarter of what weights leave, at least one of "
        "max_model_len.",
        above=0.0,
        maximum=1.0,
    )
    kv_allocator: str = setting(
        "paged",
        "How sequences get KV memory. paged: blocks on demand; modules: and prompt_cache; layerkv: layers wait in "
        "swap_space if short. Baselines: contiguous, contiguous-pow2, -oracle, -predicted (length_predictor): runs; "
        "virtual: addresses; vtensor: chunks.",
    )
    module_chunk_tokens: int = setting(
        0,
        "With kv_allocator modules: prompts without prompt_cache are cut into modules of so many tokens (whole "
        "blocks), each computed by itself. 0: they are not.",
        minimum=0,
    )
    module_recompute: float = setting(
        0.0,
        "Of the tokens of modules that module_chunk_tokens made, behind the first: the share that is computed again in "
        "the whole context.",
        minimum=0.0,
        maximum=1.0,
    )
    kv_layer_tpot: float | None = setting(
        None,
        "With kv_allocator layerkv: the most seconds of a step that decodes: whose layers would make it longer "
        "waits with decoding. By default 1.2 times what such steps take without.",
        above=0.0,
    )
    kv_layer_rows: int = setting(
        0,
        "With kv_allocator layerkv: sequences that should run at once; so much memory stays free that all find room "
        "for two layers, of 2048 tokens at most. 0: whoever comes first takes whole blocks.",
        minimum=0,
    )
    enable_prefix_caching: bool = setting(True, "Reuse KV blocks of prompts that begin alike.")
    prefix_cache: str = setting("radix", "Which prefix cache.")
    eviction: str = setting("lru", "Which cached blocks are given up first.")
    kv_cache_dtype: str = setting(
        "auto",
        "Type of keys and values. auto: as dtype. int8, int4, int2: with scales for each token. kivi4, kivi2: keys by "
        "channel, newest tokens whole. By layer and head a JSON object: "
        '{"dtype": "int4", "layers": {"0-1": "int8"}, "recent": 64, "sinks": 32}.',
        takes_object=True,
    )
    kv_rotation: str = setting(
        "none",
        "Turn keys and values before they are rounded, so that no component stands out. hadamard: by a Hadamard "
        "matrix; queries and outputs are turned with them.",
        choices=("none", "hadamard"),
    )
    kv_selector: str = setting(
        "none",
        "What of its context a sequence keeps. none: all of it. Every other one gives up accuracy for memory or speed; "
        "penstock cap says how much of each.",
    )
    kv_budget: str = setting(
        "25%",
        "How much a kv_selector keeps of each sequence: tokens (512), or a share of those that there are (25%).",
    )
    kv_selector_config: str | None = setting(
        None,
        'Options of the kv_selector, as a JSON object: {"sinks": 4, "recent": 32, "interval": 64}.',
        takes_object=True,
    )
    swap_space: float = setting(
        0.0, "GiB of host memory to which preempted sequences may be swapped; 0: they are recomputed.", minimum=0
    )
    swap_tier: str = setting(
        "host",
        "How they are. host: block by block, within the step. fastswitch: in runs, back by threads beside the steps, "
        "and with copies that stay, so that who is swapped again copies only what is new. disk: as host, in a file of "
        "swap_space.",
        choices=("host", "fastswitch", "disk"),
    )
    enable_hierarchical_cache: bool = setting(
        False,
        "Blocks that the prefix cache gives up wait in swap_space, unless preempted sequences need the room, and come "
        "back when a prompt begins with them. For models whose layers all keep their whole context.",
    )
    kv_offload: str = setting(
        "none",
        "Where full blocks are kept outside this process; prompts that begin with them are read. disk:FOLDER,20GiB "
        "(10GiB if not said): files; remote:HOST:PORT: penstock cache serve. Spaces between several: one folder, "
        "remotes that share blocks out.",
    )
    kv_offload_secret_file: str | None = setting(
        None,
        "A file with the secret that engines and a server of blocks (kv_offload remote:HOST:PORT) share: one line of "
        "32 characters or more. Engines may have a second line, which the server has not: it then cannot make blocks.",
    )
    kv_offload_format: str = setting(
        "plain",
        "How blocks are written there. plain: as in memory. cachegen: in 2.6 bits a number (-fine 3.5, -coarse 2); "
        "tokens may change. hidden: what keys and values come from, half their bytes if heads share none; exact in "
        "float32. Each has its own blocks.",
        choices=(PLAIN, *BLOCK_CODECS.names(), HIDDEN),
    )
    kv_load_policy: str = setting(
        "auto",
        "How a prompt's blocks are read. wait: all. cake: from its end while its front is computed. split: what is "
        "computed meanwhile follows measured rates. auto: what takes least, or nothing. cake and split: if all layers "
        "keep everything.",
        choices=("wait", "cake", "split", "auto"),
    )
    kv_fetch_ahead: float = setting(
        0.25,
        "GiB of host memory for blocks of kv_offload that are read for requests while these wait to be admitted, and "
        "are kept from eviction; 0: nothing is read ahead.",
        minimum=0,
    )
    kv_offload_eviction: str = setting(
        "lru",
        "Which blocks leave a full folder: of the text used longest ago lru the end first, recompute the beginning, "
        "which is computed again for least while the rest is read.",
        choices=("lru", "recompute"),
    )
    kv_pin_share: float = setting(
        0.1,
        "The part of KV memory that requests may pin (kv_hints), so that nothing takes it until their time to live is "
        "over; tenants have parts of it. 0: nobody may pin.",
        minimum=0,
        maximum=0.9,
    )
    kv_events_config: str | None = setting(
        None,
        "Tell other processes, such as routers, over ZeroMQ which blocks are kept for reuse, as a JSON object with "
        'vLLM\'s names: {"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}. Needs penstock[events].',
        takes_object=True,
    )
    slot_checkpoint_tokens: int = setting(
        512, "Recurrent states are kept for reuse at prompt ends and every so many tokens.", minimum=1
    )
    slot_checkpoint_rule: str = setting(
        "distance",
        "Where they are kept. distance: as slot_checkpoint_tokens says. branch: where a prompt parts from known "
        "text, and at the end of each sequence.",
    )
    grammar_cache_bytes: int = setting(
        64 << 20, "Bytes of compiled grammars (structured outputs) that are kept.", minimum=0
    )
    warm_grammars: bool = setting(
        False, "Make a server's tables for structured outputs at its start, not when the first grammar comes."
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Section):
    """Who runs, and how much per step."""

    scheduling_policy: str = setting("fcfs", "Who is served first.")
    length_predictor: str | None = setting(
        None,
        "Who says how long an output will be: history, learned, asked, oracle; knobs as NAME:knob=value. Memory is set "
        "aside by it, and policies that look at lengths go by it.",
    )
    max_num_seqs: int | None = setting(None, "Sequences running at once; by default 64.", minimum=1)
    max_num_batched_tokens: int | None = setting(
        None, "Token budget of one step; by default 512, more if other settings need it.", minimum=1
    )
    preemption_mode: str = setting(
        "auto",
        "How a preempted sequence gets its KV back. auto: whichever the cost table says is cheaper.",
        choices=("auto", "recompute", "swap"),
    )
    pause_mode: str = setting(
        "auto",
        "What becomes of the KV of a request while it waits for a tool that it called (Request.calls). auto: what "
        "wastes least memory over time, by measured pace.",
        choices=("auto", "preserve", "discard", "swap"),
    )
    offline_policy: str = setting(
        "fcfs",
        "Who is served first of offline work (batches, background responses, service_tier flex): a scheduling_policy.",
    )
    offline_step_ms: float = setting(
        100.0,
        "Offline work is cut so that a step of it alone takes no longer, in milliseconds, or no longer than two of one "
        "token: so long at most does an online request wait for it, for each step in flight.",
        above=0.0,
    )
    offline_slowdown: float = setting(
        0.1,
        "How much longer a step in which online requests decode may take because of offline work: 0.1 is a tenth. 0: "
        "offline work runs only while nothing else does.",
        minimum=0.0,
        maximum=10.0,
    )
    schedule_conservativeness: float = setting(
        1.0,
        "How much of what running requests may still generate is kept free when another one enters (SGLang's name). "
        "0: nothing: more run at once, and more are thrown out and computed again.",
        minimum=0,
    )
    enable_chunked_prefill: bool = setting(
        True, "Let a prompt span several steps. Off: a step must be able to hold the longest sequence."
    )
    long_prefill_token_threshold: int = setting(
        0, "Tokens that one sequence may take from a step's budget; 0: as many as there are.", minimum=0
    )
    decode_step_ms: float = setting(
        100.0,
        "A server's steps in which somebody decodes are cut so that they take no longer, as predicted, in "
        "milliseconds; a prompt gets a block per step at least.",
        above=0.0,
    )
    adaptive: bool = setting(
        False,
        "Let a controller move knobs of the scheduler as the load wants it, each move with its reason in log, metrics "
        "and /internal/state. Tokens stay the same.",
    )
    adaptive_slo: str = setting(
        "ttft=1,tpot=0.1",
        "What adaptive mode keeps for requests that promise nothing themselves: seconds to the first token and per "
        "token after it, or as 500ms.",
    )
    adaptive_knobs: str = setting(
        "all",
        "Which knobs adaptive mode may move, with commas. all: those that have their defaults; max_num_seqs and "
        "max_num_batched_tokens never beyond what is given.",
    )


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig(Section):
    """What computes a step."""

    ops: str = setting(
        "auto",
        "What computes. native: compiled kernels, the same tokens in every batch. ref: numpy, row by row, the same "
        "tokens in every batch, slow. blas: one product for all rows; logits depend on the batch. auto: native "
        "if it can run the model, else ref.",
    )
    device: str = setting(
        "auto",
        "Where the model runs. cpu: kernels of this package. cuda, cuda:N: a GPU, by torch, which penstock[gpu] "
        "brings. cpu-torch: what runs on a GPU, on the CPU, to try it; slow. auto: cpu.",
    )
    threads: int | None = setting(
        None,
        "Threads that compute, with native kernels; by default one for each core this process may use, shared out "
        "among ranks.",
        minimum=1,
        maximum=1024,
    )
    tensor_parallel_size: int = setting(
        1,
        "Ranks that share one model out, each a process with part of every layer's weights, heads and KV cache. The "
        "tokens are those of one rank. threads are each rank's.",
        minimum=1,
        maximum=64,
    )
    nnodes: int = setting(
        1,
        "Hosts that the ranks are on, as many on each. The first runs penstock serve as ever, the others the same "
        "with --headless and a node_rank.",
        minimum=1,
        maximum=64,
    )
    node_rank: int = setting(0, "Which of nnodes this host is; 0: the one with the engine.", minimum=0, maximum=63)
    master_addr: str = setting(
        "127.0.0.1",
        "With nnodes: the address of the host with node_rank 0, where the others connect. Nothing that ranks give each "
        "other is encrypted: use a network of your own.",
    )
    master_port: int = setting(29501, "The port for that, the same on all hosts.", minimum=1, maximum=65535)
    ranks_secret_file: str | None = setting(
        None,
        "File with the secret of hosts with ranks or engines, the same on all: a line of 32 characters or more "
        "(openssl rand -hex 32). Needed where master_addr or data_parallel_address isn't this machine's alone.",
    )
    distributed_executor_backend: str = setting(
        "mp",
        "Who starts what runs on further hosts (nnodes, data_parallel_size_local): mp (whoever runs penstock serve "
        "--headless there), ray (nodes of a Ray cluster, RAY_ADDRESS or the one of this machine; pip install "
        "penstock[ray]).",
        choices=("mp", "ray"),
    )
    data_parallel_size: int = setting(
        1,
        "Engines of the same model behind one server, each with a whole model and KV memory of its own; route_policy "
        "chooses between them. What one of them had goes on with the others when it ends.",
        minimum=1,
        maximum=64,
    )
    data_parallel_size_local: int | None = setting(
        None,
        "How many of the engines of data_parallel_size are on this host; 0: none. The others join, while the server "
        "runs, from hosts that run penstock serve --headless. By default all; with distributed_executor_backend ray, "
        "one.",
        minimum=0,
        maximum=64,
    )
    data_parallel_start_rank: int | None = setting(
        None,
        "With headless and data_parallel_size: the number of this host's first engine. Those of the server's own host "
        "begin at 0.",
        minimum=0,
        maximum=63,
    )
    data_parallel_address: str = setting(
        "127.0.0.1",
        "The address of the server's host where hosts with engines connect. Nothing between them is encrypted: use a "
        "network of your own.",
    )
    data_parallel_rpc_port: int = setting(29550, "The port for that, the same on all hosts.", minimum=1, maximum=65535)
    max_replicas: int | None = setting(
        None,
        "Engines of the model that the server may have at most, where they are added and removed while it runs. Memory "
        "and cores are shared out among so many. By default data_parallel_size.",
        minimum=1,
        maximum=64,
    )
    tensor_parallel_sums: bool = setting(
        False,
        "With several ranks: split every second product by inputs and add the ranks' sums up, as Megatron-LM does. Two "
        "exchanges a layer instead of four, but logits differ by up to 1e-4. Plain weights only.",
    )
    enable_expert_parallel: bool = setting(
        False,
        "With several ranks: each has whole experts of a mixture, instead of some outputs of every expert, and ranks "
        "give each other what theirs made of the tokens that chose them. The tokens are those of one rank.",
    )
    context_parallel_size: int = setting(
        1,
        "Ranks over which the tokens of every sequence are shared out: each keeps 1/N of the keys and values, and what "
        "they find is merged. As many as tensor_parallel_size; given alone, it means that many. Logits differ by 1e-5.",
        minimum=1,
        maximum=64,
    )
    context_parallel_reduce: str = setting(
        "flat",
        "How ranks merge what they found over their tokens. flat: each gives each other its heads, added in order of "
        "ranks. tree: pairwise, in log2(N) exchanges, where N is a power of two; else flat.",
        choices=("flat", "tree"),
    )
    context_parallel_placement: str = setting(
        "round",
        "Which rank keeps which tokens. round: they go round, one by one, so all ranks have as many. home: blocks are "
        "whole; a sequence's lie on its home rank until that is full, then on ranks that lend theirs, the one with "
        "most free ones first.",
        choices=("round", "home"),
    )
    pipeline_parallel_size: int = setting(
        1,
        "Stages that a model's layers are shared out to, one behind the other, each of tensor_parallel_size ranks: a "
        "process has its layers' weights and KV cache. The tokens are those of one rank.",
        minimum=1,
        maximum=64,
    )
    pipeline_microbatches: int | None = setting(
        None,
        "Parts into which a step falls, at most, so that stages compute at the same time. By default as many as "
        "stages, of 32 tokens at least: weights are read once for each.",
        minimum=1,
        maximum=64,
    )
    packed_weights: str = setting(
        "auto",
        "Where weights are that an earlier start has packed. copied: in huge pages, quicker to read. mapped: in the "
        "file, which processes share. streamed: copied layer by layer, while steps run already. auto: copied, or "
        "mapped if memory is short.",
        choices=("auto", "copied", "mapped", "streamed"),
    )
    weight_memory_bytes: int | None = setting(
        None,
        "Bytes of packed weights in memory at a time, at most: the other layers are read from the disk in every step, "
        "while those before them compute. For models that memory does not hold. By default all are there.",
        minimum=1,
    )
    memory_bytes: int | None = setting(
        None,
        "Bytes for weights, keys and values together: FlexGen's search decides which layers stay, how many sequences "
        "share those that are read, and whose keys and values wait on the disk.",
        minimum=1,
    )
    offload_rates: str = setting(
        "auto",
        "What that search knows of this machine. auto: measured at the first start with memory_bytes, and kept in the "
        "cache folder; or a JSON file with read, step_s, row_s, layers_share, kv_read.",
    )
    weight_prefetch: int = setting(
        1, "Layers that are on their way from the disk while one computes, with weight_memory_bytes.", minimum=0
    )
    expert_memory_bytes: int | None = setting(
        None,
        "Memory for the experts of a mixture, with native kernels; the others stay in a file and are read when a "
        "router chooses them. No token changes. By default all are in memory.",
        minimum=1,
    )
    expert_eviction: str = setting(
        "lru",
        "Which expert leaves expert_memory_bytes when another comes. lru: used longest ago. lfu: used least often. "
        "lifo: who came last. activation: used least lately, and late in the model.",
    )
    expert_prediction: str = setting(
        "none",
        "Which experts are read before a router asks for them. none. router: the next layer's choice for this layer's "
        "rows. activations: what like sequences used. trained:FILE: what a predictor says.",
    )
    attention_backend: str = setting(
        "ref",
        "Which implementation of attention. ref: the backend's own; ref-online: in one pass, by ops ref. Where torch "
        "computes: flex (FlexAttention of torch), flashinfer (where that package is installed).",
    )
    cascade_attention: bool = setting(
        True,
        "Read the KV blocks with which several sequences of a step begin once for all of them. It changes no bit. "
        "Native kernels only.",
    )
    batch_invariant: bool = setting(
        False,
        "On a GPU: a row has the same bits in every batch, by products in one fixed order, which is slower. On the CPU "
        "it has them anyway, but with ops blas.",
    )
    enforce_eager: bool = setting(
        False, "On a GPU: start every operation of every step from the host; capture no decode graphs."
    )
    cudagraph_capture_sizes: str = setting(
        "auto",
        "For which numbers of rows a GPU has decode graphs, captured at the start: 1,2,4,8. A step takes the smallest "
        "that holds it. auto: powers of two up to max_num_seqs on a GPU, else none. With cpu-torch numbers try a mock.",
    )
    executor: str = setting(
        "inproc",
        "Where the model runs. inproc: in the engine's own thread. multiproc: in a process of its own, so that with "
        "depth 2 the engine schedules while it runs.",
    )
    simulated_device: str | None = setting(
        None,
        "Compute nothing: answer with made-up tokens at the pace of this device (h100-sxm, a100-80g, or a file that "
        "penstock sim calibrate wrote of this model), to try clients, limits and several engines. No weights are read.",
    )
    depth: int = setting(1, "Steps that may be in flight; by default 2 on a GPU.", minimum=1)
    log_file: str | None = setting(
        None,
        "File to which processes of the engine append their stacks when they are stuck or crash, and tracebacks; by "
        "default of penstock serve log/engine.log in the cache folder, else standard error.",
    )
    preset: str | None = setting(
        None,
        "The parts that another system had, such as vllm-2023, orca, llama.cpp, as settings, which your own beat; "
        "several with commas, if they do not contradict each other. penstock features says what each sets.",
    )
    tuned_for: str | None = setting(
        None,
        "Machine, version and model that settings were tuned for, as penstock tune writes it into its file; elsewhere "
        "an engine refuses to start with them. Without it nothing is checked.",
        takes_object=True,
    )
    plugin: str | None = setting(
        None,
        "Python files (FILE.py) or modules with parts of your own, with commas between them: they register policies, "
        "selectors and the like when they are imported. Name only what you trust: they run as Penstock does.",
    )
    speculative_config: str | None = setting(
        None,
        'Speculative decoding, as a JSON object: {"method": "ngram", "num_speculative_tokens": 5}. Without it, or when '
        "drafts do not pay, every step yields one token. No method changes what is generated, unless its verifier "
        "says so.",
        takes_object=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_parallel_size == 1:  # there are as many ranks as tokens are shared out over
            object.__setattr__(self, "tensor_parallel_size", self.context_parallel_size)

    @property
    def num_ranks(self) -> int:
        """Processes that have a part of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def most_replicas(self) -> int:
        """Engines of the model that the server may have, here and on other hosts."""
        return max(self.data_parallel_size, self.max_replicas or 1)

    @property
    def size_here(self) -> int:
        """Engines of data_parallel_size on this host."""
        if self.data_parallel_size_local is not None:
            return self.data_parallel_size_local
        return 1 if self.distributed_executor_backend == "ray" and self.nnodes == 1 else self.data_parallel_size

    @property
    def num_elsewhere(self) -> int:
        """Engines that join from other hosts."""
        return self.data_parallel_size - self.size_here

    @property
    def is_replicated(self) -> bool:
        """A router chooses between engines, or the only one is on another host."""
        return self.most_replicas > 1 or self.num_elsewhere > 0

    @property
    def replicas_here(self) -> int:
        """Engines that this machine is shared out among."""
        return max(1, self.most_replicas - self.num_elsewhere)

    @property
    def replicas_field(self) -> str:
        """The setting that makes several of them."""
        if self.data_parallel_size > 1:
            return "data_parallel_size"
        return "data_parallel_size_local" if self.num_elsewhere else "max_replicas"

    @property
    def ranks_field(self) -> str:
        """The setting that makes several of them."""
        return "pipeline_parallel_size" if self.pipeline_parallel_size > 1 else "tensor_parallel_size"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of one engine. Build it with `config.from_kwargs`, `from_toml` or `from_args`.

    Raises ConfigError when settings contradict each other (what depends on the model or the machine is checked by
    `plan.resolve`).
    """

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    execution: ExecutionConfig = ExecutionConfig()
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        cache = self.cache
        where = self.execution.packed_weights
        by_layer = self.execution.weight_memory_bytes is not None or where == "streamed"
        moving = by_layer or self.execution.expert_memory_bytes is not None
        check_lora(self.lora, cache.kv_offload_format, moving=moving)
        parse_rope_scaling(self.model.rope_scaling)
        parse_speculative(self.execution.speculative_config)
        if cache.kv_cache_dtype != "auto":
            parse_kv_format(cache.kv_cache_dtype)
        parse_selection(cache.kv_selector, cache.kv_budget, cache.kv_selector_config)
        parse_kv_events(cache.kv_events_config)
        parse_sizes(self.execution.cudagraph_capture_sizes)
        if cache.kv_cache_memory_bytes is not None and cache.num_gpu_blocks_override is not None:
            raise ConfigError(
                f"num_gpu_blocks_override: {cache.num_gpu_blocks_override} contradicts kv_cache_memory_bytes "
                f"{cache.kv_cache_memory_bytes}: both set the size of the KV memory; give only one of them",
                field="num_gpu_blocks_override",
            )
        if self.execution.weight_memory_bytes is not None and where not in ("auto", "streamed"):
            raise ConfigError(
                f"weight_memory_bytes: layers are read from the disk, and packed_weights {where} has all of them in "
                "memory; leave packed_weights away",
                field="weight_memory_bytes",
            )
        if self.execution.num_ranks > 1:
            check_ranks(self)
        if self.execution.is_replicated or self.execution.data_parallel_size_local is not None:
            check_replicas(self)
        if self.execution.simulated_device is not None:
            check_simulated(self)
        if self.execution.memory_bytes is not None:
            self._check_one_budget()
        if self.execution.expert_memory_bytes is not None and by_layer:
            raise ConfigError(
                "expert_memory_bytes: experts come one by one as routers choose them, and with weight_memory_bytes or "
                "packed_weights streamed whole layers do; give only one of them",
                field="expert_memory_bytes",
            )

    def _check_one_budget(self) -> None:
        given = {
            name: getattr(self.execution, name) is not None for name in ("weight_memory_bytes", "expert_memory_bytes")
        }
        given |= {name: getattr(self.cache, name) is not None for name in _KV_SIZES}
        given["packed_weights"] = self.execution.packed_weights != "auto"
        for name in (name for name, is_given in given.items() if is_given):
            raise ConfigError(
                f"{name}: memory_bytes shares memory out between weights, keys and values; leave one of both away",
                field=name,
            )

    @property
    def sizes_kv(self) -> bool:
        """Whether somebody said how much memory KV may take."""
        return any(getattr(self.cache, name) is not None for name in _KV_SIZES)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """`speculative_config`, parsed."""
        return parse_speculative(self.execution.speculative_config)

    @property
    def selection(self) -> SelectionConfig | None:
        """`kv_selector`, `kv_budget` and `kv_selector_config`, parsed; None: everything is kept."""
        return parse_selection(self.cache.kv_selector, self.cache.kv_budget, self.cache.kv_selector_config)

    def as_kwargs(self) -> dict[str, Any]:
        """Every setting by its flat name: `from_kwargs(**config.as_kwargs()) == config`."""
        return {item.name: getattr(getattr(self, item.section), item.name) for item in SETTINGS.values()}


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "execution": ExecutionConfig,
    "lora": LoraConfig,
}
"""TOML table name -> section class."""

SETTINGS: dict[str, Setting] = {item.name: item for section in SECTIONS.values() for item in settings_of(section)}
"""Every setting by name; names are unique over all sections."""
