"""The engine's part of fine-tuning: the oldest job is trained in the time that requests leave.

A piece of work (`backends.gpu.train`) is a layer over a few tokens, so requests wait for milliseconds at most. Between
steps of requests a piece is done once as much time has been saved up (`finetune_share` of theirs) as pieces of its kind
take; while nobody asks, pieces follow each other. What is read or written takes a thread. No token of a request depends
on it. Source: FlexLLM, Miao et al., arXiv 2402.18789, section 6 (co-serving by a budget of tokens a step).
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.base.errors import ConfigError, PenstockError
from penstock.base.flock import lock_file
from penstock.config import EngineConfig
from penstock.families.registry import open_model
from penstock.formats.peft import CONFIG_NAME, WEIGHTS_NAME
from penstock.formats.safetensors import read_safetensors
from penstock.formats.safetensors_out import write_safetensors
from penstock.launch.finetune_jobs import FINAL, Event, Job, JobFolder, JobState, replace
from penstock.launch.hub import local_path

if TYPE_CHECKING:
    from penstock.backends.gpu.train.open import Trained
    from penstock.backends.gpu.train.trainer import Trainer

log = logging.getLogger("penstock.launch")
_LOOK_S, _REST_S, _TELL_S, _SAVE_S = 0.5, 0.2, 0.25, 20.0
_CHECKPOINT = "checkpoint.safetensors"
_TYPES = {"F32": "<f4", "I64": "<i8"}


class Finetuner:
    """Implements `core.spare.SpareWork`. `open`: makes a job's trainer, in a thread; `lock`: a descriptor that holds
    the folder."""

    def __init__(
        self, folder: JobFolder, base: str, share: float, open: Callable[[Job], tuple[Trainer, Trained]], *,
        now: Callable[[], float] = time.perf_counter, lock: int | None = None,
    ) -> None:  # fmt: skip
        if lock is not None:
            weakref.finalize(self, os.close, lock)
        self._folder, self._base, self._share, self._open, self._now = folder, base, share, open, now
        self._job: Job | None = None
        self._opened: tuple[Trainer, Trained] | PenstockError | Exception | None = None
        self._work: Iterator[str] | None = None
        self._kind = ""
        self._costs: dict[str, float] = {}
        self._credit, self._looked_s, self._told_s, self._saved_s, self._told = 0.0, -1e9, 0.0, 0.0, 0
        self._writing: threading.Thread | None = None
        self._beside_s, self._tokens, self._tokens_before = 0.0, 0, 0

    def counters(self) -> dict[str, float]:
        """See `core.spare.SpareWork`."""
        own = self._opened[0].num_tokens if isinstance(self._opened, tuple) and self._work is not None else 0
        return {
            "finetune_tokens": self._tokens + max(0, own - self._tokens_before),
            "finetune_beside_s": self._beside_s,
        }

    def rest(self, called: Callable[[], bool]) -> bool:
        """See `core.spare.SpareWork`."""
        end = self._now() + _REST_S
        while self._ready() and not called() and self._now() < end:
            self._piece()
        return self._work is not None

    def between(self, step_s: float) -> None:
        """See `core.spare.SpareWork`."""
        if self._share <= 0.0 or not self._ready():
            return
        earned = self._share * step_s
        self._credit = min(self._credit + earned, max(self._cost(), earned))
        while self._work is not None and self._credit >= self._cost():
            took = self._piece()
            self._credit -= took
            self._beside_s += took

    def _cost(self) -> float:
        """Seconds that what comes next will take."""
        return self._costs.get(self._kind, 0.0)

    def _ready(self) -> bool:
        """Whether there is work; looks for some, if not too often."""
        if self._work is not None:
            return True
        now = self._now()
        if self._job is None:
            if now - self._looked_s >= _LOOK_S:
                self._looked_s = now
                self._take()
            return False
        if self._opened is None:
            return False
        if isinstance(self._opened, Exception):
            self._fail(self._opened)
            return False
        self._work = self._opened[0].work()
        self._told, self._saved_s = self._opened[0].step, now
        self._tokens_before = self._opened[0].num_tokens
        self._say(f"training goes on at step {self._told}" if self._told else "training has begun")
        if self._work is not None:  # it could be said
            self._kind = next(self._work, "")
            if not self._kind:
                self._finish()
        return self._work is not None

    def _take(self) -> None:
        if self._writing is not None and self._writing.is_alive():
            return  # what has ended has not said so yet
        try:
            for job in self._folder.jobs():
                if job.base == self._base and self._folder.state(job.id).status not in FINAL:
                    self._job, self._opened = job, None
                    threading.Thread(target=self._begin, args=(job,), name="penstock-finetune", daemon=True).start()
                    return
        except OSError as error:
            log.warning("fine-tuning jobs cannot be looked at: %s", error.strerror or error)

    def _begin(self, job: Job) -> None:
        try:
            self._opened = self._open(job)
        except Exception as error:
            self._opened = error

    def _piece(self) -> float:
        """Do what comes next; how long it took."""
        assert self._work is not None
        assert isinstance(self._opened, tuple)
        trainer, kind, began = self._opened[0], self._kind, self._now()
        try:
            following = next(self._work, None)
        except Exception as error:
            self._fail(error)
            return self._now() - began
        took = self._now() - began
        before = self._costs.get(kind)
        self._costs[kind] = took if before is None else 0.5 * (before + took)
        if trainer.step != self._told:
            self._after_step(trainer)
        if following is None:
            self._finish()
        elif self._work is not None:
            self._kind = following
        return took

    def _after_step(self, trainer: Trainer) -> None:
        assert self._job is not None
        now, job_id = self._now(), self._job.id
        last = trainer.step == trainer.num_steps
        self._told = trainer.step
        try:
            loss = trainer.losses[-1]
            data = {"step": trainer.step, "total_steps": trainer.num_steps, "train_loss": round(loss.value, 6)}
            self._folder.tell(job_id, Event(
                created_at=int(time.time()), data=data, message=f"Step {trainer.step}/{trainer.num_steps}: "
                f"training loss={loss.value:.4f}",
            ))  # fmt: skip
            if self._folder.is_cancelled(job_id):
                self._end("cancelled", None)
                return
            if now - self._saved_s >= _SAVE_S and not last:
                self._saved_s = now
                self._write(self._save, self._job, trainer.state(), self._state("running"))
        except OSError as error:
            self._fail(error)

    def _state(self, status: str, error: str | None = None) -> JobState:
        trainer = self._opened[0] if isinstance(self._opened, tuple) else None
        done = int(time.time()) if status in FINAL else None
        if trainer is None:
            return JobState(status=status, error=error, finished_at=done)
        loss = trainer.losses[-1].value if trainer.losses else None
        return JobState(
            status=status, step=trainer.step, num_steps=trainer.num_steps, num_tokens=trainer.num_tokens, loss=loss,
            error=error, finished_at=done,
        )  # fmt: skip

    def _say(self, message: str) -> None:
        assert self._job is not None
        try:
            self._folder.tell(self._job.id, Event(created_at=int(time.time()), message=message))
            self._folder.write_state(self._job.id, self._state("running"))
        except OSError as error:
            self._fail(error)

    def _write(self, work: Callable[..., None], *args: Any) -> None:
        if self._writing is not None and self._writing.is_alive():
            return  # the next one will do
        self._writing = threading.Thread(target=work, args=args, name="penstock-finetune", daemon=True)
        self._writing.start()

    def _save(self, job: Job, arrays: dict[str, np.ndarray[Any, Any]], state: JobState) -> None:
        try:
            write_safetensors(self._folder.path(job.id) / _CHECKPOINT, arrays)
            self._folder.write_state(job.id, state)
        except OSError as error:
            log.warning("a checkpoint of %s could not be written: %s", job.id, error.strerror or error)

    def _finish(self) -> None:
        assert self._job is not None
        assert isinstance(self._opened, tuple)
        job, trained, state = self._job, self._opened[1], self._state("succeeded")
        if self._writing is not None:
            self._writing.join()
        self._write(self._publish, job, trained.tensors(), trained.config(), state)
        self._leave()

    def _publish(
        self, job: Job, tensors: dict[str, np.ndarray[Any, Any]], config: dict[str, Any], state: JobState
    ) -> None:
        """An adapter is whole before its job has succeeded."""
        try:
            folder = self._folder.path(job.id) / "adapter"
            folder.mkdir(exist_ok=True)
            write_safetensors(folder / WEIGHTS_NAME, tensors)
            replace(folder / CONFIG_NAME, json.dumps(config | {"base_model_name_or_path": job.base}).encode())
            (self._folder.path(job.id) / _CHECKPOINT).unlink(missing_ok=True)
            self._folder.tell(job.id, Event(created_at=int(time.time()), message=f"the adapter {job.name} is there"))
        except OSError as error:
            state.status, state.error = "failed", f"the adapter could not be written: {error.strerror or error}"
        try:
            self._folder.write_state(job.id, state)
        except OSError as error:
            log.warning("%s has ended, and cannot say so: %s", job.id, error.strerror or error)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, PenstockError):
            what = str(error)
        else:
            log.error("a training failed", exc_info=error)
            what = f"the training failed: {type(error).__name__}: {error}"
        self._end("failed", what)

    def _end(self, status: str, error: str | None) -> None:
        job, state = self._job, self._state(status, error)
        if job is None:
            return
        if self._writing is not None:
            self._writing.join()  # what it says of the job comes before
        try:
            said = f"the job is {status}" if error is None else error
            level = "info" if error is None else "error"
            self._folder.tell(job.id, Event(created_at=int(time.time()), message=said, level=level))
            self._folder.write_state(job.id, state)
        except OSError as trouble:
            log.warning("%s has ended, and cannot say so: %s", job.id, trouble.strerror or trouble)
        self._leave()

    def _leave(self) -> None:
        self._tokens = int(self.counters()["finetune_tokens"])
        if isinstance(self._work, Iterator):
            getattr(self._work, "close", lambda: None)()
        self._job, self._opened, self._work, self._kind = None, None, None, ""


def finetuner_of(config: EngineConfig) -> Finetuner | None:
    """None: nothing is trained. Raises: ConfigError if another engine trains in that folder, or it cannot be used."""
    if config.lora.finetune_root is None:
        return None
    try:
        folder = JobFolder(Path(config.lora.finetune_root))
        lock = os.open(folder.root / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f"finetune_root: {config.lora.finetune_root} cannot be used: {error.strerror}", field="finetune_root"
        ) from None
    try:
        lock_file(lock)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f"finetune_root: another engine trains in {config.lora.finetune_root}; name another folder",
            field="finetune_root",
        ) from None

    def open_job(job: Job) -> tuple[Trainer, Trained]:
        from penstock.backends.gpu.train.open import open_trainer  # torch: only once there is something to train

        checkpoint = open_model(local_path(config.model.model, config.model.revision))
        saved = folder.path(job.id) / _CHECKPOINT
        return open_trainer(
            checkpoint, folder.examples(job.id), job.recipe, state=read_state(saved) if saved.exists() else None
        )

    return Finetuner(folder, config.model.model, config.lora.finetune_share, open_job, lock=lock)


def read_state(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """What `_save` wrote."""
    data = path.read_bytes()
    return {
        name: np.frombuffer(data, _TYPES[ref.dtype], ref.nbytes // np.dtype(_TYPES[ref.dtype]).itemsize, ref.offset)
        .reshape(ref.shape)
        for name, ref in read_safetensors(path).items()
    }  # fmt: skip
