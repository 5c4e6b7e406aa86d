"""Log-probabilities in the shapes of completions, chat completions and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.core.output import Logprob
from penstock.server.schema.openai import CompletionLogprobs, PromptLogprob, PromptLogprobs, TokenLogprob, TopLogprob

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

Entry = dict[int, Logprob]
LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have (vLLM's number)."""


class LogprobWriter:
    """One per request. `as_ids` writes tokens as "token_id:123", which tells apart tokens of equal text.

    `top`: how many alternatives were asked for.
    """

    def __init__(self, tokenizer: Tokenizer | None, top: int, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._as_ids = as_ids or tokenizer is None

    def text(self, token_id: int, entry: Logprob | None = None) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        assert self._tokenizer is not None
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def _bytes(self, token_id: int, text: str) -> list[int]:
        table = None if self._tokenizer is None else self._tokenizer.table
        data = None if table is None else table[token_id]
        return list(text.encode("utf-8", "replace") if data is None else data)

    def _best(self, entry: Entry) -> list[tuple[int, Logprob]]:
        """The likeliest, in order; the chosen token is among them only if it is one of them."""
        ranked = sorted(entry.items(), key=lambda item: item[1].rank or 1 << 60)
        return ranked[: self._top]

    def chat(self, token_ids: Sequence[int], entries: Sequence[Entry]) -> list[TokenLogprob]:
        out = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = self.text(token_id, entry[token_id])
            out.append(
                TokenLogprob(
                    token=text,
                    logprob=_finite(entry[token_id].logprob),
                    bytes=self._bytes(token_id, text),
                    top_logprobs=[self._top_one(i, e) for i, e in self._best(entry)],
                )
            )
        return out

    def _top_one(self, token_id: int, entry: Logprob) -> TopLogprob:
        text = self.text(token_id, entry)
        return TopLogprob(token=text, logprob=_finite(entry.logprob), bytes=self._bytes(token_id, text))

    def completion(
        self, token_ids: Sequence[int], entries: Sequence[Entry | None], offset: int
    ) -> tuple[CompletionLogprobs, int]:
        """The entries, and the offset behind them. An entry of None (the first token of a prompt) has no number.

        Tokens of equal text share a key of `top_logprobs`: the likelier one has it.
        """
        out = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = self.text(token_id, entry[token_id] if entry is not None else None)
            out.tokens.append(text)
            out.text_offset.append(offset)
            offset += len(text)
            if entry is None:
                out.token_logprobs.append(None)
                out.top_logprobs.append(None)
                continue
            out.token_logprobs.append(_finite(entry[token_id].logprob))
            top: dict[str, float] = {}
            # As at OpenAI, the chosen token is always there, beside the likeliest.
            for i, e in [*self._best(entry), (token_id, entry[token_id])]:
                top.setdefault(self.text(i, e), _finite(e.logprob))
            out.top_logprobs.append(top)
        return out, offset


def prompt_logprobs(entries: Sequence[Entry | None]) -> PromptLogprobs:
    """vLLM's shape: one object per prompt token, keyed by token id."""
    return [
        None if entry is None
        else {str(i): PromptLogprob(logprob=_finite(e.logprob), rank=e.rank, decoded_token=e.decoded_token)
              for i, e in entry.items()}
        for entry in entries
    ]  # fmt: skip


def _finite(value: float) -> float:
    return max(value, LOWEST)
