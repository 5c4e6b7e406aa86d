"""Where the tokens of a text stand in it."""

from __future__ import annotations

from penstock.text.detokenize import IncrementalDetokenizer
from penstock.text.tokenizer import Tokenizer

_NEAR = 16
"""Characters that a normaliser may have taken out between two tokens, or more."""


class TokenPlaces:
    """Follows a text token by token: where each begins, in characters, and what it is called there.

    A token that is part of a character stands where the character does. One that the text does not show stands between
    its neighbours.
    """

    def __init__(
        self, tokenizer: Tokenizer, detokenizer: IncrementalDetokenizer, at: int = 0, text: str | None = None
    ) -> None:
        """`detokenizer`: a fresh one, as the text's own is. `at`: where the tokens begin.

        `text`: what the tokens were made of, if they come from a text. It lacks what encoding put around it, and a
        normaliser may have changed what the tokens say.
        """
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._at = at
        self._text = text

    def next(self, token_id: int) -> tuple[int, str]:
        """(offset, name) of the next token. The name is the token's own text but where it begins a text: a
        SentencePiece token then has no space in front."""
        alone = self._tokenizer.token_text(token_id)
        whole = self._tokenizer.is_whole(token_id)
        text, begin = self._text, self._at
        if text is not None and token_id in self._tokenizer.special_ids and not text.startswith(alone, begin):
            return begin, alone
        piece = self._detokenizer.add_one(token_id)
        if text is not None and piece and not text.startswith(piece, begin):
            found = text.find(piece, begin, begin + len(piece) + _NEAR)
            begin = found if found >= 0 else begin
        self._at = begin + len(piece)
        if text is not None:
            self._at = min(self._at, len(text))
        if not whole or self._detokenizer.skips(token_id):
            return begin, alone
        if piece.endswith(alone):  # before it may come what was left of a broken character
            return max(begin, self._at - len(alone)), alone
        return begin, piece
