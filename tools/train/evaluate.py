"""What a model folder can do, measured through Penstock's own `LLM`.

    PYTHONPATH=tools python -m train.evaluate build/nano --corpus ../shared/data/corpus --out build/nano-card

Skills on the test half (exact answers, Wilson intervals), a needle in held-out prose by depth and length, key-value
lookup by position, bits per byte of children's books that nobody was trained on, unselected samples. Writes
evaluation.json, evaluation.md and needle.html; `--n 2 --prose-chars 3000` is a quick look.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock import LLM, SamplingParams
from penstock.eval.intervals import wilson
from train import skills
from train.kneser_ney import baseline
from train.report import heat_map, markdown
from train.text import held_out_prose

BASELINES = {
    "the children's books": ("children",),
    "all prose": ("children", "tinystories", "novels"),
}
"""What a 5-gram is trained on, and the token files of it."""
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (256, 512, 1024, 1536, 2048)
PAIRS = (10, 40, 120)
BINS = 5
BEGINNINGS = ("Once upon a time", "The little girl", '"Where are you going?"', "On a cold winter morning")
CHATS = (
    "Hello!", "Tell me a story about a dog.", "What is 21 + 34?", "I would like to order a pizza.",
    "Tom has the ball. Tom is in the garden.\n\nWho has the ball?", "What is the capital of France?",
)  # fmt: skip
_WINDOW = 1024


def score(rights: Sequence[bool]) -> dict[str, Any]:
    low, high = wilson(sum(rights), len(rights))
    rate = sum(rights) / len(rights) if rights else 0.0
    return {"right": sum(rights), "n": len(rights), "rate": rate, "low": low, "high": high}


def said(text: str) -> str:
    """An answer as it is compared: up to its first full stop or end of line, without spaces around it."""
    return re.split(r"[.\n]", text.strip(), maxsplit=1)[0].strip()


def prose_noise(prose: str) -> skills.Noise:
    """Stretches of `prose` that begin with a word."""

    def noise(rng: random.Random, size: int) -> str:
        start = rng.randrange(max(1, len(prose) - size - 40))
        start = prose.find(" ", start) + 1
        return prose[start : start + size].strip()

    return noise


class Reader:
    """An LLM that is asked questions in batches."""

    def __init__(self, llm: LLM, show_progress: bool = False) -> None:
        self.llm = llm
        self.show_progress = show_progress
        self.tokenizer = llm.get_tokenizer()
        self.bos = llm.engine.spec.bos_token_id
        self.max_len = llm.engine.limits.max_model_len

    def ids(self, text: str) -> list[int]:
        """As in training: the token that begins a text, then the text."""
        ids: list[int] = self.tokenizer.encode(text) if text else []
        return ids if self.bos is None or ids[:1] == [self.bos] else [self.bos, *ids]

    def room(self, exercise: skills.Exercise) -> int:
        """Tokens that an answer may have."""
        return len(self.tokenizer.encode(" " + exercise.answer, add_special_tokens=False)) + 4

    def fits(self, exercise: skills.Exercise) -> bool:
        return len(self.ids(exercise.prompt)) + self.room(exercise) + 16 <= self.max_len

    def answers(self, exercises: Sequence[skills.Exercise], *, chat: bool = False) -> list[str]:
        """What the model says, greedily, one text per exercise."""
        params = [
            SamplingParams(temperature=0, max_tokens=self.room(e), stop=["\n"] if chat else [".", "\n"])
            for e in exercises
        ]
        if not exercises:
            return []
        if chat:
            talks = [[{"role": "user", "content": e.prompt}] for e in exercises]
            outputs = self.llm.chat(talks, params, use_tqdm=self.show_progress)
        else:
            prompts = [{"prompt_token_ids": self.ids(e.prompt)} for e in exercises]
            outputs = self.llm.generate(prompts, params, use_tqdm=self.show_progress)
        return [output.outputs[0].text for output in outputs]

    def rights(self, exercises: Sequence[skills.Exercise], *, chat: bool = False) -> list[bool]:
        found = self.answers(exercises, chat=chat)
        return [said(text) == said(e.answer) for text, e in zip(found, exercises, strict=True)]


def skill_scores(reader: Reader, prose: str, n: int, seed: int = 0) -> dict[str, dict[str, Any]]:
    """skill -> form ("plain", and "chat" if there is a template) -> score. Contexts of 60 to 2400 characters."""
    noise = prose_noise(prose)
    forms = ("plain", "chat") if reader.llm.engine.chat_template is not None else ("plain",)
    out: dict[str, dict[str, Any]] = {}
    for name, make in skills.SKILLS.items():
        rng = random.Random(f"{name} {seed}")
        exercises = []
        for i in range(n):
            size = int(60 * 40 ** (i / max(1, n - 1)))
            made = make(rng, "test", size, noise)
            while not reader.fits(made) and size > 20:
                size //= 2
                made = make(rng, "test", size, noise)
            exercises.append(made)
        exercises = [e for e in exercises if reader.fits(e)]
        out[name] = {form: score(reader.rights(exercises, chat=form == "chat")) for form in forms}
    return out


def needle_grid(reader: Reader, prose: str, n: int, lengths: Iterable[int] = LENGTHS, seed: int = 0) -> dict[str, Any]:
    """Rates by depth (rows) and length in tokens (columns); lengths beyond the model's context are cut to it."""
    rng = random.Random(seed)
    noise = prose_noise(prose)
    sample = prose[:20000]
    per_token = len(sample) / len(reader.tokenizer.encode(sample, add_special_tokens=False))
    lengths = sorted({min(length, reader.max_len) for length in lengths})
    cells: dict[tuple[float, int], list[skills.Exercise]] = {}
    for depth in DEPTHS:
        for length in lengths:
            cells[depth, length] = [_needle(reader, rng, noise, depth, length, per_token) for _ in range(n)]
    rights = iter(reader.rights([e for cell in cells.values() for e in cell]))
    scores = {key: score([next(rights) for _ in cell]) for key, cell in cells.items()}
    means = [
        sum(len(reader.ids(e.prompt)) for d in DEPTHS for e in cells[d, length]) / (n * len(DEPTHS))
        for length in lengths
    ]
    return {
        "depths": list(DEPTHS), "lengths": lengths, "mean_tokens": means,
        "scores": [[scores[depth, length] for length in lengths] for depth in DEPTHS],
    }  # fmt: skip


