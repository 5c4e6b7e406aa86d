"""Batches on a folder that servers share: one owner each, whoever dies; nobody's input is taken away."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.base.errors import RefusedError
from penstock.server.batches.files import FileStore
from penstock.server.batches.folder import BatchFolder, Claim, Record
from penstock.server.call import ANYONE, Tenant
from penstock.server.schema.batches import BatchObject, RequestCounts

ID = "batch_" + "0" * 24


def record(store: FileStore, number: int = 0, status: str = "in_progress", served: str = "nano", **more: str) -> Record:
    batch = BatchObject(
        id=f"batch_{number:024x}", endpoint="/v1/completions", input_file_id=more.get("source", "file-" + "1" * 24),
        completion_window="24h", status=status, created_at=number, request_counts=RequestCounts(),
    )  # fmt: skip
    return Record(
        tenant=more.get("tenant", ANYONE.name), served=served, output_id=store.new_id(), error_id=store.new_id(),
        batch=batch,
    )  # fmt: skip


def put(folder: BatchFolder, store: FileStore, made: Record, *, lock: bool = True) -> Path:
    tenant = Tenant(made.tenant)
    path = folder.path(tenant, made.batch.id)
    store.make_folder(tenant)
    folder.save(path, msgspec.json.encode(made))
    if lock:
        path.with_suffix(".lock").touch()
    return path


def ids(claims: list[Claim]) -> list[str]:
    return [claim.record.batch.id for claim in claims]


def any_model(record: Record) -> bool:
    return record.served == "nano"


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path, 100_000)


def test_a_batch_without_an_owner_is_claimed_once(store: FileStore) -> None:
    one, other = BatchFolder(store), BatchFolder(store)
    put(one, store, record(store, 0))
    put(one, store, record(store, 1, status="completed"))
    put(one, store, record(store, 2, served="another"))
    put(one, store, record(store, 3, tenant="b"))
    claims = one.look(set(), any_model)
    assert [claim.record.batch.created_at for claim in claims] == [0, 3]
    assert other.look(set(), any_model) == []
    os.close(claims[0].number)  # as its process's end does
    assert ids(other.look(set(), any_model)) == ids(claims[:1])


def test_only_a_first_look_reads_every_batch(store: FileStore) -> None:
    folder = BatchFolder(store)
    put(folder, store, record(store), lock=False)
    assert folder.look(set(), any_model) == []
    assert len(folder.look(set(), any_model, every=True)) == 1


def test_a_look_at_a_folder_that_did_not_change_reads_no_names(store: FileStore) -> None:
    folder = BatchFolder(store)
    path = put(folder, store, record(store, served="another"))
    listed: list[str] = []
    real = Path.glob

    def glob(self: Path, pattern: str) -> Iterator[Path]:
        listed.append(pattern)
        return real(self, pattern)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "glob", glob)
        for _ in range(10):
            assert folder.look(set(), any_model) == []
        assert listed.count("batch_*.lock") == 2  # once more, since a change in the same tick goes unseen
        path.with_name(f"batch_{1:024x}.lock").touch()
        put(folder, store, record(store, 1))
        assert len(folder.look(set(), any_model)) == 1


HOLD = """
import fcntl, os, subprocess, sys, time
number = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(number, fcntl.LOCK_EX)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_an_owner_that_is_stopped_keeps_it_and_one_that_dies_does_not_though_its_child_lives(store: FileStore) -> None:
    folder = BatchFolder(store)
    path = put(folder, store, record(store))
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path.with_suffix(".lock"))], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        try:
            owner.send_signal(signal.SIGSTOP)
            assert folder.look(set(), any_model) == []
            owner.kill()
            owner.wait()
            assert len(folder.look(set(), any_model)) == 1
        finally:
            os.kill(child, signal.SIGKILL)


def test_descriptors_of_locks_are_not_inherited(store: FileStore) -> None:
    folder = BatchFolder(store)
    number = folder.claim(put(folder, store, record(store)))
    assert number is not None
    assert not os.get_inheritable(number)


