"""The tasks of `penstock eval` by name, and how they are asked for: `NAME`, `NAME:FILE`, `NAME?option=value&...`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from penstock.base.errors import ConfigError
from penstock.base.registry import Registry
from penstock.eval.tasks.base import Options, Task

TASKS: Registry[Callable[..., Task], None] = Registry("task")
TASKS.add("perplexity", "penstock.eval.tasks.perplexity:make")
TASKS.add("cloze", "penstock.eval.tasks.cloze:make")
TASKS.add("needle", "penstock.eval.tasks.needle:make")
TASKS.add("lookup", "penstock.eval.tasks.pairs:make_lookup")
TASKS.add("lines", "penstock.eval.tasks.pairs:make_lines")
TASKS.add("passage", "penstock.eval.tasks.passage:make")
TASKS.add("two-hop", "penstock.eval.tasks.exact:make_two_hop")
TASKS.add("copy", "penstock.eval.tasks.exact:make_copy")
TASKS.add("arithmetic", "penstock.eval.tasks.exact:make_arithmetic")
TASKS.add("json", "penstock.eval.tasks.records:make")
TASKS.add("listops", "penstock.eval.tasks.listops:make")
TASKS.add("count", "penstock.eval.tasks.passages:make_count")
TASKS.add("find", "penstock.eval.tasks.passages:make_find")
TASKS.add("next-line", "penstock.eval.tasks.next_line:make")
TASKS.add("mmlu", "penstock.eval.tasks.mmlu:make")
TASKS.add("bbh", "penstock.eval.tasks.bbh:make")
TASKS.add("truthfulqa", "penstock.eval.tasks.truthfulqa:make")
TASKS.add("gsm8k", "penstock.eval.tasks.gsm8k:make")
TASKS.add("humaneval", "penstock.eval.tasks.code:make_humaneval")
TASKS.add("mbpp", "penstock.eval.tasks.code:make_mbpp")
TASKS.add("nq-open", "penstock.eval.tasks.nq_open:make")
TASKS.add("kv", "penstock.eval.tasks.kv_records:make")
TASKS.add("longbench", "penstock.eval.tasks.longbench:make")
TASKS.add("texts", "penstock.eval.tasks.texts:make")
TASKS.add("ruler", "penstock.eval.tasks.ruler:make")

DEFAULT = ("perplexity", "cloze", "needle", "lookup", "passage", "two-hop", "copy", "arithmetic", "json")
"""What is asked if nothing is named: all that needs no file and that the bundled model learnt something of."""
FILES = {
    "cloze": "lambada_test.jsonl", "bbh": "bbh_9tasks.jsonl", "gsm8k": "gsm8k_test.jsonl",
    "humaneval": "humaneval.jsonl", "kv": "lost_in_middle_kv75.jsonl", "mbpp": "mbpp.jsonl",
    "nq-open": "nq_open_oracle.jsonl", "truthfulqa": "truthfulqa.jsonl", "perplexity": "wikitext2_valid.txt",
    "mmlu": "mmlu_test.jsonl",
}  # fmt: skip
"""What a task's file is called in the folder of `--data`, where no file is named."""
RUNS_CODE = ("humaneval", "mbpp")


@dataclass(frozen=True)
class Asked:
    """A task as it was asked for. `spec` is how results call it."""

    spec: str
    task: Task


def make_tasks(specs: Sequence[str], *, data: Path | None = None, allow_code: bool = False) -> list[Asked]:
    """Tasks, with their files read and their options checked, before a model is. Raises ConfigError or InputError.

    `data`: a folder with files of known names. `allow_code`: programs that a model wrote may be run.
    """
    if data is not None and not data.is_dir():
        raise ConfigError(f"--data {str(data)!r} is not a folder", field="data")
    if not specs:
        raise ConfigError(f"--tasks names none; there are {', '.join(TASKS)}", field="tasks")
    doubled = next((spec for i, spec in enumerate(specs) if spec in specs[:i]), None)
    if doubled is not None:
        raise ConfigError(f"task {doubled!r} is asked for twice", field="tasks")
    made: list[Asked] = []
    for spec in specs:
        name, path, options = _parse(spec)
        if name in RUNS_CODE and not allow_code:
            raise ConfigError(
                f"task {name!r} runs programs that the model wrote, on this machine and with your rights: add "
                "--allow-code-execution if you want that",
                field="tasks",
            )
        if path is None and data is not None and name in FILES and (data / FILES[name]).is_file():
            path = data / FILES[name]
        read = Options(name, options)
        task: Task = TASKS.get(name)(path, read)
        read.finish()
        made.append(Asked(_called(spec, made), task))
    return made


def _called(spec: str, before: Sequence[Asked]) -> str:
    """Short: a file without its folder, so that results of two machines are called alike; whole if that is taken."""
    head, mark, options = spec.partition("?")
    name, colon, path = head.partition(":")
    short = f"{name}{colon}{Path(path).name if path else ''}{mark}{options}"
    return spec if any(asked.spec == short for asked in before) else short


def _parse(spec: str) -> tuple[str, Path | None, dict[str, str]]:
    head, mark, tail = spec.partition("?")
    name, colon, path = head.partition(":")
    if name not in TASKS.names():
        near = get_close_matches(name, TASKS.names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(TASKS)}"
        raise ConfigError(f"unknown task {name!r}; {hint}", field="tasks")
    if colon and not path:
        raise ConfigError(f"task {spec!r} names no file after the colon", field="tasks")
    options: dict[str, str] = {}
    for part in tail.split("&") if mark else ():
        key, equals, value = part.partition("=")
        if not key or not equals or not value or key in options:
            raise ConfigError(f"task {spec!r}: options look like name=value, each once, joined by &; not {part!r}",
                              field="tasks")  # fmt: skip
        options[key] = value
    return name, Path(path) if path else None, options


def split_specs(listed: str) -> list[str]:
    """`a,b?c=1,d:FILE` as a list."""
    return [part.strip() for part in listed.split(",") if part.strip()]
