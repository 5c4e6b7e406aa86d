"""The stores of blocks that the settings name: a folder is made and checked, keys are read, and what is there."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import stat
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.base.cache import cache_folder
from penstock.base.errors import ConfigError
from penstock.base.flock import lock_file
from penstock.config import EngineConfig
from penstock.config.offload import DiskStore, OutsideStores, offload_of
from penstock.core.block_codec import BLOCK_CODECS, BlockCodec, BlockPart
from penstock.core.cache_spec import CacheGroup
from penstock.core.events import StoreNews
from penstock.core.page_ops import DISK, REMOTE, STATE
from penstock.formats.files import quoted
from penstock.kv.store_index import NO_LIMIT
from penstock.kv.stored import StoreSettings, paths_of
from penstock.launch.remote_store import RemoteStore
from penstock.ops.native.abi import ABI
from penstock.ops.native.content_key import FileHashes
from penstock.plan.resolve import Plan
from penstock.runner.block_files import OVERHEAD, BlockFiles, file_bytes, is_whole
from penstock.runner.block_peer import Address
from penstock.runner.shared_secret import FIELD, Secrets, read_secrets

if TYPE_CHECKING:
    from penstock.core.request import Request
    from penstock.families.checkpoint import Checkpoint

SECRET, LOCK, ABOUT, SERVED, PINS = "secret", "lock", "about.json", "served", "pins.json"
SECRET_BYTES = 32
NUM_TRIED = 4
LOOK_S = 10.0
"""Between two looks at what others do in the folder."""
_PART_S = 60.0  # a file without its name that nobody has written to for so long is nobody's
_log = logging.getLogger(__name__)


def open_folder(store: DiskStore, key: bytes | None = None) -> bytes:
    """Make the folder if it is not there, and its secret: `key`, or a drawn one. Returns the secret.

    Raises ConfigError if it cannot be used, others can read it, or it holds something else.
    """
    folder = store.folder
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Looked at before the secret: engines that begin at the same time make that first, by a part of its own.
        others = any(not path.name.startswith(f".{SECRET}.") for path in folder.iterdir())
        info = folder.stat()
        problem = ""
        if info.st_uid != os.geteuid():
            problem = f"belongs to user {info.st_uid}; name a folder of your own"
        elif info.st_mode & 0o077:
            problem = f"can be used by others (mode {stat.S_IMODE(info.st_mode):o}); chmod 700 it, or name a new one"
        elif others and not (folder / SECRET).exists():
            problem = "holds other things; name a new folder, or an empty one"
        if problem:
            raise ConfigError(f"kv_offload: {quoted(folder)} {problem}", field="kv_offload")
        found = _secret(folder, key)
        if key is not None and found != key:
            raise ConfigError(
                f"kv_offload: blocks of {quoted(folder)} are named by another secret than {FIELD} has; name a new one",
                field="kv_offload",
            )
        return found
    except OSError as error:
        raise ConfigError(
            f"kv_offload: {quoted(folder)} cannot be used: {error.strerror or error}", field="kv_offload"
        ) from error


def rank_folder(store: DiskStore, rank: int, world_size: int) -> Path:
    """Where a rank's blocks are: the folder itself for the lead, one of its own beside it for each other, made here.

    Raises ConfigError if it cannot be made."""
    if rank == 0:
        return store.folder
    folder = store.folder.with_name(f"{store.folder.name}.rank{rank}of{world_size}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"kv_offload: {quoted(folder)} cannot be made: {error.strerror or error}", field="kv_offload"
        ) from error
    return folder


def _secret(folder: Path, key: bytes | None) -> bytes:
    """Made once, whole or not at all: two servers that begin at the same time have the same one."""
    path = folder / SECRET
    if not path.exists():
        part = folder / f".{SECRET}.{secrets.token_hex(8)}.part"
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(key or secrets.token_bytes(SECRET_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
        part.unlink()
    found = path.read_bytes()
    if len(found) != SECRET_BYTES:
        raise ConfigError(
            f"kv_offload: the file {quoted(path)} is damaged; remove the folder, and its blocks are made anew",
            field="kv_offload",
        )
    return found


def fingerprint(config: EngineConfig, checkpoint: Checkpoint, plan: Plan, machine: str) -> str:
    """Of all that decides the bytes of keys and values: 16 hex digits. `machine`: what the kernels are compiled for."""
    files = sorted({tensor.path for weight in checkpoint.weights.values() for tensor in weight.tensors})
    hashes = FileHashes(cache_folder("weights")).of(files)
    said = config.as_kwargs()
    decide = (
        "quantization",
        "activation_quantization",
        "kv_rotation",
        "ops",
        "device",
        "attention_backend",
        "block_size",
        "kv_offload_format",
    )
    parts = [
        _version(), ABI, machine, plan.block_size, plan.dtype, plan.kv_dtype, repr(checkpoint.spec),
        repr(plan.own_groups), {name: said.get(name) for name in decide}, sorted(hashes),
    ]  # fmt: skip
    if config.execution.tensor_parallel_size > 1:  # what is found there is one rank's part
        parts.append(config.execution.tensor_parallel_size)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]


def _version() -> str:
    """Of this package, which imports this room: so it is not imported here."""
    return str(sys.modules["penstock"].__version__)


def make_block_codec(name: str, groups: Sequence[CacheGroup], block_size: int) -> BlockCodec | None:
    """The codec `name` (`kv_offload_format`) for the planes of a block, in the order of its file; None: it is plain.

    Raises ConfigError.
    """
    if name not in BLOCK_CODECS:
        return None
    kept = [group for group in groups if group.spec.per_token]
    last = max(1, *(layer for group in kept for layer in group.layers)) if kept else 1
    parts = []
    for group in kept:
        depths = tuple(layer / last for layer in group.layers for _ in range(group.spec.lanes))
        rows = [(plane, block_size) for plane in group.spec.planes]
        rows += [(plane, plane.page_rows(block_size)) for plane in group.spec.page_planes]
        for plane, tokens in rows:
            parts.append(BlockPart(plane.dtype, depths, tokens, plane.heads // group.spec.lanes, plane.dim))
    return BLOCK_CODECS.get(name)(tuple(parts))


class StoreModel(msgspec.Struct, frozen=True):
    """Whose blocks a folder below the store's holds; for people."""

    model: str
    kv_dtype: str
    block_size: int
    version: str


