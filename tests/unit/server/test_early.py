"""B15: what the front end knows of engines with roles when it refuses before a prompt is spent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.base.errors import ConfigError
from penstock.core.messages import EngineInfo, EngineSnapshot
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.server.admission.early import EarlyRejection, mode_of

INFO = EngineInfo(
    vocab_size=100, max_model_len=512, block_size=16, num_blocks=256, max_num_seqs=2, alone_s=[(1, 0.01), (100, 0.1)]
)


def engine(role: str, state: str = "ready", **said: Any) -> Any:
    return SimpleNamespace(role=role, state=state, draining=False, snapshot=EngineSnapshot(**said))


def early(*replicas: Any, mode: str = "predicted") -> EarlyRejection:
    client = SimpleNamespace(replicas=list(replicas), find=lambda name: None)
    return EarlyRejection(cast("Any", client), INFO, mode)


def taken(started: bool, out: float = 50, work: float = 100) -> Any:
    request = Request(request_id="x", prompt_token_ids=[1] * 100, rules=TokenRules(), max_tokens=50)
    progress = SimpleNamespace(request=request, out=out, width=1, work=work)
    return SimpleNamespace(progress=progress, stream=None, started=started)


def asked(slo_s: float | None = None) -> Request:
    return Request(
        request_id="y", prompt_token_ids=[1] * 100, rules=TokenRules(), max_tokens=50, slo_ttft_s=slo_s, arrival_s=0.0
    )


def test_speeds_are_those_of_engines_of_each_kind_and_of_the_cost_model_until_then() -> None:
    pools = early(engine("prefill", prefill_token_s=0.002), engine("decode", decode_s=[0.02]), engine("decode"))
    speed = pools.speed()
    assert speed is not None
    assert (speed.prefills, speed.decodes, speed.slots, speed.kv_tokens) == (1, 2, 4, 2 * 4096)
    assert speed.prompt_token_ns == 2_000_000
    assert speed.step_us(1) == 20_000
    fresh = early(engine("prefill"), engine("decode")).speed()
    assert fresh is not None
    assert fresh.prompt_token_ns == 1_000_000
    assert fresh.step_us(1) == 10_000


def test_B15_an_engine_that_has_died_has_no_places() -> None:
    """Three are there of four places; when one of the two that decode dies, there are two, and the next is refused."""
    there = [taken(True) for _ in range(3)]
    whole = early(engine("prefill"), engine("decode"), engine("decode"))
    less = early(engine("prefill"), engine("decode"), engine("decode", "restarting"))
    one, other = (pools.judge(asked(), 100, 50, 1, None, there) for pools in (whole, less))
    assert one is not None
    assert other is not None
    assert one.retry_us is None
    assert other.retry_us is not None
    assert whole.shown(there, 7) == {"mode": "predicted", "places": 4, "decoding": 3, "prompts": 0, "refused": 7}


def test_where_nobody_of_a_kind_is_ready_others_stand_in() -> None:
    alone = early(engine("prefill"), engine("decode", "starting")).speed()
    assert alone is not None
    assert (alone.prefills, alone.decodes) == (1, 1)
    assert early(engine("prefill", "failed"), engine("decode", "failed")).speed() is None
    nothing = early(engine("decode", "failed")).judge(asked(), 100, 50, 1, None, [])
    assert nothing is None


def test_first_tokens_in_time() -> None:
    pools, queue = early(engine("prefill"), engine("decode"), mode="now"), [taken(False)] * 3
    late = pools.judge(asked(), 100, 50, 1, 0.25, queue)
    assert late is not None
    assert late.retry_us == 150_000
    assert "its first token would take about 0.4 s" in late.why


def test_a_mode_needs_roles() -> None:
    assert mode_of("off", None) is None
    assert mode_of("now", "prefill=1,decode=1") == "now"
    with pytest.raises(ConfigError, match="give replica_roles, too"):
        mode_of("predicted", None)
