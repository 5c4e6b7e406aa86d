"""I03: packed weights from a cold disk come past the system's cache, and are the same bytes."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.backends.native.backend import NOT_BUILT
from penstock.ops.native import packed_file
from penstock.ops.native.abi import Act, Format
from penstock.ops.native.direct_file import PAGE, U8, DirectFile, UnsoundError, cached_pages
from penstock.ops.native.library import best_library
from penstock.ops.native.matrix import Packed
from penstock.ops.native.packed_file import PackedStore, huge_pages
from penstock.ops.native.packed_format import array_sizes

pytestmark = [
    pytest.mark.skipif(best_library() is None, reason=NOT_BUILT),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what its cache has"),
]
Reading = Callable[[DirectFile, int, U8], None]
KEY = hashlib.sha256(b"cold").hexdigest()
PAGES = 3000


@pytest.fixture
def noise(tmp_path: Path) -> tuple[Path, U8]:
    data = np.random.default_rng(3).integers(0, 256, PAGES * PAGE, np.uint8)
    path = tmp_path / "noise"
    path.write_bytes(data.tobytes())
    return path, data


def opened(path: Path) -> DirectFile:
    file = DirectFile(os.open(path, os.O_RDONLY))
    if not file.is_direct:
        pytest.skip("the disk of this test cannot be read past the cache")
    return file


def drop(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_I03_the_system_says_what_its_cache_has(noise: tuple[Path, U8]) -> None:
    path, data = noise
    file, out = opened(path), huge_pages(PAGES * PAGE)
    drop(path)
    for read, kept in ((file.read, 0), (file.read, 0), (file.read_kept, PAGES)):
        out[:] = 0
        read(0, out)
        assert np.array_equal(out, data)
        found = cached_pages(file.fd)
        assert found is not None
        assert found.sum() == kept


@pytest.mark.parametrize("read", [DirectFile.read, DirectFile.read_kept])
def test_I03_a_file_that_has_become_shorter_is_said_so(noise: tuple[Path, U8], read: Reading) -> None:
    path, _ = noise
    file, out = opened(path), huge_pages(PAGES * PAGE)
    os.truncate(path, 64 * PAGE)
    with pytest.raises(UnsoundError, match="shorter"):
        read(file, 0, out)


def matrices() -> dict[str, Packed]:
    library, rng, found = best_library(), np.random.default_rng(5), {}
    for n, rows in enumerate((700, 64, 4000)):
        size = array_sizes(library, Format.F32, rows, 500, False, None)[0]
        data = rng.standard_normal(size // 4, np.float32).view(np.uint8)
        found[f"layers.{n}.q"] = Packed(Format.F32, Act.F32, rows, 500, False, data)
    return found


@pytest.mark.parametrize("slow", [True, False])
def test_I03_packed_weights_are_the_same_cold_half_cold_warm_and_mapped(
    slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A start from a cold disk reads past the cache; a slow one's file is left there for the next."""
    monkeypatch.setattr(packed_file, "SLOW_BYTES_PER_S", 1e15 if slow else 1.0)
    store, wanted, past = PackedStore(tmp_path), matrices(), list[int]()
    assert store.save(KEY, wanted)
    path = store.path(KEY)
    opened(path)
    really = DirectFile.read
    monkeypatch.setattr(DirectFile, "read", lambda file, at, into: (past.append(len(into)), really(file, at, into)))
    num_bytes = path.stat().st_size
    for before, copy, least, most in (
        ("cold", True, num_bytes - 8 * PAGE, num_bytes), ("", True, 0, 0), ("half", True, 1, num_bytes - (4 << 20)),
        ("", False, 0, 0),
    ):  # fmt: skip
        if before:
            drop(path)
        if before == "half":
            with path.open("rb", 0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                file.read(5 << 20)
        past.clear()
        found = store.load(KEY, copy=copy)
        assert found is not None
        for name, matrix in wanted.items():
            assert np.array_equal(np.ravel(found[name].data).view(np.uint8), np.ravel(matrix.data).view(np.uint8))
        assert least <= sum(past) <= most, before
        if not slow:
            assert kept(path) == (before == ""), before
            path.read_bytes()
        until_s = time.monotonic() + 5
        while not kept(path) and time.monotonic() < until_s:
            time.sleep(0.01)
        assert kept(path), "the next start finds it in the cache"


def kept(path: Path) -> bool:
    with path.open("rb") as file:
        found = cached_pages(file.fileno())
    assert found is not None
    return bool(found.all())


def test_I03_a_flipped_bit_is_found_in_a_cold_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = PackedStore(tmp_path)
    assert store.save(KEY, matrices())
    with store.path(KEY).open("r+b") as file:
        file.seek(9 << 20)  # in the last matrix, behind two whole parts
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    drop(store.path(KEY))
    assert store.load(KEY) is None
    assert "damaged content" in caplog.text
