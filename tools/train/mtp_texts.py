"""What a head for multi-token prediction learns from: texts, what its model makes of them, kept in a file.

Half of the texts the model writes itself behind beginnings of the files, which is where its drafts will be wanted; the
rest are pieces of the files. Hidden states are those of the engine that will run the head (its stored weights and its
rounding included), and so are the model's likeliest tokens.

Shape letters: N texts, T tokens of each, E hidden, C likeliest tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import LLM, SamplingParams

LIKELIEST = 16
PROMPT_SHARE = 3 / 8
"""Of a text that the model writes, what it is given."""


@dataclass(frozen=True)
class Texts:
    """tokens [N, T]; hidden float16 [N, T, E], behind the final norm; best [N, T, C], likeliest first, and probs
    float16 [N, T, C] of the token behind each."""

    tokens: npt.NDArray[np.int32]
    hidden: npt.NDArray[np.float16]
    best: npt.NDArray[np.int32]
    probs: npt.NDArray[np.float16]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def joined(cls, paths: Sequence[Path]) -> Texts:
        """Those of several files, in their order."""
        parts = []
        for path in paths:
            with np.load(path) as kept:
                parts.append([kept[field.name] for field in fields(cls)])
        return cls(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def prepare(
    model: str, files: Sequence[Path], out: Path, *, own: int, read: int, length: int, seed: int, threads: int,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Write `own` texts by the model and `read` out of the files, `length` tokens each, to `out`, if it is not there.

    Raises: ValueError if the files are too short.
    """
    if out.exists():
        return
    llm, rng = LLM(model, max_model_len=length, threads=threads, speculative_config='{"method": "none"}'), _rng(seed)
    encode = llm.get_tokenizer().encode
    every = [encode(path.read_text("utf-8", errors="replace")) for path in files]
    every = [ids for ids in every if len(ids) >= length]
    if not every:
        raise ValueError(f"no file has {length} tokens; give longer --texts, or a smaller --length")
    pieces = [_piece(every, rng, length) for _ in range(own + read)]
    given = int(length * PROMPT_SHARE)
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2), seed=i, max_tokens=length - given, ignore_eos=True, detokenize=False
        )
        for i in range(own)
    ]  # fmt: skip
    say(f"{own} texts of {length} tokens are written")
    texts = []
    for first in range(0, own, 32):
        begun = [piece[:given] for piece in pieces[first : min(own, first + 32)]]
        written = llm.generate([{"prompt_token_ids": ids} for ids in begun], params[first : first + 32])
        texts += [[*ids, *one.outputs[0].token_ids] for ids, one in zip(begun, written, strict=True)]
        say(f"written: {len(texts)}")
    texts += pieces[own:]
    found = Texts(*map(np.stack, zip(*_read(llm, texts, say), strict=True)))
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(out, tokens=found.tokens, hidden=found.hidden, best=found.best, probs=found.probs)


def _rng(seed: int) -> random.Random:
    return random.Random(seed)


def _piece(every: Sequence[Sequence[int]], rng: random.Random, length: int) -> list[int]:
    ids = rng.choice(every)
    at = rng.randrange(len(ids) - length + 1)
    return list(ids[at : at + length])


def _read(llm: LLM, texts: Sequence[Sequence[int]], say: Callable[[str], None]) -> list[tuple[Any, ...]]:
    """Of each text tokens, hidden states, likeliest tokens and their probabilities."""
    runner: Any = llm.engine.core.executor.runner  # type: ignore[attr-defined]
    forward, planes = runner._forward, runner.storage.planes
    run, seen, out = forward.run_pooling, [], []

    def keep(plan: Any, given: Any) -> Any:
        found = run(plan, given)
        seen.append(np.array(found[1]))
        return found

    forward.run_pooling = keep
    for i, text in enumerate(texts):
        seen.clear()
        llm.embed([{"prompt_token_ids": list(text)}], pooling="mean")  # needs the hidden states of all tokens
        hidden = np.concatenate(seen)
        assert len(hidden) == len(text)
        best, probs = _likeliest(forward.run_head(hidden, planes))
        out.append((np.array(text, np.int32), hidden.astype(np.float16), best, probs))
        if (i + 1) % 32 == 0:
            say(f"read: {i + 1} of {len(texts)}")
    forward.run_pooling = run
    return out


def _likeliest(logits: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]:
    """Shapes: logits [T, V], which is written to no more than once read -> [T, C], [T, C]."""
    best = np.empty((len(logits), LIKELIEST), np.int32)
    probs = np.empty((len(logits), LIKELIEST), np.float16)
    for t, row in enumerate(logits):
        ids = np.argpartition(row, -LIKELIEST)[-LIKELIEST:]
        ids = ids[np.argsort(-row[ids], kind="stable")]
        best[t] = ids
        weights = np.exp(row[ids] - row[ids[0]])
        probs[t] = weights / weights.sum()
    return best, probs
