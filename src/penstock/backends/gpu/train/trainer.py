"""The steps of a training, cut into pieces of work that take milliseconds each.

Which numbers come out depends on texts, settings and the length of slices, never on when a piece of work is done or who
else uses the machine: torch runs on one thread while it works here. A step's state is parameters, two moments each and
its number, so a training goes on from what `state` said as if it had never stopped.
Source: AdamW, Loshchilov & Hutter, arXiv 1711.05101.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.backends.gpu.ops import PLAIN
from penstock.backends.gpu.train.pieces import GraphPieces, Text
from penstock.core.training import Recipe, TrainingExample

_BETAS, _EPS, _CLIP = (0.9, 0.999), 1e-8, 1.0
_TILE = 2048
"""Rows of the head that are multiplied with at a time."""
Arrays = Mapping[str, np.ndarray[Any, Any]]


class Trained(Protocol):
    """What a training changes, by name."""

    @property
    def parameters(self) -> dict[str, Tensor]: ...


class Loss(NamedTuple):
    """`value`: mean over the targets of a step, nats a token."""

    step: int
    value: float
    num_targets: int


class Trainer:
    """`work` yields the kind of what comes next and does it when it is asked for more.

    Attributes:
        step: steps that are done.
        losses: of each step, before it changed anything.
        num_tokens: that have been read.
    """

    def __init__(
        self, pieces: GraphPieces, trained: Trained, examples: Sequence[TrainingExample], recipe: Recipe, *,
        state: Arrays | None = None,
    ) -> None:  # fmt: skip
        """`state`: what `state` of an earlier one said; without it, from the beginning."""
        self._pieces, self._trained, self._examples, self.recipe = pieces, trained, examples, recipe
        self._names = sorted(trained.parameters)
        self._moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in trained.parameters.items()}
        self.step, self.num_tokens = 0, 0
        self.losses: list[Loss] = []
        if state is not None:
            self._restore(state)

    @property
    def num_steps(self) -> int:
        return self.recipe.num_steps(len(self._examples))

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """Between steps."""
        out: dict[str, np.ndarray[Any, Any]] = {"step": np.array([self.step, self.num_tokens], np.int64)}
        for name in self._names:
            first, second = self._moments[name]
            parts = {"value": self._trained.parameters[name].detach(), "first": first, "second": second}
            out |= {f"{name}:{part}": x.numpy().copy() for part, x in parts.items()}
        out["losses"] = np.array([x.value for x in self.losses], np.float32)
        out["targets"] = np.array([x.num_targets for x in self.losses], np.int64)
        return out

    def _restore(self, state: Arrays) -> None:
        self.step, self.num_tokens = (int(x) for x in state["step"])
        pairs = zip(state["losses"].tolist(), state["targets"].tolist(), strict=True)
        self.losses = [Loss(i, value, count) for i, (value, count) in enumerate(pairs)]
        for name in self._names:
            targets = (self._trained.parameters[name].detach(), *self._moments[name])
            for part, target in zip(("value", "first", "second"), targets, strict=True):
                target.copy_(torch.from_numpy(np.array(state[f"{name}:{part}"])))

    def run(self) -> None:
        """All of it at once."""
        for _ in self.work():
            pass

    def work(self) -> Iterator[str]:
        """See the class. Kinds of equal work have equal names."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            while self.step < self.num_steps:
                yield from self._step()
        finally:
            torch.set_num_threads(threads)

    def _step(self) -> Iterator[str]:
        batch = [self._examples[i] for i in self.recipe.batch(self.step, len(self._examples))]
        count = sum(sum(example.targets[1:]) for example in batch)
        total = 0.0
        for example in batch:
            text = Text(example.token_ids[:-1])
            yield from self._forwards(text)
            total += yield from self._head(text, example, 1.0 / max(1, count))
            yield from self._backwards(text)
            self.num_tokens += text.length
        yield "update"
        self._update()
        self.losses.append(Loss(self.step, total / max(1, count), count))
        self.step += 1

    def loss_of(self, example: TrainingExample) -> tuple[float, int]:
        """Sum of the nats of an example's targets, and how many there are; nothing is trained."""
        text = Text(example.token_ids[:-1])
        for _ in self._forwards(text):
            pass
        work, total = self._head(text, example, None), 0.0
        while True:
            try:
                next(work)
            except StopIteration as end:
                total = end.value
                break
        return total, sum(example.targets[1:])

    def _slices(self, text: Text) -> list[tuple[int, int]]:
        size = self.recipe.slice_tokens
        return [(a, min(a + size, text.length)) for a in range(0, text.length, size)]

    def _forwards(self, text: Text) -> Iterator[str]:
        for piece in range(self._pieces.num_pieces):
            yield from self._begin(piece)
            for a, b in self._slices(text):
                yield f"forward {piece > 0}"
                self._pieces.forward(piece, text, a, b)
            self._pieces.left()

    def _begin(self, piece: int) -> Iterator[str]:
        work = self._pieces.begin(piece)
        while True:
            yield "widen"
            if next(work, self) is self:
                return

    def _backwards(self, text: Text) -> Iterator[str]:
        for piece in reversed(range(self._pieces.first_tuned, self._pieces.num_pieces)):
            yield from self._begin(piece)
            for a, b in reversed(self._slices(text)):
                yield f"backward {piece + 1 < self._pieces.num_pieces}"
                self._pieces.backward(piece, text, a, b)
            self._pieces.left()

    def _head(self, text: Text, example: TrainingExample, scale: float | None) -> Generator[str, None, float]:
        """Adds gradients of hidden states, each target's loss times `scale`; None: none. Returns the sum of losses."""
        head = self._pieces.head
        vocab = head.matrix.shape[0]
        total = 0.0
        for a, b in self._slices(text):
            at = [t for t in range(a, b) if example.targets[t + 1]]
            if not at:
                continue
            hidden = self._pieces.hidden(text, a, b)[[t - a for t in at]]
            wanted = torch.tensor([example.token_ids[t + 1] for t in at])
            lse = torch.full((len(at),), -torch.inf)
            own = torch.zeros(len(at))
            for lo in range(0, vocab, _TILE):
                yield "head"
                with torch.no_grad():
                    logits = self._logits(hidden, lo)
                    lse = torch.logaddexp(lse, torch.logsumexp(logits, dim=-1))
                    here = (wanted >= lo) & (wanted < lo + logits.shape[1])
                    own[here] = logits[here, wanted[here] - lo]
            total += float((lse - own).double().sum())
            if scale is None:
                continue
            leaf = hidden.clone().requires_grad_()
            for lo in range(0, vocab, _TILE):
                yield "head back"
                logits = self._logits(leaf, lo)
                grad = torch.exp(logits.detach() - lse[:, None])
                here = (wanted >= lo) & (wanted < lo + logits.shape[1])
                grad[here, wanted[here] - lo] -= 1.0
                torch.autograd.backward(logits, grad * scale)
            grads = torch.zeros(b - a, hidden.shape[1])
            assert leaf.grad is not None
            grads[[t - a for t in at]] = leaf.grad
            self._pieces.add_hidden_grad(text, grads, a, b)
        return total

    def _logits(self, hidden: Tensor, lo: int) -> Tensor:
        head = self._pieces.head
        hi = min(lo + _TILE, head.matrix.shape[0])
        bias = None if head.bias is None else head.bias[lo:hi]
        out = torch.nn.functional.linear(hidden, head.matrix.rows(lo, hi), bias)
        for node in head.after:
            out = PLAIN[node.op](out, *node.bound, **node.named)
        return out

    def _update(self) -> None:
        rate, decay = self.recipe.rate(self.step, self.num_steps), self.recipe.weight_decay
        parameters = self._trained.parameters
        with torch.no_grad():
            grads = {n: g for n in self._names if (g := parameters[n].grad) is not None}
            norm = float(torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()) if grads else 0.0
            shrink = min(1.0, _CLIP / (norm + 1e-6))
            for name, grad in grads.items():
                own, (first, second) = parameters[name], self._moments[name]
                grad = grad * shrink
                first.mul_(_BETAS[0]).add_(grad, alpha=1 - _BETAS[0])
                second.mul_(_BETAS[1]).addcmul_(grad, grad, value=1 - _BETAS[1])
                t = self.step + 1
                mean, spread = first / (1 - _BETAS[0] ** t), second / (1 - _BETAS[1] ** t)
                own.mul_(1 - rate * decay).sub_(rate * mean / (spread.sqrt() + _EPS))
                own.grad = None
