"""Packed weights on disk: what comes back is what was saved, or nothing comes back."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.backends.native.backend import NOT_BUILT
from penstock.base.cache import cache_folder
from penstock.base.errors import ModelError
from penstock.core.panels import Panels
from penstock.ops.native import content_key as keys
from penstock.ops.native.abi import ABI, PANEL, Act, Format
from penstock.ops.native.content_key import FileHashes, content_key
from penstock.ops.native.direct_file import PAGE
from penstock.ops.native.library import best_library
from penstock.ops.native.matrix import Packed
from penstock.ops.native.packed_file import SUFFIX, PackedStore, huge_pages
from penstock.ops.native.packed_format import (
    VERSION,
    PageSums,
    array_sizes,
    num_panels,
    sealed,
)

pytestmark = pytest.mark.skipif(best_library() is None, reason=NOT_BUILT)

KEY = hashlib.sha256(b"key").hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()
_CODES = Panels("U4", 32, "F16", "U8")
SHAPES: list[tuple[Format, Act, int, int, Panels | None, bool, bool, bool]] = [
    # format, act, rows, cols, panels, pair, bias, order
    (Format.F32, Act.F32, 65, 3, None, False, False, False),
    (Format.F16, Act.F32, 64, 7, None, False, True, False),
    (Format.BF16, Act.BF16, 130, 33, None, False, False, False),
    (Format.BLOCK, Act.I8, 100, 18, Panels("U8", 0, "F32", offset=128), False, True, False),
    (Format.BLOCK, Act.I8, 70, 96, Panels("T4", 32, "E8M0", factor=0.5, table=tuple(range(16))), False, False, False),
    (Format.BLOCK, Act.F32, 90, 128, _CODES, True, True, True),
]


def some(
    format: Format, act: Act, rows: int, cols: int, panels: Panels | None, pair: bool, bias: bool, order: bool
) -> Packed:
    """A matrix of noise: the store does not look into what it keeps, but for the order of inputs."""
    rng = np.random.default_rng(rows * 1000 + cols)
    sizes = array_sizes(best_library(), format, rows, cols, pair, panels)
    data, of_bias = (rng.integers(0, 256, n, dtype=np.uint8) for n in sizes[:2])
    return Packed(
        format, act, rows, cols, pair, data, of_bias.view(np.float32) if bias else None, panels=panels,
        order=rng.permutation(cols).astype(np.int32) if order else None,
    )  # fmt: skip


def model() -> dict[str, Packed]:
    return {f"m{i}": some(*shape) for i, shape in enumerate(SHAPES)}


def same(a: Packed, b: Packed) -> bool:
    fields = [name for name, kind in a.struct._fields_ if kind is not ctypes.c_void_p]
    if any(getattr(a.struct, n) != getattr(b.struct, n) for n in fields):
        return False
    for x, y in ((a.data, b.data), (a.bias, b.bias), (a.order, b.order)):
        if (x is None) != (y is None) or (x is not None and y is not None and x.tobytes() != y.tobytes()):
            return False
    return True


@pytest.fixture
def store(tmp_path: Path) -> PackedStore:
    return PackedStore(tmp_path / "weights")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    with caplog.at_level(logging.WARNING, logger="penstock"):
        yield lambda: caplog.text


def file_of(store: PackedStore, key: str = KEY) -> Path:
    return store.folder / (key + SUFFIX)


@pytest.mark.parametrize("copy", [True, False])
def test_what_was_saved_comes_back(store: PackedStore, copy: bool) -> None:
    saved = model()
    assert store.load(KEY, copy=copy) is None
    assert store.save(KEY, saved)
    found = store.load(KEY, copy=copy)
    assert found is not None
    assert list(found) == list(saved)
    for name, m in found.items():
        assert same(m, saved[name])
        assert m.struct.data == m.data.ctypes.data
        assert m.data.ctypes.data % 64 == 0
        for array in (m.data, m.bias, m.order):
            assert array is None or not array.flags.writeable
        if m.panels is not None and m.panels.table:
            assert np.ctypeslib.as_array((ctypes.c_float * 16).from_address(m.struct.table)).tolist() == [*range(16)]
        assert (m.struct.bias or 0) % 64 == (m.struct.order or 0) % 64 == 0
    assert store.load(OTHER, copy=copy) is None
    # Memory stays while a matrix does, also without the name of the file.
    file_of(store).unlink()
    assert same(found["m5"], saved["m5"])


def test_a_model_without_matrices_and_one_with_a_long_index(store: PackedStore) -> None:
    assert store.save(KEY, {})
    assert store.load(KEY) == {}
    assert store.load(KEY, copy=False) == {}
    many = {f"{'name' * 5} {i} {chr(0x4E00 + i)}": some(*SHAPES[i % 2]) for i in range(120)}
    assert store.save(KEY, many)
    found = store.load(KEY)
    assert found is not None
    assert all(same(found[name], m) for name, m in many.items())


def test_folder_and_files_are_private_and_nothing_else_is_left(store: PackedStore) -> None:
    old = os.umask(0)
    try:
        assert store.save(KEY, model())
    finally:
        os.umask(old)
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert file_of(store).stat().st_mode & 0o777 == 0o600
    assert os.listdir(store.folder) == [KEY + SUFFIX]


@pytest.mark.parametrize("key", ["", "../x", KEY.upper(), KEY[:-1], KEY + "\n", "g" * 64])
def test_a_key_is_a_hash(store: PackedStore, key: str) -> None:
    with pytest.raises(ValueError, match="64 hex"):
        store.load(key)
    with pytest.raises(ValueError, match="64 hex"):
        store.save(key, {})


def test_arrays_that_do_not_fit_their_format_are_not_saved(store: PackedStore) -> None:
    m = some(*SHAPES[3])
    m.data = m.data[:-1]
    with pytest.raises(ValueError, match="format has"):
        store.save(KEY, {"m": m})
    assert not store.folder.exists() or not os.listdir(store.folder)


# -- files that are not what they should be ----------------------------------------------------------------------


@pytest.mark.parametrize("copy", [True, False])
def test_a_flipped_byte_anywhere_that_counts_means_absent(
    store: PackedStore, copy: bool, warnings: Callable[[], str]
) -> None:
    store.save(KEY, model())
    path, good = file_of(store), file_of(store).read_bytes()
    rng = np.random.default_rng(0)
    index_end = 56 + int.from_bytes(good[16:24], "little")
    start = -(-index_end // PAGE) * PAGE
    places = [*range(56), *rng.integers(56, index_end, 60).tolist(), *rng.integers(start, len(good), 60).tolist()]
    for at in places:
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        assert store.load(KEY, copy=copy) is None, f"byte {at}"
    assert "is not used" in warnings()
    path.write_bytes(good)
    assert store.load(KEY, copy=copy) is not None


@pytest.mark.parametrize("copy", [True, False])
def test_a_file_of_another_length_means_absent(store: PackedStore, copy: bool) -> None:
    store.save(KEY, model())
    path, good = file_of(store), file_of(store).read_bytes()
    lengths = [0, 1, 8, 55, 56, 57, 100, PAGE - 1, PAGE, PAGE + 1, len(good) - PAGE, len(good) - 1]
    for length in [*lengths, *np.random.default_rng(1).integers(0, len(good), 40).tolist()]:
        path.write_bytes(good[:length])
        assert store.load(KEY, copy=copy) is None, f"{length} bytes"
    for more in (b"\0", bytes(PAGE)):
        path.write_bytes(good + more)
        assert store.load(KEY, copy=copy) is None


def test_pages_in_another_order_and_zeroed_ones_are_found(store: PackedStore) -> None:
    store.save(KEY, {"m": some(Format.F32, Act.F32, 640, 16, None, False, False, False)})
    path, good = file_of(store), file_of(store).read_bytes()
    pages = [good[i : i + PAGE] for i in range(0, len(good), PAGE)]
    path.write_bytes(b"".join([pages[0], pages[2], pages[1], *pages[3:]]))
    assert store.load(KEY) is None
    path.write_bytes(b"".join([*pages[:4], bytes(PAGE), *pages[5:]]))
    assert store.load(KEY) is None


def hostile(good: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with its index changed, and sealed again."""
    length = int.from_bytes(good[16:24], "little")
    index = msgspec.json.decode(good[56 : 56 + length])
    change(index)
    raw = msgspec.json.encode(index).ljust(length)
    start = -(-(56 + length) // PAGE) * PAGE
    head = sealed(raw) + raw
    return head + bytes(max(0, start - len(head))) + good[start:]


def matrix(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["matrices"][5].update(fields)


def panels(number: int = 5, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["matrices"][number]["panels"].update(fields)


HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "offset": lambda i: i["matrices"][0]["data"].__setitem__(0, 2**40),
    "negative offset": lambda i: i["matrices"][0]["data"].__setitem__(0, -PAGE),
    "head as data": lambda i: i["matrices"][0]["data"].__setitem__(0, 0),
    "unaligned": lambda i: i["matrices"][0]["data"].__setitem__(0, PAGE + 1),
    "huge offset": lambda i: i["matrices"][0]["data"].__setitem__(0, 10**30),
    "shorter": lambda i: i["matrices"][0]["data"].__setitem__(1, 1),
    "longer": lambda i: i["matrices"][5]["data"].__setitem__(1, 2**33),
    "more rows": matrix(rows=194), "many rows": matrix(rows=2**31), "no rows": matrix(rows=0),
    "negative rows": matrix(rows=-64), "odd pair": matrix(rows=89), "more columns": matrix(cols=161),
    "no columns": matrix(cols=0), "many columns": matrix(cols=2**62), "no pair": matrix(pair=False, rows=900),
    "group": panels(group=48), "no group": panels(group=0), "negative group": panels(group=-32),
    "another code": panels(code="U8"), "no code": panels(code="U9"), "no scale": panels(scale="F64"),
    "another scale": panels(scale="F32"), "no zero": panels(zero="F32"), "offset of codes": panels(offset=1 << 20),
    "factor of its own": panels(has_factor=True), "table of none": panels(table=[1.0] * 16),
    "short table": panels(4, table=[1.0]), "no table": panels(4, table=[]),
    "huge number": panels(4, table=[1e300] * 16),
    "large number": panels(4, table=[200.0] * 16), "half a number": panels(4, table=[0.5] * 16),
    "no panels": matrix(panels=None), "panels of floats": lambda i: i["matrices"][0].update(panels={"code": "U8"}),
    "short order": lambda i: i["matrices"][5]["order"].__setitem__(1, 4), "another format": matrix(format=3),
    "factor": panels(factor=1e300),
    "no format": matrix(format=9), "negative format": matrix(format=-1), "act": matrix(act=7),
    "short bias": lambda i: i["matrices"][5]["bias"].__setitem__(1, 4),
    "kind of rows": lambda i: i["matrices"][0].update(act=2),
    "bias of none": lambda i: i["matrices"][0].update(bias=[2**40, 8]),
    "order of none": lambda i: i["matrices"][0].update(order=[2**40, 8]),
    "twice": lambda i: i["matrices"][1].update(name="m0"),
    "one less": lambda i: i["matrices"].pop(),
    "another key": lambda i: i.update(key=OTHER),
    "file bytes": lambda i: i.update(file_bytes=i["file_bytes"] + PAGE),
    "digest": matrix(digest="0" * 64), "text": matrix(rows="90"), "unknown": matrix(more=1),
    "no matrices": lambda i: i.pop("matrices"), "null": matrix(data=None),
    "digest of none": matrix(digest=""),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("copy", [True, False])
def test_a_sealed_index_that_lies_means_absent(
    store: PackedStore, name: str, copy: bool, warnings: Callable[[], str]
) -> None:
    store.save(KEY, model())
    path = file_of(store)
    path.write_bytes(hostile(path.read_bytes(), HOSTILE[name]))
    assert store.load(KEY, copy=copy) is None
    assert "is not used" in warnings()


def test_the_helper_above_makes_sound_files(store: PackedStore) -> None:
    store.save(KEY, model())
    path = file_of(store)
    path.write_bytes(hostile(path.read_bytes(), lambda index: None))
    assert store.load(KEY) is not None
    path.write_bytes(hostile(path.read_bytes(), lambda index: index["matrices"][0].update(name="renamed")))
    assert "renamed" in (store.load(KEY) or {})


@pytest.mark.parametrize("raw", [b"", b"null", b"[]", b"{", b"\xff\xfe", b'{"key":1}', b"[" * 100_000])
def test_an_index_that_is_none_means_absent(store: PackedStore, raw: bytes) -> None:
    store.save(KEY, {})
    head = sealed(raw) + raw
    file_of(store).write_bytes(head + bytes(-len(head) % PAGE))
    assert store.load(KEY) is None


def test_a_file_of_another_version_means_absent(store: PackedStore, warnings: Callable[[], str]) -> None:
    store.save(KEY, {})
    good = file_of(store).read_bytes()
    length = int.from_bytes(good[16:24], "little")
    raw = good[56 : 56 + length]
    for version, abi in ((VERSION + 1, ABI), (VERSION, ABI + 1)):
        file_of(store).write_bytes(sealed(raw, version, abi) + good[56:])
        assert store.load(KEY) is None
    assert "another version" in warnings()


# -- whom to trust -----------------------------------------------------------------------------------------------


def test_what_others_can_write_is_not_used(store: PackedStore, warnings: Callable[[], str]) -> None:
    store.save(KEY, model())
    path = file_of(store)
    for mode in (0o620, 0o602):
        path.chmod(mode)
        assert store.load(KEY) is None
    assert "can be written by others" in warnings()
    path.chmod(0o600)
    assert store.load(KEY) is not None
    for mode in (0o770, 0o707, 0o1777):
        store.folder.chmod(mode)
        assert store.load(KEY) is None
        assert not store.save(OTHER, model())
    store.folder.chmod(0o755)
    assert store.load(KEY) is not None


def test_what_belongs_to_others_is_not_used(
    store: PackedStore, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], str]
) -> None:
    store.save(KEY, model())
    real, own = os.fstat, os.geteuid()
    path = file_of(store)
    for theirs in (path, store.folder):
        inode = theirs.stat().st_ino

        def fstat(fd: int, inode: int = inode) -> os.stat_result:
            info = real(fd)
            return os.stat_result((*info[:4], own + 1, *info[5:10])) if info.st_ino == inode else info

        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", fstat)
            assert store.load(KEY) is None
    assert f"belongs to user {own + 1}" in warnings()
    assert store.load(KEY) is not None


def test_links_pipes_and_folders_in_place_of_a_file_mean_absent(store: PackedStore, tmp_path: Path) -> None:
    store.save(KEY, model())
    path = file_of(store)
    moved = tmp_path / "elsewhere"
    path.rename(moved)
    path.symlink_to(moved)
    assert store.load(KEY) is None
    path.unlink()
    os.mkfifo(path, 0o600)
    assert store.load(KEY) is None  # and does not wait for somebody to write
    path.unlink()
    path.mkdir(mode=0o700)
    assert store.load(KEY) is None
    assert not store.save(KEY, model())
    assert os.listdir(store.folder) == [KEY + SUFFIX]


def test_a_cache_that_cannot_be_used_is_a_warning(tmp_path: Path, warnings: Callable[[], str]) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        assert not PackedStore(folder).save(KEY, model())
        assert PackedStore(folder).load(KEY) is None
    assert "cannot be" in warnings()


def test_a_full_disk_leaves_nothing(
    store: PackedStore, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], str]
) -> None:
    store.save(OTHER, {})
    real = os.write

    def write(fd: int, data: Any) -> int:
        if memoryview(data).nbytes > 100_000:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    big = {"m": some(Format.F32, Act.F32, 640, 1000, None, False, False, False)}
    monkeypatch.setattr(os, "write", write)
    assert not store.save(KEY, big)
    assert "No space left" in warnings()
    assert os.listdir(store.folder) == [OTHER + SUFFIX]
    monkeypatch.undo()
    monkeypatch.setattr("penstock.ops.native.packed_file._SPARE_BYTES", 1 << 60)
    assert not store.save(KEY, big)
    assert "too little room" in warnings()