def _needle(
    reader: Reader, rng: random.Random, noise: skills.Noise, depth: float, length: int, per_token: float
) -> skills.Exercise:
    """A prompt of at most `length` tokens, its answer included, and not much less."""
    size = int((length - 60) * per_token)
    while True:
        made = skills.hidden(rng, "test", max(size, 0), noise, depth)
        over = len(reader.ids(made.prompt)) + reader.room(made) + 16 - length
        if over <= 0 or size <= 0:
            return made
        size -= int((over + 2) * per_token)


def lookup_grid(reader: Reader, n: int, pairs: Iterable[int] = PAIRS, seed: int = 0) -> dict[str, Any]:
    """Rates by the number of pairs (rows) and where the wanted one stands (columns, fifths of the list)."""
    rng = random.Random(seed)
    kept, rows = [], []
    for count in pairs:
        cells: list[list[skills.Exercise]] = [[] for _ in range(BINS)]
        while any(len(cell) < n for cell in cells):
            made = skills.lookup(rng, "test", 14 * count, lambda r, size: "")
            at = min(int((made.depth or 0.0) * BINS), BINS - 1)
            if not reader.fits(made):
                break
            if len(cells[at]) < n:
                cells[at].append(made)
        if all(len(cell) == n for cell in cells):
            rights = iter(reader.rights([e for cell in cells for e in cell]))
            kept.append(count)
            rows.append([score([next(rights) for _ in cell]) for cell in cells])
    return {"pairs": kept, "bins": BINS, "scores": rows}


