"""Which blocks of KV an engine keeps, as changes: what routers follow to know whose cache has the start of a prompt.

Source: vLLM's `vllm.distributed.kv_events`, whose names, fields and order of fields these are.
"""

from __future__ import annotations

import msgspec

DEVICE, HOST, DISK, REMOTE = "GPU", "CPU", "DISK", "SHARED_STORAGE"
"""Media, in the words of vLLM and of llm-d's connector for it. `DEVICE` is the memory that the engine computes from,
also where that is main memory; `REMOTE` is what servers of blocks keep."""


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Blocks are kept in `medium` from now on.

    Attributes:
        block_hashes: names, 64 bits each. One stands for all of the text up to the end of its block.
        parent_block_hash: of the block before the first one, each other one follows the one before it; None: they begin
            a text, or (media other than the device) they need not follow one another.
        token_ids: of all blocks, one after the other; empty where they are not told.
        block_size: tokens of a block.
        lora_id, lora_name: of the adapter that the blocks belong to, None: of none. The number is of its content
            (`core.adapter.number_of`), the name that by which the request that computed them called it.
        medium: where they are.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Blocks are not kept in `medium` any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Nothing is kept anywhere: an engine has begun, or its prefix cache was emptied."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