# -- room --------------------------------------------------------------------------------------------------------


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    one = {"m": some(Format.F32, Act.F32, 64, 64, None, False, False, False)}
    probe = PackedStore(tmp_path / "probe")
    probe.save(KEY, one)
    size = file_of(probe).stat().st_size
    store = PackedStore(tmp_path / "weights", max_bytes=3 * size + 10)
    names = [hashlib.sha256(bytes([i])).hexdigest() for i in range(5)]
    for i, name in enumerate(names[:3]):
        assert store.save(name, one)
        os.utime(file_of(store, name), (1000 + i, 1000 + i))
    (store.folder / "note.txt").write_text("not ours to remove")
    assert store.load(names[0]) is not None  # the oldest is used: now it is the newest
    assert store.save(names[3], one)
    assert [store.load(n, copy=False) is not None for n in names] == [True, False, True, True, False]
    os.utime(file_of(store, names[2]), (1, 1))
    assert store.save(names[0], one), "what is replaced counts once"
    assert len(list(store.folder.glob("*" + SUFFIX))) == 3
    assert (store.folder / "note.txt").exists()


def test_what_is_larger_than_the_cache_is_not_kept(tmp_path: Path, warnings: Callable[[], str]) -> None:
    store = PackedStore(tmp_path, max_bytes=10_000)
    assert not store.save(KEY, model())
    assert "are not kept" in warnings()
    assert os.listdir(tmp_path) == []


