"""Decode graphs before anything is loaded: for which rows, why not, and how much memory they take. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from penstock.config import EngineConfig, from_kwargs
from penstock.config.graphs import FIELD, parse_sizes, sizes_up_to
from penstock.core.cache_spec import CacheGroup
from penstock.core.events import Decision
from penstock.core.kv_format import parse_kv_format
from penstock.core.model_spec import Attention, BlockAttention, EntryAttention, Experts, Latent, ModelSpec
from penstock.ops.attention import DEVICE_ATTENTION
from penstock.plan.memory import gib
from penstock.plan.resolve import DEFAULT_NUM_SEQS, Plan

CONTEXTS = (4096, 32768)
"""Beside max_model_len, in tokens: what a step's kernels have room for follows from the smallest that holds it."""
GRAPH_BYTES = 4 << 20
"""A graph's own, beside what its operations share with the others. Assumed, not measured."""
_SPLIT = 512
"""`kernels.attention_decode.SPLIT`, which cannot be imported without Triton."""


def contexts_up_to(max_model_len: int) -> tuple[int, ...]:
    """Tokens for which there are graphs, ascending."""
    return (*(c for c in CONTEXTS if c < max_model_len), max_model_len)


def wanted_graphs(config: EngineConfig) -> tuple[tuple[int, ...] | None, str]:
    """Rows of decode graphs (None: powers of two up to max_num_seqs; (): none) and why that is so."""
    execution = config.execution
    given = parse_sizes(execution.cudagraph_capture_sizes)
    if execution.enforce_eager:
        return (), "enforce_eager is set"
    if execution.attention_backend in DEVICE_ATTENTION.names():
        return (), f"attention_backend {execution.attention_backend} plans every step on the host"
    if execution.device.startswith("cuda"):
        if find_spec("triton") is None:
            return (), "they need the attention kernels, and Triton is not installed"
        return given, "as given" if given else "powers of two up to max_num_seqs"
    if given is None:
        return (), "operations on the CPU are called, not launched; cudagraph_capture_sizes 1,2,4 tries them"
    return given, "as given, recorded on the CPU by a mock of CUDA graphs"


def graphs_state() -> str:
    """What a GPU would have by default, in one line."""
    sizes, why = wanted_graphs(from_kwargs(model="any", device="cuda"))
    if sizes == ():
        return f"none: {why}"
    return f"for 1, 2, 4, ... max_num_seqs rows, where the model can be captured: --explain says ({FIELD} changes it)"


def problem_of(spec: ModelSpec, groups: Sequence[CacheGroup], kv_dtype: str) -> str | None:
    """What keeps a model's steps from being captured, as far as its spec tells: see `graphs.why_not`."""
    if any(isinstance(layer.ffn, Experts) for layer in spec.layers) and not _safe("experts"):
        return "experts are chosen on the host"
    if any(isinstance(m := layer.mixer, Latent) and (m.indexer or m.reads_choice) for layer in spec.layers):
        return "an indexer's choice of tokens is made on the host"
    if any(isinstance(layer.mixer, BlockAttention) for layer in spec.layers):
        return "an indexer's choice of blocks is made on the host"
    if any(isinstance(layer.mixer, EntryAttention) and layer.mixer.every is not None for layer in spec.layers):
        return "entries of several tokens are looked up on the host"
    if any(group.spec.kind == "slot" for group in groups):
        return "the pages of recurrent states are looked up on the host"
    formats = [parse_kv_format(kv_dtype).of(n) for n in range(len(spec.layers))]
    if any(own.recent or own.sinks for own in formats):
        return "blocks are encoded as they fill up"
    if any(group.spec.lanes > 1 for group in groups):
        return "heads keep tables of their own"
    if any(group.spec.page_planes for group in groups):
        return "tokens choose the pages they read"
    return None


def _safe(op: str) -> bool:
    from penstock.backends.gpu.tables import PLAIN

    return bool(getattr(PLAIN[op], "capture_safe", False))


def graph_bytes(spec: ModelSpec, rows: Sequence[int], max_model_len: int) -> int:
    """Memory of graphs for `rows`: what the operations of the largest share, and what each has of its own."""
    n, partial, width = max(rows), 0, 0
    for layer in spec.layers:
        if isinstance(layer.mixer, Attention | Latent):
            heads, dim = layer.mixer.num_heads, _value_dim(layer.mixer)
            partial = max(partial, heads * (max_model_len // _SPLIT + 1) * (dim + 2))
            width = max(width, heads * dim)
        own = layer.ffn.expert if isinstance(layer.ffn, Experts) else layer.ffn
        width = max(width, getattr(own, "width", 0))
    activations = partial + 4 * width + 4 * spec.hidden_size + 2 * spec.vocab_size
    return 4 * n * activations + len(rows) * len(contexts_up_to(max_model_len)) * GRAPH_BYTES


def _value_dim(mixer: Attention | Latent) -> int:
    return mixer.kv_rank if isinstance(mixer, Latent) else mixer.head_dim


def planned_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Of the graphs that a GPU will hold, to be set aside before anything else is planned."""
    sizes, _ = wanted_graphs(config)
    if sizes == () or not config.execution.device.startswith("cuda"):
        return 0
    rows = sizes_up_to(config.scheduler.max_num_seqs or DEFAULT_NUM_SEQS, sizes)
    length = config.model.max_model_len or spec.max_position
    # Those of steps with adapters share what the plain ones have for their operations.
    more = len(rows) * len(contexts_up_to(length)) * GRAPH_BYTES if config.lora.enable_lora else 0
    return graph_bytes(spec, rows, length) + more


def graph_decision(config: EngineConfig, spec: ModelSpec, plan: Plan) -> Decision:
    """Whether decode steps run by graphs, for how many rows, and why."""
    sizes, why = wanted_graphs(config)
    problem = None if sizes == () else problem_of(spec, plan.own_groups, plan.kv_dtype)
    if sizes == () or problem is not None:
        return Decision("decode_graphs", "none", problem or why)
    rows = sizes_up_to(plan.max_num_seqs, sizes)
    if config.execution.device.startswith("cuda"):
        why += f"; {gib(graph_bytes(spec, rows, plan.max_model_len))} are set aside, a prediction"
    return Decision("decode_graphs", ",".join(map(str, rows)), why)
