"""Fine-tuning jobs over HTTP: what is refused before anything begins, a job to its end, and its adapter served."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.base.errors import ConfigError
from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from tests.training import pico

ASK: dict[str, Any] = {"prompt": "Color?", "max_tokens": 4, "temperature": 0, "logprobs": 0}
LINE = {"prompt": "Color?", "completion": " blue blue blue"}


def lines(*items: Any) -> bytes:
    return b"".join((item if isinstance(item, bytes) else json.dumps(item).encode()) + b"\n" for item in items)


def config(tmp: Path, **more: Any) -> Any:
    base: dict[str, Any] = {
        "model": str(pico()), "served_model_name": "pico", "port": 0, "ops": "ref", "max_model_len": 96,
        "num_gpu_blocks_override": 64, "engine_in_process": True, "finetune_root": str(tmp / "jobs"),
        "finetune_share": 0.5, "files_dir": str(tmp / "files"),
    }  # fmt: skip
    return serve_from_kwargs(**base | more)


def client_of(live: LiveServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=live.url + "/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("finetuning")


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[openai.OpenAI]:
    with LiveServer(config(root)) as live:
        yield client_of(live)


def ended(client: openai.OpenAI, job_id: str) -> Any:
    for _ in range(1200):
        job = client.fine_tuning.jobs.retrieve(job_id)
        if job.status in ("succeeded", "failed", "cancelled"):
            return job
        time.sleep(0.05)
    raise AssertionError(job)


CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
BAD = [
    (lines(LINE, b"{"), "line 2: is no JSON object"),
    (lines({"question": "x"}), "line 1: has neither messages, nor prompt and completion, nor text"),
    (lines(LINE, {"text": "  "}), "line 2: has no text in text"),
    (lines({"text": "word " * 200}), "tokens; at most 96 are learnt from at once"),
    (
        lines({"messages": [{"role": "tool", "content": "x"}]}),
        "has a message of the role 'tool'; system, user, assistant",
    ),
    (lines({"messages": [{"role": "user", "content": "x"}]}), "has no message of the assistant to learn from"),
    (lines({"messages": [{"role": "user"}]}), "has no text in content"),
    (lines(CHAT | {"messages": []}), "line 1: has no messages"),
]


@pytest.mark.parametrize(("data", "said"), BAD)
def test_J28_a_bad_file_gets_a_sentence_and_no_job(served: openai.OpenAI, data: bytes, said: str) -> None:
    before = len(list(served.fine_tuning.jobs.list()))
    file = served.files.create(file=("a.jsonl", data), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        served.fine_tuning.jobs.create(model="pico", training_file=file.id)
    assert refused.value.param == "training_file"
    assert len(list(served.fine_tuning.jobs.list())) == before


@pytest.mark.parametrize(
    ("more", "said"),
    [({"model": "gpt-9"}, "is not trained here; pico is"), ({"training_file": "file-0"}, "there is no file"),
     ({"suffix": "a b"}, "suffix: up to 64"), ({"hyperparameters": {"n_epochs": 0}}, "n_epochs must be from 1 to 50"),
     ({"extra_body": {"hyperparameters": {"target_modules": ["c"]}}}, "no product of this model is called 'c'; it has"),
     ({"extra_body": {"hyperparameters": {"lora_rank": 65}}}, "lora_rank must be from 1 to 64"),
     ({"validation_file": "file-1"}, "no validation_file is read")],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(served: openai.OpenAI, more: dict[str, Any], said: str) -> None:
    file = served.files.create(file=("a.jsonl", lines(LINE)), purpose="fine-tune")
    asked: dict[str, Any] = {"model": "pico", "training_file": file.id}
    with pytest.raises(openai.APIStatusError, match=said):
        served.fine_tuning.jobs.create(**asked | more)


def test_J28_a_job_runs_beside_requests_and_its_adapter_answers(served: openai.OpenAI, root: Path) -> None:
    plain = served.completions.create(model="pico", **ASK).choices[0].text
    file = served.files.create(file=("a.jsonl", lines(*[LINE] * 6, CHAT)), purpose="fine-tune")
    asked = {"hyperparameters": {"learning_rate_multiplier": 40.0, "n_epochs": 4, "lora_rank": 4}}
    job = served.fine_tuning.jobs.create(
        model="pico", training_file=file.id, suffix="blue", seed=7, extra_body=asked, metadata={"a": "b"}
    )
    assert (job.status, job.object, job.seed, job.metadata) == ("queued", "fine_tuning.job", 7, {"a": "b"})
    while served.fine_tuning.jobs.retrieve(job.id).status != "succeeded":  # requests meanwhile: the model's own
        assert served.completions.create(model="pico", **ASK).choices[0].text == plain
    done = ended(served, job.id)
    name = done.fine_tuned_model
    assert name == f"ft:pico:blue:{job.id[6:18]}"
    assert done.trained_tokens > 100
    assert done.finished_at >= done.created_at
    events = [e for e in served.fine_tuning.jobs.list_events(job.id, limit=50).data if e.type == "metrics"]
    losses = [e.data["train_loss"] for e in reversed(events)]
    assert len(losses) == 28
    assert sum(losses[-7:]) < 0.5 * sum(losses[:7])
    for _ in range(100):  # the name comes with the next look
        if name in [model.id for model in served.models.list()]:
            break
        time.sleep(0.05)
    assert served.completions.create(model=name, **ASK).choices[0].text.startswith(" blue blue")
    assert served.completions.create(model="pico", **ASK).choices[0].text == plain
    told = httpx.get(str(served.base_url).removesuffix("/v1/") + "/metrics").text
    assert re.search(r"penstock:finetune_tokens_total{.*} [1-9]", told)
    assert re.search(r"penstock:finetune_beside_seconds_total{.*} [0-9.e-]+", told)
    with pytest.raises(openai.ConflictError, match="the job has ended: it is succeeded"):
        served.fine_tuning.jobs.cancel(job.id)


def test_a_job_can_be_cancelled_and_none_is_confused_with_another(served: openai.OpenAI) -> None:
    file = served.files.create(file=("a.jsonl", lines(*[LINE] * 40)), purpose="fine-tune")
    first = served.fine_tuning.jobs.create(model="pico", training_file=file.id, hyperparameters={"n_epochs": 50})
    assert served.fine_tuning.jobs.cancel(first.id).status == "cancelled"
    assert ended(served, first.id).fine_tuned_model is None
    with pytest.raises(openai.NotFoundError, match="there is no fine-tuning job"):
        served.fine_tuning.jobs.retrieve("ftjob-" + "0" * 24)
    assert served.fine_tuning.jobs.list(limit=1).data[0].id == first.id


def test_J28_adapters_are_there_after_a_restart_and_the_admin_key_is_needed(
    root: Path, served: openai.OpenAI, tmp_path: Path
) -> None:
    before = {model.id for model in served.models.list()}
    with pytest.raises(ConfigError, match="another engine trains in"), LiveServer(config(root)):
        pass
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    with LiveServer(config(tmp_path, admin_api_key="sk-admin", api_key="sk-user", finetune_share=0.0)) as live:
        assert {model.id for model in client_of(live, "sk-user").models.list()} >= {n for n in before if "ft:" in n}
        with pytest.raises(openai.PermissionDeniedError, match="this needs the admin key"):
            client_of(live, "sk-user").fine_tuning.jobs.list()
        assert len(client_of(live, "sk-admin").fine_tuning.jobs.list().data) >= 2


def test_a_server_that_trains_nothing_says_so_and_a_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    none = config(tmp_path, finetune_root=None)
    with LiveServer(none) as live, pytest.raises(openai.NotFoundError, match="start the server with --finetune-root"):
        client_of(live).fine_tuning.jobs.list()
    (tmp_path / "jobs").write_text("")
    with pytest.raises(ConfigError, match=r"finetune_root: .*jobs cannot be used"), LiveServer(config(tmp_path)):
        pass