def test_what_dead_processes_left_is_removed(store: PackedStore) -> None:
    store.save(KEY, {})
    old, fresh = (store.folder / f".{OTHER}{SUFFIX}.{digit * 16}.tmp" for digit in "ab")
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    store.save(OTHER, {})
    assert not old.exists()
    assert fresh.exists(), "somebody may be writing it"


SAVE = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.unit.ops.test_packed_file import KEY, model
from penstock.ops.native.packed_file import PackedStore
store = PackedStore(Path({folder!r}))
while time.time() < {start}: pass
for _ in range(30):
    assert store.save(KEY, model())
    assert store.load(KEY, copy=False) is not None
"""


def test_two_processes_that_save_the_same_key_end_well(store: PackedStore) -> None:
    root = str(Path(__file__).resolve().parents[3])
    code = SAVE.format(root=root, folder=str(store.folder), start=time.time() + 1.5)
    running = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in running:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert err == ""
    found = store.load(KEY)
    assert found is not None
    assert all(same(found[name], m) for name, m in model().items())
    assert os.listdir(store.folder) == [KEY + SUFFIX]


# -- sizes and sums ----------------------------------------------------------------------------------------------


def test_an_order_that_leads_out_of_a_row_means_absent(store: PackedStore, warnings: Callable[[], str]) -> None:
    for wrong in (-1, 128, 1 << 30):
        m = some(*SHAPES[5])
        assert m.order is not None
        m.order[7] = wrong
        assert store.save(KEY, {"m": m})
        assert store.load(KEY) is None
    assert "in an order that is none" in warnings()


@pytest.mark.parametrize(("rows", "pair", "panels"), [(1, False, 1), (64, False, 1), (65, False, 2), (64, True, 1),
                                                     (66, True, 2), (128, True, 2), (130, True, 3)])  # fmt: skip
def test_panels(rows: int, pair: bool, panels: int) -> None:
    assert num_panels(rows, pair) == panels
    assert array_sizes(best_library(), Format.F32, rows, 3, pair, None)[1] == panels * PANEL * 4


def test_page_sums_do_not_depend_on_the_parts() -> None:
    data = np.random.default_rng(3).integers(0, 256, 5 * PAGE + 100, dtype=np.uint8)
    padded = np.concatenate([data, np.zeros(PAGE - 100, np.uint8)])
    found = set()
    for cuts in ([0, len(data)], [0, PAGE, 3 * PAGE, len(data)]):
        sums = PageSums()
        for a, b in pairwise(cuts):
            sums.add(data[a:b])
        found.add(sums.hex())
    whole = PageSums()
    whole.add(padded)
    by_hand = [sum(np.frombuffer(padded[i : i + PAGE], "<u8").tolist()) % 2**64 for i in range(0, len(padded), PAGE)]
    expected = hashlib.sha256(b"".join(s.to_bytes(8, "little") for s in by_hand)).hexdigest()
    assert found == {whole.hex()} == {expected}


def test_huge_pages_are_aligned_and_live_as_long_as_they_are_used() -> None:
    for size in (0, 1, 5_000_000):
        memory = huge_pages(size)
        assert len(memory) == size
        assert memory.ctypes.data % (2 << 20) == 0 or size == 0
        memory[:] = 7


# -- keys --------------------------------------------------------------------------------------------------------


def settled(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled as soon as they are written."""
    monkeypatch.setattr(keys, "_SETTLED_NS", -1)


