"""The server's part of fine-tuning: it checks what is wanted, and serves what has come of it."""

from __future__ import annotations

import asyncio
import logging
import time
from importlib.util import find_spec
from pathlib import Path

from penstock.base.errors import ConfigError, InputError, ModelError, RefusedError
from penstock.config import EngineConfig
from penstock.core.training import Recipe
from penstock.launch.finetune_jobs import FINAL, Job, JobFolder, JobState, new_id
from penstock.server.batches.files import FileStore
from penstock.server.call import Tenant
from penstock.server.context import Server
from penstock.server.errors import WireError
from penstock.server.finetuning.lines import Texts, read_examples
from penstock.server.schema.finetuning import (
    Hyperparameters,
    JobEvent,
    JobObject,
    JobRequest,
)

log = logging.getLogger("penstock.server")
MAX_UNFINISHED, MAX_STEPS = 16, 1_000_000
_LOOK_S = 0.5
_RATE = 2e-4
_USUAL = ("q_proj", "v_proj")
_SUFFIX = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


class FineTuning:
    """Jobs of one server. Methods belong to the event loop's thread."""

    def __init__(self, server: Server, config: EngineConfig) -> None:
        """Raises: ConfigError."""
        root = config.lora.finetune_root
        assert root is not None
        if find_spec("torch") is None:
            raise ConfigError(
                "finetune_root: training needs torch; pip install penstock[train]", field="finetune_root"
            )  # fmt: skip
        try:
            self._folder = JobFolder(Path(root))
        except OSError as error:
            raise ConfigError(
                f"finetune_root: {root} cannot be used: {error.strerror}", field="finetune_root"
            ) from None
        self._server, self._config = server, config
        self._done: set[str] = set()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve what there is, and what comes."""
        await self._look()
        self._watching = asyncio.create_task(self._watch(), name="finetuning-watch")

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._look()
            except OSError as error:
                log.warning("fine-tuning jobs cannot be looked at: %s", error.strerror or error)

    async def _look(self) -> None:
        """Adapters of jobs that have succeeded get their names."""
        adapters = self._server.adapters
        assert adapters is not None
        for job, state in await asyncio.to_thread(self._all):
            if job.id in self._done or state.status not in FINAL:
                continue
            self._done.add(job.id)
            if state.status == "succeeded" and job.base == self._config.model.model:
                try:
                    await adapters.adopt(job.name, self._folder.path(job.id) / "adapter")
                    log.info("the adapter %s is served", job.name)
                except (InputError, ModelError) as error:
                    log.warning("the adapter of %s cannot be served: %s", job.id, error)

    def _all(self) -> list[tuple[Job, JobState]]:
        return [(job, self._folder.state(job.id)) for job in self._folder.jobs()]

    # -- what clients ask for ------------------------------------------------------------------------------------

    async def create(self, tenant: Tenant, wanted: JobRequest) -> JobObject:
        """Raises InputError, RefusedError, WireError. Nothing has begun then."""
        server = self._server
        if wanted.model not in (server.model_name, *server.aliases):
            raise WireError(
                404, f"the model {wanted.model[:80]!r} is not trained here; {server.model_name} is", param="model",
                code="model_not_found",
            )  # fmt: skip
        if wanted.validation_file is not None:
            raise InputError("no validation_file is read; leave it away", param="validation_file")
        if wanted.method is not None and wanted.method.type != "supervised":
            raise InputError(f"method {wanted.method.type[:40]!r} is unknown; supervised is done", param="method")
        suffix = wanted.suffix or ""
        if len(suffix) > 64 or not set(suffix) <= _SUFFIX:
            raise InputError("suffix: up to 64 letters, digits, - and _ are taken", param="suffix")
        open_jobs = [job for job, state in await asyncio.to_thread(self._all) if state.status not in FINAL]
        if len(open_jobs) >= MAX_UNFINISHED:
            raise RefusedError(f"{len(open_jobs)} jobs have not ended; cancel one, or wait", status=429)
        store: FileStore = server.parts["files"]
        try:
            path = await asyncio.to_thread(store.path, tenant, wanted.training_file)
        except RefusedError as error:
            raise WireError(404, str(error), param="training_file", code="not_found") from None
        limits, service = server.service.limits, server.service
        texts = Texts(
            service.need_tokenizer(), service.chat_template, next(iter(limits.eos_token_ids), None),
            limits.max_model_len,
        )  # fmt: skip
        examples = await asyncio.to_thread(read_examples, path, texts)
        recipe = await asyncio.to_thread(self._recipe, _hyper(wanted), wanted.seed or 0, len(examples))
        job_id = new_id()
        job = Job(
            id=job_id, created_at=int(time.time()), base=self._config.model.model, model=server.model_name,
            name=":".join(["ft", Path(server.model_name).name[:40], *([suffix] if suffix else []), job_id[6:18]]),
            training_file=wanted.training_file, recipe=recipe, num_examples=len(examples),
            num_tokens=sum(len(example.token_ids) for example in examples),
            hyperparameters=_said(recipe), suffix=wanted.suffix, metadata=wanted.metadata,
        )  # fmt: skip
        await asyncio.to_thread(self._folder.create, job, examples)
        return self._shown(job, JobState())

    def _recipe(self, hyper: Hyperparameters, seed: int, num_examples: int) -> Recipe:
        """Raises InputError."""

        def number(name: str, default: float, least: float, most: float) -> float:
            value = getattr(hyper, name)
            value = default if value in (None, "auto") else value
            if not least <= value <= most:
                raise InputError(f"{name} must be from {least:g} to {most:g}, not {value:g}", param=name)
            return float(value)

        adapters = self._server.adapters
        assert adapters is not None
        rank = int(number("lora_rank", 8, 1, self._config.lora.max_lora_rank))
        known = {module.rpartition(".")[2] for module in adapters.book.sites}
        targets = hyper.target_modules
        if targets in (None, "auto"):
            targets = [name for name in _USUAL if name in known] or sorted(known)
        assert isinstance(targets, list)
        strange = [name[:40] for name in targets if name not in known]
        if strange or not targets:
            named = f"no product of this model is called {strange[0]!r}" if strange else "no modules are named"
            raise InputError(f"target_modules: {named}; it has {', '.join(sorted(known))}", param="target_modules")
        recipe = Recipe(
            kind=hyper.adapter_type if hyper.adapter_type not in (None, "auto") else "lora",
            targets=tuple(sorted(set(targets))), rank=rank,
            alpha=number("lora_alpha", 2.0 * rank, 1e-3, 4096),
            learning_rate=_RATE * number("learning_rate_multiplier", 1.0, 1e-4, 1e3),
            batch_size=int(number("batch_size", 1, 1, 256)), epochs=int(number("n_epochs", 3, 1, 50)),
            seed=abs(seed) % (1 << 31),
        )  # fmt: skip
        if recipe.num_steps(num_examples) > MAX_STEPS:
            raise InputError(f"n_epochs: that would be more than {MAX_STEPS} steps", param="n_epochs")
        return recipe

    async def newest(self) -> list[JobObject]:
        """Newest first."""
        found = await asyncio.to_thread(self._all)
        return [self._shown(job, state) for job, state in reversed(found)]

    async def get(self, job_id: str) -> JobObject:
        """Raises WireError (404)."""
        job = await asyncio.to_thread(self._job, job_id)
        return self._shown(job, await asyncio.to_thread(self._folder.state, job_id))

    async def cancel(self, job_id: str) -> JobObject:
        """Raises WireError: 404, or 409 for a job that has ended."""
        await asyncio.to_thread(self._job, job_id)
        state = await asyncio.to_thread(self._folder.state, job_id)
        if state.status in FINAL:
            raise WireError(409, f"the job has ended: it is {state.status}", code="job_ended", param="job_id")
        await asyncio.to_thread(self._folder.cancel, job_id)
        return await self.get(job_id)

    async def events(self, job_id: str) -> list[JobEvent]:
        """Newest first. Raises WireError (404)."""
        job = await asyncio.to_thread(self._job, job_id)
        found = await asyncio.to_thread(self._folder.events, job_id)
        begun = JobEvent(
            id=f"{job_id}-0", created_at=job.created_at, level="info", type="message", data={},
            message=f"created: {job.num_examples} examples of {job.num_tokens} tokens",
        )  # fmt: skip
        told = [
            JobEvent(
                id=f"{job_id}-{i}", created_at=e.created_at, level=e.level, message=e.message,
                type="message" if e.data is None else "metrics", data=e.data or {},
            )
            for i, e in enumerate(found, 1)
        ]  # fmt: skip
        return [begun, *told][::-1]

    def _job(self, job_id: str) -> Job:
        job = self._folder.job(job_id)
        if job is None:
            raise WireError(404, f"there is no fine-tuning job {job_id[:64]!r}", code="not_found", param="job_id")
        return job

    def _shown(self, job: Job, state: JobState) -> JobObject:
        failed = state.status == "failed"
        return JobObject(
            id=job.id, created_at=job.created_at, finished_at=state.finished_at, model=job.model, status=state.status,
            fine_tuned_model=job.name if state.status == "succeeded" else None, training_file=job.training_file,
            hyperparameters=job.hyperparameters, trained_tokens=state.num_tokens if state.step else None,
            method={"type": "supervised", "supervised": {"hyperparameters": job.hyperparameters}},
            error={"code": "training_failed", "message": state.error, "param": None} if failed else None,
            seed=job.recipe.seed, suffix=job.suffix, metadata=job.metadata,
        )  # fmt: skip


def _hyper(wanted: JobRequest) -> Hyperparameters:
    supervised = None if wanted.method is None else wanted.method.supervised
    given = None if supervised is None else supervised.hyperparameters
    return given or wanted.hyperparameters or Hyperparameters()


def _said(recipe: Recipe) -> dict[str, object]:
    return {
        "n_epochs": recipe.epochs, "batch_size": recipe.batch_size,
        "learning_rate_multiplier": recipe.learning_rate / _RATE, "adapter_type": recipe.kind, "lora_rank": recipe.rank,
        "lora_alpha": recipe.alpha, "target_modules": list(recipe.targets),
    }  # fmt: skip


async def install(server: Server, config: EngineConfig) -> None:
    """Add this part to a server that is being built. Raises ConfigError."""
    part = FineTuning(server, config)
    server.parts["finetuning"] = part
    await part.start()
    server.closers.append(part.close)
