"""Greedy texts of Penstock and llama.cpp from one GGUF file, and whose token float32 prefers where they part.

    LLAMA_CPP_LIB_PATH=BUILD/bin PYTHONPATH=. python benchmarks/quality/agreement.py MODEL.gguf [MODEL.gguf ...]
        --llama-cpp PYTHON --raw FILE [FILE ...] --chat FILE.jsonl [FILE.jsonl ...] [--prompts 50] [--out FILE.json]
        [--settings '{"activation_quantization": "none"}' --again RESULT.json]

Both continue the same token ids by `--new` tokens and go on behind ends of texts. Half of the prompts are questions in
the model's chat template (the first of `turns`, `question`, `prompt` or `text` of a line), half the beginnings of
passages, cut to 48 tokens; all are passages where the file has no template.

Two engines that round differently part where two tokens are nearly as likely, and what follows is another text. So a
text is judged once: at its first difference, by what float32 expects there (the file's weights as they are,
activations, keys and values in float32). Where its two best logits are at most `--near` apart, either token is right.
Elsewhere the difference *counts*, and the table tells whose token is float32's own. `--again` takes llama.cpp's texts
from an earlier result, for other settings of Penstock on the same prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import about, save, show
from benchmarks.quality.deviation import FLOAT32, ORACLE, Logits, passages, penstock
from rich.console import Console
from rich.progress import track

from penstock import LLM
from penstock.base.errors import InputError
from penstock.core.sampling import SamplingParams

RAW_TOKENS, CHAT_CHARACTERS = 48, 800
OURS, THEIRS, NEITHER = "penstock", "llama.cpp", "neither"
COLUMNS = ("file", "texts", "alike", "parted at a near tie", "count", "float32 says Penstock", "llama.cpp", "neither")


def questions(file: Path) -> list[str]:
    """What a user may say, of a .jsonl file; long ones are left out."""
    found = []
    for line in file.read_text("utf-8").splitlines():
        entry = json.loads(line)
        said = next((entry[key] for key in ("turns", "question", "prompt", "text") if key in entry), None)
        said = said[0] if isinstance(said, list) and said else said
        if isinstance(said, str) and 0 < len(said) <= CHAT_CHARACTERS:
            found.append(said)
    return found


def drawn(files: Sequence[Sequence[str]], count: int) -> list[str]:
    """`count` texts, of the files in turns, each file's in an order of a fixed seed. SystemExit if there are fewer."""
    rng = np.random.default_rng(0)
    shuffled = [[texts[i] for i in rng.permutation(len(texts))] for texts in files]
    found = [texts[n] for n in range(max(map(len, shuffled), default=0)) for texts in shuffled if n < len(texts)]
    if len(found) < count:
        raise SystemExit(f"the files have {len(found)} texts and {count} are wanted: name more of --raw and --chat")
    return found[:count]


def prompts(llm: LLM, raw: Sequence[str], chat: Sequence[str]) -> list[tuple[str, list[int]]]:
    """("chat" or "raw", token ids) of every prompt that the model takes; of a model without a template no chat."""
    first = SamplingParams(temperature=0.0, max_tokens=1)
    found = []
    for said in chat:
        try:
            (answer,) = llm.chat([{"role": "user", "content": said}], first)
        except InputError:
            return [("raw", raw_ids(llm, text)) for text in raw]
        found.append(("chat", list(answer.prompt_token_ids)))
    return found + [("raw", raw_ids(llm, text)) for text in raw[: len(raw) - len(found)]]


def raw_ids(llm: LLM, text: str) -> list[int]:
    assert llm.engine.tokenizer is not None, "a GGUF file has its tokenizer"
    return llm.engine.tokenizer.encode(text[: 16 * RAW_TOKENS])[:RAW_TOKENS]


