"""Tokens to train on: prose as uint16 files in an ignored folder, exercises made up as they are needed.

`python -m train.corpus CORPUS OUT` trains the tokenizer and writes one `<source>.u16` per kind of prose, so that a
machine that has only the repository can train. `--tokenizer FOLDER` takes the one of a model folder instead: weights go
on from weights with the same one only.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from train import skills
from train.text import orders, sources
from train.tokenizer import save_tokenizer, train_tokenizer

U16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]
CONTEXT_WEIGHT = 0.02
"""What a token of an exercise's context counts for in the loss if it is not prose; a token of prose counts 1."""
_TOKENIZER_CHARS = 12_000_000


def prepare(corpus: Path, out: Path, tokenizer_from: Path | None = None) -> None:
    """Write tokenizer (trained, or that of the model folder `tokenizer_from`) and token files to `out`."""
    console = Console(stderr=True)
    out.mkdir(parents=True, exist_ok=True)
    found = sources(corpus)
    if tokenizer_from is not None:
        save_tokenizer(Tokenizer.from_file(str(tokenizer_from / "tokenizer.json")), out)
    elif not (out / "tokenizer.json").exists():
        console.print("training the tokenizer")
        rng = random.Random(0)
        parts = [text[i : i + 4000] for s in found for text in s.documents for i in range(0, len(text), 4000)]
        rng.shuffle(parts)
        examples = [
            "".join(p.text for p in skills.exercise(rng, "train", 300, lambda r, n: "").pieces(chat=i % 2 == 0))
            for i in range(2000)
        ]
        save_tokenizer(train_tokenizer(parts[: _TOKENIZER_CHARS // 4000] + examples), out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    weights = {}
    for source in found:
        ids: list[int] = []
        for document in track(source.documents, description=source.name, console=console):
            ids += [end, *tokenizer.encode(document).ids]
        np.array(ids, np.uint16).tofile(out / f"{source.name}.u16")
        weights[source.name] = source.weight
    (out / "sources.json").write_text(json.dumps(weights), "utf-8")
    turns = [chat for chat in orders(corpus) if chat]
    ids = []
    for chat in track(turns, description="orders", console=console):
        text = "".join(f"<|im_start|>{who}\n{said}<|im_end|>\n" for who, said in chat)
        ids += [end, *tokenizer.encode(text).ids]
    np.array(ids, np.uint16).tofile(out / "orders.u16")
    weights["orders"] = 0.4
    (out / "sources.json").write_text(json.dumps(weights), "utf-8")
    for name in weights:
        console.print(f"{name}: {(out / f'{name}.u16').stat().st_size // 2:,} tokens, weight {weights[name]}")


@dataclass
class Mixture:
    """Endless rows of `length` tokens: windows of prose, or exercises one after another.

    `share`: part of the rows that are exercises; `repeats`: part of those that only repeat one stretch of tokens.
    Everything follows from `seed`.
    """

    folder: Path
    length: int
    share: float
    seed: int
    repeats: float = 0.2

    def __post_init__(self) -> None:
        weights: dict[str, float] = json.loads((self.folder / "sources.json").read_text("utf-8"))
        self._prose = [np.fromfile(self.folder / f"{name}.u16", np.uint16) for name in weights]
        # A source is drawn in proportion to its size times its weight.
        mass = np.array([len(t) * w for t, w in zip(self._prose, weights.values(), strict=True)])
        self._mass = (mass / mass.sum()).tolist()
        self._tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self._end = self._tokenizer.token_to_id("<|endoftext|>")
        self._rng = random.Random(self.seed)

    def rows(self) -> Iterator[tuple[U16, F32]]:
        """(tokens [length + 1], weight of predicting each token but the first [length])."""
        while True:
            if self._rng.random() >= self.share:
                yield self._window()
            else:
                yield self._repeats() if self._rng.random() < self.repeats else self._exercises()

    def _window(self) -> tuple[U16, F32]:
        tokens = self._rng.choices(self._prose, self._mass)[0]
        start = self._rng.randrange(len(tokens) - self.length - 1)
        return tokens[start : start + self.length + 1], np.ones(self.length, np.float32)

    def _noise(self, rng: random.Random, size: int) -> str:
        tokens = rng.choices(self._prose[:3], self._mass[:3])[0]
        start = rng.randrange(len(tokens) - size)
        return str(self._tokenizer.decode(tokens[start : start + size // 3].tolist())).strip()[:size]

    def _repeats(self) -> tuple[U16, F32]:
        """One stretch of prose or of random tokens again and again: what follows is known from the second time on."""
        rng = self._rng
        n = rng.randint(8, self.length // 2)
        if rng.random() < 0.5:
            segment = np.array([rng.randrange(3, self._tokenizer.get_vocab_size()) for _ in range(n)], np.uint16)
        else:
            segment = self._window()[0][:n]
        times = -(-(self.length + 1) // n)
        weights = np.ones(self.length + 1, np.float32)
        weights[:n] = CONTEXT_WEIGHT
        return np.tile(segment, times)[: self.length + 1], weights[1:]

    def _exercises(self) -> tuple[U16, F32]:
        ids: list[int] = []
        weights: list[float] = []
        answers: list[bool] = []
        rng = self._rng
        while len(ids) < self.length + 1:
            # Most are short; some fill the whole row, so that facts are found at every distance.
            left = (self.length + 1 - len(ids)) * 3
            size = int(min(left, 60 * 2 ** (rng.random() * 7)))
            pieces = skills.exercise(rng, "train", size, self._noise).pieces(chat=rng.random() < 0.3)
            made = [(p, self._tokenizer.encode(p.text, add_special_tokens=False)) for p in pieces]
            if sum(len(e.ids) for _, e in made) + 1 > self.length + 1 - len(ids) and len(ids) > self.length // 2:
                break
            ids.append(self._end)
            weights.append(CONTEXT_WEIGHT)
            answers.append(False)
            for piece, encoded in made:
                ids += encoded.ids
                answers += [piece.answer] * len(encoded.ids)
                weights += [
                    1.0 if piece.answer or _inside(span, piece.prose) else CONTEXT_WEIGHT for span in encoded.offsets
                ]
        pad = self.length + 1 - len(ids)
        ids = ids[: self.length + 1] + [self._end] * pad
        found = np.array(weights[: self.length + 1] + [0.0] * pad, np.float32)[1:]
        asked = np.array(answers[: self.length + 1] + [False] * pad)[1:]
        # A row has few answers: they are made to count, together, about half of what a row of prose does.
        found[asked] *= min(8.0, max(1.0, 0.5 * self.length / max(1.0, float(found[asked].sum()))))
        return np.array(ids, np.uint16), found


def _inside(span: tuple[int, int], stretches: Sequence[tuple[int, int]]) -> bool:
    return any(a <= span[0] and span[1] <= b for a, b in stretches)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="model folder whose tokenizer is taken")
    given = parser.parse_args()
    prepare(given.corpus, given.out, given.tokenizer)
