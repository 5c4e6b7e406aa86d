"""/metrics: vLLM's names beside ours. One registry per server; nothing is global.

Labels of all: model_name, engine. vLLM's semantics where a name is vLLM's: `request_success` counts samples, the
counters of the prefix cache count tokens.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as open_metrics
from prometheus_client.registry import Collector

from penstock import __version__
from penstock.core.messages import AGES_S
from penstock.server.adapters import adapter_name
from penstock.server.context import Server
from penstock.server.distribution import Distribution
from penstock.server.observation.replicas import REPLICA_COUNTERS, REPLICA_GAUGES, STATES, facts_of_all
from penstock.server.observation.stats import GOOD, Stats

if TYPE_CHECKING:
    from penstock.server.errors import WireError

LABELS = ["model_name", "engine"]
OPEN_METRICS = "application/openmetrics-text"
BOTH = ("vllm:", "penstock:")
OURS = ("penstock:",)
_ENGINE_STATES = ("starting", "ready", "restarting", "failed", "stopped", "asleep")
_VLLM_REASONS = {"queue_full": "max_num_queued_reqs", "queue_tokens": "max_num_queued_tokens"}
"""Reasons of admission that vLLM has a word for."""

_HISTOGRAMS = (
    ("time_to_first_token_seconds", "Seconds from arrival to the first token.", "ttft"),
    ("inter_token_latency_seconds", "Seconds between two tokens of a sample.", "itl"),
    ("request_time_per_output_token_seconds", "Mean seconds per token after the first, per request.", "tpot"),
    ("e2e_request_latency_seconds", "Seconds from arrival to the end.", "e2e"),
    ("request_queue_time_seconds", "Seconds until a request was first computed.", "queue"),
    ("request_prefill_time_seconds", "Seconds from then to the first token.", "prefill"),
    ("request_decode_time_seconds", "Seconds from the first token to the last.", "decode"),
    ("request_inference_time_seconds", "Seconds in the engine: prefill and decode.", "inference"),
    ("request_prompt_tokens", "Prompt tokens per request.", "prompt_lengths"),
    ("request_generation_tokens", "Generated tokens per request.", "generation_lengths"),
    ("request_max_num_generation_tokens", "Generated tokens of a request's longest sample.", "longest_sample"),
    ("request_prefill_kv_computed_tokens", "Prompt tokens that were computed, not found.", "computed_lengths"),
    ("request_params_n", "Samples asked for.", "params_n"),
    ("request_params_max_tokens", "max_tokens asked for.", "params_max_tokens"),
    ("request_num_preemptions", "Preemptions per request.", "preemptions"),
    ("iteration_tokens_total", "Tokens per engine step, averaged over a tenth of a second.", "step_tokens"),
)  # fmt: skip
_ENGINE_COUNTERS = (
    ("prefix_cache_queries", "Tokens that were looked up in the prefix cache.", "num_prefix_queries_tokens", BOTH),
    ("prefix_cache_hits", "Tokens that the prefix cache had.", "num_prefix_hit_tokens", BOTH),
    ("num_preemptions", "Sequences that had to give their memory back.", "num_preemptions", BOTH),
    ("engine_steps", "Steps of the engine.", "num_steps", OURS),
    ("scheduled_tokens", "Tokens computed, prompts and decodes.", "num_scheduled_tokens", OURS),
    ("recomputed_tokens", "Tokens computed again after a preemption.", "num_recomputed_tokens", OURS),
    ("offline_tokens", "Tokens of steps that were offline work.", "num_offline_tokens", OURS),
    ("offline_preemptions", "Times that offline work gave way.", "num_offline_preemptions", OURS),
    ("swaps", "Sequences swapped to the host.", "num_swaps", OURS),
    ("offloaded_blocks", "Deprecated: kv_tier_written_blocks of tier host.", "num_offloaded_blocks", OURS),
    ("loaded_blocks", "Deprecated: kv_tier_read_blocks of tier host.", "num_loaded_blocks", OURS),
    ("reused_swap_blocks", "Blocks swapped again without a copy: it was kept.", "reused_blocks", OURS),
    ("layerwise_admissions", "Prompts that entered with layers away (layerkv).", "num_layerwise", OURS),
    ("layers_back", "Layers of sequences that came back.", "num_layers_back", OURS),
    ("layer_waits", "Decodes that waited a step for layers.", "num_layer_waits", OURS),
    ("kv_fetched_blocks", "Blocks read for requests that waited in the queue.", "fetched_blocks", OURS),
    ("failed_loads", "Sequences computed again because a tier had lost what it was given.", "num_failed_loads", OURS),
    ("external_prefix_cache_queries", "Tokens looked up in the store of blocks.", "num_store_query_tokens", BOTH),
    ("external_prefix_cache_hits", "Tokens that the store of blocks had.", "num_store_hit_tokens", BOTH),
    ("kv_module_tokens", "Tokens of modules that requests wanted (kv_allocator modules).", "num_module_tokens", OURS),
    ("kv_module_hits", "Tokens of these that were copied instead of computed.", "num_module_hit_tokens", OURS),
    ("kv_blended_tokens", "Tokens of modules computed again in the whole context.", "num_blended_tokens", OURS),
    ("kv_events", "Events of KV blocks for subscribers.", "num_kv_events", OURS),
    ("kv_events_dropped", "Events of KV blocks that found the queue full.", "num_dropped_kv_events", OURS),
    ("kv_aside_blocks", "Blocks set aside by a selection that went to host memory.", "num_aside_blocks", OURS),
    ("kv_selections", "Times that a sequence gave up a part of its cache.", "num_selections", OURS),
    ("kv_chosen_tokens", "Tokens of kv heads that were read because a selector chose them.", "num_chosen_tokens", OURS),
    ("kv_choosable_tokens", "Tokens of kv heads that it might have chosen.", "num_choosable_tokens", OURS),
    ("attention_keys_read", "Tokens of kv heads that attention read (native kernels).", "num_keys_read", OURS),
    ("attention_keys_shared", "As many more, had none been read once for several.", "num_keys_shared", OURS),
    ("borrowed_blocks", "Blocks got from another rank than the sequence's home.", "num_borrowed_blocks", OURS),
    ("rank_exchanges", "Exchanges between the ranks of a model.", "num_exchanges", OURS),
    ("rank_bytes", "Bytes that ranks gave each other, once for each that got them.", "num_rank_bytes", OURS),
    ("rank_wire_bytes", "Bytes of them that went between hosts, with heads of frames.", "num_wire_bytes", OURS),
    ("rank_wait_seconds", "Seconds that ranks waited for each other, of all together.", "rank_wait_s", OURS),
    ("read_weight_bytes", "Bytes of weights read while steps ran.", "num_weight_bytes", OURS),
    ("weight_wait_seconds", "Seconds for which steps have waited for weights.", "weight_wait_s", OURS),
    ("kv_growths", "Times that KV took more memory.", "num_kv_growths", OURS),
    ("kv_refusals", "Times that the machine had too little memory for KV to grow.", "num_kv_refusals", OURS),
    ("evicted_blocks", "Blocks that the prefix cache gave up.", "num_evicted_blocks", OURS),
    ("prefill_seconds", "Seconds of steps that prompts owe.", "prefill_s", OURS),
    ("decode_seconds", "Seconds of steps that decoding owes.", "decode_s", OURS),
    ("forks", "Sequences that share a parent's blocks.", "num_forks", OURS),
    ("grammar_cache_hits", "Grammars that were compiled already.", "num_grammar_hits", OURS),
    ("grammar_cache_misses", "Grammars that had to be compiled.", "num_grammar_misses", OURS),
    (
        "late_compilations",
        "Kernels that were compiled after /ready, while streams waited.",
        "num_late_compilations",
        OURS,
    ),
    ("expert_hits", "Experts in memory when a layer asked for them (expert_memory_bytes).", "num_expert_hits", OURS),
    ("expert_late", "Experts on their way when a layer asked for them.", "num_expert_late", OURS),
    ("expert_misses", "Experts read because a layer had asked for them.", "num_expert_misses", OURS),
    ("experts_fetched_ahead", "Experts read before anybody asked.", "num_experts_ahead", OURS),
    ("experts_foreseen", "Of these, those that were asked for then.", "num_experts_foreseen", OURS),
    ("expert_read_bytes", "Bytes of experts read from the disk.", "expert_read_bytes", OURS),
    ("expert_stall_seconds", "Seconds that steps waited for experts.", "expert_stall_s", OURS),
    ("adaptive_moves", "Times that adaptive mode gave a knob another value.", "num_moves", OURS),
    ("weight_swaps", "Times that other weights were taken up.", "num_weight_swaps", OURS),
    ("weight_swap_seconds", "Seconds for which nothing ran meanwhile.", "weight_swap_s", OURS),
    ("lora_adapters_wanted", "Times that a row needed its adapter.", "num_adapters_wanted", OURS),
    ("lora_adapter_hits", "Times that it was in memory already.", "num_adapter_hits", OURS),
    ("lora_adapters_given_up", "Adapters that left memory for others.", "num_adapters_given_up", OURS),
    ("finetune_tokens", "Tokens that fine-tuning has read.", "finetune_tokens", OURS),
    ("finetune_beside_seconds", "Seconds of fine-tuning between steps of requests.", "finetune_beside_s", OURS),
    ("lora_wait_seconds", "Seconds that steps waited for adapters to be read.", "adapter_wait_s", OURS),
    ("row_errors", "Requests that the engine ended with an error.", "num_errors", OURS),
)

LENGTH_COUNTERS = (
    ("outputs", "Outputs that had a predicted length.", "num"),
    ("unknown", "Outputs whose length nobody could predict.", "num_unknown"),
    ("bucket_hits", "Of those predicted, that ended in the predicted bucket.", "num_hits"),
    ("outgrown", "Of those predicted, that were longer than its end.", "num_outgrown"),
    ("error_tokens", "Sum of the differences of predicted and actual tokens.", "error_tokens"),
)
_TIER_GAUGES = (
    ("kv_tier_blocks", "Blocks of prompts in a tier of KV that nobody uses now.", "blocks"),
    ("kv_tier_bytes", "Bytes of these.", "num_bytes"),
    ("kv_tier_limit_bytes", "Bytes that the tier may take.", "limit_bytes"),
    ("kv_tier_pinned_blocks", "Blocks that hints have pinned.", "pinned"),
)
_HINTS = ("retain", "pin", "demote", "refused_pin", "gave_way", "pause_preserve", "pause_swap", "pause_discard")
_TIER_COUNTERS = (
    ("hit_tokens", "Tokens of prompts that came from a tier."),
    ("left_blocks", "Blocks that left a tier, to make room."),
    ("written_blocks", "Blocks written to a tier."),
    ("written_bytes", "Bytes of these."),
    ("read_blocks", "Blocks read from a tier."),
    ("read_bytes", "Bytes of these."),
    ("refused_blocks", "Blocks that a tier had no room for, or that could not be written."),
)
_MISSES = "tier_misses:"


def unread(stats: Stats, names: Iterable[str]) -> dict[str, float]:
    """Blocks of tiers that could not be read, by "TIER:REASON". `names`: of counters."""
    return {name.removeprefix(_MISSES): stats.counter(name) for name in names if name.startswith(_MISSES)}


class Metrics(Collector):
    """Reads `Stats` and the engine's last snapshot when somebody scrapes."""

    def __init__(self, server: Server, stats: Stats) -> None:
        self.server = server
        self.stats = stats
        self._began = time.time()
        self._labels = [server.model_name, "0"]
        self.registry = CollectorRegistry()
        self.registry.register(self)
        if server.first is not None:
            return  # the process is told of once
        ProcessCollector(registry=self.registry)
        info = server.client.info
        if info is not None and info.pid and not info.host:  # a process of another host is none of ours
            ProcessCollector("penstock_engine", self._engine_pid, registry=self.registry)

    def render(self, only: str | None = None, accept: str = "") -> tuple[bytes, str]:
        """The text and its content type: OpenMetrics if `accept`, a request's header, has it, else Prometheus' own.

        `only`: the one tenant whose numbers are told; None: all of them.
        """
        told = _Told(self, only)
        if OPEN_METRICS not in accept:
            return generate_latest(told), "text/plain; version=0.0.4; charset=utf-8"
        # With its default, the library writes `_` for the `:` of names in samples, though not in their heads.
        encode: Callable[..., bytes] = open_metrics
        keep = {"escaping": "allow-utf-8"} if "escaping" in inspect.signature(encode).parameters else {}
        return encode(told, **keep), f"{OPEN_METRICS}; version=1.0.0; charset=utf-8"

    def describe(self) -> Iterable[Metric]:
        return ()  # otherwise a registration collects once

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        if self.server.speculates:
            yield from self._speculation()
        yield from self._compression()
        yield from self._lengths()
        yield from self._encoding()
        yield from self._predictions()
        yield from self._adapters()
        yield from self._info()
        yield from self._energy()
        yield from self._models()
        yield from self._replicas()
        yield from self._autoscale()
        for name, text, attribute in _HISTOGRAMS:
            yield from self._histogram(name, text, getattr(self.stats, attribute))
        text = "Quality of experience of finished streams: what was shown over what was expected, 0 to 1."
        yield from self._histogram("qoe", text, self.stats.qoe, OURS)

    def _engine_pid(self) -> int:
        info = self.server.client.info
        return info.pid if info is not None and not info.host else 0

    def tenants(self, only: str | None) -> Iterator[Metric]:
        values = {key: n for key, n in self.stats.tenants.items() if only is None or key[0] == only}
        text = "Requests and tokens by tenant."
        yield from self._labelled(CounterMetricFamily, "tenant", text, ("tenant", "kind"), values)

    # -- shapes --------------------------------------------------------------------------------------------------

    def _gauge(self, name: str, text: str, value: float, prefixes: tuple[str, ...] = OURS) -> Iterator[Metric]:
        for prefix in prefixes:
            family = GaugeMetricFamily(prefix + name, text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family

    def _counter(self, name: str, text: str, value: float, prefixes: tuple[str, ...] = OURS) -> Iterator[Metric]:
        for prefix in prefixes:
            family = CounterMetricFamily(prefix + name, text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family

    def _labelled(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        labels: tuple[str, ...],
        values: Mapping[Any, float],
        prefixes: tuple[str, ...] = OURS,
    ) -> Iterator[Metric]:
        """`values`: by label value, or by a tuple of them."""
        for prefix in prefixes:
            family = kind(prefix + name, text, labels=[*LABELS, *labels])
            for key, value in sorted(values.items(), key=lambda item: str(item[0])):
                family.add_metric([*self._labels, *map(str, key if isinstance(key, tuple) else (key,))], value)
            yield family

    def _histogram(
        self, name: str, text: str, distribution: Distribution, prefixes: tuple[str, ...] = BOTH
    ) -> Iterator[Metric]:
        buckets: list[Any] = list(distribution.cumulative())
        for at, (trace_id, value, unix_s) in distribution.exemplars.items():
            buckets[at] = (*buckets[at], Exemplar({"trace_id": trace_id}, value, unix_s))
        for prefix in prefixes:
            family = HistogramMetricFamily(prefix + name, text, labels=LABELS)
            family.add_metric(self._labels, buckets, distribution.total)
            yield family

    # -- what there is -------------------------------------------------------------------------------------------

    def _gauges(self) -> Iterator[Metric]:
        client = self.server.client
        now, load = client.snapshot, load_of(self.server)
        yield from self._gauge("num_requests_running", "Sequences being computed.", now.num_running, BOTH)
        yield from self._gauge("num_requests_waiting", "Sequences that wait for room.", now.num_waiting, BOTH)
        yield from self._labelled(
            GaugeMetricFamily, "num_requests_waiting_by_reason", "The same by reason.", ("reason",),
            {"capacity": now.num_waiting, "deferred": 0}, BOTH,
        )  # fmt: skip
        text = "The same of offline work, which is counted among those that run and not among those that wait."
        states = {"running": now.num_offline_running, "waiting": now.num_offline_waiting}
        yield from self._labelled(GaugeMetricFamily, "num_offline_requests", text, ("state",), states)
        usage = "Share of the KV blocks in use, 0 to 1; what only the prefix cache holds is free."
        yield from self._gauge("kv_cache_usage_perc", usage, load["kv_cache_usage"], BOTH)
        models = self.server.models
        awake = models is None or models.served[self.server.model_name].level == 0
        yield from self._gauge("engine_sleep_state", "1: awake.", float(awake), ("vllm:",))
        yield from self._gauge("live_requests", "Requests that have not ended.", client.num_live)
        yield from self._gauge("waiting_tokens", "Prompt tokens that wait.", now.waiting_tokens)
        yield from self._labelled(
            GaugeMetricFamily, "kv_blocks", "KV blocks by state.", ("state",),
            {"used": now.kv_used, "cached": now.kv_evictable, "free": now.kv_total - now.kv_used - now.kv_evictable},
        )  # fmt: skip
        if now.rank_blocks:
            text = "Blocks of KV memory of each rank, where blocks are whole on one: lent, borrowed, free, total."
            blocks: dict[tuple[int, str], float] = {
                (n, name): getattr(rank, name)
                for n, rank in enumerate(now.rank_blocks) for name in rank.__struct_fields__
            }  # fmt: skip
            yield from self._labelled(GaugeMetricFamily, "rank_blocks", text, ("rank", "which"), blocks)
        yield from self._gauge("saturation", "How full the engine is, 0 to 1: scale by it.", load["saturation"])
        yield from self._gauge("predicted_wait_seconds", "Wait of a request that came now.", load["predicted_wait_s"])
        yield from self._gauge("predicted_ttft_seconds", "Its time to the first token.", load["predicted_ttft_s"])
        yield from self._gauge("engine_step_seconds", "Seconds that the last step took.", now.step_s)
        yield from self._gauge("engine_progress_age_seconds", "Since its loop moved.", client.link.progress_age_s())
        yield from self._gauge("engine_up", "1: the engine is ready.", float(client.state == "ready"))
        yield from self._labelled(
            GaugeMetricFamily, "engine_state", "1 for the state that the engine is in.", ("state",),
            {state: float(state == client.state) for state in (*_ENGINE_STATES, client.state)},
        )  # fmt: skip
        yield from self._gauge("draining", "1: nothing new is taken on.", float(draining(self.server)))
        watch = self.server.parts.get("loop_watch")
        if watch is not None:
            text = "Longest time that one piece of work held the server's event loop, in CPU time of its thread."
            yield from self._gauge("event_loop_longest_hold_seconds", text, watch.longest_s)
            text = "The same in time that passed: longer if the machine had no processor to give."
            yield from self._gauge("event_loop_longest_delay_seconds", text, watch.latest_s)
        for name, text, field in _TIER_GAUGES:
            values = {tier.name: float(getattr(tier, field)) for tier in now.tiers}
            yield from self._labelled(GaugeMetricFamily, name, text, ("tier",), values)
        if now.knobs:
            text = "What adaptive mode has set; of scheduling_policy 1 for the one in use."
            knobs: dict[tuple[str, str], float] = {
                (knob, value if isinstance(value, str) else ""): 1.0 if isinstance(value, str) else float(value)
                for knob, value in now.knobs.items()
            }
            yield from self._labelled(GaugeMetricFamily, "adaptive_knob", text, ("knob", "value"), knobs)
            yield from self._gauge("adaptive_frozen", "1: adaptive mode moves no knob.", float(now.frozen))
        memory = memory_of(self.server)
        text = "Bytes by subsystem."
        yield from self._labelled(GaugeMetricFamily, "memory_bytes", text, ("subsystem",), memory)
        if client.info is not None:
            text = "Bytes of the model's weights by the format that they are held in."
            held = client.info.weight_bytes
            yield from self._labelled(GaugeMetricFamily, "weight_bytes", text, ("format",), held)
            text = "1 for what the weights came from: read, packed before; made, packed by this start; none is kept."
            came = {state: float(state == (client.info.packed_file or "none")) for state in ("read", "made", "none")}
            yield from self._labelled(GaugeMetricFamily, "packed_file", text, ("state",), came)

    def _of_tiers(self) -> Iterator[Metric]:
        """What went to each tier of KV and came from it. The device has what is computed; nothing is written to it."""
        found = self.server.client.snapshot.counters
        for what, text in _TIER_COUNTERS:
            names = [name for name in found if name.startswith(f"tier_{what}:")]
            values = {name.rpartition(":")[2]: self.stats.counter(name) for name in names}
            yield from self._labelled(CounterMetricFamily, f"kv_tier_{what}", text, ("tier",), values)
        misses = {tuple(why.split(":")): num for why, num in unread(self.stats, found).items()}
        text = "Blocks of a tier that could not be read, and were computed."
        yield from self._labelled(CounterMetricFamily, "kv_tier_misses", text, ("tier", "reason"), misses)

    def _ages(self) -> Iterator[Metric]:
        """Of blocks of each tier, when they were found and when they left it; of stores those that this engine used."""
        texts = {"found": "Seconds for which blocks were unused when they were found.",
                 "left": "Seconds for which blocks were unused when they left."}  # fmt: skip
        bounds = [*(f"{bound:.1f}" for bound in AGES_S), "+Inf"]
        tiers = [name.split(":")[1] for name in self.server.client.snapshot.counters if name.startswith("age_found:")]
        for which, text in texts.items():
            family = HistogramMetricFamily(f"penstock:kv_{which}_block_age_seconds", text, labels=[*LABELS, "tier"])
            for tier in sorted({"device", *tiers}):
                figures = self.stats.ages(which, tier)
                sums = list(accumulate(figures[:-1]))
                family.add_metric([*self._labels, tier], list(zip(bounds, sums, strict=True)), figures[-1])
            yield family

    def _counters(self) -> Iterator[Metric]:
        s = self.stats
        for name, text, counter, prefixes in _ENGINE_COUNTERS:
            yield from self._counter(name, text, s.counter(counter), prefixes)
        yield from self._of_tiers()
        yield from self._counter("prompt_tokens", "Prompt tokens processed.", s.num_prompt_tokens, BOTH)
        yield from self._counter("prompt_tokens_cached", "Of these, found in the cache.", s.num_cached_tokens, BOTH)
        yield from self._labelled(
            CounterMetricFamily, "prompt_tokens_by_source", "Prompt tokens by where they came from.", ("source",),
            {"local_compute": s.num_prompt_tokens - s.num_cached_tokens, "local_cache_hit": s.num_cached_tokens}, BOTH,
        )  # fmt: skip
        yield from self._counter("generation_tokens", "Tokens generated.", s.num_generation_tokens, BOTH)
        text = "Tokens of prompts that were computed: never here, here once, behind the last whole block, and so on."
        yield from self._labelled(CounterMetricFamily, "prefix_cache_missed_tokens", text, ("reason",), s.misses())
        done = {name: s.counter(f"hint_{name}") for name in _HINTS}
        yield from self._labelled(CounterMetricFamily, "kv_hints", "Hints by what was done.", ("action",), done)
        yield from self._ages()
        reasons = {"stop": 0, "length": 0, "repetition": 0, "abort": 0, "error": 0} | dict(s.samples)
        yield from self._labelled(
            CounterMetricFamily,
            "request_success",
            "Finished samples by reason.",
            ("finished_reason",),
            reasons,
            ("vllm:",),
        )
        yield from self._labelled(
            CounterMetricFamily, "requests", "Finished requests.", ("endpoint", "ending"), s.requests
        )
        gone: dict[str, int] = {"client_gone": 0, "timeout": 0}
        for (_, ended), number in s.requests.items():
            if ended not in (*GOOD, "error"):
                gone[ended] = gone.get(ended, 0) + number
        yield from self._labelled(CounterMetricFamily, "requests_aborted", "Aborted requests.", ("reason",), gone)
        yield from self._labelled(CounterMetricFamily, "requests_refused", "By reason.", ("reason",), s.refused)
        rejected = dict.fromkeys(_VLLM_REASONS.values(), 0)
        for reason, number in getattr(self.server.parts.get("admission"), "refused", {}).items():
            rejected[_VLLM_REASONS.get(reason, reason)] = number
        text = "Refused at arrival, by reason."
        yield from self._labelled(CounterMetricFamily, "admission_rejections", text, ("reason",), rejected, BOTH)
        yield from self._labelled(CounterMetricFamily, "request_errors", "Error answers.", ("status",), s.errors)
        text = "Finished requests with a tpot_slo_ms, by whether they kept it."
        yield from self._labelled(CounterMetricFamily, "request_tpot_slo", text, ("met",), s.tpot_slo)
        text = "Requests with a ttft_slo_ms that had a first token, by whether it was in time."
        yield from self._labelled(CounterMetricFamily, "request_ttft_slo", text, ("met",), s.ttft_slo)
        watch = self.server.parts.get("loop_watch")
        if watch is not None:
            yield from self._counter("event_loop_long_holds", "Holds of the event loop over 50 ms.", watch.num_long)
        restarts = self.server.client.num_restarts
        yield from self._counter("engine_restarts", "Engines that had to be started again.", restarts)
        convictions = self.server.client.convictions
        text = "Requests that were ended because engines died of them."
        yield from self._counter("request_convictions", text, convictions.num_convicted)
        text = "Requests that were refused because engines had died of their like."
        yield from self._counter("convicted_requests_refused", text, convictions.num_refused)
        yield from self._counter("request_replays", "Requests that a new engine went on with.", s.num_replays)

    def _speculation(self) -> Iterator[Metric]:
        """The definitions are those of `core.acceptance`. Positions count from 0, as vLLM's do."""
        a = self.stats.acceptance
        for name, text, value, prefixes in (
            ("num_drafts", "Sequences' drafts that were verified, one a step.", a.num_drafts, BOTH),
            ("num_draft_tokens", "Drafts that were verified.", a.num_draft_tokens, BOTH),
            ("num_accepted_tokens", "Drafts that were right.", a.num_accepted_tokens, BOTH),
            ("steps", "Steps with room for drafts.", a.num_steps, OURS),
            ("draft_seconds", "Seconds of these steps that the drafter took.", a.draft_s, OURS),
            ("verify_seconds", "Seconds of these steps that all else took.", a.verify_s, OURS),
            ("compared_seconds", "Steps with drafts that plain ones can be compared with.", a.compared_s, OURS),
            ("plain_seconds", "What plain steps would have taken for their tokens.", a.plain_s, OURS),
        ):
            yield from self._counter("spec_decode_" + name, text, value, prefixes)
        text = "Drafts that were right, by how many come before them."
        yield from self._labelled(
            CounterMetricFamily, "spec_decode_num_accepted_tokens_per_pos", text, ("position",),
            dict(enumerate(a.accepted_at)), BOTH,
        )  # fmt: skip
        for name, text, share in (
            ("mean_accepted_length", "Tokens per draft: those accepted and the model's own.", a.mean_length),
            ("draft_share", "Share of the drafter in these steps, 0 to 1.", a.draft_share),
            ("speedup", "Effective speed-up of steps with drafts, estimated from plain ones.", a.speedup),
        ):
            if share is not None:
                yield from self._gauge("spec_decode_" + name, text, share)

    def _compression(self) -> Iterator[Metric]:
        part = self.server.parts["compression"]
        text = "Seconds from a prompt to its compressed form, its turn waited for; part of the time to first token."
        yield from self._histogram("prompt_compression_seconds", text, part.seconds, OURS)
        text = "Tokens of compressed prompts, before and after."
        yield from self._labelled(CounterMetricFamily, "prompt_compression_tokens", text, ("stage",), part.tokens)
        text = "Prompts compressed, by method."
        yield from self._labelled(CounterMetricFamily, "prompt_compressions", text, ("method",), part.prompts)

    def _lengths(self) -> Iterator[Metric]:
        lengths = self.server.service.lengths
        if lengths is None:
            return
        for name, text, attribute in LENGTH_COUNTERS:
            yield from self._counter(f"length_prediction_{name}", text, getattr(lengths.accuracy, attribute))
        correlation = lengths.accuracy.correlation
        if correlation is not None:
            text = "Rank correlation of predicted and actual lengths, of the last 512."
            yield from self._gauge("length_prediction_rank_correlation", text, correlation)

    def _encoding(self) -> Iterator[Metric]:
        encoding = self.server.service.encoding
        yield from self._gauge("encoding_queue_requests", "Long texts waiting or encoded.", encoding.queue.num_jobs)
        yield from self._gauge("encoding_queue_characters", "Characters of these.", encoding.queue.queued)
        text = "Texts refused before they were encoded, by reason."
        yield from self._labelled(CounterMetricFamily, "encoding_refused", text, ("reason",), encoding.refusals())
        text = "Seconds that long texts waited for their turn to be encoded; part of the time to first token."
        yield from self._histogram("encoding_wait_seconds", text, encoding.waited, OURS)

    def _predictions(self) -> Iterator[Metric]:
        promises = getattr(self.server.parts.get("admission"), "promises", None)
        if promises is None:
            return
        text = "Seconds to the first token, as predicted when a request was taken on."
        yield from self._histogram("predicted_time_to_first_token_seconds", text, promises.predicted, OURS)
        text = "Time to the first token, by what was predicted: 1 is right, 2 twice as long."
        yield from self._histogram("time_to_first_token_by_prediction", text, promises.ratios, OURS)
        text = "Seconds between the predicted time to the first token and what it was."
        yield from self._histogram("time_to_first_token_error_seconds", text, promises.errors, OURS)

    def _adapters(self) -> Iterator[Metric]:
        """vLLM's: names of adapters as labels, the value is the time."""
        if self.server.adapters is None:
            return
        states: dict[bool, set[str]] = {True: set(), False: set()}
        for stream in self.server.client.streams:
            if (name := adapter_name(stream)) is not None:
                states[stream.started].add(name)
        yield from self._gauge("lora_adapters", "Adapters that requests may name.", len(self.server.adapters.names))
        counters = self.server.client.snapshot.counters
        text = "Blocks of KV memory that adapters have now."
        yield from self._gauge("lora_blocks", text, counters.get("num_adapter_blocks", 0))
        text = "Adapters that lie in these."
        yield from self._gauge("lora_adapters_in_blocks", text, counters.get("num_adapters_held", 0))
        names = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        info = self.server.client.info
        decided = {} if info is None else {name: value for name, value, _ in info.decisions}
        most = decided.get("max_loras", "")
        labels = (most, ",".join(sorted(states[False])), ",".join(sorted(states[True])))
        text = "Adapters of the requests that wait and that run."
        yield from self._labelled(GaugeMetricFamily, "lora_requests_info", text, names, {labels: time.time()}, BOTH)

    def _energy(self) -> Iterator[Metric]:
        use = self.server.parts.get("energy")
        if use is not None:
            text = "Joules since the server was ready: of the whole machine by its counters (rapl), or by a model."
            values = {use.meter.source: use.joules()}
            yield from self._labelled(CounterMetricFamily, "energy_joules", text, ("source",), values)

    def _models(self) -> Iterator[Metric]:
        """Of a model that comes and goes."""
        models = self.server.models
        if models is None:
            return
        mine = models.served[self.server.model_name]
        yield from self._counter("model_starts", "Times that a request has started the model.", mine.num_starts)
        text = "Times that the model has left memory: idle, for another's memory, asked to sleep, or failed."
        yield from self._labelled(CounterMetricFamily, "model_stops", text, ("reason",), mine.stops)
        text = "Seconds from a start's turn until the model was ready."
        yield from self._histogram("model_start_seconds", text, mine.start_s, OURS)
        yield from self._gauge("model_waiting_requests", "Requests that wait for the model's start.", mine.num_waiting)
        yield from self._gauge("model_held_bytes", "Weights and KV that are planned for it now.", mine.held_bytes)
        if self.server.first is None:
            text = "Bytes that models may take together, by device."
            limits = {place or "cpu": limit for place, limit in models.limits.items()}
            yield from self._labelled(GaugeMetricFamily, "models_memory_limit_bytes", text, ("device",), limits)

    def _replicas(self) -> Iterator[Metric]:
        """Of each engine, where the model has several."""
        client = self.server.client
        if client.placing is None:
            return
        found = facts_of_all(self.server)
        for name, text, value in REPLICA_GAUGES:
            values = {one.number: float(value(one)) for one in found}
            yield from self._labelled(GaugeMetricFamily, name, text, ("replica",), values)
        text = "What state the engine is in: 1 for that."
        states = {(one.number, state): float(one.state == state) for one in found for state in STATES}
        yield from self._labelled(GaugeMetricFamily, "replica_state", text, ("replica", "state"), states)
        text = "The machine that the engine is on, if it is another than the server's."
        hosts = {(one.number, one.host): 1.0 for one in found if one.host}
        yield from self._labelled(GaugeMetricFamily, "replica_host_info", text, ("replica", "host"), hosts)
        for name, text, value in REPLICA_COUNTERS:
            values = {one.number: float(value(one)) for one in found}
            yield from self._labelled(CounterMetricFamily, name, text, ("replica",), values)

    def _autoscale(self) -> Iterator[Metric]:
        scaling = self.server.parts.get("autoscale")
        if scaling is None:
            return
        yield from self._gauge("autoscale_wanted_replicas", "Engines that autoscale wants.", scaling.wanted)
        text = "What autoscale has done: up and down are decisions, failed are engines that did not start or end."
        yield from self._labelled(CounterMetricFamily, "autoscale_decisions", text, ("kind",), scaling.counts)

    def _info(self) -> Iterator[Metric]:
        info = self.server.client.info
        if info is None:
            return
        if (version := self.server.weight_version) is not None:
            text = "The version of the weights in force, and whether generation is paused."
            labels = (version, str(int(self.server.client.paused)))
            yield from self._labelled(GaugeMetricFamily, "weights_info", text, ("version", "paused"), {labels: 1}, OURS)
        config = {
            "block_size": info.block_size, "num_gpu_blocks": info.num_blocks, "cache_dtype": info.kv_dtype or "auto",
            "max_model_len": info.max_model_len, "max_num_seqs": info.max_num_seqs,
        }  # fmt: skip
        for prefix in BOTH:
            family = GaugeMetricFamily(
                prefix + "cache_config_info", "The engine's KV memory.", labels=[*LABELS, *config]
            )
            family.add_metric([*self._labels, *map(str, config.values())], 1.0)
            yield family
        yield from self._labelled(GaugeMetricFamily, "build_info", "Which Penstock.", ("version",), {__version__: 1.0})
        yield from self._gauge("startup_seconds", "From the engine's start to ready.", info.load_s)
        parts: dict[str, float] = {}
        for name, took_s in info.start_parts:
            parts[name] = parts.get(name, 0.0) + took_s
        text = "What the start of the engine's process went to."
        yield from self._labelled(GaugeMetricFamily, "startup_part_seconds", text, ("part",), parts, OURS)
        yield from self._gauge("start_time_seconds", "When the server was ready, in Unix time.", self._began)
        yield from self._gauge("max_num_seqs", "Sequences at once.", info.max_num_seqs)
        yield from self._gauge("kv_capacity_tokens", "Tokens that the KV memory holds.", info.kv_capacity_tokens or 0)


class _Told(CollectorRegistry):
    """What a request may see."""

    def __init__(self, metrics: Metrics, only: str | None) -> None:
        super().__init__()
        self._metrics = metrics
        self._only = only

    def collect(self) -> Iterator[Metric]:
        if not self._metrics.server.others:
            yield from self._metrics.registry.collect()
            yield from self._metrics.tenants(self._only)
            return
        families: dict[str, Metric] = {}
        for one in self._metrics.server.each:
            metrics: Metrics = one.parts["metrics"]
            for family in (*metrics.registry.collect(), *metrics.tenants(self._only)):
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from families.values()


# -- the same numbers for others ---------------------------------------------------------------------------------


def draining(server: Server) -> bool:
    return server.draining or server.service.draining


def memory_of(server: Server) -> dict[str, int]:
    """Bytes by subsystem: the engine's, and what parts of the server say of themselves (`memory_bytes()`)."""
    info = server.client.info
    found = dict(info.memory_bytes) if info is not None else {}
    found |= server.client.snapshot.memory_bytes
    found["grammars"] = int(server.client.snapshot.counters.get("grammar_bytes", 0))
    for name, part in server.parts.items():
        size = getattr(part, "memory_bytes", None)
        if callable(size):
            found[name] = int(size())
    return found


def models_shown(server: Server) -> list[dict[str, Any]]:
    """Of several models: what each is doing. `idle_s`: since its last request; `keep_alive_s`: None for ever."""
    if server.models is None:
        return []
    now = server.service.clock.now()
    return [
        {
            "name": model.name, "state": model.state, "level": model.level, "held_bytes": model.held_bytes,
            "needs_bytes": model.num_bytes, "num_requests": model.client.num_live, "num_waiting": model.num_waiting,
            "idle_s": 0.0 if model.client.num_live else now - model.used_s,
            "keep_alive_s": None if math.isinf(model.keep_alive_s) else model.keep_alive_s,
        }
        for model in server.models
    ]  # fmt: skip


def load_of(server: Server) -> dict[str, Any]:
    """How busy it is. `saturation`: 0 idle, 1 a new request has to wait. Admission knows best, if it says."""
    client, snapshot = server.client, server.client.snapshot
    admission = server.parts.get("admission")
    usage = snapshot.kv_used / snapshot.kv_total if snapshot.kv_total else 0.0
    slots = client.info.max_num_seqs if client.info is not None else 0
    full = 1.0 if snapshot.num_waiting else max(usage, snapshot.num_running / slots if slots else 0.0)
    wait_s = _ask(admission, "predicted_wait_s", 0.0)
    prompts = server.parts["stats"].prompt_lengths
    mean = prompts.total / prompts.num if prompts.num else 0.0
    return {
        "server_load": client.num_live,
        "running": snapshot.num_running,
        "waiting": snapshot.num_waiting,
        "kv_cache_usage": usage,
        "saturation": min(1.0, max(0.0, _ask(admission, "saturation", full))),
        "predicted_wait_s": wait_s,
        "predicted_ttft_s": admission.predicted_ttft_s(mean) if isinstance(admission, Predicting) else wait_s,
    }


@runtime_checkable
class Predicting(Protocol):
    """An admission that says when first tokens would come."""

    def predicted_ttft_s(self, num_prompt: float) -> float: ...


def _ask(part: object, name: str, otherwise: float) -> float:
    """What `part` says, if it knows."""
    value = getattr(part, name, None)
    return float(value()) if callable(value) else otherwise


async def install(server: Server) -> None:
    """Count from now on."""
    stats = Stats(server.client, server.service.clock)

    def on_refused(scope: Any, status: int, error: WireError | None) -> None:
        refused = status in (429, 503) and error is not None and scope["method"] == "POST"
        stats.on_refused(status, (error.code or error.type) if refused and error is not None else None)

    server.on_refused.append(on_refused)
    server.parts["stats"] = stats
    server.parts["metrics"] = Metrics(server, stats)
