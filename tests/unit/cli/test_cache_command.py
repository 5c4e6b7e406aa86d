"""`penstock cache`: what a folder of blocks holds, by model and tenant; deleting, and finding what is damaged."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from penstock.cli.main import main
from tests.engine.harness import Knobs, fake_engine, request, run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three blocks of alice, two of bob."""
    place = tmp_path / "kv"
    core, _ = fake_engine(Knobs(block_size=4, budget=64, kv_offload=f"disk:{place}"))
    run(core, [request([3 + i for i in range(13)], max_tokens=1, tenant="alice")])
    run(core, [request([9 + i for i in range(9)], max_tokens=1, tenant="bob", namespace=b"bob")])
    core.executor._runner.storage.outside.close()  # type: ignore[attr-defined]
    return place


def rows(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[tuple[int, int]]:
    capsys.readouterr()
    assert main(["cache", "ls", str(folder), "--json", *more]) == 0
    return sorted((row["blocks"], row["tokens"]) for row in json.loads(capsys.readouterr().out))


def test_ls_counts_by_tenant(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rows(folder, capsys) == [(2, 8), (3, 12)]
    assert rows(folder, capsys, "--tenant", "alice") == [(3, 12)]
    assert rows(folder, capsys, "--model", "(test)") == [(2, 8), (3, 12)]
    assert rows(folder, capsys, "--model", "another") == []
    assert main(["cache", "ls", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "(test)" in shown
    assert "alice" not in shown, "names of tenants are nobody's business"


def test_rm_deletes_a_tenant_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "rm", str(folder)]) == 2
    assert "--tenant NAME" in capsys.readouterr().err
    assert main(["cache", "rm", str(folder), "--tenant", "alice"]) == 0
    assert "3 blocks deleted" in capsys.readouterr().out
    assert rows(folder, capsys) == [(2, 8)]
    for path in folder.glob("*/*/*"):
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    assert main(["cache", "rm", str(folder), "--unused-for", "3h"]) == 0
    assert rows(folder, capsys) == [(2, 8)]
    assert main(["cache", "rm", str(folder), "--unused-for", "1h"]) == 0
    assert rows(folder, capsys) == []
    assert main(["cache", "rm", str(folder), "--all"]) == 0


def test_verify_finds_what_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "verify", str(folder)]) == 0
    assert "5 blocks read, 0 damaged" in capsys.readouterr().out
    bad = sorted(folder.glob("*/*/*"))[0]
    bad.write_bytes(bad.read_bytes()[:-1] + b"?")
    assert main(["cache", "verify", str(folder)]) == 1
    assert main(["cache", "verify", str(folder), "--delete"]) == 0
    assert not bad.exists()


def test_another_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "ls", str(tmp_path)]) != 0
    assert "is no folder of KV blocks" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["cache", "rm", str(tmp_path), "--unused-for", "soon"])


def test_pinned_blocks_are_spared_by_evict_and_seen_by_ls(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "pin", str(folder)]) == 2
    assert main(["cache", "pin", str(folder), "--tenant", "alice", "--for", "7d"]) == 0
    assert "3 blocks pinned" in capsys.readouterr().out
    assert main(["cache", "ls", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted((row["blocks"], row["pinned"]) for row in found) == [(2, 0), (3, 3)]
    assert main(["cache", "evict", str(folder), "--all"]) == 0
    assert "2 blocks deleted" in capsys.readouterr().out
    assert rows(folder, capsys) == [(3, 12)]
    assert main(["cache", "unpin", str(folder), "--tenant", "alice"]) == 0
    assert main(["cache", "evict", str(folder), "--all"]) == 0
    assert rows(folder, capsys) == []


def test_one_block_by_name_and_those_of_an_age(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = sorted(folder.glob("*/*/*-1"))[0]
    assert main(["cache", "pin", str(folder), "--name", block.name[:12]]) == 0
    for path in folder.glob("*/*/*"):
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    assert main(["cache", "evict", str(folder), "--unused-for", "1h"]) == 0
    assert "4 blocks deleted" in capsys.readouterr().out
    assert block.exists()
    assert main(["cache", "unpin", str(folder), "--name", block.name[:12]]) == 0
    assert main(["cache", "evict", str(folder), "--name", block.name[:12]]) == 0
    assert not block.exists()


def test_warm_says_what_it_needs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "warm", str(folder)]) != 0
    assert "--prompts FILE" in capsys.readouterr().err
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    assert main(["cache", "warm", str(folder), "--prompts", str(bad)]) != 0
    assert "line 2" in capsys.readouterr().err
    bad.write_text('{"prompt": "a"}\n')
    assert main(["cache", "warm", str(folder), "--prompts", str(bad)]) != 0
    assert "--model PATH" in capsys.readouterr().err
    assert main(["cache", "pin", "http://127.0.0.1:9", "--all"]) != 0
    assert main(["cache", "warm", "http://127.0.0.1:9", "--prompts", str(bad)]) != 0
    assert "cannot connect" in capsys.readouterr().err
