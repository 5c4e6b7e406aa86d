"""What runs for one plain request: the functions of Penstock between its prompt and its text, and their lines.

    python tools/request_path.py          a table by file, the most lines first
    python tools/request_path.py --all    every function
    python tools/request_path.py --quantization int4-w4a8     of other weights

The bundled model answers a prompt of five words with eight tokens, after it has answered another one: what a start does
once does not count. A function's lines are those of its source, from `def` to its end, without functions inside it that
did not run.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import penstock

ROOT = Path(penstock.__file__).parent


class RequestPath(NamedTuple):
    """By file, below the package: name of each function that ran -> its lines."""

    files: dict[str, dict[str, int]]

    @property
    def num_functions(self) -> int:
        return sum(map(len, self.files.values()))

    @property
    def num_lines(self) -> int:
        return sum(sum(found.values()) for found in self.files.values())


def of_one_request(quantization: str = "none") -> RequestPath:
    """Of the native backend where there is one."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    llm = penstock.LLM("nano", num_gpu_blocks_override=64, max_num_seqs=4, quantization=quantization)
    params = penstock.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm.generate(["A first one"], params)
    sys.setprofile(note)
    llm.generate(["Once there was a dog"], params)
    sys.setprofile(None)
    files: dict[str, dict[str, int]] = defaultdict(dict)
    for code in seen:
        file = Path(code.co_filename)
        if file.is_relative_to(ROOT) and not code.co_name.startswith("<"):
            inner = [c for c in code.co_consts if isinstance(c, CodeType) and not c.co_name.startswith("<")]
            lines = len(inspect.getsourcelines(code)[0]) - sum(len(inspect.getsourcelines(c)[0]) for c in inner)
            files[file.relative_to(ROOT).as_posix()][code.co_qualname] = lines
    return RequestPath(dict(files))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--quantization", default="none")
    args = parser.parse_args()
    every, found = args.all, of_one_request(args.quantization)
    for file, functions in sorted(found.files.items(), key=lambda item: -sum(item[1].values())):
        print(f"{sum(functions.values()):5} {len(functions):3}  {file}")
        for name, lines in sorted(functions.items()) if every else ():
            print(f"      {lines:5}  {name}")
    print(f"{found.num_functions} functions in {len(found.files)} files, {found.num_lines} lines")


if __name__ == "__main__":
    main()
