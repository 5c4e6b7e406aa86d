"""What `penstock doctor` says of the stores of blocks: what is there, what is wrong, what to change."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.doctor_stores import lines_of
from penstock.config import from_kwargs
from penstock.config.offload import DiskStore
from penstock.launch.block_server import BlockServer, MemoryShelf, listen
from penstock.launch.kv_store import open_folder, open_served
from penstock.runner import block_peer
from penstock.runner.block_files import OVERHEAD, seal
from penstock.runner.block_peer import Address, BlockPeer
from penstock.runner.shared_secret import make_secret, read_secrets

PLACE = "0123456789abcdef/0123456789abcdef/" + "0" * 32 + "-0"


def told(offload: str, secret: Path | None = None) -> tuple[str, bool]:
    config = from_kwargs(
        model="nano", kv_offload=offload, kv_offload_secret_file=None if secret is None else str(secret)
    )
    lines, good = lines_of(config)
    return "\n".join(lines), good


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    make_secret(tmp_path / "shared")
    return tmp_path / "shared"


@pytest.fixture
def server(secret: Path) -> Iterator[BlockServer]:
    found = BlockServer(listen("127.0.0.1:0", anywhere=False), read_secrets(secret).connection, MemoryShelf(), 1 << 30)
    thread = threading.Thread(target=found.run, daemon=True)
    thread.start()
    yield found
    found.close()
    thread.join(5)


def test_nothing_is_said_of_no_store() -> None:
    assert told("none") == ("", True)


def test_a_folder_is_counted_tried_and_complained_of(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    text, good = told(f"disk:{folder},1MiB")
    assert good
    assert "is not there yet" in text
    assert not folder.exists(), "asking makes nothing"
    key = open_folder(DiskStore(folder, 0))
    block = bytearray(1000 + OVERHEAD)
    seal(key, PLACE, block)
    (folder / PLACE).parent.mkdir(parents=True)
    (folder / PLACE).write_bytes(block)
    text, good = told(f"disk:{folder},1MiB")
    assert good
    assert "1 blocks of 1 models, 1 kB of 1 MB; one is read in" in text
    text, good = told(f"disk:{folder},9000TiB")
    assert good
    assert "that it may still take: give a smaller size" in text
    block[-40] ^= 1
    (folder / PLACE).write_bytes(block)
    text, good = told(f"disk:{folder},1MiB")
    assert not good
    assert f"1 of 1 are damaged: penstock cache verify {folder} --delete" in text
    folder.chmod(0o755)
    text, good = told(f"disk:{folder},1MiB")
    assert not good
    assert "cannot be used" in text
    assert "chmod 700" in text
    open_served(tmp_path / "served")
    assert not told(f"disk:{tmp_path / 'served'}")[1]


def test_each_server_has_a_line(tmp_path: Path, secret: Path, server: BlockServer) -> None:
    port = int(server.sock.getsockname()[1])
    BlockPeer(Address("127.0.0.1", port, read_secrets(secret).connection)).put(PLACE, bytearray(500))
    text, good = told(f"remote:127.0.0.1:{port}", secret)
    assert good
    assert f"KV server 127.0.0.1:{port}: 1 blocks, " in text
    assert "ms (protocol 1)" in text
    open_folder(DiskStore(tmp_path / "kv", 0))
    text, good = told(f"disk:{tmp_path / 'kv'} remote:127.0.0.1:{port}", secret)
    assert not good
    assert "are named by another secret" in text
    text, good = told(f"disk:{tmp_path / 'new'} remote:127.0.0.1:{port} remote:127.0.0.1:1", secret)
    assert not good
    folder, there, gone = text.splitlines()
    assert folder.startswith("KV folder")
    assert "it answers" in there
    assert "127.0.0.1:1: cannot be used: nothing listens there; start penstock cache serve" in gone
    make_secret(tmp_path / "other")
    text, good = told(f"remote:127.0.0.1:{port}", tmp_path / "other")
    assert not good
    assert "it has another secret; give both sides one first line" in text


def test_a_server_that_is_stopped_is_told_of(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_peer, "ANSWER_S", 0.1)
    with listen("127.0.0.1:0", anywhere=False) as sock:  # connections wait, and nobody takes them
        text, good = told(f"remote:127.0.0.1:{sock.getsockname()[1]}", secret)
    assert not good
    assert "it says nothing for 0.1 s" in text
    assert "leave it out" in text
