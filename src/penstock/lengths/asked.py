"""The model's own word: it is asked how long its answer will be before it gives it, over the same prompt.

The question stands where the answer would, as its beginning, so that prompt and question share the prompt's blocks and
the prompt is computed once. The answer is a few greedy tokens; the first number in it counts words, and how many tokens
one of those comes to is learned from what ends (the median ratio of the last ones). Who says no number is not known.
Small models say much the same whatever they are asked: `docs/concepts/length-prediction.md` has the correlation.
Source: Zheng et al., Response Length Perception and Sequence Scheduling, arXiv 2305.13144, section 3 (perception in
advance; there the instruction is changed, here it stays and the answer's beginning is given).
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Sequence as Seq
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.lengths import refused

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

QUESTION = "[Word count of the complete answer:"
TOKENS_PER_WORD = 1.4
MOST_OPEN = 4096
"""Requests whose word is remembered until they end; of more, the oldest are not learned from."""


class AskedPredictor:
    """Args:
    tokens: of the model's word, at most, >= 1.
    window: ended requests from which the tokens of a word are learned, >= 1.
    """

    name = "asked"

    def __init__(self, tokens: int = 6, window: int = 64) -> None:
        if tokens < 1 or window < 1:
            raise refused("tokens and window of asked must be at least 1")
        self.tokenizer: Tokenizer | None = None
        self._tokens = tokens
        self._question: list[int] = []
        self._ratios: deque[float] = deque(maxlen=window)
        self._said: OrderedDict[str, int] = OrderedDict()

    def question(self, request: Request) -> Request | None:
        if self.tokenizer is None or request.whole or request.prefetches:
            return None
        asked = self._question = self._question or self.tokenizer.encode_inner(QUESTION)
        if len(asked) + self._tokens > request.max_tokens:
            return None  # it would cost more than the answer, and might not fit the context
        return msgspec.structs.replace(
            request, request_id=f"{request.request_id}-length", prompt_token_ids=request.prompt_token_ids + asked,
            rules=TokenRules(temperature=0.0, adapter=request.rules.adapter), n=1, max_tokens=self._tokens,
            stop_token_ids=[], repetition=None, calls=[], hints=[],
        )  # fmt: skip

    def predict(self, request: Request, answer: Seq[int]) -> int:
        found = None
        if self.tokenizer is not None and answer:
            found = re.search(r"\d+", self.tokenizer.decode(list(answer)).replace(",", ""))
        if found is None or not (words := int(found[0][:9])) > 0:
            return 0
        self._said[request.request_id] = words
        while len(self._said) > MOST_OPEN:
            self._said.popitem(last=False)
        per_word = median(self._ratios) if self._ratios else TOKENS_PER_WORD
        return min(max(1, round(words * per_word)), request.max_tokens)

    def learn(self, request: Request, num_generated: int) -> None:
        words = self._said.pop(request.request_id, 0)
        if words:
            self._ratios.append(num_generated / words)
