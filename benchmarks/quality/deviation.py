"""How far engines' next tokens lie from those of float32, on one GGUF file.

    LLAMA_CPP_LIB_PATH=BUILD/bin PYTHONPATH=. python benchmarks/quality/deviation.py MODEL.gguf [MODEL.gguf ...]
        --texts FILE [FILE ...] [--llama-cpp PYTHON] [--engines NAME ...] [--num-texts 200] [--out FILE.json]

All read the same token ids, `--tokens` of each text, and what each expects behind the eighth token and every later one
is compared with what float32 expects there: the file's weights as they are, activations, keys and values in float32.
*kl*: KL(float32 || engine) in nats (`eval.compare` defines it). *top5*: the mean distance of log probabilities, in
nats, over float32's five likeliest tokens. *same*: the share of positions where both put the same token first. Every
text counts alike; intervals are 95 % (bootstrap over texts), differences from llama.cpp are taken text by text.

Texts: runs of paragraphs of .txt files, and lines of .jsonl files (`text`, or `question` and `answer`), in turns,
drawn with a fixed seed. `--llama-cpp` names a Python with llama-cpp-python; without it, Penstock is measured alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.common import about, save, show
from benchmarks.quality.selector_pairs import difference
from rich.console import Console
from rich.progress import track

from penstock.base.bf16 import F32
from penstock.config import from_kwargs
from penstock.core.matrix_format import parse_scheme
from penstock.eval.perplexity import F64, log_probs
from penstock.eval.scorer import load, make_scorer
from penstock.families.registry import open_model
from penstock.launch.tokenizer import load_tokenizer
from penstock.text.tokenizer import Tokenizer

Logits = Callable[[Sequence[int]], F32]
"""Token ids [T] -> [T, V]."""
Found = dict[str, list[float]]
"""Measure -> one figure a text."""
Deviation = Mapping[str, float]

FLOAT32 = {"dtype": "float32", "activation_quantization": "none"}
PENSTOCK: dict[str, dict[str, str]] = {
    "penstock": {},
    "penstock, bfloat16 rows": {"activation_quantization": "none"},
    "penstock, KV float16": {"kv_cache_dtype": "float16"},
    "penstock, KV float32": {"kv_cache_dtype": "float32"},
}
LLAMA_CPP = {"llama.cpp": "default", "llama.cpp, KV float32": "float32"}
"""Keys and values are float16 by default."""
BASELINE = "llama.cpp"
MEASURES = ("kl", "top5", "same")
FIRST, TOP = 8, 5
ORACLE = Path(__file__).resolve().parents[2] / "tools" / "oracles" / "llama_cpp_logits.py"


class Exact:
    """What float32 expects behind some tokens, made ready for engines to be compared with."""

    def __init__(self, logits: F32) -> None:
        """`logits`: [T, V]."""
        p = log_probs(logits)
        self._weight = np.exp(p)
        self._entropy: F64 = -np.einsum("tv,tv->t", self._weight, p)
        self._top = np.argpartition(p, -TOP, axis=1)[:, -TOP:]
        self._of_top = np.take_along_axis(p, self._top, axis=1)
        self._first = p.argmax(axis=1)

    def deviation(self, logits: F32) -> Deviation:
        """Means over the rows of an engine's logits [T, V].

        The cross entropy is the engine's normaliser less the mean logit: no second table of logarithms is made, which
        would take longer than the models do.
        """
        top = logits.max(axis=1)
        wide = np.exp(logits - top[:, None]).sum(axis=1, dtype=np.float64)
        normaliser = np.log(wide) + top
        cross = normaliser - np.einsum("tv,tv->t", self._weight, logits)
        own = np.take_along_axis(logits, self._top, axis=1) - normaliser[:, None]
        return {
            "kl": float((cross - self._entropy).mean()),
            "top5": float(np.abs(own - self._of_top).mean()),
            "same": float((logits.argmax(axis=1) == self._first).mean()),
        }


def penstock(model: str, settings: Mapping[str, str], max_model_len: int = 256) -> Logits:
    """As the engine would serve it; rows of a prompt have the bits that they have in every batch."""
    loaded = load(from_kwargs(model=model, ops="native", max_model_len=max_model_len, threads=1, **settings))
    return make_scorer(loaded, parse_scheme("none")).logits


@contextmanager
def llama_cpp(python: str, model: str, kv: str) -> Iterator[Logits]:
    """A process of llama.cpp's own environment, one text at a time."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npy"
        command = [python, str(ORACLE), model, str(out), "--stream", "--kv", kv]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None

            def logits(ids: Sequence[int]) -> F32:
                assert process.stdin is not None
                assert process.stdout is not None
                print(*ids, sep=",", file=process.stdin, flush=True)
                if process.stdout.readline().strip() != "done":
                    raise SystemExit(
                        f"llama.cpp gave no logits of {Path(model).name}: it refuses the file, or {python} has none"
                    )
                found: F32 = np.load(out)
                return found

            try:
                yield logits
            finally:
                process.stdin.close()


