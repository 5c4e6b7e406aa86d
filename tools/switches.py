"""The switches that `tools/pairs.py` combines: one list, a line each. Every registered name must be in it."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from typing import Any

MODEL = "pico"
"""Two layers; it comes with the package."""


@dataclass(frozen=True)
class Switch:
    """`settings` of the engine; `{files}` in them is a folder with what some drafters read. `exact`: no token may
    change. `headline`: gains are counted with those of other families."""

    name: str
    family: str
    settings: dict[str, Any]
    exact: bool = True
    headline: bool = False


def selector(name: str, headline: bool = False, **options: Any) -> Switch:
    settings = {"kv_selector": name, "kv_budget": "50%"}
    if options:
        settings["kv_selector_config"] = json.dumps(options)
    return Switch(f"selector {name}", "selection", settings, exact=False, headline=headline)


def drafts(method: str, **more: Any) -> dict[str, Any]:
    return {"speculative_config": json.dumps({"method": method, "controller": "fixed", **more})}


def verified(verifier: str, **more: Any) -> dict[str, Any]:
    return drafts("draft-model", model=MODEL, verifier=verifier, **more)


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_scaling": json.dumps({"rope_type": kind, "factor": 2.0, **more})}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}
LONG = {
    "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 2048,
}  # fmt: skip
MIXED = '{"dtype": "int4", "layers": {"0": {"k": "int8", "v": "int4"}}, "recent": 16}'
SWITCHES: tuple[Switch, ...] = (
    Switch("KV int8", "codec", {"kv_cache_dtype": "int8"}, exact=False, headline=True),
    Switch("KV int4", "codec", {"kv_cache_dtype": "int4"}, exact=False, headline=True),
    Switch("KV int2", "codec", {"kv_cache_dtype": "int2"}, exact=False),
    Switch("KV kivi4", "codec", {"kv_cache_dtype": "kivi4"}, exact=False),
    Switch("KV kivi2", "codec", {"kv_cache_dtype": "kivi2"}, exact=False, headline=True),
    Switch("KV mixed", "codec", {"kv_cache_dtype": MIXED}, exact=False),
    Switch("KV rotated", "rotation", {"kv_rotation": "hadamard"}, exact=False),
    Switch("weights int8-w8a8", "weights", {"quantization": "int8-w8a8"}, exact=False, headline=True),
    Switch("weights int8-wo", "weights", {"quantization": "int8-wo"}, exact=False),
    Switch("weights int4-w4a8", "weights", {"quantization": "int4-w4a8"}, exact=False),
    Switch("weights int4-wo", "weights", {"quantization": "int4-wo"}, exact=False),
    Switch("weights from disk", "weights", {"weight_memory_bytes": 700_000, "weight_prefetch": 0}),
    Switch("dtype float32", "weights", {"dtype": "float32"}, exact=False),
    Switch("dtype float16", "weights", {"dtype": "float16"}, exact=False),
    selector("streaming", headline=True),
    selector("window"),
    selector("random"),
    selector("h2o"),
    selector("scissorhands"),
    selector("snapkv", headline=True),
    selector("pyramidkv"),
    selector("alisa"),
    selector("adakv"),
    Switch("selector leankv", "selection", {
        "kv_selector": "leankv", "kv_budget": "50%", "kv_cache_dtype": '{"dtype": {"k": "int8", "v": "int4"}}',
    }, exact=False),
    selector("fastgen"),
    selector("retrieval", profile="{files}/heads.json"),
    selector("quest", headline=True),
    selector("infinigen", dense_layers=1, recent=4, reach=0.5),
    Switch("rope linear", "positions", scaled("linear"), exact=False),
    Switch("rope ntk", "positions", scaled("ntk"), exact=False),
    Switch("rope dynamic", "positions", scaled("dynamic"), exact=False),
    Switch("rope llama3", "positions", scaled("llama3", **LLAMA3), exact=False),
    Switch("rope yarn", "positions", scaled("yarn"), exact=False, headline=True),
    Switch("rope longrope", "positions", scaled("longrope", **LONG), exact=False),
    Switch("drafts ngram", "speculation", drafts("ngram"), headline=True),
    Switch("drafts suffix", "speculation", drafts("suffix")),
    Switch("drafts rest", "speculation", drafts("rest", datastore="{files}/texts")),
    Switch("drafts function", "speculation", drafts("function", function="tools.switches:again")),
    Switch("drafts reference", "speculation", drafts("reference")),
    Switch("drafts jacobi", "speculation", drafts("jacobi")),
    Switch("drafts gauss-seidel", "speculation", drafts("gauss-seidel")),
    Switch("drafts lookahead", "speculation", drafts("lookahead")),
    Switch("drafts draft-model", "speculation", drafts("draft-model", model=MODEL), headline=True),
    Switch("drafts specinfer", "speculation", drafts("specinfer", model=f"{MODEL},ngram")),
    Switch("drafts early-exit", "speculation", drafts("early-exit", exit_layer=1)),
    Switch("drafts self-draft", "speculation", drafts("self-draft", skip_layers="1")),
    Switch("drafts medusa", "speculation", drafts("medusa", heads="{files}/medusa")),
    Switch("drafts eagle", "speculation", drafts("eagle", heads="{files}/eagle")),
    Switch("controller adaptive", "speculation", drafts("ngram", controller="adaptive")),
    Switch("verifier speculative-sampling", "speculation", drafts("ngram", verifier="speculative-sampling")),
    Switch("verifier multi-step", "speculation", verified("multi-step", tree="k-ary")),
    Switch("verifier spectr", "speculation", verified("spectr", tree="k-ary")),
    Switch("verifier typical", "speculation", verified("typical"), exact=False),
    Switch("verifier bild", "speculation", verified("bild"), exact=False),
    Switch("KV contiguous", "memory", {"kv_allocator": "contiguous"}, headline=True),
    Switch("KV contiguous-pow2", "memory", {"kv_allocator": "contiguous-pow2"}),
    Switch("KV contiguous-oracle", "memory", {"kv_allocator": "contiguous-oracle"}),
    Switch(
        "KV contiguous-predicted", "memory",
        {"kv_allocator": "contiguous-predicted", "length_predictor": "oracle:noise=0.5"},
    ),
    Switch("KV virtual", "memory", {"kv_allocator": "virtual"}),
    Switch("KV vtensor", "memory", {"kv_allocator": "vtensor"}),
    Switch("KV layerkv", "memory", {"kv_allocator": "layerkv", "swap_space": 0.1}),
    Switch("KV modules", "memory", {"kv_allocator": "modules"}, exact=False),
    Switch("prefixes hash", "memory", {"prefix_cache": "hash"}),
    Switch("prefixes none", "memory", {"prefix_cache": "none"}),
    Switch("prefixes off", "memory", {"enable_prefix_caching": False}),
    Switch("eviction fifo", "memory", {"eviction": "fifo"}),
    Switch("eviction lfu", "memory", {"eviction": "lfu"}),
    Switch("eviction flops", "memory", {"eviction": "flops"}),
    Switch("eviction priority", "memory", {"eviction": "priority"}),
    Switch("checkpoints at branches", "memory", {"slot_checkpoint_rule": "branch"}),
    Switch("blocks of 4", "memory", {"block_size": 4}),
    Switch("swap", "memory", {"swap_space": 0.01, "preemption_mode": "swap"}),
    Switch("swap fastswitch", "memory", {"swap_space": 0.01, "preemption_mode": "swap", "swap_tier": "fastswitch"}),
    Switch("swap disk", "memory", {"swap_space": 0.01, "preemption_mode": "swap", "swap_tier": "disk"}),
    Switch("policy andes", "scheduling", {"scheduling_policy": "andes"}),
    Switch("policy batchllm", "scheduling", {"scheduling_policy": "batchllm"}),
    Switch("policy cache-aware", "scheduling", {"scheduling_policy": "cache-aware"}),
    Switch("policy dynamic", "scheduling", {"scheduling_policy": "dynamic:timeout_s=0.01,size=2"}),
    Switch("policy fair", "scheduling", {"scheduling_policy": "fair"}),
    Switch("policy fastserve", "scheduling", {"scheduling_policy": "fastserve:batch=2,quantum_s=0.04"}),
    Switch("policy lamps", "scheduling", {"scheduling_policy": "lamps"}),
    Switch("policy length-aware", "scheduling", {"scheduling_policy": "length-aware:size=2,group=4"}),
    Switch("policy multi-bin", "scheduling", {"scheduling_policy": "multi-bin:bins=2,size=2,timeout_s=0.01"}),
    Switch("policy prefill-first", "scheduling", {"scheduling_policy": "prefill-first"}, headline=True),
    Switch("policy priority", "scheduling", {"scheduling_policy": "priority"}),
    Switch("policy slo", "scheduling", {"scheduling_policy": "slo"}),
    Switch("policy s3", "scheduling", {"scheduling_policy": "s3", "length_predictor": "history"}),
    Switch("policy splitfuse", "scheduling", {"scheduling_policy": "splitfuse"}),
    Switch("policy static", "scheduling", {"scheduling_policy": "static:size=2"}),
    Switch("whole prompts", "scheduling", {"enable_chunked_prefill": False}),
    Switch("long-prefill threshold", "scheduling", {"long_prefill_token_threshold": 16}),
    Switch("two steps in flight", "scheduling", {"depth": 2}),
    Switch("adapters", "adapters", {"enable_lora": True, "max_loras": 2}, exact=False),
    Switch("ops ref", "compute", {"ops": "ref"}, exact=False),
    Switch("ops blas", "compute", {"ops": "blas"}, exact=False),
    Switch("device cpu-torch", "compute", {"ops": "torch"}, exact=False),
    Switch("ops native", "compute", {"ops": "native"}),
    Switch("attention ref-online", "compute", {"attention_backend": "ref-online"}, exact=False),
)  # fmt: skip
"""What does not exist yet (a selector without its file, a type that kv_cache_dtype does not know) is left out until it
does. "exact" of another op table would be too much: it adds in another order."""
BY_BLOCKS = {"selector streaming", "selector quest", "selector leankv", "KV kivi4", "KV kivi2", "KV mixed"}
"""What they lose goes by whole blocks, and so depends on the size of one."""
PLAIN: dict[str, set[str]] = {
    "kv_allocator": {"paged"}, "prefix_cache": {"radix"}, "eviction": {"lru"},
    "slot_checkpoint_rule": {"distance"}, "scheduling_policy": {"fcfs"},
    "attention_backend": {"ref"}, "executor": {"inproc", "multiproc"}, "verifier": {"match"}, "rope_type": {"default"},
    "quantization": {"none"}, "dtype": {"auto", "bfloat16"}, "method": {"draft_model", "mtp"},
    "kv_cache_dtype": {"auto", "float32", "float16", "bfloat16"},
}  # fmt: skip
"""What the plain engine has (and, of drafters, the other spelling of one and what few checkpoints have; of executors,
the same rank elsewhere): no switches. KV in one of the model's types goes with dtype."""


