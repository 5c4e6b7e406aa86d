"""Of `penstock doctor`: whether the stores of blocks that `kv_offload` names can be used, and what to change."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

from penstock.cli.models import size_text

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.config.offload import DiskStore
    from penstock.runner.block_peer import Address

NUM_READ = 8
_CHANGE = {
    "secret": "give both sides one first line: --secret-file of penstock cache serve, --kv-offload-secret-file here",
    "slow": "see what holds it up, or leave it out: every question to it waits so long",
    "frame": "what it says is not its own: mend what stands between",
}
"""Where what is wrong does not say what to do."""


def lines_of(config: EngineConfig) -> tuple[list[str], bool]:
    """A line for the folder and one for each server, and whether all can be used. Raises ConfigError."""
    from penstock.config.offload import offload_of
    from penstock.launch.kv_store import addresses_of, shared_key

    offload = offload_of(config.cache.kv_offload)
    if offload is None:
        return [], True
    told = [] if offload.disk is None else [_folder(offload.disk, shared_key(config, offload))]
    told += [_server(address) for address in addresses_of(config, offload)] if offload.remotes else []
    return [text for text, _ in told], all(good for _, good in told)


def _folder(store: DiskStore, key: bytes | None) -> tuple[str, bool]:
    from penstock.base.errors import ConfigError
    from penstock.launch.kv_store import is_served, open_folder, places
    from penstock.runner.block_files import is_whole

    place = next(path for path in (store.folder, *store.folder.parents) if path.exists())
    free, name = shutil.disk_usage(place).free, f"KV folder {store.folder}"
    if place != store.folder:
        return (
            f"{name}: is not there yet; the first server that names it makes it{_room(free, store.limit_bytes)}",
            True,
        )
    try:
        if not any(store.folder.iterdir()):
            return f"{name}: is empty{_room(free, store.limit_bytes)}", True
        secret = open_folder(store, key)
    except (ConfigError, OSError) as error:
        return f"{name}: cannot be used: {str(error).removeprefix('kv_offload: ')}", False
    if is_served(store.folder):
        return f"{name}: is that of a server of blocks (penstock cache serve); name one of your own", False
    found = places(store.folder)
    blocks = [block for at in found for block in at.blocks]
    held = sum(block.num_bytes for block in blocks)
    text = f"{name}: {len(blocks):,} blocks of {len({at.print_ for at in found})} models, "
    text += f"{size_text(held)} of {size_text(store.limit_bytes)}"
    newest = sorted(blocks, key=lambda block: -block.used_s)[:NUM_READ]
    began = time.perf_counter()
    num_bad = sum(not is_whole(store.folder, block.name, secret) for block in newest)
    if newest:
        text += f"; one is read in {(time.perf_counter() - began) / len(newest) * 1e3:.1f} ms"
    if num_bad:
        return f"{text}; {num_bad} of {len(newest)} are damaged: penstock cache verify {store.folder} --delete", False
    return text + _room(free, store.limit_bytes - held), True


def _room(free: int, wanted: int) -> str:
    """What to say if the drive has less than a folder may still take."""
    if free >= wanted:
        return ""
    return f"; the drive has {size_text(free)} for the {size_text(wanted)} that it may still take: give a smaller size"


def _server(address: Address) -> tuple[str, bool]:
    from penstock.runner.block_peer import BlockPeer
    from penstock.runner.block_wire import MOST_LISTED, VERSION, Ask, PeerError

    peer, name = BlockPeer(address), f"KV server {address}"
    try:
        listing = peer.list(Ask(""))
        began = time.perf_counter()
        peer.list(Ask("", listing.epoch, listing.until))
        took_s = time.perf_counter() - began
    except PeerError as error:
        change = _CHANGE.get(error.reason, "")
        return f"{name}: cannot be used: {error}{change and f'; {change}'}", False
    num, held = len(listing.found), sum(num_bytes for _, num_bytes in listing.found)
    more = " or more" if num >= MOST_LISTED else ""
    return (
        f"{name}: {num:,}{more} blocks, {size_text(held)}; it answers in {took_s * 1e3:.1f} ms (protocol {VERSION})",
        True,
    )