def test_what_ended_while_we_looked_is_not_run_again(store: FileStore) -> None:
    """Its owner ends it between our reading it and our getting the lock."""
    folder = BatchFolder(store)
    made = record(store)
    path = put(folder, store, made)
    real = folder.claim

    def claim(path: Path) -> int | None:
        made.batch.status = "completed"
        folder.save(path, msgspec.json.encode(made))
        return real(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "claim", claim)
        assert folder.look(set(), any_model) == []
    assert not path.with_suffix(".lock").exists()


def test_the_lock_of_a_file_that_was_removed_meanwhile_is_nobody_s(store: FileStore) -> None:
    folder = BatchFolder(store)
    path = put(folder, store, record(store))
    real = fcntl.flock

    def flock(number: int, how: int) -> None:
        path.with_suffix(".lock").unlink()  # its owner ended it between our two steps
        real(number, how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        assert folder.claim(path) is None


def test_anybody_ends_a_batch_that_nobody_owns(store: FileStore) -> None:
    """Also a server without its model: nothing has to be computed for that."""
    folder = BatchFolder(store)
    path = put(folder, store, record(store, served="another"))
    assert folder.look(set(), any_model) == []
    folder.ask_for_end(path)
    (claim,) = folder.look(set(), any_model)
    assert claim.record.batch.status == "cancelling"
    folder.release(path, claim.number, ended=True)
    assert not list(path.parent.glob("*.cancel"))
    assert not list(path.parent.glob("*.lock"))


def test_asking_for_the_end_of_what_has_ended_leaves_nothing(store: FileStore) -> None:
    folder = BatchFolder(store)
    path = put(folder, store, record(store, status="completed"), lock=False)
    folder.ask_for_end(path)
    assert not list(path.parent.glob("*.cancel"))
    found = folder.read(path)
    assert found is not None
    assert found.batch.status == "completed"


def test_a_batch_that_begins_while_its_input_is_deleted_is_seen(store: FileStore) -> None:
    """The deletion looks, then the batch begins in another server, then the deletion goes on."""
    folder = BatchFolder(store)
    begun = store.begin(ANYONE)
    begun.write(b"x")
    made = begun.commit("a", "batch")
    looks = []

    def in_use() -> str | None:
        looks.append(1)
        if len(looks) == 2:
            put(folder, store, record(store, source=made.id))
        return folder.in_use(ANYONE, made.id)

    with pytest.raises(RefusedError, match="still reading") as refused:
        store.delete(ANYONE, made.id, in_use)
    assert refused.value.status == 409
    assert store.get(ANYONE, made.id) == made
    assert store.path(ANYONE, made.id).read_bytes() == b"x"


def test_answers_of_an_earlier_version_are_taken_over(store: FileStore) -> None:
    """They lay beside the batch; where a full disk had made it fail, nobody could read them."""
    folder = BatchFolder(store)
    made = record(store, status="failed")
    path = put(folder, store, made, lock=False)
    path.with_suffix(".out").write_bytes(b'{"custom_id":"a"}\n')
    (claim,) = folder.look(set(), any_model, every=True)
    folder.prepare(ANYONE, claim.record)
    assert store.finish(ANYONE, made.output_id)
    assert json.loads(store.path(ANYONE, made.output_id).read_bytes()) == {"custom_id": "a"}
    assert store.get(ANYONE, made.output_id).status == "processed"
    assert not store.finish(ANYONE, made.error_id)


def test_answers_of_which_a_dead_owner_told_nobody_can_be_read(store: FileStore) -> None:
    folder = BatchFolder(store)
    made = record(store)
    path = put(folder, store, made)
    folder.prepare(ANYONE, made)
    found = folder.read(path)
    assert found is not None
    assert (found.batch.output_file_id, found.batch.error_file_id) == (None, None)
    path.with_name(made.output_id).write_bytes(b"{}\n{")
    found = folder.read(path)
    assert found is not None
    assert (found.batch.output_file_id, found.batch.error_file_id) == (made.output_id, None)