def again(tokens: list[int], room: int) -> list[int]:
    """A drafter: what followed the last time that the newest token stood here."""
    before = [i for i, token in enumerate(tokens[:-1]) if token == tokens[-1]]
    return tokens[before[-1] + 1 :][:room] if before else []


def present() -> tuple[Switch, ...]:
    """Switches whose parts exist."""
    return tuple(switch for switch in SWITCHES if exists(switch))


def exists(switch: Switch) -> bool:
    from penstock.select import KV_SELECTORS

    name = switch.settings.get("kv_selector")
    if name is None:
        return True
    # Its file need not be there, so it is not imported.
    if name not in KV_SELECTORS.names():
        return False
    target = KV_SELECTORS.target(name)
    return importlib.util.find_spec(target.partition(":")[0]) is not None


def registered() -> dict[str, tuple[str, ...]]:
    """Every name that exists, by setting (or by field of speculative_config and rope_scaling)."""
    from penstock.backends import BACKENDS
    from penstock.config.engine import DTYPES
    from penstock.config.positions import KEYS
    from penstock.core.kv_codec import codecs_by_token
    from penstock.core.kv_format import ALIASES
    from penstock.core.matrix_format import SCHEMES
    from penstock.drafters import DRAFTERS
    from penstock.executor import EXECUTORS
    from penstock.kv import KV_MANAGERS
    from penstock.kv.checkpoints import CHECKPOINT_RULES
    from penstock.kv.eviction import EVICTION_POLICIES
    from penstock.kv.prefix import PREFIX_CACHES
    from penstock.ops.attention import ATTENTION_BACKENDS
    from penstock.runner.verifiers import VERIFIERS
    from penstock.sched.drafts import DRAFT_CONTROLLERS
    from penstock.sched.policy import POLICIES
    from penstock.select import KV_SELECTORS

    return {
        "kv_allocator": tuple(KV_MANAGERS), "prefix_cache": tuple(PREFIX_CACHES), "eviction": tuple(EVICTION_POLICIES),
        "slot_checkpoint_rule": tuple(CHECKPOINT_RULES),
        "scheduling_policy": tuple(POLICIES), "ops": tuple(BACKENDS), "attention_backend": tuple(ATTENTION_BACKENDS),
        "executor": tuple(EXECUTORS), "kv_selector": tuple(KV_SELECTORS), "method": tuple(DRAFTERS),
        "verifier": tuple(VERIFIERS), "controller": tuple(DRAFT_CONTROLLERS), "rope_type": tuple(KEYS),
        "quantization": tuple(SCHEMES.split(", ")), "kv_cache_dtype": (*codecs_by_token(), *ALIASES),
        "dtype": DTYPES,
    }  # fmt: skip


def unlisted() -> list[str]:
    """Registered names that no switch turns on, as `setting=name`."""
    turned: dict[str, set[str]] = {name: set(values) for name, values in PLAIN.items()}
    for switch in SWITCHES:
        for name, value in switch.settings.items():
            found = json.loads(value) if name in ("speculative_config", "rope_scaling") else {name: value}
            if name in ("kv_selector_config", "kv_cache_dtype") and str(value).startswith("{"):
                continue
            for key, inner in found.items():
                turned.setdefault(key, set()).add(str(inner).partition(":")[0])
    everything = registered().items()
    return [f"{key}={name}" for key, names in everything for name in names if name not in turned.get(key, set())]


def possible(a: Switch, b: Switch) -> bool:
    """Whether an engine can have both: two values of one setting exclude each other."""
    return not any(a.settings[name] != b.settings[name] for name in a.settings.keys() & b.settings.keys())


def counted(a: Switch, b: Switch) -> bool:
    """Whether the pair's gain is counted."""
    return a.headline and b.headline and a.family != b.family
