"""Trace loaders: small samples, broken lines, and the published files where they are at hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from penstock.base.errors import ConfigError, InputError
from penstock.sim.traces import WORKLOADS, TraceOptions, open_trace
from penstock.sim.workload import TimedRequest
from tests.shared import shared

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:46.6805900,879,55"""
MOONCAKE = (
    '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 1500, "input_length": 1024, "output_length": 7, "hash_ids": [0, 2]}\n'
)
VIDUR = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n2015,156,2171,12.9\n"
ALIBABA = (
    "gmt_create,predict_type,predict_status,exec_time_seconds,groupId,prompt_length\n"
    "2024-11-15 16:57:50,TXT_2_IMG,SUCCEED,32.0,G0000,63.0\n2024-11-15 16:57:53,TXT_2_IMG,SUCCEED,43.0,G0001,\n"
)
WINDOWS = "0,4.0,1.0,Gamma,1.0,0.25\n600,0,0,,0,0\n1200,2.0,3.0,Weibull,0.4,0.01\n"
LENGTHS = {
    "0": {"input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{3: 1.0, 4: 0.0}"},
    "1200": {"input_tokens": "{}", "output_tokens": "{}"},
}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_azure(tmp_path: Path) -> None:
    workload = open_trace(write(tmp_path, "x.txt", AZURE))
    requests = list(workload)
    assert workload.num_requests == len(requests) == 3
    assert requests[0] == TimedRequest(0.0, 374, 44)
    assert requests[1].arrival_s == pytest.approx(4.314579, abs=2e-6)
    assert requests[2].arrival_s == 60.0
    zoned = AZURE.replace("5900,", "59+00:00,")
    assert len(list(open_trace(write(tmp_path, "z.csv", zoned)))) == 3


def test_mooncake(tmp_path: Path) -> None:
    workload = open_trace(write(tmp_path, "x.jsonl", MOONCAKE))
    assert workload.block_tokens == 512
    assert list(workload) == [
        TimedRequest(0.0, 600, 5, blocks=(0, 1)),
        TimedRequest(1.5, 1024, 7, blocks=(0, 2)),
    ]


def test_vidur_has_no_times(tmp_path: Path) -> None:
    workload = open_trace(write(tmp_path, "x.csv", VIDUR))
    assert not workload.has_times
    assert [(r.num_prompt, r.num_output) for r in workload] == [(3772, 54), (2015, 156)]


def test_alibaba_takes_times_and_tenants_only(tmp_path: Path) -> None:
    workload = open_trace(write(tmp_path, "x.csv", ALIBABA), TraceOptions(num_prompt=7, num_output=3))
    assert list(workload) == [TimedRequest(0.0, 7, 3, tenant="G0000"), TimedRequest(3.0, 7, 3, tenant="G0001")]


def test_servegen(tmp_path: Path) -> None:
    trace = write(tmp_path, "a-trace.csv", WINDOWS)
    write(tmp_path, "a-dataset.json", json.dumps(LENGTHS))
    requests = list(open_trace(trace))
    assert requests == list(open_trace(tmp_path)), "one client, by file or by folder"
    times = np.array([r.arrival_s for r in requests])
    assert np.all(np.diff(times) >= 0)
    assert not np.any((times >= 600) & (times < 1200)), "a silent window"
    assert np.sum(times < 600) == pytest.approx(2400, rel=0.1)
    bursty = [np.sum([r.arrival_s >= 1200 for r in open_trace(trace, TraceOptions(seed=s))]) for s in range(5)]
    assert np.mean(bursty) == pytest.approx(1200, rel=0.15), "the window's rate counts, not the fitted scale"
    assert {r.num_prompt for r in requests} == {10, 20}
    assert {r.num_output for r in requests} == {3}
    assert np.mean([r.num_prompt == 20 for r in requests]) == pytest.approx(0.75, abs=0.05)
    assert {r.tenant for r in requests} == {"a"}


def test_clients_are_merged_in_order(tmp_path: Path) -> None:
    for client in "ab":
        write(tmp_path, f"{client}-trace.csv", WINDOWS)
        write(tmp_path, f"{client}-dataset.json", json.dumps(LENGTHS))
    requests = list(itertools.islice(open_trace(tmp_path), 500))
    assert {r.tenant for r in requests} == {"a", "b"}
    assert [r.arrival_s for r in requests] == sorted(r.arrival_s for r in requests)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (AZURE.replace("396", "0"), 3, "ContextTokens"),
        (AZURE.replace("396", "-4"), 3, "ContextTokens"),
        (AZURE.replace("396", "1e99"), 3, "ContextTokens"),
        (AZURE.replace("396", "nan"), 3, "ContextTokens"),
        (AZURE.replace(",109", ""), 3, "columns"),
        (AZURE.replace("18:15:50", "17:15:50"), 3, "sort"),
        (AZURE.replace("2023-11-16 18:15:50", "never"), 3, "date"),
        (MOONCAKE.replace("1500", "-1"), 2, "timestamp"),
        (MOONCAKE.replace("1024", "100"), 2, "hash_ids"),
        (MOONCAKE.replace("[0, 2]", "[0, -2]"), 2, "hash_ids"),
        (MOONCAKE.replace("[0, 2]", "[0, 2"), 2, "Mooncake"),
        (MOONCAKE.replace('"output_length": 7', '"output_length": "7"'), 2, "output_length"),
        (VIDUR.replace("2015", "2015.5"), 3, "num_prefill_tokens"),
        (ALIBABA.replace("16:57:53", "16:57:49"), 3, "sort"),
    ],
)
def test_a_broken_line_is_named_or_counted(tmp_path: Path, text: str, line: int, says: str) -> None:
    path = write(tmp_path, "trace", text)
    with pytest.raises(InputError, match=rf"trace:{line}: .*{says}"):
        list(open_trace(path))
    workload = open_trace(path, TraceOptions(skip_broken=True))
    kept = list(workload)
    assert len(kept) == len(text.strip().splitlines()) - 1 - (0 if text.startswith("{") else 1)
    assert workload.broken.count == 1
    assert f"trace:{line}" in workload.broken.first
    list(workload)
    assert workload.broken.count == 1, "counted anew by every iteration"


