"""Wire shapes of /v1/fine_tuning/jobs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Hyperparameters(msgspec.Struct, kw_only=True):
    """OpenAI's three, and those of an adapter. "auto" and null: the server chooses. `adapter_type`: lora, or peqa (the
    scales of a base that is stored in few bits)."""

    n_epochs: int | Literal["auto"] | None = None
    batch_size: int | Literal["auto"] | None = None
    learning_rate_multiplier: float | Literal["auto"] | None = None
    adapter_type: Literal["auto", "lora", "peqa"] | None = None
    lora_rank: int | Literal["auto"] | None = None
    lora_alpha: float | Literal["auto"] | None = None
    target_modules: list[str] | Literal["auto"] | None = None


class Supervised(msgspec.Struct, kw_only=True):
    hyperparameters: Hyperparameters | None = None


class TrainingMethod(msgspec.Struct, kw_only=True):
    type: str = "supervised"
    supervised: Supervised | None = None


class JobRequest(msgspec.Struct, kw_only=True):
    """`hyperparameters`: the older place of `method.supervised.hyperparameters`."""

    model: str
    training_file: str
    validation_file: str | None = None
    hyperparameters: Hyperparameters | None = None
    method: TrainingMethod | None = None
    suffix: str | None = None
    seed: int | None = None
    metadata: dict[str, str] | None = None


class JobObject(msgspec.Struct, kw_only=True):
    """Times are seconds since 1970."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None = None
    model: str
    fine_tuned_model: str | None = None
    organization_id: str = ""
    status: str
    training_file: str
    validation_file: str | None = None
    hyperparameters: dict[str, Any]
    method: dict[str, Any]
    trained_tokens: int | None = None
    error: dict[str, Any] | None = None
    result_files: list[str] = []
    seed: int
    suffix: str | None = None
    estimated_finish: int | None = None
    integrations: list[Any] = []
    metadata: dict[str, str] | None = None


class JobList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[JobObject]
    has_more: bool


class JobEvent(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: str
    message: str
    type: str
    data: dict[str, Any]


class JobEventList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[JobEvent]
    has_more: bool
