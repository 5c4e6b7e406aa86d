"""Models that have a name on this machine: one small JSON file each, and a lock that whoever runs the model holds.

The files of a model lie in the cache of the Hugging Face Hub, or wherever a folder was given its name; here stands
where, with which hashes, and which of them Penstock brought (no others are ever removed).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import msgspec

from penstock.base.cache import cache_folder
from penstock.base.errors import ModelError
from penstock.base.flock import lock_file
from penstock.formats.files import quoted
from penstock.launch.transfer import locked
from penstock.ops.native.private_folder import PrivateFolder

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,79}(:[A-Za-z0-9][\w.-]{0,39})?")
_SUFFIX = ".json"
_MAX_BYTES = 1 << 20


class StoredFile(msgspec.Struct, frozen=True):
    """`made`: Penstock brought it. `digest`: see `transfer.HubFile`; "" in a folder of the user's."""

    num_bytes: int
    digest: str = ""
    made: bool = False


class NamedModel(msgspec.Struct, kw_only=True):
    """A model with a name. `path`: what is opened. `repo`, `revision`, `commit`: on the Hugging Face Hub, "" for a
    folder of the user's. `whole`: the pull ended. `quantization`: of most of its bytes."""

    name: str
    path: str
    repo: str = ""
    revision: str = ""
    commit: str = ""
    licence: str = ""
    quantization: str = ""
    pulled_s: float = 0.0
    whole: bool = False
    files: dict[str, StoredFile] = {}

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())

    def missing(self) -> str | None:
        """A file that is gone or of another size."""
        path = Path(self.path)
        base = path
        if self.repo:
            base = next((p for p in (path, *path.parents) if p.name == self.commit), path)
        elif not path.is_dir():
            base = path.parent
        for name, file in self.files.items():
            try:
                if os.stat(base / name).st_size != file.num_bytes:
                    return str(base / name)
            except OSError:
                return str(base / name)
        return None


class Hold:
    """A model that may not be removed while this is open. Closed with `close`, or by the end of the process."""

    def __init__(self) -> None:
        self._fds: list[int] = []

    def add(self, fd: int) -> None:
        self._fds.append(fd)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def __del__(self) -> None:
        self.close()


class ModelStore:
    """`folder`: by default models/ beside the packed weights (PENSTOCK_CACHE, XDG_CACHE_HOME, ~/.cache)."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = cache_folder("models") if folder is None else folder

    def get(self, name: str) -> NamedModel | None:
        """None too for a file that cannot be trusted or read (a warning says so)."""
        with _opened(self.folder, create=False) as folder:
            return None if folder is None else _read(folder, _file_name(name), name)

    def has(self, name: str) -> bool:
        """Whether all of it is here."""
        record = self.get(name)
        return record is not None and record.whole and record.missing() is None

    def all(self) -> list[NamedModel]:
        """By name. What cannot be read is left out."""
        with _opened(self.folder, create=False) as folder:
            if folder is None:
                return []
            found = [_read(folder, name, None) for name, _ in folder.files(_SUFFIX)]
        return sorted((record for record in found if record is not None), key=lambda record: record.name)

    def save(self, record: NamedModel) -> None:
        """Raises ModelError if the folder cannot be used."""
        with _opened(self.folder, create=True) as folder:
            if folder is None:
                raise ModelError(f"{quoted(self.folder)} cannot be used for the names of models; set PENSTOCK_CACHE")
            folder.write(_file_name(record.name), [msgspec.json.format(msgspec.json.encode(record))])

    def forget(self, name: str) -> None:
        with _opened(self.folder, create=False) as folder:
            if folder is not None:
                folder.remove(_file_name(name))
                folder.remove(_file_name(name, ".lock"))

    def hold(self, *paths: Path | str) -> Hold:
        """Keep what lies at `paths` from being removed: all names of it are in use until the hold is closed."""
        wanted = {os.path.realpath(path) for path in paths}
        hold = Hold()
        for record in self.all():
            if os.path.realpath(record.path) in wanted:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                try:
                    fd = os.open(self.folder / _file_name(record.name, ".lock"), flags, 0o600)
                except OSError:  # where nothing can be written, nothing can be removed either
                    continue
                hold.add(fd)
                lock_file(fd, shared=True, wait=True)
        return hold

    def in_use(self, name: str) -> bool:
        """Whether a living process holds it; the dead hold nothing."""
        try:
            with (self.folder / _file_name(name, ".lock")).open("rb") as file:
                lock_file(file)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @contextmanager
    def alone(self, name: str) -> Iterator[bool]:
        """Whether nobody runs the model; while the context lasts, nobody begins to."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.folder / _file_name(name, ".lock")).open("ab") as file:
            try:
                lock_file(file)
            except BlockingIOError:
                yield False
                return
            yield True

    @contextmanager
    def pulling(self, name: str, waits: Callable[[], None]) -> Iterator[None]:
        """One process at a time pulls a name; `waits()` is called if another one does, and may raise."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(self.folder / _file_name(name, ".pull"), waits):
            yield


def _file_name(name: str, suffix: str = _SUFFIX) -> str:
    return quote(name, safe="")[:200] + suffix


@contextmanager
def _opened(path: Path, *, create: bool) -> Iterator[PrivateFolder | None]:
    folder = PrivateFolder.open(path, create=create)
    try:
        yield folder
    finally:
        if folder is not None:
            folder.close()


def _read(folder: PrivateFolder, file_name: str, name: str | None) -> NamedModel | None:
    fd = folder.open_file(file_name)
    if fd is None:
        return None
    with open(fd, "rb") as file:
        try:
            record = msgspec.json.decode(file.read(_MAX_BYTES), type=NamedModel)
        except msgspec.MsgspecError:
            return None
    return record if name in (None, record.name) else None
