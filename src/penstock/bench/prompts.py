"""What is asked: prompts made up to a length, or from local files of conversations and traces."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.errors import ConfigError
from penstock.bench import DATASETS

MOONCAKE_BLOCK = 512
"""Tokens that one of the trace's hash ids stands for. Source: Mooncake's FAST25 traces."""

# Common words, a token each in most vocabularies.
_COMMON = (
    "the of and to in is that it was for on are with as they be at one have this from by hot word but what some we "
    "can out other were all there when up use your how said an each she which do their time if will way about many "
    "then them write would like so these her long make thing see him two has look more day could go come did number "
    "sound no most people my over know water than call first who may down side been now find any new work part take "
    "get place made live where after back little only round man year came show every good me give our under name very "
    "through just form sentence great think say help low line differ turn cause much mean before move right boy old "
    "too same tell does set three want air well also play small end put home read hand port large spell add even land "
    "here must big high such follow act why ask men change went light kind off need house picture try us again animal "
    "point"
)
WORDS = _COMMON.split()


@dataclass(frozen=True)
class Sample:
    """One request. Units: tokens; `arrival_s` seconds from the trace's beginning, None if the rate decides.

    `prompt_len` is what was intended; servers say what it was. `output_len` None leaves the end to the server.
    """

    prompt: str | list[int]
    prompt_len: int
    output_len: int | None
    arrival_s: float | None = None


class Maker:
    """Makes prompts of so many tokens: of ids from `pool`, or without one of words, `tokens_per_word` each."""

    def __init__(self, pool: list[int] | None = None, tokens_per_word: float = 1.0) -> None:
        self._pool = pool
        self._tokens_per_word = max(tokens_per_word, 0.1)

    def draw(self, rng: np.random.Generator, num_tokens: int) -> list[Any]:
        if self._pool is not None:
            return [self._pool[i] for i in rng.integers(0, len(self._pool), num_tokens)]
        num_words = max(1, round(num_tokens / self._tokens_per_word)) if num_tokens else 0
        return [WORDS[i] for i in rng.integers(0, len(WORDS), num_words)]

    def join(self, drawn: list[Any]) -> str | list[int]:
        return drawn if self._pool is not None else " ".join(drawn)

    def count(self, text: str) -> int:
        """About how many tokens a text has."""
        return max(1, round(len(text.split()) * self._tokens_per_word))


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Which prompts. Names are those of vLLM's flags."""

    name: str = "random"
    path: str | None = None
    num_prompts: int = 1000
    seed: int = 0
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    output_len: int | None = None
    """Instead of what the file says (sharegpt, custom)."""
    max_input_len: int | None = None
    max_output_len: int | None = None
    trace_speed: float = 1.0
    disable_shuffle: bool = False

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            raise ConfigError(f"dataset_name must be one of {', '.join(DATASETS)}", field="dataset_name")
        if self.num_prompts < 1:
            raise ConfigError("num_prompts must be at least 1", field="num_prompts")
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError("random_range_ratio must be from 0 to below 1", field="random_range_ratio")
        if self.random_input_len < 1 or self.random_output_len < 1 or self.random_prefix_len < 0:
            raise ConfigError("lengths must be at least 1 token", field="random_input_len")
        if not self.trace_speed > 0:
            raise ConfigError("trace_speed must be above 0", field="trace_speed")
        if self.name not in ("random", "prefix_repetition") and self.path is None:
            raise ConfigError(f"dataset {self.name!r} needs a file: --dataset-path", field="dataset_path")


def make_samples(data: Dataset, maker: Maker) -> list[Sample]:
    """Equal seeds make equal samples. Raises ConfigError."""
    rng = np.random.default_rng(data.seed)
    match data.name:
        case "random":
            return _random(data, maker, rng)
        case "prefix_repetition":
            return _prefixes(data, maker, rng)
        case "sharegpt" | "custom":
            return _texts(data, maker, rng)
    return _trace(data, maker)


def _random(data: Dataset, maker: Maker, rng: np.random.Generator) -> list[Sample]:
    prefix = maker.draw(rng, data.random_prefix_len)
    out = []
    for _ in range(data.num_prompts):
        lens = [_around(rng, n, data.random_range_ratio) for n in (data.random_input_len, data.random_output_len)]
        prompt = maker.join(prefix + maker.draw(rng, lens[0]))
        out.append(Sample(prompt, data.random_prefix_len + lens[0], lens[1]))
    return out


def _around(rng: np.random.Generator, middle: int, ratio: float) -> int:
    low, high = max(1, int(middle * (1 - ratio))), int(middle * (1 + ratio))
    return int(rng.integers(low, high + 1))


def _prefixes(data: Dataset, maker: Maker, rng: np.random.Generator) -> list[Sample]:
    if data.prefix_repetition_num_prefixes < 1 or data.prefix_repetition_suffix_len < 1:
        raise ConfigError("prefix_repetition needs a prefix and a suffix", field="prefix_repetition_num_prefixes")
    length = data.prefix_repetition_prefix_len
    prefixes = [maker.draw(rng, length) for _ in range(data.prefix_repetition_num_prefixes)]
    out = []
    for i in range(data.num_prompts):
        prompt = maker.join(prefixes[i % len(prefixes)] + maker.draw(rng, data.prefix_repetition_suffix_len))
        out.append(Sample(prompt, length + data.prefix_repetition_suffix_len, data.prefix_repetition_output_len))
    return [out[i] for i in rng.permutation(len(out))]


# -- files of texts ----------------------------------------------------------------------------------------------