@pytest.mark.parametrize(
    ("window", "says"),
    [("0,1,1,Pareto,1,1", "Gamma"), ("0,-1,1,Gamma,1,1", "rate"), ("0,1,1,Gamma,0,1", "shape"), ("0,1,1", "columns")],
)
def test_a_broken_window_is_named(tmp_path: Path, window: str, says: str) -> None:
    trace = write(tmp_path, "a-trace.csv", window + "\n")
    write(tmp_path, "a-dataset.json", json.dumps(LENGTHS))
    with pytest.raises(InputError, match=rf"a-trace.csv:1: .*{says}"):
        list(open_trace(trace))


@pytest.mark.parametrize(
    "lengths",
    [
        "[",
        "[]",
        '{"0": {}}',
        '{"0": {"input_tokens": "__import__(1)", "output_tokens": "{1: 1}"}}',
        '{"0": {"input_tokens": "{1: 2}", "output_tokens": "{1: 1}"}}',
        '{"0": {"input_tokens": "{}", "output_tokens": "{}"}}',
    ],
)
def test_a_data_set_is_data(tmp_path: Path, lengths: str) -> None:
    trace = write(tmp_path, "a-trace.csv", WINDOWS)
    write(tmp_path, "a-dataset.json", lengths)
    with pytest.raises(InputError, match=r"a-dataset.json"):
        list(open_trace(trace))


def test_what_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="known format"):
        open_trace(write(tmp_path, "x", "hello\n"))
    with pytest.raises(InputError, match="known format"):
        open_trace(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        open_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="azure2023"):
        open_trace(write(tmp_path, "y", AZURE), format="azur")
    with pytest.raises(InputError, match="header"):
        list(open_trace(write(tmp_path, "z", VIDUR), format="azure2023"))
    long_line = write(tmp_path, "long", MOONCAKE + "x" * 2**23)
    with pytest.raises(InputError, match="long:3: is longer"):
        list(open_trace(long_line))


def test_each_format_recognises_its_own_only(tmp_path: Path) -> None:
    samples = {"azure2023": AZURE, "mooncake": MOONCAKE, "vidur": VIDUR, "alibaba": ALIBABA}
    for name, text in samples.items():
        path = write(tmp_path, name, text)
        seen = [other for other in WORKLOADS if WORKLOADS.get(other)().recognises(path, text.encode())]
        assert seen == [name]


@pytest.mark.parametrize(
    ("name", "rows", "span_s", "mean_prompt", "mean_output"),
    [
        ("azure2023_conv.csv", 19_366, 3502, 1155, 211),
        ("azure2023_code.csv", 8_819, 3436, 2048, 28),
        ("mooncake_conversation.jsonl", 12_031, 3537, 12_035, 343),
        ("vidur_arxiv_summarization_lengths.csv", 28_257, 0, 2588, 291),
        ("alibaba_genai2026_lora_requests.csv", 26_823, 1_989_367, 512, 128),
    ],
)
def test_published_files(name: str, rows: int, span_s: float, mean_prompt: int, mean_output: int) -> None:
    workload = open_trace(shared("data", "traces", name))
    requests = list(workload)
    assert workload.num_requests == len(requests) == rows
    assert requests[-1].arrival_s == pytest.approx(span_s, abs=0.5)
    assert round(np.mean([r.num_prompt for r in requests])) == mean_prompt
    assert round(np.mean([r.num_output for r in requests])) == mean_output


def test_published_prefixes() -> None:
    """Of all blocks, 36.6 % repeat a prefix that came before (what the data's own description says)."""
    seen: set[int] = set()
    total = hits = 0
    for request in open_trace(shared("data", "traces", "mooncake_conversation.jsonl")):
        total += len(request.blocks)
        hits += next((k for k, b in enumerate(request.blocks) if b not in seen), len(request.blocks))
        seen.update(request.blocks)
    assert len(seen) == 182_790
    assert hits / total == pytest.approx(0.366, abs=0.0005)


def test_published_clients() -> None:
    workload = open_trace(shared("data", "traces", "servegen"))
    requests = list(itertools.islice(workload, 5000))
    assert "13 clients" in workload.description
    assert len({r.tenant for r in requests}) >= 9
    assert [r.arrival_s for r in requests] == sorted(r.arrival_s for r in requests)
    rate = len(requests) / requests[-1].arrival_s
    assert 150 < rate < 350, "the clients' rates of the first window add up to about 240 requests per second"
