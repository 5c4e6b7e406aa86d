"""How well output lengths of a real model are predicted: by history, by a classifier, by the model's own word.

    PYTHONPATH=. python benchmarks/quality/lengths.py MODEL [--data FOLDER] [--prompts 100] [--seconds 60]
        --state FILE.json [--out RESULT.json]

Answers are greedy, of at most `--tokens` tokens, to questions of the tasks below in the model's chat template. They are
written to `--state`; who runs out of `--seconds` is called again and goes on. Then requests are predicted one after the
other, in an order of a fixed seed, and learned from as they end: what a server would have known at each moment. Tasks
are tenants. `always the median` knows the lengths of all answers before, and nothing of a prompt: the line to beat.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from benchmarks.common import about, save, show
from benchmarks.quality.agreement import questions
from rich.console import Console

from penstock import LLM, SamplingParams
from penstock.core.protocols import LengthPredictor
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.lengths.asked import QUESTION, AskedPredictor
from penstock.lengths.history import HistoryPredictor
from penstock.lengths.learned import LearnedPredictor
from penstock.lengths.score import Accuracy

TASKS = ("spec_bench", "gsm8k_test", "mbpp", "truthfulqa", "nq_open_oracle")
COLUMNS = ("predictor", "predicted", "in their bucket", "longer", "mean error, tokens", "rank correlation")
SETTINGS = {"max_model_len": 1536, "max_num_seqs": 16}
Answer = dict[str, Any]


class Always:
    """The median of what has ended."""

    name = "always the median"

    def __init__(self) -> None:
        self._seen: list[int] = []

    def question(self, request: Request) -> Request | None:
        return None

    def predict(self, request: Request, answer: Sequence[int]) -> int:
        return round(median(self._seen)) if self._seen else 0

    def learn(self, request: Request, num_generated: int) -> None:
        self._seen.append(num_generated)


class Kept:
    """In place of a tokenizer: what the model said is kept as text."""

    def __init__(self) -> None:
        self.said = ""

    def decode(self, ids: Sequence[int]) -> str:
        return self.said


def drawn(folder: Path, count: int) -> list[tuple[str, str]]:
    """(task, question) of the tasks in turns, in an order of a fixed seed."""
    rng, found = np.random.default_rng(0), []
    for task in TASKS:
        texts = questions(folder / f"{task}.jsonl")
        found.append([(task, texts[i]) for i in rng.permutation(len(texts))])
    mixed = [texts[n] for n in range(max(map(len, found))) for texts in found if n < len(texts)][:count]
    return [mixed[i] for i in rng.permutation(len(mixed))]


def answered(llm: LLM, asked: Sequence[tuple[str, str]], most: int) -> list[Answer]:
    """Lengths of answers, and what the model says of them when it is asked first."""
    params = SamplingParams(temperature=0.0, max_tokens=most)
    full = llm.chat([[{"role": "user", "content": text}] for _, text in asked], params)
    tokenizer = llm.get_tokenizer()
    words = [{"prompt_token_ids": [*o.prompt_token_ids, *tokenizer.encode_inner(QUESTION)]} for o in full]
    said = llm.generate(words, SamplingParams(temperature=0.0, max_tokens=6))
    return [
        {"task": task, "prompt": list(o.prompt_token_ids), "tokens": len(o.outputs[0].token_ids),
         "said": s.outputs[0].text, "ended": o.outputs[0].finish_reason}
        for (task, _), o, s in zip(asked, full, said, strict=True)
    ]  # fmt: skip


def scored(predictor: LengthPredictor, answers: Sequence[Answer], most: int) -> Accuracy:
    """Each is predicted from those before it."""
    score, kept = Accuracy(), Kept()
    if isinstance(predictor, AskedPredictor):
        predictor.tokenizer = kept  # type: ignore[assignment]
    for number, one in enumerate(answers):
        request = Request(
            request_id=str(number), prompt_token_ids=one["prompt"], rules=TokenRules(), max_tokens=most,
            tenant=one["task"],
        )  # fmt: skip
        kept.said = one["said"]
        score.add(predictor.predict(request, [0]), one["tokens"])
        predictor.learn(request, one["tokens"])
    return score


def row(name: str, score: Accuracy) -> list[str]:
    if score.num == 0:
        return [name, "0", *["-"] * 4]
    rho = score.correlation
    return [name, f"{score.num}", f"{score.num_hits / score.num:.0%}", f"{score.num_outgrown / score.num:.0%}",
            f"{score.error_tokens / score.num:.1f}", "-" if rho is None else f"{rho:.2f}"]  # fmt: skip


def continued(args: argparse.Namespace) -> list[Answer]:
    """What `--state` has, and as many more as there is time for."""
    began = time.monotonic()
    wanted = drawn(args.data, args.prompts)
    state: dict[str, Any] = json.loads(args.state.read_text("utf-8")) if args.state.exists() else {}
    key = {"model": args.model, "prompts": args.prompts, "tokens": args.tokens}
    answers: list[Answer] = state["answers"] if state.get("key") == key else []
    if len(answers) < len(wanted):
        llm = LLM(args.model, **SETTINGS)
        longest = 0.0
        while len(answers) < len(wanted) and time.monotonic() - began + longest < args.seconds:
            before = time.monotonic()
            answers += answered(llm, wanted[len(answers) : len(answers) + SETTINGS["max_num_seqs"]], args.tokens)
            longest = max(longest, time.monotonic() - before)
            args.state.write_text(json.dumps({"key": key, "answers": answers}), "utf-8")
    print(f"{len(answers)} of {len(wanted)} answers")
    return answers


def summary(answers: Sequence[Answer]) -> Mapping[str, Any]:
    lengths = [one["tokens"] for one in answers]
    numbers = [int(found[0][:6]) for one in answers if (found := re.search(r"\d+", one["said"])) is not None]
    return {"answers": len(answers), "cut off at the limit": sum(one["ended"] == "length" for one in answers),
            "median tokens": median(lengths), "said a number": len(numbers),
            "different numbers": len(set(numbers))}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/eval"), help="folder with the tasks' files")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=192, help="of an answer at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="of this call, about")
    parser.add_argument("--state", type=Path, required=True, help="answers so far")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    answers = continued(args)
    if not answers:
        return
    rows = [
        row(predictor.name, scored(predictor, answers, args.tokens))
        for predictor in (Always(), HistoryPredictor(quantile=0.5), LearnedPredictor(quantile=0.5), AskedPredictor())
    ]
    show(Console(), "lengths of answers", COLUMNS, rows)
    print(summary(answers))
    if args.out is not None and len(answers) == args.prompts:
        told = {"columns": COLUMNS, "rows": rows} | summary(answers)
        save(str(args.out), about(model=Path(args.model).name, tokens=args.tokens) | told)


if __name__ == "__main__":
    main()