def greedy(llm: LLM, ids: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    return [list(o.outputs[0].token_ids) for o in llm.generate([{"prompt_token_ids": list(p)} for p in ids], params)]


def llama_cpp(python: str, model: str, ids: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """As it comes: keys and values in float16. SystemExit if it fails."""
    command = [python, str(ORACLE), model, "--stream", "--kv", "default"]
    command += ["--greedy", str(new), "--length", str(max(map(len, ids)))]
    found: list[list[int]] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for prompt in track(ids, Path(model).name, console=Console(stderr=True)):
            line = ""
            with suppress(BrokenPipeError):  # it has ended
                print(*prompt, sep=",", file=process.stdin, flush=True)
                line = process.stdout.readline()
            if not line:
                with suppress(BrokenPipeError):
                    process.stdin.close()
                raise SystemExit(f"llama.cpp gave no tokens of {Path(model).name}, or {python} has no llama.cpp")
            found.append([int(part) for part in line.split(",")])
        process.stdin.close()
    return found


def earlier(result: Path | None, model: str, ids: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """llama.cpp's texts of a result; none where it has not this file with these prompts."""
    found = [] if result is None else json.loads(result.read_text())["models"]
    for one in found:
        theirs = [text[THEIRS] for text in one["texts"]]
        if one["model"] == Path(model).name and [t["prompt"] for t in one["texts"]] == [*map(list, ids)]:
            return theirs if all(len(text) == new for text in theirs) else []
    return []


def judged(
    exact: Logits, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int], near: float
) -> dict[str, Any]:
    """The first difference of two texts; {} where there is none."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if at is None:
        return {}
    logits = exact([*prompt, *ours[:at]])[-1]
    second, best = np.argsort(logits, kind="stable")[-2:].tolist()
    gap = float(logits[best] - logits[second])
    whose = {ours[at]: OURS, theirs[at]: THEIRS}.get(int(logits.argmax()), NEITHER)
    behind = {name: float(logits[best] - logits[token]) for name, token in ((OURS, ours[at]), (THEIRS, theirs[at]))}
    return {"at": at, "gap": gap, "counts": gap > near, "float32": whose, "behind": behind}


def row(found: dict[str, Any]) -> list[str]:
    """A model's line of the table."""
    parted = [text["parted"] for text in found["texts"] if text["parted"]]
    whose = Counter(p["float32"] for p in parted if p["counts"])
    total, counting = len(found["texts"]), sum(whose.values())
    figures = [total, total - len(parted), len(parted) - counting, counting, whose[OURS], whose[THEIRS], whose[NEITHER]]
    return [found["model"], *map(str, figures)]


def of_model(model: str, args: argparse.Namespace) -> dict[str, Any]:
    settings = json.loads(args.settings)
    llm = LLM(model, **{"ops": "native", "max_model_len": 512, "threads": args.threads, **settings})
    raw = drawn([passages(file) for file in args.raw], args.prompts)
    chat = drawn([questions(file) for file in args.chat], args.prompts // 2) if args.chat else []
    asked = prompts(llm, raw, chat)
    ids = [prompt for _, prompt in asked]
    ours = greedy(llm, ids, args.new)
    llm.engine.core.executor.close()
    del llm
    theirs = earlier(args.again, model, ids, args.new) or llama_cpp(args.llama_cpp, model, ids, args.new)
    exact = penstock(model, FLOAT32, max_model_len=512)
    texts = []
    for (kind, prompt), mine, other in zip(asked, ours, theirs, strict=True):
        parted = judged(exact, prompt, mine, other, args.near)
        texts.append({"kind": kind, "prompt": prompt, "penstock": mine, "llama.cpp": other, "parted": parted})
    return {"model": Path(model).name, "settings": settings, "texts": texts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--llama-cpp", metavar="PYTHON", required=True, help="one that has llama-cpp-python")
    parser.add_argument("--again", type=Path, metavar="RESULT.json")
    parser.add_argument("--raw", nargs="+", type=Path, required=True, help=".txt, or .jsonl as deviation.py reads it")
    parser.add_argument("--chat", nargs="+", type=Path, default=[])
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--near", type=float, default=0.05, help="logits")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of Penstock")
    parser.add_argument("--settings", default="{}", metavar="JSON", help="of Penstock")
    parser.add_argument("--out")
    args = parser.parse_args()
    found = []
    for model in args.models:
        found.append(of_model(model, args))
        asked = {key: getattr(args, key) for key in ("prompts", "new", "near")}
        asked |= {key: [file.name for file in getattr(args, key)] for key in ("raw", "chat")}
        save(args.out, about(benchmark="agreement", asked=asked, models=found))
        show(Console(), f"{args.new} greedy tokens, Penstock and llama.cpp", COLUMNS, [row(one) for one in found])


if __name__ == "__main__":
    main()
