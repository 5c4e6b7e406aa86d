"""The settings of a server. `penstock serve` and the table [server] of a TOML file; `LLM` knows none of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.base.errors import ConfigError
from penstock.config.engine import EngineConfig
from penstock.config.setting import Section, setting
from penstock.config.several import seconds_of


@dataclass(frozen=True, kw_only=True)
class ServerConfig(Section):
    """Where the server listens, who may ask, and how much it takes on. Lists are written with commas."""

    host: str = setting("127.0.0.1", "Address to listen on. 0.0.0.0 is everywhere: give keys first.")
    port: int = setting(8000, "Port to listen on; 0 takes any that is free.", minimum=0, maximum=65535)
    uds: str | None = setting(None, "Listen on this unix socket instead.")
    headless: bool = setting(
        False,
        "No server: this host runs ranks (node_rank 1 and above) for the engine at master_addr, or engines (from "
        "data_parallel_start_rank on) for the server at data_parallel_address.",
    )
    served_model_name: str | None = setting(None, "Names by which clients call the model (commas between them).")
    lora_modules: str | None = setting(
        None,
        "Adapters that are served from the start, by the names by which clients call them: name=path, with spaces "
        'between several, or JSON objects {"name": "sql", "path": "adapters/sql"}.',
    )
    lora_root: str | None = setting(
        None, "Folder below which adapters may be loaded while the server runs (/v1/load_lora_adapter); none: nowhere."
    )
    keep_alive: str | None = setting(
        None,
        "How long a model stays in memory after its last request: seconds, 90s, 5m, 1h30m; -1: for ever. By default "
        "for ever, and 5m where the server has several models (--model NAME=PATH).",
    )
    route_policy: str = setting(
        "prefix",
        "Which of several engines (data_parallel_size) a request goes to: prefix (who has its beginning cached, unless "
        "others have much less to do), session, least-requests, least-tokens, least-kv, power-of-two, length-buckets "
        "(answers that will be long are spread), virtual-usage, round-robin, random.",
    )
    replica_roles: str | None = setting(
        None,
        "What engines (data_parallel_size) are for: prefill=1,decode=3; those left over are mixed. Prompts are "
        "computed by the first kind, tokens by the second, and keys and values go by kv_offload.",
    )
    early_rejection: str = setting(
        "off",
        "Refuse (429) before its prompt is computed what would find no place at the engines that decode "
        "(replica_roles): predicted looks at them as they will be when its prompt is done, now as they are.",
        choices=("off", "now", "predicted"),
    )
    enable_migration: bool = setting(
        False,
        "Requests that run or wait move between engines (data_parallel_size) where that makes room for those who wait; "
        "keys and values go by kv_offload.",
    )
    autoscale: str | None = setting(
        None,
        "Adds and removes engines with the load, from min_replicas to max_replicas: reactive (by requests in flight), "
        "predictive (by those expected when an engine has started), fixed; with knobs: reactive:target=12,down_s=120.",
    )
    min_replicas: int | None = setting(
        None,
        "Engines that autoscale leaves at least; by default data_parallel_size, with which the server begins.",
        minimum=1,
        maximum=64,
    )
    models_memory: float | None = setting(
        None,
        "GiB that several models may take together, weights and KV (by default, what is free at the start). Who has "
        "been idle longest leaves for another.",
        above=0.0,
    )
    weights_root: str | None = setting(
        None,
        "Folder below which other weights of the model may be taken up while the server runs "
        "(/update_weights_from_disk); none: nowhere. Answers then say which weights they are of.",
    )
    any_model_name: bool = setting(
        False,
        "Answer requests for models of any other name, too, with the model that is served, under its own name. What "
        "they ask for beyond its context is cut.",
    )
    api_key: str | None = setting(
        None, "Keys of which clients must send one (commas between them); from the environment (VLLM_API_KEY, too) "
        "other users of the machine cannot read them.", secret=True
    )  # fmt: skip
    api_keys_file: str | None = setting(
        None, "TOML file of keys, one table [name] each: key or key_sha256, weight, tokens_per_minute, "
        "max_concurrent, kv_share, class, admin."
    )  # fmt: skip
    admin_api_key: str | None = setting(None, "Key for the admin routes; without one they do not exist.", secret=True)
    ssl_certfile: str | None = setting(None, "TLS certificate (PEM). A changed file is taken up without a restart.")
    ssl_keyfile: str | None = setting(None, "TLS private key (PEM).")
    ssl_ca_certs: str | None = setting(None, "Certificates of clients must be signed by these.")
    allowed_origins: str | None = setting(None, "Origins that browsers may send from (CORS), commas; * is all.")
    allowed_hosts: str | None = setting(
        None, "Names that clients may call the server by while it asks for no key, besides localhost, this machine's "
        "own and host (commas; .example.org: all below it; * is any). Addresses and names without a dot always pass."
    )  # fmt: skip
    root_path: str = setting("", "Path under which a proxy publishes the server.", allow_empty=True)
    chat_template: str | None = setting(None, "Chat template instead of the model's: a file or the template itself.")
    trust_request_chat_template: bool = setting(False, "Run chat templates that come with requests.")
    tool_call_parser: str | None = setting(None, "How this model writes tool calls; by default found by its template.")
    reasoning_parser: str | None = setting(None, "How this model marks its thoughts; by default by its template.")
    tool_prompt: str = setting(
        "auto",
        "Tell models whose chat template shows no tools of them in plain words. auto: whatever tool_choice says; "
        "required: only where a call is required or a function is named, to which decoding is bound; off: no tools.",
        choices=("auto", "required", "off"),
    )
    bare_tool_calls: str = setting(
        "auto",
        "Take JSON that is a call of a declared tool for one, without the marks of the model's template. auto: from "
        "models of which it is known that they leave the marks out (Qwen 2.5); on: from all; off: from none.",
        choices=("auto", "on", "off"),
    )
    enable_auto_tool_choice: bool = setting(True, "Let the model decide about tools (tool_choice auto).")
    max_logprobs: int = setting(20, "Largest logprobs of a request; -1: the whole vocabulary.", minimum=-1)
    max_logprob_entries: int = setting(
        1_000_000, "Log-probabilities that a request may come to: n x max_tokens x (logprobs + 1).", minimum=1
    )
    strict: bool = setting(False, "Refuse unknown fields in requests; otherwise they are ignored with a warning.")
    max_num_queued_reqs: int = setting(
        256, "Requests that may wait; more are refused with 429. 0: as many as come.", minimum=0
    )
    max_num_queued_tokens: int = setting(
        0, "Prompt tokens that may wait; 0: sixteen times what the KV memory holds.", minimum=0
    )
    max_queue_wait: float = setting(
        60.0, "Seconds of predicted waiting from which requests are refused; 0: any.", minimum=0
    )
    ttft_slo: float | None = setting(
        None, "Seconds in which first tokens should come (ttft_slo_ms of a request goes before it). Where one is "
        "foreseen to be late, its request is refused at once, with the time at which it would not be.", above=0,
    )  # fmt: skip
    tpot_slo: float | None = setting(
        None, "Seconds that a token after the first should take on average (tpot_slo_ms of a request goes before it).",
        above=0,
    )  # fmt: skip
    qoe_ttft_s: float = setting(
        1.0, "Seconds to the first token that readers of streams expect, where a request has no expected_ttft_s; for "
        "penstock:qoe and the policy andes.", minimum=0.0, maximum=86_400.0,
    )  # fmt: skip
    qoe_tds: float = setting(
        4.8, "Tokens per second after it that they read, where a request has no expected_tds.", above=0.0, maximum=1e6
    )
    request_timeout: float | None = setting(None, "Seconds that a request may take in all.", above=0)
    max_body_bytes: int = setting(16 << 20, "Largest request body.", minimum=1024)
    max_header_bytes: int = setting(64 << 10, "Largest request header.", minimum=1024)
    max_connections: int = setting(
        2048,
        "Connections at once. When they are used up, those that wait for a request are closed, oldest first.",
        minimum=1,
    )
    max_connections_per_address: int = setting(
        0,
        "Of these, those of one client address; 0: three quarters. All clients of a proxy have its address.",
        minimum=0,
    )
    probe_port: int | None = setting(
        None, "Second port with connections of its own, for /health, /ready, /metrics and /admin only; /metrics needs "
        "no key there. 0 takes any that is free.", minimum=0, maximum=65535,
    )  # fmt: skip
    probe_host: str | None = setting(None, "Address of the second port; by default that of the first.")
    header_timeout: float = setting(10.0, "Seconds in which a request's header must be there.", above=0)
    body_timeout: float = setting(60.0, "Seconds in which a request's body must be there.", above=0)
    max_stream_chars: int = setting(
        1 << 20, "Characters a slow reader of a stream may be behind before it is given up.", minimum=1024
    )
    sse_keep_alive_interval: float = setting(
        0.0, "Seconds without news after which a stream of events gets a comment, so that proxies keep its connection; "
        "0: none.", minimum=0,
    )  # fmt: skip
    otlp_traces_endpoint: str | None = setting(
        None, "Where OpenTelemetry traces go (OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces): one span per "
        "request, in the trace that its traceparent names. Needs penstock[otel]."
    )  # fmt: skip
    trace_prompts: bool = setting(False, "Put prompts and answers into traces, too; otherwise they hold none.")
    max_n: int = setting(64, "Samples per request.", minimum=1)
    max_prompts: int = setting(1024, "Prompts per completion request.", minimum=1)
    shutdown_timeout: float = setting(
        60.0, "Seconds that running requests may take to end after SIGTERM; 0 ends them at once.", minimum=0
    )
    max_restarts_per_minute: int = setting(
        3, "Engine restarts in a minute after which the server gives up. Those do not count for which one request has "
        "been found guilty.", minimum=0,
    )  # fmt: skip
    watchdog_timeout: float = setting(
        60.0, "Seconds without any progress, of the time in which it could have run, after which an engine is "
        "replaced. A long step makes progress with each of its operations.", above=0,
    )  # fmt: skip
    response_store_size: int = setting(1000, "Responses that are kept for later questions; 0: none.", minimum=0)
    response_store_ttl: float = setting(3600.0, "Seconds for which they are kept.", above=0)
    files_dir: str | None = setting(
        None, "Folder of uploaded files and batches, which servers may share; by default the cache folder."
    )
    max_files_bytes: int = setting(
        1 << 30, "Bytes that the files of each key may take, outputs of batches among them; 0: no files.", minimum=0
    )
    grammar_timeout: float = setting(5.0, "Seconds that compiling a grammar may take.", above=0)
    disable_log_stats: bool = setting(False, "No line about throughput every ten seconds.")
    power_watts: str | None = setting(
        None, "What the machine draws, for the energy in /metrics: IDLE:LOAD in watts, a device's name, or rapl (the "
        "processor's counters). By default the counters, where they may be read; else a model of the cores.",
    )  # fmt: skip
    request_log: bool = setting(True, "One line per finished request, without its text.")
    engine_in_process: bool = setting(False, "Run the engine as a thread of the server (it cannot be restarted then).")
    fault: str | None = setting(
        None, "For tests: make a part fail, site:kind:nth (commas between several). Never settable by requests."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_alive is not None:
            try:
                seconds_of(self.keep_alive)
            except ValueError as error:
                raise ConfigError(f"keep_alive: {error}", field="keep_alive") from None

    def names(self, field_name: str) -> list[str]:
        """A setting with commas as a list."""
        value = getattr(self, field_name)
        return [part.strip() for part in value.split(",") if part.strip()] if value else []


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """An engine and the server in front of it; `models`: further ones that are served by the same server."""

    engine: EngineConfig
    server: ServerConfig = field(default_factory=ServerConfig)
    models: tuple[FurtherModel, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FurtherModel:
    """A model beside the first one. Of `config.server` only what `config.several.OF_A_MODEL` names is its own."""

    name: str
    config: ServeConfig