def _texts(data: Dataset, maker: Maker, rng: np.random.Generator) -> list[Sample]:
    assert data.path is not None
    pairs = list(_sharegpt(data.path) if data.name == "sharegpt" else _custom(data.path))
    if not pairs:
        raise ConfigError(f"{data.path}: has no usable prompts", field="dataset_path")
    order = range(len(pairs)) if data.disable_shuffle else [int(i) for i in rng.permutation(len(pairs))]
    out = []
    for i in itertools.islice(itertools.cycle(order), data.num_prompts):
        prompt, answer = pairs[i]
        said = answer if isinstance(answer, int) else maker.count(answer) if answer is not None else None
        wanted = data.output_len if data.output_len is not None else said
        if wanted is not None and data.max_output_len is not None:
            wanted = min(wanted, data.max_output_len)
        out.append(Sample(prompt, maker.count(prompt), wanted))
    return out


def _sharegpt(path: str) -> Iterator[tuple[str, str | int | None]]:
    """First question and first answer of each conversation."""
    try:
        entries = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}", field="dataset_path") from None
    for entry in entries if isinstance(entries, list) else []:
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        said = [t.get("value") for t in turns[:2] if isinstance(t, dict)] if isinstance(turns, list) else []
        texts = [text for text in said if isinstance(text, str) and text]
        if len(texts) == 2:
            yield texts[0], texts[1]


def _custom(path: str) -> Iterator[tuple[str, str | int | None]]:
    """JSON lines with `prompt` and, if they like, `output_tokens`."""
    for number, entry in _json_lines(path):
        prompt, wanted = entry.get("prompt"), entry.get("output_tokens")
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f"{path}, line {number}: has no prompt", field="dataset_path")
        yield prompt, wanted if isinstance(wanted, int) else None


def _json_lines(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    entry = json.loads(line)
                    if not isinstance(entry, dict):
                        raise ConfigError(f"{path}, line {number}: is not a JSON object", field="dataset_path")
                    yield number, entry
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: cannot be read as JSON lines: {error}", field="dataset_path") from None


# -- traces: times and lengths, no texts -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    time_s: float | None
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()


def _trace(data: Dataset, maker: Maker) -> list[Sample]:
    assert data.path is not None
    rows = list(itertools.islice(_rows(data.path), data.num_prompts))
    if not rows:
        raise ConfigError(f"{data.path}: has no requests", field="dataset_path")
    times = [row.time_s for row in rows if row.time_s is not None]
    if data.name == "timed_trace" and len(times) < len(rows):
        raise ConfigError(f"{data.path}: has no times; use it as burstgpt, with a rate", field="dataset_path")
    first_s = min(times, default=0.0)
    out = []
    for number, row in enumerate(rows):
        length = max(1, min(row.input_len, data.max_input_len or row.input_len))
        wanted = max(1, min(row.output_len, data.max_output_len or row.output_len))
        sample = Sample(maker.join(_content(row, length, number, data.seed, maker)), length, wanted)
        if data.name == "timed_trace" and row.time_s is not None:
            sample = replace(sample, arrival_s=(row.time_s - first_s) / data.trace_speed)
        out.append(sample)
    return sorted(out, key=lambda s: s.arrival_s or 0.0)


def _content(row: _Row, length: int, number: int, seed: int, maker: Maker) -> list[Any]:
    """Equal blocks of a trace have equal content, so that prefixes repeat as they did."""
    if not row.blocks:
        return maker.draw(np.random.default_rng([seed, 1, number]), length)
    out: list[Any] = []
    left = length
    for block in row.blocks:
        size = min(left, MOONCAKE_BLOCK)
        # The whole block is drawn, then cut: a shorter one begins like the longer one.
        drawn = maker.draw(np.random.default_rng([seed, 2, block]), MOONCAKE_BLOCK)
        out += drawn[: max(1, len(drawn) * size // MOONCAKE_BLOCK)]
        left -= size
        if left <= 0:
            break
    return out


def _rows(path: str) -> Iterator[_Row]:
    if path.endswith((".jsonl", ".json")):
        for number, entry in _json_lines(path):
            try:
                yield _Row(
                    float(entry["timestamp"]) / 1000, int(entry["input_length"]), int(entry["output_length"]),
                    tuple(int(h) for h in entry.get("hash_ids") or ()),
                )  # fmt: skip
            except (KeyError, TypeError, ValueError):
                raise ConfigError(
                    f"{path}, line {number}: needs timestamp (ms), input_length and output_length", field="dataset_path"
                ) from None
        return
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns = _columns(path, reader.fieldnames or ())
            for row in reader:
                if int(float(row[columns[2]])) > 0:  # BurstGPT counts failures as answers of 0 tokens
                    at = None if columns[0] is None else _seconds(row[columns[0]])
                    yield _Row(at, int(float(row[columns[1]])), int(float(row[columns[2]])))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field="dataset_path") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}, line {reader.line_num}: {error}", field="dataset_path") from None


_SHAPES = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),  # Azure 2023 and 2024
    ("Timestamp", "Request tokens", "Response tokens"),  # BurstGPT
    (None, "num_prefill_tokens", "num_decode_tokens"),  # Vidur: lengths only
)


def _columns(path: str, names: Any) -> tuple[str | None, str, str]:
    for shape in _SHAPES:
        if all(name is None or name in names for name in shape):
            return shape
    known = "; ".join(", ".join(n for n in shape if n) for shape in _SHAPES)
    raise ConfigError(f"{path}: its columns are of no known trace ({known})", field="dataset_path")


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        # Azure writes seven digits after the second, Python reads six.
        head, _, rest = text.strip().partition(".")
        digits = "".join(itertools.takewhile(str.isdigit, rest))
        whole = datetime.fromisoformat(head + rest[len(digits) :])
        return whole.timestamp() + (float("0." + digits) if digits else 0.0)
