"""What a front end and an engine process tell each other. Ids, numbers and short texts only; no pickle, ever."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.core.output import EngineOutput
from penstock.core.pooler import PoolingSpec
from penstock.core.request import Abort, Control, Request
from penstock.core.weight_swap import WeightsOrder


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is, fixed from the moment it is ready until it ends. All that a front end needs to know of it.

    Units: tokens and blocks as named; `load_s` seconds from start to ready.
    """

    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int | None = None
    eos_token_ids: list[int] = []
    block_size: int = 0
    num_blocks: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    num_params: int = 0
    embedding_size: int = 0
    generates: bool = True
    pooler: PoolingSpec | None = None
    num_words: int = 0
    """These three: see `text.limits.Limits`."""
    dtype: str = ""
    kv_dtype: str = ""
    pid: int = 0
    host: str = ""
    """Name and address of the machine that it is on, if it is another than its front end's."""
    memory_bytes: dict[str, int] = {}
    """Bytes by what for, "weights" and "kv_limit": what KV may take."""
    weight_bytes: dict[str, int] = {}
    """Those of "weights" (draft models' are not among them) by the format that they are held in."""
    packed_file: str = ""
    """See `Executor.packed_file`."""
    load_s: float = 0.0
    start_parts: list[tuple[str, float]] = []
    """(what, seconds) of its start, one after the other, from the process's beginning to ready; empty in a thread."""
    alone_s: list[tuple[int, float]] = []
    """(tokens, seconds) of prompts that are computed alone, as the cost model has it: before anything is measured."""
    drafts: bool = False
    """A step may yield several tokens of a sequence."""
    caches_prefixes: bool = True
    block_secret: bytes = b""
    block_fingerprint: str = ""
    """What names of the blocks that it tells of are made with (`kv.block_names`); without a secret it tells of none."""
    pin_blocks: int = 0
    """Blocks that hints may pin."""
    module_tokens: int = 0
    """Modules of prompts are filled up to multiples of so many tokens (`kv.modules`); 0: there are none."""
    module_chunk: int = 0
    module_recompute: float = 0.0
    """These two: see `text.limits.Limits`."""
    adapter_units: int = 0
    """The same, where adapters lie in blocks of KV."""
    decisions: list[tuple[str, Any, str]] = []
    """(name, value, why) of everything that was chosen automatically."""


AGES_S = (1.0, 10.0, 60.0, 300.0, 1800.0, 3600.0, 21600.0, 86400.0)
"""Upper bounds of buckets of ages."""
MISS_REASONS = ("new", "evicted", "tail", "not_read", "lossy")
"""Of tokens of prompts that were computed: never here (as far as is remembered); here once; behind the last whole
block, or the last token; the request reads no cache (prompt logprobs, pooling); the prompt was changed."""


class TierFacts(msgspec.Struct, frozen=True, array_like=True):
    """A tier of KV: device, host, disk or remote. Blocks that nobody uses now, and what they take; `hit_tokens`,
    `left`: tokens of prompts that came from it, and blocks that left it, since start."""

    name: str
    blocks: int
    limit_blocks: int
    num_bytes: int
    limit_bytes: int
    hit_tokens: int
    left: int
    pinned: int = 0


class RankBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of a rank, where blocks lie on one rank each (`kv.placed`): all, those that are free, those that sequences
    of other homes have, and what those of its own have of other ranks."""

    total: int
    free: int
    lent: int
    borrowed: int


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine is doing. Sent with outputs and while idle, at most every tenth of a second.

    `step` counts steps; `time_s` is the monotonic clock of the machine. Counters are `core.events.EngineStats`' names.
    `memory_bytes`: bytes by subsystem ("weights", "prefix_tree", ...; "kv" is what was taken for KV, "kv_limit" what it
    may take). KV numbers are blocks of all groups. Offline work that waits is in `num_offline_waiting` alone; what runs
    is in `num_running`, too.
    """

    time_s: float = 0.0
    step: int = 0
    step_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    num_offline_running: int = 0
    num_offline_waiting: int = 0
    kv_total: int = 0
    kv_used: int = 0
    kv_evictable: int = 0
    counters: dict[str, float] = {}
    tiers: list[TierFacts] = []
    """`kv.tier_facts` makes them, and counters beside."""
    rank_blocks: list[RankBlocks] = []
    memory_bytes: dict[str, int] = {}
    decode_s: list[float] = []
    """What its steps take, with `prefill_token_s` (`sched.costs.LearntCosts`)."""
    prefill_token_s: float = 0.0
    knobs: dict[str, Any] = {}
    """What adaptive mode has set, by name; empty: it is off. `moves`: the last ones, (seconds on the engine's clock,
    knob, value, value before, why). `frozen`: it moves nothing now."""
    moves: list[tuple[float, str, Any, Any, str]] = []
    frozen: bool = False
    leaving: bool = False
    """It was told that it will be ended (SIGTERM), and runs nothing: whoever has others gives them what it has."""
    prefix_tree: list[tuple[int, int, int]] = []
    """A sketch of the largest paths of the prefix tree, for people to look at: (depth, blocks, holders)."""


class BlocksTold(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that an engine has begun or ceased to hold, by the last 64 bits of their names (`kv.store_index`).

    `cleared`: nothing of what was told before is there; what is `stored` has come since.
    """

    cleared: bool
    stored: list[int]
    removed: list[int]


class Outputs(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """News of one step, engine to front end. `epoch`: the engine process that says so; stale ones are dropped."""

    epoch: int
    outputs: list[EngineOutput] = []
    snapshot: EngineSnapshot | None = None
    blocks: BlocksTold | None = None
    """Where a router follows them."""


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first message, front end to engine. Another `schema` is another build: refused."""

    schema: str
    epoch: int
    config: dict[str, Any]
    """`EngineConfig.as_kwargs()`."""
    faults: list[str] = []
    stall_s: float = 4.0
    """Time without a sign of life after which the engine writes its stacks to stderr."""
    weights: WeightsOrder | None = None
    """What the engine before this one had taken up."""
    block_secret: bytes = b""
    """Tell which blocks are held, by names made with this; empty: nobody wants to know."""


class Loading(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Bytes of weights read so far, and in all."""

    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    epoch: int
    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine cannot go on. `kind` is the error's class name, `message` its one sentence."""

    kind: str
    message: str
    field: str | None = None
    """The setting that has to change, if it is one."""


class Send(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Front end to engine: take these in with the next step."""

    items: list[Request | Abort | Control]


class Shutdown(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Front end to engine: end now."""


ToEngine = Hello | Send | Shutdown
FromEngine = Loading | Ready | Outputs | Failed
