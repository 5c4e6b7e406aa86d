"""Files of the Hugging Face Hub into its cache, in that one's layout: blobs/HASH, snapshots/COMMIT/NAME, refs/NAME.

`huggingface_hub` (2.4) finds files and keeps tokens; the bytes are moved here, because it begins a file again after its
process died, compares sizes but no hashes, and writes a body to the disk until it ends. Its locks are taken, so that
other programs may fill the same cache meanwhile, and find there what came.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.base.errors import ModelError
from penstock.base.flock import lock_file
from penstock.formats.files import quoted

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

SPARE_BYTES = 256 << 20
"""A disk is never filled to the last."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_INCOMPLETE = ".penstock.incomplete"
_WORKERS = 4
_TRIES = 5
_WAIT_S = 0.3
_TIMEOUT_S = 20.0
_CHUNK = 1 << 20


@dataclass(frozen=True)
class HubFile:
    """`digest`: 64 hex digits are the SHA-256 of the bytes (large files), 40 the SHA-1 of a git blob (small ones)."""

    name: str
    num_bytes: int
    digest: str


class RepoCache:
    """One commit of a repository in the cache (HF_HUB_CACHE, below HF_HOME). Raises ModelError for a commit that is
    none."""

    def __init__(self, repo: str, commit: str) -> None:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        if not _COMMIT.fullmatch(commit):
            raise ModelError(
                f"the Hugging Face Hub named {quoted(commit)} as a commit of {quoted(repo)}, which is none"
            )
        self.repo, self.commit = repo, commit
        self.root = Path(constants.HF_HUB_CACHE)
        name = repo_folder_name(repo_id=repo, repo_type="model")
        self.folder = self.root / name
        self.snapshot = self.folder / "snapshots" / commit
        self._locks = self.root / ".locks" / name

    def has(self, file: HubFile) -> bool:
        """Whether it is there, of the right size. Raises ModelError for a link that leads out of the cache."""
        path = self.snapshot / file.name
        try:
            found = path.resolve(strict=True)
        except (FileNotFoundError, RuntimeError):
            return False
        if not any(found.is_relative_to(inside.resolve()) for inside in (self.root, self.folder)):
            raise ModelError(f"{quoted(path)} leads out of the cache, to {quoted(found)}; remove it, then pull again")
        return found.is_file() and found.stat().st_size == file.num_bytes

    def missing_bytes(self, files: Sequence[HubFile]) -> int:
        """What has still to come."""
        return sum(f.num_bytes - self.arrived_bytes(f) for f in files)

    def arrived_bytes(self, file: HubFile) -> int:
        """What is here of a file already, be it from a transfer that was cut."""
        blob = self._blob(file)
        if self.has(file) or _size(blob) == file.num_bytes:
            return file.num_bytes
        return min(_size(_partial(blob)), file.num_bytes)

    def fetch(
        self, files: Sequence[HubFile], progress: Progress, made: Callable[[HubFile], None] = lambda file: None
    ) -> None:
        """Bring what is missing, side by side. `made(file)`: this call brought a file that nobody else had.

        Raises ModelError for what came and is not what the hub listed; the library's and OSError for the rest. What has
        arrived of the others stays, and the next call goes on from there.
        """
        arrived = {file.name: self.arrived_bytes(file) for file in files}
        counter = _Counter(progress, sum(arrived.values()), sum(file.num_bytes for file in files))
        ended = threading.Event()

        def one(file: HubFile) -> None:
            if not self.has(file):
                self._bring(file, arrived[file.name], counter, ended, made)

        with ThreadPoolExecutor(_WORKERS) as pool:
            coming = [pool.submit(one, file) for file in files]
            try:
                done, _ = wait(coming, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            finally:
                ended.set()
                pool.shutdown(cancel_futures=True)

    def remember(self, revision: str | None) -> None:
        """Which commit a branch or tag was, for times without a network."""
        revision = revision or "main"
        path = self.folder / "refs" / revision
        if revision == self.commit or (path.is_file() and path.read_text() == self.commit):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        temporary.write_text(self.commit)
        temporary.replace(path)

    def wrong(self, file: HubFile) -> str | None:
        """The digest of what lies there, if it is not the one listed."""
        found = digest_of(self.snapshot / file.name, len(file.digest))
        return None if found == file.digest else found

    def drop(self, name: str, digest: str) -> bool:
        """Remove a file, and its blob unless another snapshot has it, too; whether the blob went."""
        link, blob = self.snapshot / name, self.folder / "blobs" / digest
        if not _DIGEST.fullmatch(digest) or not link.parent.resolve().is_relative_to(self.folder.resolve()):
            return False
        link.unlink(missing_ok=True)
        others = (path for path in (self.folder / "snapshots").rglob("*") if path.is_symlink())
        if any(os.path.realpath(path) == os.path.realpath(blob) for path in others):
            return False
        blob.unlink(missing_ok=True)
        return True

    def drop_partials(self) -> None:
        """Remove what cut transfers left, unless they go on."""
        for path in (self.folder / "blobs").glob(f"*{_INCOMPLETE}"):
            digest = path.name.removesuffix(_INCOMPLETE)
            with (self._locks / f"{digest}.lock").open("ab") as lock, suppress(BlockingIOError):
                lock_file(lock)
                path.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove folders of this repository that have become empty, from below."""
        for top in (self.snapshot, self.folder / "snapshots", self.folder / "blobs"):
            for path in sorted((p for p in top.rglob("*") if p.is_dir() and not p.is_symlink()), reverse=True):
                _remove_empty(path)
            _remove_empty(top)
        if not any((self.folder / part).exists() for part in ("snapshots", "blobs")):
            shutil.rmtree(self.folder / "refs", ignore_errors=True)
            _remove_empty(self.folder)

    def _blob(self, file: HubFile) -> Path:
        if not _DIGEST.fullmatch(file.digest):
            raise ModelError(f"the Hugging Face Hub names no hash of {quoted(file.name)}, so that it cannot be checked")
        return self.folder / "blobs" / file.digest

    def _bring(
        self, file: HubFile, arrived: int, counter: _Counter, ended: threading.Event, made: Callable[[HubFile], None]
    ) -> None:
        blob = self._blob(file)
        blob.parent.mkdir(parents=True, exist_ok=True)
        with locked(self._locks / f"{file.digest}.lock"):
            if _size(blob) != file.num_bytes or digest_of(blob, len(file.digest)) != file.digest:
                partial = _partial(blob)
                resumed = _size(partial) > 0
                counter.add(min(_size(partial), file.num_bytes) - arrived)  # another process may have gone on with it
                self._download(file, partial, counter, ended)
                found = digest_of(partial, len(file.digest))
                if found != file.digest and resumed:  # what lay there may have been spoiled
                    partial.unlink()
                    counter.add(-file.num_bytes)
                    self._download(file, partial, counter, ended)
                    found = digest_of(partial, len(file.digest))
                if found != file.digest:
                    partial.unlink()
                    raise ModelError(
                        f"{quoted(self.repo)}: what came as {quoted(file.name)} is another file: its hash is {found}, "
                        f"the Hugging Face Hub lists {file.digest}; nothing of it was kept, try again"
                    )
                partial.replace(blob)
                made(file)
            else:
                counter.add(file.num_bytes - arrived)
            _link(blob, self.snapshot / file.name)

    def _download(self, file: HubFile, partial: Path, counter: _Counter, ended: threading.Event) -> None:
        """The bytes of a file behind those that are there, in as many connections as it takes."""
        from huggingface_hub import constants, hf_hub_url

        if file.num_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
            raise ModelError(
                f"{quoted(file.name)} is too large for plain HTTP; bring it with: hf download {self.repo} {file.name} "
                f"--revision {self.commit}"
            )
        url = hf_hub_url(self.repo, file.name, revision=self.commit)
        if _size(partial) > file.num_bytes:
            partial.unlink()
        tries = 0
        while (have := _size(partial)) < file.num_bytes or not partial.exists():
            if ended.is_set():
                raise ModelError("stopped")
            why: Exception = ModelError(f"the Hugging Face Hub stops in the middle of {quoted(file.name)}; try again")
            try:
                _append(url, file, partial, have, counter, ended)
            except Exception as error:
                if not is_unreachable(error):
                    raise
                why = error
            tries = 0 if _size(partial) > have else tries + 1
            if tries > _TRIES:
                raise why
            if tries:
                ended.wait(_WAIT_S * tries)


def _append(
    url: str, file: HubFile, partial: Path, have: int, counter: _Counter, ended: threading.Event
) -> None:  # fmt: skip
    import huggingface_hub

    library: Any = huggingface_hub.utils
    headers = library.build_hf_headers() | {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    session: Any = huggingface_hub.get_session()
    with session.stream("GET", url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True) as response:
        if response.status_code >= 400:
            library.hf_raise_for_status(response)
        goes_on = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if have and not (response.status_code == 206 and goes_on):
            counter.add(-have)
            have = 0
        with partial.open("r+b" if have else "wb") as out:
            out.seek(have)
            for piece in response.iter_bytes():  # a size would keep back what came before a cut
                if have + len(piece) > file.num_bytes:
                    raise ModelError(
                        f"the Hugging Face Hub sends more of {quoted(file.name)} than the {file.num_bytes:,} bytes "
                        "that it lists; try again later"
                    )
                out.write(piece)
                have += len(piece)
                counter.add(len(piece))
                if ended.is_set():
                    break
            out.flush()
            os.fsync(out.fileno())


def is_unreachable(error: Exception) -> bool:
    """No network, no answer, or none but that the hub is out of order; the library's errors carry the answer."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return int(status) >= 500
    transport = type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "requests", "urllib3")
    return transport or isinstance(error, ConnectionError | TimeoutError)