def passages(file: Path) -> list[str]:
    """Of a file; none overlaps another."""
    text = file.read_text("utf-8")
    if file.suffix != ".jsonl":
        parts = text.split("\n\n")
        return ["\n\n".join(parts[i : i + 8]) for i in range(0, len(parts), 8)]
    lines = [json.loads(line) for line in text.splitlines()]
    return ["\n".join(str(line[k]) for k in ("text", "question", "answer") if k in line) for line in lines]


def read_texts(files: Sequence[Path], tokenizer: Tokenizer, num_texts: int, tokens: int) -> npt.NDArray[np.int32]:
    """Ids [num_texts, tokens], of the files in turns; shorter texts are left out. SystemExit if there are too few."""
    rng = np.random.default_rng(0)
    drawn = [iter([parts[i] for i in rng.permutation(len(parts))]) for parts in map(passages, files)]
    out: list[list[int]] = []
    while drawn and len(out) < num_texts:
        for source in list(drawn):
            text = next(source, None)
            if text is None:
                drawn.remove(source)
                continue
            ids = list(tokenizer.encode(text[: 16 * tokens]))[:tokens]
            if len(ids) == tokens:
                out.append(ids)
    if len(out) < num_texts:
        raise SystemExit(f"the files have {len(out)} texts of {tokens} tokens: name more of --texts")
    return np.array(out[:num_texts], np.int32)


def measure(
    exact: Logits, engines: Mapping[str, Logits], texts: npt.NDArray[np.int32], jobs: int = 1
) -> dict[str, Found]:
    """Of every engine, text by text: the logits of one text are in memory, `jobs` engines read it at once."""
    found: dict[str, Found] = {name: {m: [] for m in MEASURES} for name in engines}
    with ThreadPoolExecutor(jobs) as pool:
        for ids in track(texts.tolist(), "texts", console=Console(stderr=True)):
            every = pool.map(lambda engine, ids=ids: engine(ids)[FIRST - 1 :], [exact, *engines.values()])
            reference = Exact(next(every))
            for name, logits in zip(engines, every, strict=True):
                for measured, value in reference.deviation(logits).items():
                    found[name][measured].append(value)
    return found


def summary(found: Mapping[str, Found]) -> list[dict[str, Any]]:
    """Of every engine: figures, and what they are over the baseline's, each with its interval."""
    rows = []
    for name, own in found.items():
        row: dict[str, Any] = {"engine": name}
        for m in MEASURES:
            row[m] = difference(own[m], [0.0] * len(own[m]))
            if BASELINE in found and name != BASELINE:
                row[f"{m}_minus_llama_cpp"] = difference(own[m], found[BASELINE][m])
        rows.append(row)
    return rows


def said(figure: Mapping[str, float] | None, m: str, sign: str = "") -> str:
    if figure is None:
        return ""
    if m == "same":
        return f"{figure['mean']:{sign}.2%} ({figure['low']:{sign}.2%} to {figure['high']:{sign}.2%})"
    return f"{figure['mean']:{sign}.5f} ({figure['low']:{sign}.5f} to {figure['high']:{sign}.5f})"


def of_model(model: str, args: argparse.Namespace) -> dict[str, Any]:
    console = Console()
    checkpoint = open_model(Path(model))
    tokenizer = load_tokenizer(checkpoint.tokenizer, checkpoint.spec)
    assert tokenizer is not None, "a GGUF file has its tokenizer"
    texts = read_texts(args.texts, tokenizer, args.num_texts, args.tokens)
    with ExitStack() as stack:
        engines: dict[str, Logits] = {}
        for name in args.engines:
            if name in PENSTOCK:
                engines[name] = penstock(model, PENSTOCK[name])
            elif args.llama_cpp is not None:
                engines[name] = stack.enter_context(llama_cpp(args.llama_cpp, model, LLAMA_CPP[name]))
        found = measure(penstock(model, FLOAT32), engines, texts, args.jobs)
    rows = summary(found)
    for m in MEASURES:
        shown = [[r["engine"], said(r[m], m), said(r.get(f"{m}_minus_llama_cpp"), m, "+")] for r in rows]
        show(console, f"{Path(model).name}: {m}", ["engine", "95 %", "minus llama.cpp"], shown)
    return {"model": Path(model).name, "positions": int(texts[:, FIRST - 1 :].size), "engines": rows, "texts": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--texts", nargs="+", type=Path, required=True)
    parser.add_argument("--num-texts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--llama-cpp", metavar="PYTHON")
    parser.add_argument("--jobs", type=int, default=2, help="engines at once, one thread each")
    parser.add_argument("--engines", nargs="+", default=[*PENSTOCK, *LLAMA_CPP], choices=[*PENSTOCK, *LLAMA_CPP])
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.tokens < FIRST:
        raise SystemExit(f"--tokens {args.tokens}: the first {FIRST} only lead in, so give more")
    models = [of_model(model, args) for model in args.models]
    settings = {"texts": [file.name for file in args.texts], "num_texts": args.num_texts, "tokens": args.tokens}
    save(args.out, about(benchmark="deviation", settings=settings, penstock_settings=PENSTOCK, models=models))


if __name__ == "__main__":
    main()
