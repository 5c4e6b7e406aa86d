"""Environment variables of Ollama, llama.cpp, vLLM and SGLang: none is obeyed in silence.

Who comes from another engine may have them in a profile or a unit file. A server that starts says which it has seen and
what does the same here (`seen`). A variable is meant as the flag of its engine, if it is called like one
(`config.foreign`); what is not, or means something else than it seems to, stands in `VARIABLES`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from penstock.config.foreign import ALIASES, ENVIRONMENT, FOREIGN
from penstock.config.setting import Setting

PREFIXES = ("OLLAMA_", "LLAMA_ARG_", "VLLM_", "SGLANG_")
_MAX_TOLD = 12
# What Kubernetes puts into every container of a namespace with a service of such a name; NAME_PORT is an address then.
_SERVICE = re.compile(r"[A-Z]+_(SERVICE_(HOST|PORT.*)|PORT_[0-9]+_(TCP|UDP).*)")
_ADDRESS = ("tcp://", "udp://")

_NEVER = "there is nothing to switch off: no bytes leave this machine unasked"
_LOG = "use penstock --log-level LEVEL or PENSTOCK_LOG_LEVEL"
_HUB = "models are kept where HF_HOME says"
VARIABLES: dict[str, tuple[str, ...] | str] = {
    "OLLAMA_HOST": ("host", "port"),
    "OLLAMA_CONTEXT_LENGTH": ("max_model_len",),
    "OLLAMA_NUM_PARALLEL": ("max_num_seqs",),
    "OLLAMA_MAX_QUEUE": ("max_num_queued_reqs",),
    "OLLAMA_KV_CACHE_TYPE": ("kv_cache_dtype",),
    "OLLAMA_ORIGINS": ("allowed_origins",),
    "OLLAMA_API_KEY": "it is a client's; a server's key is --api-key or PENSTOCK_API_KEY",
    "OLLAMA_MODELS": _HUB,
    "OLLAMA_MAX_LOADED_MODELS": "name further models with --model NAME=PATH; models_memory bounds what they take",
    "OLLAMA_KEEP_ALIVE": ("keep_alive",),
    "OLLAMA_FLASH_ATTENTION": FOREIGN["flash_attn"].why,
    "OLLAMA_DEBUG": _LOG,
    "OLLAMA_NO_CLOUD": _NEVER,
    "LLAMA_API_KEY": ("api_key",),
    "LLAMA_CACHE": _HUB,
    "LLAMA_OFFLINE": "HF_HUB_OFFLINE does that",
    "LLAMA_ARG_N_PARALLEL": ("max_num_seqs",),
    "LLAMA_ARG_HF_REPO": ("model",),
    "LLAMA_ARG_CACHE_TYPE_K": ("kv_cache_dtype",),
    "LLAMA_ARG_CACHE_TYPE_V": ("kv_cache_dtype",),
    "LLAMA_ARG_TIMEOUT": ("request_timeout",),
    "LLAMA_ARG_N_PREDICT": "it is max_tokens in requests",
    "LLAMA_ARG_ENDPOINT_METRICS": "/metrics is always there",
    "LLAMA_ARG_ENDPOINT_SLOTS": "/slots is always there",
    "VLLM_HOST_IP": "it is about several machines, which this version does not use",
    "VLLM_PORT": "it is about several machines; the server's is --port or PENSTOCK_PORT",
    "VLLM_LOGGING_LEVEL": _LOG,
    "VLLM_CPU_KVCACHE_SPACE": ("kv_cache_memory_bytes",),
    "VLLM_CPU_OMP_THREADS_BIND": "use --threads or PENSTOCK_THREADS, and taskset for which",
    "VLLM_CACHE_ROOT": "use PENSTOCK_CACHE",
    "VLLM_PLUGINS": ("plugin",),
    "VLLM_NO_USAGE_STATS": _NEVER,
    "VLLM_DO_NOT_TRACK": _NEVER,
    "VLLM_MAX_N_SEQUENCES": ("max_n",),
    "SGLANG_PORT": ("port",),
    "SGLANG_LOG_LEVEL": _LOG,
}
"""Variable -> the settings that do what it does, or what to do instead."""


def seen(environment: Mapping[str, str], settings: Mapping[str, Setting]) -> str:
    """A sentence about those that are set, by name and with what to use instead; "" for none. No value is told."""
    ours = [
        f"{name} is taken for {settings[ENVIRONMENT[name]].flag}" for name in ENVIRONMENT
        if environment.get(name) and ENVIRONMENT[name] in settings
        and not environment.get(settings[ENVIRONMENT[name]].variable)
    ]  # fmt: skip
    others = [f"{name} ({instead(name, settings)})" for name, value in sorted(environment.items()) if _is(name, value)]
    parts = ours
    if others:
        more = f" and {len(others) - _MAX_TOLD} more" if len(others) > _MAX_TOLD else ""
        parts = [*ours, f"not read: {', '.join(others[:_MAX_TOLD])}{more}"]
    return f"variables of other engines are set; {'; '.join(parts)}" if parts else ""


def _is(name: str, value: str) -> bool:
    known = name in VARIABLES or name.startswith(PREFIXES)
    kubernetes = _SERVICE.fullmatch(name) or value.startswith(_ADDRESS)
    return bool(value) and known and name not in ENVIRONMENT and not kubernetes


def instead(name: str, settings: Mapping[str, Setting]) -> str:
    """What does here what the variable does there."""
    found = VARIABLES.get(name)
    if isinstance(found, str):
        return found
    if found is not None:
        return _use([settings[one] for one in found])
    flag = next(name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)).lower()
    off = not any(flag in names for names in (settings, ALIASES, FOREIGN)) and flag.startswith("no_")
    flag = flag.removeprefix("no_") if off else flag
    if flag in ALIASES and ALIASES[flag].ours in settings:
        return _use([settings[ALIASES[flag].ours]], off != ALIASES[flag].opposite)
    if flag in settings:
        return _use([settings[flag]], off)
    return FOREIGN[flag].why if flag in FOREIGN else "nothing here is set by it"


def _use(items: Iterable[Setting], off: bool = False) -> str:
    """`off`: the setting is to be switched off."""
    if off:
        return "use " + " and ".join(f"--no-{item.flag[2:]} or {item.variable}=false" for item in items)
    return "use " + " and ".join(f"{item.flag} or {item.variable}" for item in items)
