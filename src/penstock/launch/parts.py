"""A rank put together, whole, from a model that is in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from penstock.backends.backend import Backend
from penstock.base.clock import Clock
from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.config.offload import offload_of
from penstock.core.adapter import AdapterRef
from penstock.core.cache_spec import HIDDEN
from penstock.core.model_spec import ModelSpec
from penstock.core.page_ops import DISK, REMOTE
from penstock.core.protocols import Drafter
from penstock.core.selection import KVSelector
from penstock.kv.virtual import virtual_slabs
from penstock.kv.vtensor import chunk_blocks, vtensor_model_len
from penstock.launch.kv_store import addresses_of, block_key, make_block_codec, rank_folder
from penstock.launch.progress import warming_up
from penstock.launch.selection import keeping_of, make_selections
from penstock.launch.speculation import DraftMeans, make_drafter, make_verifier
from penstock.model.forward import (
    AdaptingForward,
    Forward,
    LayeredForward,
    MergingForward,
    PlacingForward,
    StepLimits,
    WarmedForward,
)
from penstock.ops.adapters import LowRank
from penstock.ops.plan import Planes
from penstock.plan.adapters import adapter_units
from penstock.plan.rank_plan import rank_plan
from penstock.plan.resolve import Plan
from penstock.runner.ahead import AheadRunner, can_run_ahead
from penstock.runner.assemble import make_sampler
from penstock.runner.block_files import BlockFiles
from penstock.runner.chunks import ChunkedStorage
from penstock.runner.lazy import LazyStorage
from penstock.runner.outside import Outside
from penstock.runner.placed import placed_on
from penstock.runner.remote_blocks import RemoteBlocks
from penstock.runner.restored import RestoredOutside, Restorer
from penstock.runner.rows import RowStore
from penstock.runner.runner import Runner
from penstock.runner.stage_storage import StageStorage
from penstock.runner.storage import Storage

if TYPE_CHECKING:
    from penstock.runner.logits.grammar_cache import GrammarCache


Load = Callable[[AdapterRef], Mapping[str, LowRank]]


class Parts(NamedTuple):
    """What a rank has besides its settings: all that is no data.

    Attributes:
        forward: the model, or what stands in for one (tests).
        backend: what runs it; its sampler is used.
        grammars: what structured outputs need; without it no request may ask for them.
        means: what a drafter may be made of; `drafter`: another than the settings name (tests).
        select: the KV selector, and the model that it was made for.
        part: layers -> the model without all others, over the same weights.
        load_adapter: reads adapters (`config.lora`).
        restoring: makes what makes keys and values of hidden states (`DecoderModel.restoring`), where pages have them.
    """

    forward: Forward
    vocab_size: int
    backend: Backend | None = None
    grammars: GrammarCache | None = None
    means: DraftMeans = DraftMeans()
    drafter: Drafter | None = None
    select: tuple[KVSelector, ModelSpec] | None = None
    restoring: Callable[[Sequence[Planes]], Forward] | None = None
    part: Callable[[Collection[int]], Forward] | None = None
    load_adapter: Load | None = None


def make_rank(
    config: EngineConfig, plan: Plan, parts: Parts, clock: Clock, *, poison: bool = False, like: Runner | None = None,
    rank: int = 0,
) -> Runner:  # fmt: skip
    """`rank`: its number. `like`: over other weights; its rows and its memory are those of the new one. Mutates: the
    storage of `like`.

    Raises: ConfigError for settings that do not fit each other."""
    whole, plan = plan, rank_plan(plan, rank, config.execution.tensor_parallel_size)
    num_own = len(plan.own_groups)
    assert plan.own_groups == plan.groups[:num_own], "draft models' groups come last"
    keeping = keeping_of(config)
    make_storage: Callable[..., Storage] = partial(StageStorage, whole=whole.groups) if plan.stages else Storage
    num_slabs = plan.num_slabs
    if config.cache.kv_allocator == "virtual":  # the plan counts memory; the rank needs addresses
        make_storage = LazyStorage
        num_slabs = virtual_slabs(plan.groups, num_slabs, plan.block_size, plan.max_model_len, plan.max_num_seqs)
    elif config.cache.kv_allocator == "vtensor":
        length = vtensor_model_len(plan.groups, plan.block_size, plan.max_model_len)
        chunk = chunk_blocks(plan.groups, plan.block_size, plan.max_model_len)
        make_storage = partial(ChunkedStorage, chunk_blocks=chunk)
        num_slabs = virtual_slabs(plan.groups, num_slabs, plan.block_size, length, plan.max_num_seqs)
    placed = placed_on(plan.groups, rank)
    new_plane = None if parts.backend is None else parts.backend.new_plane
    storage = like.storage if like is not None else make_storage(
        plan.groups, num_slabs if placed is None else placed.num_slabs(num_slabs), plan.block_size,
        host_slabs=plan.num_host_slabs or None,
        tier=config.cache.swap_tier, poison=poison, new=new_plane,
    )  # fmt: skip
    storage.placed = placed if like is None else storage.placed
    offload = offload_of(config.cache.kv_offload)
    if offload is not None and like is None:
        slots = [g.index for g in plan.groups if not g.spec.per_token]
        codec = make_block_codec(config.cache.kv_offload_format, plan.own_groups, plan.block_size)
        planes: Sequence[Planes] = storage.planes[:num_own]
        if parts.restoring is not None:
            planes = [{HIDDEN: own[HIDDEN]} for own in planes]
        layout = (block_key(config, offload), planes, storage.pages_per_slab, slots, codec)
        tiers: dict[int, BlockFiles] = {}
        if offload.disk is not None:
            tiers[DISK] = BlockFiles(rank_folder(offload.disk, rank, config.execution.tensor_parallel_size), *layout)
        if offload.remotes:
            tiers[REMOTE] = RemoteBlocks(addresses_of(config, offload), *layout)
        storage.outside = Outside(tiers)
        if parts.restoring is not None:
            restorer = Restorer(parts.restoring(storage.planes), storage.planes, plan.own_groups, plan.block_size)
            storage.outside = RestoredOutside(tiers, restorer, plan.block_size)
    if config.lora.enable_lora and parts.load_adapter is not None:
        from penstock.runner.adapters import RankAdapters  # nobody else needs it at the start

        assert isinstance(parts.forward, AdaptingForward), "why_not has looked"
        lora, forward = config.lora, parts.forward
        if lora.lora_merge_threshold is not None and not (isinstance(forward, MergingForward) and forward.merges):
            raise ConfigError(
                "lora_merge_threshold: adapters are merged into weights of float32 by native kernels (ops native, "
                "dtype float32, no quantization); leave it away",
                field="lora_merge_threshold",
            )
        if adapter_units(config, plan.groups, plan.block_size):
            from penstock.runner.paged_adapters import PagedAdapters

            assert isinstance(forward, PlacingForward), "backends with units of adapters have such"
            storage.adapters = PagedAdapters(
                forward, parts.load_adapter, lora.in_memory, clock, storage.planes, plan.groups, storage.adapters
            )  # fmt: skip
        else:
            storage.adapters = RankAdapters(parts.forward, parts.load_adapter, lora.in_memory, lora.max_bytes, clock)
    rows = like.rows if like is not None else RowStore(
        plan.groups, num_slabs, plan.block_size, parts.vocab_size, rank
    )  # fmt: skip
    sampler = make_sampler(parts.backend, parts.vocab_size, parts.grammars)
    streams = None
    if config.cache.kv_allocator == "layerkv":
        if not isinstance(parts.forward, LayeredForward):
            raise ConfigError(
                "kv_allocator: layerkv moves layers while others compute, and what runs this model cannot pause "
                "between them; use ops native or ref, or another allocator",
                field="kv_allocator",
            )
        from penstock.runner.layer_streams import LayerStreams  # nobody else needs it at the start

        streams = LayerStreams(parts.forward, storage)
    blend = None
    if config.cache.kv_allocator == "modules" and parts.part is not None:
        from penstock.runner.blending import Blender  # nobody else needs it at the start

        blend = Blender(parts.forward, parts.part, rows, storage, plan.max_num_batched_tokens).blend
    selections = None
    if parts.select is not None and keeping is not None:
        selections = make_selections(*parts.select, keeping, rows, storage)
    if isinstance(parts.forward, WarmedForward):
        limits = StepLimits(
            plan.own_groups, plan.block_size, plan.max_num_seqs, plan.max_num_batched_tokens,
            trees=config.speculation is not None or parts.drafter is not None,
        )  # fmt: skip
        with warming_up() as report:
            parts.forward.warm(storage.planes, limits, report)
    drafter = parts.drafter or make_drafter(config, rows, storage, sampler, parts.means)
    verifier, depth = make_verifier(config, sampler), config.execution.depth
    ahead = can_run_ahead(
        depth, parts.forward, sampler, drafter=drafter, verifier=verifier, selections=selections
    )  # fmt: skip
    made = (AheadRunner if ahead else Runner)(
        parts.forward,
        rows,
        storage,
        sampler,
        clock=clock,
        grammars=parts.grammars,
        drafter=drafter,
        verifier=verifier,
        selections=selections,
        keeping=keeping,
        moves=config.cache.kv_allocator == "modules",
        blend=blend,
        num_own_groups=num_own,
        streams=streams,
        depth=depth,
        strict=poison,
    )
    if like is not None:
        made.greet(like)
    return made