def test_a_key_is_made_of_content_scheme_and_extra(tmp_path: Path) -> None:
    a, b = settled(tmp_path / "a", b"one"), settled(tmp_path / "b", b"two")
    folder = tmp_path / "cache"
    key = content_key([a, b], "int8-w8a8", folder=folder)
    assert len(key) == 64
    assert key == content_key([b, a], "int8-w8a8", folder=folder)
    renamed = settled(tmp_path / "c", b"one")
    assert key == content_key([renamed, b], "int8-w8a8", folder=folder)
    others = {
        content_key([a], "int8-w8a8", folder=folder),
        content_key([a, a], "int8-w8a8", folder=folder),
        content_key([a, b], "int8-wo", folder=folder),
        content_key([a, b], "int8-w8a8", "more", folder=folder),
        content_key([a, settled(tmp_path / "d", b"twO")], "int8-w8a8", folder=folder),
    }
    assert len(others | {key}) == 6


@pytest.mark.usefixtures("at_once")
def test_a_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = settled(tmp_path / "a", b"one"), tmp_path / "cache"
    first = FileHashes(folder).of([path])
    assert first == [hashlib.sha256(b"one").hexdigest()]
    assert (folder / keys.MEMORY_NAME).stat().st_mode & 0o777 == 0o600
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", None)
        assert FileHashes(folder).of([path]) == first
    # The same name, size and date, but other content: the inode's own time tells.
    info = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert FileHashes(folder).of([path]) == [hashlib.sha256(b"two").hexdigest()]