def bits_per_byte(reader: Reader, prose: str) -> dict[str, Any]:
    """Of a text from its beginning; each token sees at least half a window before it (but at the text's beginning)."""
    ids = reader.ids(prose)
    skipped = 0 if ids[0] == reader.bos else len(reader.tokenizer.decode(ids[:1]).encode())
    window = min(_WINDOW, reader.max_len - 1)
    starts = range(0, max(1, len(ids) - window // 2), max(1, window // 2))
    outputs = reader.llm.generate(
        [{"prompt_token_ids": ids[start : start + window]} for start in starts],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False),
        use_tqdm=reader.show_progress,
    )
    bits, done = 0.0, 1
    for start, output in zip(starts, outputs, strict=True):
        entries = output.prompt_logprobs or []
        for at in range(done - start, len(entries)):
            bits -= (entries[at] or {})[ids[start + at]].logprob / math.log(2)
        done = start + len(entries)
    assert done == len(ids), "every token is counted once"
    num_bytes = len(prose.encode()) - skipped
    return {"bits_per_byte": bits / num_bytes, "bytes": num_bytes, "tokens": len(ids) - 1}


def samples(reader: Reader, n: int = 20) -> list[dict[str, str]]:
    """Unselected: sample i has seed i."""
    begins = [BEGINNINGS[i % len(BEGINNINGS)] for i in range(n)]
    outputs = reader.llm.generate(
        [{"prompt_token_ids": reader.ids(text)} for text in begins],
        [SamplingParams(temperature=0.8, max_tokens=min(120, reader.max_len - 40), seed=i) for i in range(n)],
        use_tqdm=reader.show_progress,
    )
    return [{"prompt": p, "text": output.outputs[0].text} for p, output in zip(begins, outputs, strict=True)]


def chats(reader: Reader) -> list[dict[str, str]]:
    """Greedy answers to fixed questions; none without a chat template."""
    if reader.llm.engine.chat_template is None:
        return []
    talks = [[{"role": "user", "content": text}] for text in CHATS]
    outputs = reader.llm.chat(talks, SamplingParams(temperature=0, max_tokens=60), use_tqdm=reader.show_progress)
    return [{"prompt": p, "text": output.outputs[0].text} for p, output in zip(CHATS, outputs, strict=True)]


def evaluate(llm: LLM, prose: str, n: int, *, prose_chars: int = 0, console: Console | None = None) -> dict[str, Any]:
    """Everything but the baseline. `prose_chars`: how much of `prose` is measured, 0 for all."""
    reader = Reader(llm, show_progress=console is not None)
    parts: dict[str, Callable[[], Any]] = {
        "skills": lambda: skill_scores(reader, prose, n),
        "needle": lambda: needle_grid(reader, prose, max(1, n // 5)),
        "lookup": lambda: lookup_grid(reader, max(1, n // 5)),
        "prose": lambda: bits_per_byte(reader, prose[:prose_chars] if prose_chars else prose),
        "samples": lambda: samples(reader),
        "chats": lambda: chats(reader),
    }
    spec = llm.engine.spec
    out: dict[str, Any] = {"parameters": spec.num_params, "dtype": spec.dtype, "context": reader.max_len, "n": n}
    for name, part in parts.items():
        if console is not None:
            console.print(name)
        out[name] = part()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with the children's books")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prepared", type=Path, help="folder that train.corpus wrote: adds the 5-gram baseline")
    parser.add_argument("--n", type=int, default=100, help="exercises per skill; a fifth of it per cell of the grids")
    parser.add_argument("--prose-chars", type=int, default=0, help="held-out prose to measure; 0: all")
    args = parser.parse_args()
    console = Console(stderr=True)
    prose = held_out_prose(args.corpus)
    found = evaluate(LLM(args.model), prose, args.n, prose_chars=args.prose_chars, console=console)
    if args.prepared is not None:
        console.print("baseline")
        measured = prose[: args.prose_chars or None]
        found["prose"]["kneser_ney"] = {
            called: baseline(args.prepared, measured, names) for called, names in BASELINES.items()
        }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "evaluation.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
    (args.out / "evaluation.md").write_text(markdown(found), "utf-8")
    (args.out / "needle.html").write_text(heat_map(found["needle"]), "utf-8")
    console.print(f"wrote evaluation.json, evaluation.md and needle.html to {args.out}")


if __name__ == "__main__":
    main()
