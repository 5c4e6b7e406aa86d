"""Batches and background responses are offline work by default: what a server's engine makes of them, in steps."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from penstock.base.errors import ConfigError, RefusedError
from penstock.config import from_kwargs, serve_from_kwargs
from penstock.core.batch import SchedulerOutput
from penstock.engine.core import EngineCore
from penstock.launch.names import check_names
from penstock.server.call import ANYONE, Tenant
from penstock.server.live import LiveServer
from penstock.server.schema.batches import BatchObject, RequestCounts
from tests.api.conftest import bundled


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", max_model_len=256, num_gpu_blocks_override=128, max_num_seqs=2,
        served_model_name="nano", files_dir=str(tmp_path_factory.mktemp("offline")), engine_in_process=True,
    )  # fmt: skip
    with LiveServer(config) as server:
        yield server


@pytest.fixture
def sdk(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


class Watch:
    """What each step found waiting and what it scheduled: {request id: (offline, is a prompt)}."""

    def __init__(self, core: EngineCore) -> None:
        self.steps: list[tuple[set[str], dict[str, tuple[bool, bool]]]] = []
        self.core = core
        self._schedule = core.scheduler.schedule
        core.scheduler.schedule = self._look  # type: ignore[method-assign]

    def _look(self, step: int, *, idle: bool, now_s: float = 0.0) -> SchedulerOutput | None:
        core = self.core
        waiting = {s.request.request_id for s in core.scheduler.waiting if not s.offline}
        out = self._schedule(step, idle=idle, now_s=now_s)
        rows = {}
        for row in [] if out is None else out.scheduled:
            seq = core._sequences[row.seq_id]
            rows[seq.request.request_id] = (seq.offline, row.start < seq.prompt_len)
        if rows:
            self.steps.append((waiting, rows))
        return out

    def stop(self) -> None:
        self.core.scheduler.schedule = self._schedule  # type: ignore[method-assign]


@pytest.fixture
def watch(live: LiveServer) -> Iterator[Watch]:
    assert live.server is not None
    watch = Watch(live.server.client.link._loop.core)  # type: ignore[attr-defined]
    yield watch
    watch.stop()


def until(found: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 60
    while not (got := found()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return got


def batch(sdk: openai.OpenAI, num_lines: int, **more: Any) -> Any:
    lines = [
        {"custom_id": f"q{i}", "method": "POST", "url": "/v1/completions",
         "body": {"model": "nano", "prompt": f"line {i}", "max_tokens": 40, "ignore_eos": True, "temperature": 0}}
        for i in range(num_lines)
    ]  # fmt: skip
    data = "\n".join(map(json.dumps, lines)).encode()
    file = sdk.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
    return sdk.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", **({"completion_window": "24h"} | more)
    )


def test_A18_a_batch_runs_behind_online_requests(live: LiveServer, sdk: openai.OpenAI, watch: Watch) -> None:
    """Both slots and more are wanted by the lines of a batch. Each online request beside them is in the first step
    after its arrival, and no line is in a step with its prompt."""
    made = batch(sdk, 120)
    until(lambda: any(off for _, rows in watch.steps for off, _ in rows.values()), "no line has run")
    before = len(watch.steps)
    for i in range(6):
        sdk.completions.create(model="nano", prompt=f"me first, {i}", max_tokens=3)
    after = watch.steps[before:]
    assert sdk.batches.retrieve(made.id).status == "in_progress", "it did not last"
    arrivals = [(waiting, rows) for waiting, rows in after if waiting]
    assert len(arrivals) == 6
    for waiting, rows in arrivals:
        assert waiting <= set(rows), "it waited a step"
        assert not any(offline for offline, _ in rows.values()), "a line ran beside its prompt"
    assert any(off for _, rows in after for off, _ in rows.values()), "the gaps were not used"
    gate: Any = live.server.service.admission  # type: ignore[union-attr]
    assert gate.num_waiting == 0, "offline work is no load to those who come"
    text = httpx.get(live.url + "/metrics").text
    assert _value(text, "penstock:offline_tokens_total") > 0
    assert "penstock:num_offline_requests{" in text
    sdk.batches.cancel(made.id)
    until(lambda: sdk.batches.retrieve(made.id).status == "cancelled", "it is not cancelled")


def _value(text: str, name: str) -> float:
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def test_A18_a_background_response_is_offline_unless_it_says_otherwise(sdk: openai.OpenAI, watch: Watch) -> None:
    for tier, offline in ((None, True), ("auto", True), ("flex", True), ("default", False)):
        more = {} if tier is None else {"service_tier": tier}
        watch.steps.clear()
        made = sdk.responses.create(input="a", model="nano", background=True, max_output_tokens=4, **more)  # type: ignore[call-overload]
        until(lambda made=made: sdk.responses.retrieve(made.id).status != "in_progress", "it has not ended")
        assert {off for _, rows in watch.steps for off, _ in rows.values()} == {offline}, tier
        assert made.service_tier == ("flex" if offline else "default")
    watch.steps.clear()
    sdk.responses.create(input="a", model="nano", max_output_tokens=4)
    assert not any(off for _, rows in watch.steps for off, _ in rows.values())


def test_the_tier_is_a_field_or_a_header(live: LiveServer, sdk: openai.OpenAI, watch: Watch) -> None:
    message = {"role": "user", "content": "a"}
    chat = {"model": "nano", "messages": [message], "max_tokens": 3}
    asked: list[tuple[str, dict[str, Any], dict[str, str], bool]] = [
        ("/v1/chat/completions", chat | {"service_tier": "flex"}, {}, True),
        ("/v1/completions", {"model": "nano", "prompt": "a", "max_tokens": 3, "service_tier": "flex"}, {}, True),
        ("/v1/chat/completions", chat, {"X-Service-Tier": "flex"}, True),
        ("/v1/messages", chat, {"X-Service-Tier": "flex"}, True),
        ("/v1/chat/completions", chat | {"service_tier": "priority"}, {"X-Service-Tier": "flex"}, False),
        ("/v1/chat/completions", chat, {}, False),
    ]
    for path, body, headers, offline in asked:
        watch.steps.clear()
        assert httpx.post(live.url + path, json=body, headers=headers, timeout=60).status_code == 200
        assert {off for _, rows in watch.steps for off, _ in rows.values()} == {offline}, (path, headers)
    for body, headers, param in (
        (chat | {"service_tier": "slow"}, {}, "service_tier"), (chat, {"X-Service-Tier": "slow"}, "X-Service-Tier"),
    ):  # fmt: skip
        refused = httpx.post(live.url + "/v1/chat/completions", json=body, headers=headers, timeout=60)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param)
        assert "auto, default, flex" in error["message"]


def test_a_batch_is_served_like_others_in_the_last_part_of_its_window(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 24 hours the first 18 are offline: a line that is asked behind 17 has one left, one behind 20 none."""
    assert live.server is not None
    runner, told = live.server.parts["batches"], []

    async def post(app: Any, path: str, body: bytes, tenant: Tenant, request_id: str, offline_s: float) -> None:
        told.append(offline_s)

    monkeypatch.setattr("penstock.server.batches.runner.post", post)
    hour = 3600
    made = BatchObject(
        id="batch_x", endpoint="/v1/completions", model="nano", input_file_id="file-x", completion_window="24h",
        status="in_progress", created_at=1000, expires_at=1000 + 24 * hour, request_counts=RequestCounts(),
    )  # fmt: skip

    async def ask() -> None:
        for hours in (0, 17, 20):
            monkeypatch.setattr(runner, "_wall_s", lambda hours=hours: 1000 + hours * hour)
            await runner._asker(ANYONE, made)("/v1/completions", b"{}", "x")

    asyncio.run(ask())
    assert told == [18 * hour, hour, 0]


def test_offline_work_has_a_line_of_its_own(live: LiveServer) -> None:
    """It does not count for those online; with as many as the server takes there, more are refused with 429."""
    assert live.server is not None
    gate: Any = live.server.service.admission
    waiting, gate._num_offline = gate.num_waiting, 10**6
    try:
        assert gate.num_waiting == waiting
        with pytest.raises(RefusedError, match="offline work already") as caught:
            gate._check_offline()
        assert caught.value.status == 429
        gate._check_queue(ANYONE, 1, 0)
    finally:
        gate._num_offline = 0


def test_unknown_policies_of_offline_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="offline_policy: unknown") as caught:
        check_names(from_kwargs(model="m", offline_policy="lifo"))
    assert caught.value.field == "offline_policy"