def digest_of(path: Path, num_digits: int = 64) -> str:
    """64 digits: the SHA-256 of a file; 40: its SHA-1 as a git blob."""
    with path.open("rb") as file:
        if num_digits == 64:
            return hashlib.file_digest(file, "sha256").hexdigest()
        found = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        while piece := file.read(_CHUNK):
            found.update(piece)
    return found.hexdigest()


def check_space(what: str, place: Path, needed: int) -> None:
    """Raises ModelError if a disk lacks room for `needed` bytes more."""
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed and needed + SPARE_BYTES > free:
        raise ModelError(
            f"{quoted(what)} needs {needed / 1e9:.1f} GB more on the disk, but {quoted(place)} has "
            f"{free / 1e9:.1f} GB free; make room, or set HF_HOME to another place"
        )


@contextmanager
def locked(path: Path, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
    """The lock of a file, of which only one process has it; the dead have none. `waits` is called if another has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            lock_file(file)
        except BlockingIOError:
            waits()
            lock_file(file, wait=True)
        yield


class _Counter:
    """Bytes of files that come in side by side, told to `progress`."""

    def __init__(self, progress: Progress, done: int, total: int) -> None:
        self._progress, self._done, self._total = progress, done, total
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._progress(max(0, min(self._done, self._total)), self._total)


def _partial(blob: Path) -> Path:
    return blob.with_name(blob.name + _INCOMPLETE)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _link(blob: Path, link: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    temporary = link.with_name(f".{link.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.symlink_to(os.path.relpath(blob, os.path.realpath(link.parent)))
    except OSError:  # a disk without links of this kind
        shutil.copyfile(blob, temporary)
    temporary.replace(link)


def _remove_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        return