def _describe(folder: Path, about: StoreModel) -> None:
    """Without it nothing but `penstock cache ls` is poorer."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if not (folder / ABOUT).exists():
            part = folder / f".{ABOUT}.{secrets.token_hex(8)}.part"
            part.write_bytes(msgspec.json.encode(about))
            part.replace(folder / ABOUT)
    except OSError as error:
        _log.warning("%s cannot be written to: %s", folder, error.strerror)


class KVStore(NamedTuple):
    """Stores that are open. `settings`: for the books. Closing is the end of the process. `block_size`: in tokens."""

    settings: StoreSettings
    looks: Sequence[FolderLook | RemoteStore]
    block_size: int

    def news(self, now_s: float) -> list[StoreNews]:
        """What others have changed, if it is time to say."""
        return [news for look in self.looks for news in look.news(now_s)]

    def look(self, request: Request) -> None:
        """What others have just written of this request's texts is news before its first step. From any thread.

        A folder is looked at for each; servers are asked for those alone that come from another engine."""
        ends = [array("I")] if request.resume is None else [array("I", ids) for _, ids in request.resume.samples]
        prompt = array("I", request.prompt_token_ids)
        comes = request.resume is not None or request.prefetches
        paths = [path for end in ends for path in paths_of(self.settings, request, prompt + end, self.block_size)]
        if self.settings.state_bytes > OVERHEAD:
            paths += [path + STATE for path in paths]
        for look in self.looks:
            look.look_for(paths, comes=comes)


class FolderLook:
    """What a folder holds, and what others do in it."""

    def __init__(self, folder: Path, settings: StoreSettings | None = None) -> None:
        self.folder = folder
        self._seen: set[str] = set()
        self._lock: int | None = None
        self._thread: threading.Thread | None = None
        self._next_s = float("-inf")
        self._looking = threading.Lock()
        self._pins: list[str] = []
        self._kept: dict[str, float] = {}
        self._news = deque([self.look()])
        if settings is not None:
            self._try(settings)

    def news(self, now_s: float) -> list[StoreNews]:
        """What others have changed, if it is time to say; a thread looks."""
        news = [self._news.popleft() for _ in range(len(self._news))]  # a thread adds to it meanwhile
        if now_s >= self._next_s and (self._thread is None or not self._thread.is_alive()):
            if self._next_s > float("-inf"):
                self._thread = threading.Thread(target=self._look, name="penstock-store", daemon=True)
                self._thread.start()
            self._next_s = now_s + LOOK_S
        return news

    def _try(self, settings: StoreSettings) -> None:
        """Reads some blocks, so that the first decision whether to load knows what that costs."""
        own = [path for path in sorted(self._seen) if path.startswith(f"{settings.fingerprint}/")]
        began, num = time.perf_counter(), 0
        for path in own[:NUM_TRIED]:
            num += is_whole(self.folder, path, settings.secret)
        if num:
            self._news.append(StoreNews(read=(num * settings.block_bytes, time.perf_counter() - began)))

    def _look(self) -> None:
        with self._looking:
            news = self.look()
            if news != StoreNews():
                self._news.append(news)

    def look_for(self, paths: Iterable[str], *, comes: bool) -> None:
        """These alone, at once. What has gone is known by the next look. If a request `comes` from another engine, what
        was seen before, too: this engine may have removed it meanwhile, and the other one have written it anew."""
        with self._looking:
            asked = [path for path in dict.fromkeys(paths) if comes or path not in self._seen]
            there = [(path, info) for path in asked if (info := _info(self.folder / path)) is not None]
            found = [(path, info.st_size, int(info.st_mtime) // 60) for path, info in there]
            self._seen.update(path for path, *_ in found)
            if found:
                self._news.append(StoreNews(found=found))

    def look(self) -> StoreNews:
        """What has come and gone since the last look, and whether this process makes room from now on."""
        evicts = None
        if self._lock is None:
            self._lock = self._locked()
            evicts = self._lock is not None
        found, seen = [], set()
        now = time.time()
        before, kept = now - _PART_S, {}
        for path, info in files_of(self.folder):
            if path.rpartition("/")[2].startswith("."):
                if info.st_mtime < before and self._lock is not None:
                    (self.folder / path).unlink(missing_ok=True)
                continue
            seen.add(path)
            if info.st_mtime > now:
                kept[path] = info.st_mtime
            if path not in self._seen:
                found.append((path, info.st_size, int(info.st_mtime) // 60))
        gone = sorted(self._seen - seen)
        self._seen = seen
        longer = [(path, until - now) for path, until in sorted(kept.items()) if until > self._kept.get(path, 0.0)]
        self._kept = kept
        pins = sorted(pin.path for pin in read_pins(self.folder) if pin.until_s > now)
        changed, self._pins = (pins if pins != self._pins else None), pins
        return StoreNews(found=found, gone=gone, evicts=evicts, pins=changed, kept=longer)

    def _locked(self) -> int | None:
        """Whoever has the lock makes room; the dead hold none."""
        fd = None
        try:
            fd = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            BlockFiles.trouble("store-lock", self.folder / LOCK)
            lock_file(fd)
        except OSError:
            if fd is not None:
                os.close(fd)
            return None
        return fd


def _info(path: Path) -> os.stat_result | None:
    """Of a file, if it is one."""
    try:
        info = path.lstat()
    except OSError:
        return None
    return info if stat.S_ISREG(info.st_mode) else None


def files_of(folder: Path) -> list[tuple[str, os.stat_result]]:
    """Files in folders of folders; of a folder that has gone, none."""
    out: list[tuple[str, os.stat_result]] = []

    def walk(path: Path, above: str, depth: int) -> None:
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    name = f"{above}{entry.name}"
                    if depth and entry.is_dir(follow_symlinks=False):
                        walk(path / entry.name, f"{name}/", depth - 1)
                    elif not depth and entry.is_file(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):  # it went meanwhile, and it alone
                            out.append((name, entry.stat(follow_symlinks=False)))
        except OSError as error:
            _log.warning("%s cannot be looked at: %s", path, error.strerror)

    walk(folder, "", 2)
    return out


def open_store(config: EngineConfig, print_: Callable[[], str], plan: Plan) -> KVStore | None:
    """What `kv_offload` names, if it names anything. `print_`: makes the fingerprint, which reads all weights once.

    Raises ConfigError.
    """
    offload = offload_of(config.cache.kv_offload)
    if offload is None:
        return None
    secret = block_key(config, offload)
    name = print_()
    limits: dict[int, int] = {}
    if offload.disk is not None:
        limits[DISK] = offload.disk.limit_bytes
        folder = offload.disk.folder
        _describe(folder / name, StoreModel(config.model.model, plan.kv_dtype, plan.block_size, _version()))
    if offload.remotes:
        limits[REMOTE] = NO_LIMIT
    block_bytes, state_bytes = file_bytes(plan.own_groups, plan.block_size)
    both = all(group.spec.kind == "paged" for group in plan.groups)
    load, order = config.cache.kv_load_policy, config.cache.kv_offload_eviction
    if order == "recompute" and (load == "wait" or not both):
        raise ConfigError(
            "kv_offload_eviction recompute leaves texts without their beginnings, which are computed while the rest is "
            "read: set kv_load_policy to auto, split or cake, with a model whose layers all keep their whole context",
            field="kv_offload_eviction",
        )
    settings = StoreSettings(secret, name, limits, block_bytes, state_bytes, both_ends=both, load=load, order=order,
                             num_groups=len(plan.own_groups),
                             ahead_bytes=int(config.cache.kv_fetch_ahead * 2**30))  # fmt: skip
    looks: list[FolderLook | RemoteStore] = []
    if offload.disk is not None:
        looks.append(FolderLook(offload.disk.folder, settings))
    if offload.remotes:
        looks.append(RemoteStore(addresses_of(config, offload), name))
    return KVStore(settings, looks, plan.block_size)


def block_key(config: EngineConfig, offload: OutsideStores) -> bytes:
    """The key of names and MACs: of the folder, or, with remotes, what engines have in common. Makes the folder.

    Raises ConfigError.
    """
    key = shared_key(config, offload)
    if offload.disk is not None:
        return open_folder(offload.disk, key)
    assert key is not None, "neither a folder nor a remote"
    return key


def shared_key(config: EngineConfig, offload: OutsideStores) -> bytes | None:
    """What engines over remotes have in common; None without remotes. Raises ConfigError."""
    return _secrets(config).blocks if offload.remotes else None


def addresses_of(config: EngineConfig, offload: OutsideStores) -> list[Address]:
    """Of its remotes. Raises ConfigError."""
    secret = _secrets(config).connection
    return [Address(remote.host, remote.port, secret) for remote in offload.remotes]


def _secrets(config: EngineConfig) -> Secrets:
    path = config.cache.kv_offload_secret_file
    if path is None:
        raise ConfigError(
            f"kv_offload: a remote needs the secret that its server has; give {FIELD}, a file", field=FIELD
        )
    return read_secrets(Path(path).expanduser())


class FolderPin(msgspec.Struct, frozen=True):
    """Blocks whose paths below the folder begin with `path` leave after all others, until a time (since 1970)."""

    path: str
    until_s: float


def read_pins(folder: Path) -> list[FolderPin]:
    """What `penstock cache pin` has written there; nothing of what cannot be read."""
    try:
        return msgspec.json.decode((folder / PINS).read_bytes(), type=list[FolderPin])
    except (OSError, msgspec.MsgspecError):
        return []


def write_pins(folder: Path, pins: Iterable[FolderPin]) -> None:
    """In place of those that are there. Raises OSError."""
    part = folder / f".{PINS}.{secrets.token_hex(8)}.part"
    part.write_bytes(msgspec.json.encode(list(pins)))
    part.chmod(0o600)
    part.replace(folder / PINS)


class BlockFile(NamedTuple):
    """A file. `name`: its place below the folder."""

    name: str
    path: Path
    num_bytes: int
    used_s: float


@dataclass
class StorePlace:
    """The blocks of one model and tenant."""

    print_: str
    space: str
    about: StoreModel | None
    blocks: list[BlockFile]


def open_existing(folder: Path) -> bytes:
    """The secret of a folder that a server has made. Raises ConfigError."""
    if not (folder / SECRET).is_file():
        raise ConfigError(f"{quoted(folder)} is no folder of KV blocks: --kv-offload disk:FOLDER makes one", field="")
    return open_folder(DiskStore(folder, 0))


def open_served(folder: Path) -> None:
    """Make, or open, the folder of a server of blocks, which keeps what engines have keys for. Raises ConfigError."""
    if (folder / SECRET).is_file() and not is_served(folder):
        raise ConfigError(f"{quoted(folder)} is an engine's own (--kv-offload disk:FOLDER); name a new one", field="")
    open_folder(DiskStore(folder, 0))
    (folder / SERVED).touch(mode=0o600)


def is_served(folder: Path) -> bool:
    """Whether it is a server's."""
    return (folder / SERVED).is_file()


def places(folder: Path) -> list[StorePlace]:
    """What is there, by model and tenant."""
    out: dict[str, StorePlace] = {}
    for name, info in files_of(folder):
        above, _, last = name.rpartition("/")
        if last.startswith("."):
            continue
        if above not in out:
            print_, _, space = above.partition("/")
            about = None
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                about = msgspec.json.decode((folder / print_ / ABOUT).read_bytes(), type=StoreModel)
            out[above] = StorePlace(print_, space, about, [])
        out[above].blocks.append(BlockFile(name, folder / name, info.st_size, info.st_mtime))
    return [out[key] for key in sorted(out)]