def test_a_file_that_changed_just_now_is_not_remembered(tmp_path: Path) -> None:
    path, folder = settled(tmp_path / "a", b"one"), tmp_path / "cache"
    FileHashes(folder).of([path])
    assert not (folder / keys.MEMORY_NAME).exists()


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": 1}', b"\xff", b'{"x": "short"}'])
def test_a_broken_memory_is_forgotten(tmp_path: Path, content: bytes) -> None:
    path, folder = settled(tmp_path / "a", b"one"), tmp_path / "cache"
    folder.mkdir(mode=0o700)
    (folder / keys.MEMORY_NAME).write_bytes(content)
    (folder / keys.MEMORY_NAME).chmod(0o600)
    for _ in range(2):
        assert FileHashes(folder).of([path]) == [hashlib.sha256(b"one").hexdigest()]


@pytest.mark.usefixtures("at_once")
def test_a_memory_that_cannot_be_kept_is_a_warning(tmp_path: Path, warnings: Callable[[], str]) -> None:
    path = settled(tmp_path / "a", b"one")
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    assert FileHashes(folder).of([path]) == [hashlib.sha256(b"one").hexdigest()]
    assert "is not used" in warnings()
    assert os.listdir(folder) == []


def test_what_cannot_be_hashed_is_one_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "pipe"):
        with pytest.raises(ModelError):
            content_key([path], "none", folder=tmp_path / "cache")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder("weights") == Path("/a/weights")
    monkeypatch.delenv("PENSTOCK_CACHE")
    assert cache_folder("weights") == Path("/b/penstock/weights")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder("weights") == Path("/c/.cache/penstock/weights")
    assert PackedStore().folder == cache_folder("weights")
