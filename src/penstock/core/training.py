"""What a training is asked for: texts as ids, and how they are gone through."""

from __future__ import annotations

import random

import msgspec


class TrainingExample(msgspec.Struct, frozen=True, array_like=True):
    """`targets`: for each token whether it is to be learnt; the first one never is."""

    token_ids: list[int]
    targets: list[bool]


class Recipe(msgspec.Struct, frozen=True):
    """How a model is trained.

    Attributes:
        kind: lora, or peqa: the scales of a base that is stored in few bits.
        learning_rate: the highest; it rises over the first steps, to a tenth of all of them and ten at most, and falls
            to zero in a straight line.
        batch_size: examples of a step.
        epochs: how often all examples are read, each time in another order (from `seed`).
        slice_tokens: tokens that are computed at a time.
        targets: last parts of the names of modules that are trained.
    """

    kind: str = "lora"
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    rank: int = 8
    alpha: float = 16.0
    learning_rate: float = 2e-4
    batch_size: int = 1
    epochs: int = 3
    weight_decay: float = 0.0
    slice_tokens: int = 16
    seed: int = 0

    def num_steps(self, num_examples: int) -> int:
        return self.epochs * -(-num_examples // self.batch_size)

    def batch(self, step: int, num_examples: int) -> list[int]:
        """The examples of a step, by number."""
        per = -(-num_examples // self.batch_size)
        epoch, at = divmod(step, per)
        order = list(range(num_examples))
        random.Random(self.seed * 1_000_003 + epoch).shuffle(order)
        return order[at * self.batch_size : (at + 1) * self.batch_size]

    def rate(self, step: int, num_steps: int) -> float:
        warm = max(1, min(10, num_steps // 10))
        return self.learning_rate * min(1.0, (step + 1) / warm) * (1.0 - step / max(1, num_steps))
