"""Perplexity of a fixed text in fixed windows, read by the engine itself. Conditions: `eval.perplexity`."""

from __future__ import annotations

import math
from pathlib import Path

from penstock.base.errors import InputError
from penstock.eval.perplexity import beginning, cut
from penstock.eval.sample import SAMPLE
from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Reading, Task
from penstock.eval.tasks.files import MAX_BYTES
from penstock.formats.files import quoted, read_text


class Perplexity(Task):
    """A window is an example; its tokens and bytes are its weights. Bytes of a window: its share of the text's, by
    tokens, so that only their sum is exact."""

    name = "perplexity"
    kind: Kind = "perplexity"
    metrics: tuple[Metric, ...] = (Metric("perplexity", "perplexity"), Metric("bits_per_byte", "bits"))
    axes: tuple[str, ...] = ()
    source = "a text in windows that overlap by half, every token counted once"

    def __init__(self, text: str, max_tokens: int, window: int, stride: int) -> None:
        self.text, self.max_tokens, self.window, self.stride = text, max_tokens, window, stride

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        """All windows of the text's first `max_tokens` tokens: neither seed nor limit change them."""
        window = min(512, reader.room - 1) if self.window == 0 else self.window
        stride = max(1, window // 2) if self.stride == 0 else self.stride
        if not 2 <= window < reader.room:
            raise InputError(f"task 'perplexity': window must be 2 to {reader.room - 1}, not {window}", param="tasks")
        if stride >= window:
            raise InputError(f"task 'perplexity': stride must be less than the window, {window}, not {stride}",
                             param="tasks")  # fmt: skip
        text = beginning(self.text, reader.tokenizer, self.max_tokens)
        ids = reader.ids(text)
        if len(ids) < 2:
            raise InputError("task 'perplexity': the text has fewer than two tokens", param="tasks")
        begins = ids[0] == reader.tokenizer.bos_id
        skipped = 0 if begins else len(reader.tokenizer.decode(ids[:1]).encode())
        windows = cut(ids, window, stride, ids[0] if begins else None)
        per_token = max(1, len(text.encode()) - skipped) / (len(ids) - 1)
        return [
            Example(
                None, readings=(Reading(tuple(w.token_ids), w.first),), tags={"window": i},
                weights={"perplexity": w.num_counted, "bits_per_byte": w.num_counted * per_token},
            )
            for i, w in enumerate(windows)
        ]  # fmt: skip

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        nats = -math.fsum(answer.logprobs)
        return {"perplexity": nats, "bits_per_byte": nats}


def make(path: Path | None, options: Options) -> Task:
    text = SAMPLE if path is None else read_text(path, MAX_BYTES)
    if not text.strip():
        raise InputError(f"{quoted(path)} is empty", param="tasks")
    return Perplexity(
        text, options.number("tokens", 4096, 2, 1 << 30), options.number("window", 0, 2, 1 << 24),
        options.number("stride", 0, 1, 1 << 24),
    )  # fmt: skip
