"""Files on a disk that is full or broken, and under a quota that several servers share."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from pathlib import Path

import pytest

from penstock.base.errors import RefusedError
from penstock.server.batches.files import FileStore, whole_bytes
from penstock.server.call import ANYONE, Tenant
from penstock.server.errors import wire_error
from penstock.server.schema.files import FileObject
from tests.unit.server.faulty_disk import failing


def upload(store: FileStore, data: bytes, tenant: Tenant = ANYONE, piece: int = 1000) -> FileObject:
    """As the route does it."""
    begun = store.begin(tenant)
    try:
        for at in range(0, len(data), piece):
            begun.write(data[at : at + piece])
        return begun.commit("a", "batch")
    finally:
        begun.discard()


def contents(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("*/*"))


@pytest.mark.parametrize(
    ("code", "status"),
    [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EFBIG, 507), (errno.EIO, 500), (errno.EROFS, 500),
     (errno.EMFILE, 503)],
)  # fmt: skip
def test_whatever_the_disk_refuses_an_upload_leaves_nothing(tmp_path: Path, code: int, status: int) -> None:
    """Each change that an upload makes fails once: the answer says why, and no byte stays."""
    store = FileStore(tmp_path, 10_000)
    kept = upload(store, b"kept")
    before = contents(tmp_path)
    with failing(tmp_path, code, nth=10_000) as all_of_them:
        store.delete(ANYONE, upload(store, b"x" * 2500).id)
    assert {"open", "write", "fsync", "replace"} <= set(all_of_them)
    for nth in range(len(all_of_them) - 1):  # the last is the deletion's
        with failing(tmp_path, code, nth) as tried, pytest.raises(OSError, match=os.strerror(code)) as raised:
            upload(store, b"x" * 2500)
        told = wire_error(raised.value)
        assert (told.status, told.code != "internal_error") == (status, True), tried
        assert contents(tmp_path) == before, tried
        assert str(tmp_path) not in told.message
    assert [file.id for file in store.list(ANYONE)] == [kept.id]
    assert upload(store, b"x" * 9000).bytes == 9000, "what failed counts no longer"


def test_a_disk_that_stays_full_loses_nothing_that_was_there(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 10_000)
    kept = upload(store, b"kept")
    for nth in range(8):
        with failing(tmp_path, errno.ENOSPC, nth, times=math.inf), pytest.raises(OSError, match="No space"):
            upload(store, b"x" * 2500)
        assert store.path(ANYONE, kept.id).read_bytes() == b"kept"
        assert sorted(contents(tmp_path)) == sorted([kept.id, f"{kept.id}.json"])


def test_no_descriptor_is_not_no_file(tmp_path: Path) -> None:
    """A description that cannot be read now is not one that is not there."""
    store = FileStore(tmp_path, 10_000)
    made = upload(store, b"x")
    with pytest.MonkeyPatch.context() as patch:

        def fail(path: Path) -> bytes:
            raise OSError(errno.EMFILE, "too many")

        patch.setattr(Path, "read_bytes", fail)
        with pytest.raises(OSError, match="too many"):
            store.get(ANYONE, made.id)
        with pytest.raises(OSError, match="too many"):
            store.delete(ANYONE, made.id)
    assert store.get(ANYONE, made.id) == made


def test_two_servers_share_one_count(tmp_path: Path) -> None:
    one, other = FileStore(tmp_path, 10_000), FileStore(tmp_path, 10_000)
    upload(one, b"x" * 4000)
    upload(other, b"x" * 4000)
    for store in (one, other):
        with pytest.raises(RefusedError, match="more than 10000 bytes") as refused:
            upload(store, b"x" * 4000)
        assert (refused.value.status, refused.value.code) == (413, "files_full")
    other.delete(ANYONE, other.list(ANYONE)[0].id)
    upload(one, b"x" * 4000)


def test_uploads_at_the_same_time_cannot_pass_the_quota_together(tmp_path: Path) -> None:
    """Two servers; each upload alone would fit."""
    stores = [FileStore(tmp_path, 10_000), FileStore(tmp_path, 10_000)]
    begun = [store.begin(ANYONE) for store in stores]
    for _ in range(5):
        for one in begun:
            one.write(b"x" * 1000)
    for one in begun:
        with pytest.raises(RefusedError):
            one.write(b"x")
    # The piece by which several servers may pass it together is seen in the end.
    (stores[0].folder(ANYONE) / "upload-0").write_bytes(b"x")
    with pytest.raises(RefusedError):
        begun[1].commit("a", "batch")
    for one in begun:
        one.discard()
    upload(stores[0], b"x" * 9000)


def test_many_threads_of_one_server_stop_at_the_quota(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 100_000)
    folder = store.make_folder(ANYONE)
    refused: list[int] = []

    def write(name: str) -> None:
        number = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for _ in range(100):
            try:
                store.append(folder, number, b"x" * 700)
            except RefusedError:
                refused.append(1)
        os.close(number)

    threads = [threading.Thread(target=write, args=(f"file-{i:024x}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = sum(path.stat().st_size for path in folder.iterdir())
    assert 100_000 - 700 < total <= 100_000
    assert refused


def test_a_tenant_has_its_own_room(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 10_000)
    upload(store, b"x" * 9000, Tenant("a"))
    upload(store, b"x" * 9000, Tenant("b"))
    with pytest.raises(RefusedError):
        upload(store, b"x" * 9000, Tenant("a"))


def test_what_a_dead_server_left_goes_and_what_a_live_one_writes_stays(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 10_000, wall_s=lambda: time.time() + 3600)
    kept = upload(store, b"kept")
    folder = store.make_folder(ANYONE)
    (folder / "upload-0123").write_bytes(b"x" * 5000)
    (folder / ("file-" + "0" * 24)).write_bytes(b"x" * 5000)
    alive = store.begin(ANYONE)
    store.sweep()
    assert len(list(folder.glob("upload-*"))) == 1
    assert {path.name for path in folder.glob("file-*")} == {kept.id, f"{kept.id}.json"}
    alive.write(b"x")
    alive.commit("a", "batch")


def test_a_growing_file_ends_with_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "out"
    assert whole_bytes(path) == 0
    for data, whole in ((b"", 0), (b"abc", 0), (b"a\n", 2), (b"a\nbc", 2), (b"a\n" + b"b" * 200_000, 2)):
        path.write_bytes(data)
        assert whole_bytes(path) == whole
