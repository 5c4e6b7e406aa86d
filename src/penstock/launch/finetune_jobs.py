"""Fine-tuning jobs on disk: a server writes what is wanted, an engine how far it is. Each file has one writer.

ROOT/JOB/job.json and examples.msgpack are the server's, as is `cancel`, which asks for an end; state.json,
events.jsonl, checkpoint.safetensors and the folder `adapter` the engine's. Everything is written by rename or at the
end of a file, so whoever dies leaves what can be gone on from.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.training import Recipe, TrainingExample

FINAL = ("succeeded", "failed", "cancelled")
_ID = re.compile(r"ftjob-[0-9a-f]{24}")


class Job(msgspec.Struct, kw_only=True):
    """What is wanted. `base`: the model as the engine's settings name it; `name`: what the adapter will be called."""

    id: str
    created_at: int
    base: str
    model: str
    name: str
    training_file: str
    recipe: Recipe
    num_examples: int
    num_tokens: int
    hyperparameters: dict[str, Any]
    suffix: str | None = None
    metadata: dict[str, str] | None = None


class JobState(msgspec.Struct, kw_only=True):
    """How far it is. Times are seconds since 1970; `loss`: of the newest step."""

    status: str = "queued"
    step: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    loss: float | None = None
    error: str | None = None
    finished_at: int | None = None


class Event(msgspec.Struct, kw_only=True):
    created_at: int
    message: str
    level: str = "info"
    data: dict[str, Any] | None = None
    """Of a step: step, total_steps, train_loss."""


def new_id() -> str:
    return "ftjob-" + secrets.token_hex(12)


class JobFolder:
    """All methods may raise OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, job_id: str) -> Path:
        return self.root / job_id

    def create(self, job: Job, examples: Sequence[TrainingExample]) -> None:
        """It is there once job.json is."""
        folder = self.path(job.id)
        folder.mkdir(mode=0o700)
        replace(folder / "examples.msgpack", msgspec.msgpack.encode(examples))
        replace(folder / "job.json", msgspec.json.encode(job))

    def jobs(self) -> list[Job]:
        """Oldest first."""
        found = [self.job(name) for name in os.listdir(self.root) if _ID.fullmatch(name)]
        return sorted((job for job in found if job is not None), key=lambda job: (job.created_at, job.id))

    def job(self, job_id: str) -> Job | None:
        return _read(self.path(job_id) / "job.json", Job) if _ID.fullmatch(job_id) else None

    def state(self, job_id: str) -> JobState:
        found = _read(self.path(job_id) / "state.json", JobState) or JobState()
        if found.status not in FINAL and self.is_cancelled(job_id):
            found.status = "cancelled"
        return found

    def write_state(self, job_id: str, state: JobState) -> None:
        replace(self.path(job_id) / "state.json", msgspec.json.encode(state))

    def examples(self, job_id: str) -> list[TrainingExample]:
        return msgspec.msgpack.decode((self.path(job_id) / "examples.msgpack").read_bytes(), type=list[TrainingExample])

    def cancel(self, job_id: str) -> None:
        (self.path(job_id) / "cancel").touch(mode=0o600)

    def is_cancelled(self, job_id: str) -> bool:
        return (self.path(job_id) / "cancel").exists()

    def tell(self, job_id: str, event: Event) -> None:
        with (self.path(job_id) / "events.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")

    def events(self, job_id: str) -> list[Event]:
        """Oldest first. A line that is not whole yet is left out."""
        try:
            lines = (self.path(job_id) / "events.jsonl").read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        return [msgspec.json.decode(line, type=Event) for line in lines]


def replace(path: Path, data: bytes) -> None:
    """The file is as it was, or all of this."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
