"""SentencePiece vocabularies, encoded and decoded exactly as SentencePiece does.

Here: normalisation, user-defined symbols, the fallback to bytes, special tokens; `score_models` has the two models.
What differs from SentencePiece, beside that: the unknown piece decodes to nothing (or its name), not to U+2047; a
control piece between two byte pieces does not break up the character that they make.

Source: Kudo & Richardson, SentencePiece, arXiv 1808.06226; `normalizer.cc`, `bpe_model.cc`, `unigram_model.cc` and
`sentencepiece_processor.cc` of github.com/google/sentencepiece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken

from penstock.base.errors import ModelError, UnsupportedError
from penstock.text.charsmap import Charsmap
from penstock.text.coverage import Coverage
from penstock.text.piece_backend import Literals, PieceBackend, added_tokens
from penstock.text.score_bpe import MAX_PIECE_CHARS
from penstock.text.score_models import ScoreModel, Unigram, bpe
from penstock.text.token_bytes import BYTE_PIECE, BYTEWISE, SPACE_MARK, TokenBytes, marked_spaces
from penstock.text.tokenizer import Tokenizer, guarded, literal_of

UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_MAX_CHARS = 1 << 23
"""In all pieces together: the time to find the merges grows with it. Vocabularies of 256,000 pieces have 2^21."""


@dataclass
class ScoredPieces:
    """A vocabulary by id, and how its texts are normalised. The fields are those of `tokenizer.model`."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    model_type: int = BPE
    byte_fallback: bool = True
    whitespace_as_suffix: bool = False
    bos_piece: str = "<s>"
    eos_piece: str = "</s>"
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = False
    escape_whitespaces: bool = True


def sentencepiece_tokenizer(
    vocab: ScoredPieces, config: Mapping[str, Any] | None = None, name: str = "tokenizer.model"
) -> Tokenizer:
    """The tokenizer of a SentencePiece vocabulary; `config` is the content of `tokenizer_config.json`.

    Control pieces and the unknown piece become special tokens with their spelling as text form, as in Hugging Face
    tokenizers; `encode` puts BOS first unless `add_bos_token` is false, and EOS last if `add_eos_token` is true or the
    class is T5's. Text behind a special token gets the dummy prefix again unless `legacy` is false.
    Raises: ModelError; UnsupportedError for word and character models.
    """
    return guarded(name, lambda: _build(vocab, dict(config or {})))


def _build(vocab: ScoredPieces, config: dict[str, Any]) -> Tokenizer:
    _check(vocab)
    added = added_tokens(config.get("added_tokens_decoder"))
    for token_id, token in added.items():
        if token_id < len(vocab.pieces) and vocab.pieces[token_id] != token.content:
            raise ModelError(
                f"added_tokens_decoder calls token {token_id} {token.content[:40]!r}, but the vocabulary says "
                f"{vocab.pieces[token_id][:40]!r}"
            )
    encoder = _Encoder(vocab, user_defined={i for i, t in enumerate(vocab.types) if t == USER_DEFINED} - added.keys())
    special = {
        i: AddedToken(text, normalized=False, special=True)
        for i, text in enumerate(vocab.pieces)
        if vocab.types[i] in (CONTROL, UNKNOWN) and text
    } | added
    pieces = dict(enumerate(vocab.pieces)) | {i: t.content for i, t in added.items()}
    backend = PieceBackend(
        pieces, _table(vocab, pieces), encoder, special=special, user_defined=encoder.user_defined,
        unknown_id=encoder.unknown_id, continues_after_special=config.get("legacy") is False,
        coverage=encoder.coverage(special.values()),
    )  # fmt: skip
    ids = {t.content: i for i, t in sorted(special.items(), reverse=True)}
    bos = ids.get(literal_of(config["bos_token"]) if "bos_token" in config else vocab.bos_piece)
    eos = ids.get(literal_of(config["eos_token"]) if "eos_token" in config else vocab.eos_piece)
    t5 = str(config.get("tokenizer_class", "")).removesuffix("Fast") == "T5Tokenizer"
    made = Tokenizer(
        backend, bos_id=bos, eos_ids=[] if eos is None else [eos],
        prepend_bos=bool(config.get("add_bos_token", not t5)), append_eos=bool(config.get("add_eos_token", t5)),
    )  # fmt: skip
    made.decode(made.encode("a"))  # some broken rules only show when used
    return made


def _check(vocab: ScoredPieces) -> None:
    if vocab.model_type not in (UNIGRAM, BPE):
        kind = {3: "word", 4: "character"}.get(vocab.model_type, str(vocab.model_type))
        raise UnsupportedError(f"it is a SentencePiece model of the kind {kind!r}; Unigram and BPE are read")
    if not len(vocab.pieces) == len(vocab.scores) == len(vocab.types) or not vocab.pieces:
        raise ModelError(
            f"it has {len(vocab.pieces)} pieces, {len(vocab.scores)} scores and {len(vocab.types)} token types"
        )
    if sum(map(len, vocab.pieces)) > _MAX_CHARS:
        raise ModelError(f"its pieces have more than {_MAX_CHARS} characters together")
    seen: dict[str, int] = {}
    for i, (piece, type_) in enumerate(zip(vocab.pieces, vocab.types, strict=True)):
        if len(piece) > MAX_PIECE_CHARS:
            raise ModelError(f"piece {i} has {len(piece)} characters; {MAX_PIECE_CHARS} are allowed")
        if type_ in (NORMAL, USER_DEFINED, UNUSED):
            if not piece:
                raise ModelError(f"piece {i} is empty")
            if seen.setdefault(piece, i) != i:
                raise ModelError(f"piece {i} is the same as piece {seen[piece]}")


def _byte_pieces(vocab: ScoredPieces) -> dict[str, int]:
    """Spelling of a byte piece -> its byte. Raises: ModelError."""
    out: dict[str, int] = {}
    for i, (piece, kind) in enumerate(zip(vocab.pieces, vocab.types, strict=True)):
        if kind == BYTE:
            found = BYTE_PIECE.fullmatch(piece)
            if found is None:
                raise ModelError(f"byte piece {i} is spelled {piece[:40]!r}")
            out[piece] = int(found[1], 16)
    return out


def _table(vocab: ScoredPieces, pieces: Mapping[int, str]) -> TokenBytes:
    of_bytes = {piece: bytes([value]) for piece, value in _byte_pieces(vocab).items()}

    def to_bytes(piece: str) -> bytes:
        single = of_bytes.get(piece)
        return marked_spaces(piece) if single is None else single

    marks: Any = "each" if vocab.remove_extra_whitespaces else "one" if vocab.add_dummy_prefix else ""
    return TokenBytes(pieces.get, to_bytes, errors=BYTEWISE, strip_marks=marks)


class _Encoder:
    """Plain text -> ids."""

    def __init__(self, vocab: ScoredPieces, user_defined: set[int]) -> None:
        self._vocab = vocab
        self.user_defined = {i: vocab.pieces[i] for i in sorted(user_defined)}
        unknown = [i for i, kind in enumerate(vocab.types) if kind == UNKNOWN]
        self.unknown_id = unknown[0] if unknown else None
        value_of = _byte_pieces(vocab)
        ids = {value_of[p]: i for i, p in enumerate(vocab.pieces) if vocab.types[i] == BYTE}
        self._bytes = [ids[b] for b in range(256)] if len(ids) == 256 and vocab.byte_fallback else None
        if vocab.byte_fallback and self._bytes is None:
            raise ModelError(f"it falls back to bytes, but has pieces for only {len(ids)} of the 256")
        if self._bytes is None and self.unknown_id is None:
            raise ModelError("it has neither byte pieces nor a piece for unknown text")
        self._symbols = Literals({text: i for i, text in self.user_defined.items()})
        self._charsmap = Charsmap(vocab.charsmap) if vocab.charsmap else None
        ordinary = {p: i for i, p in enumerate(vocab.pieces) if vocab.types[i] in (NORMAL, UNUSED)}
        unused = {i for i, kind in enumerate(vocab.types) if kind == UNUSED}
        if vocab.model_type == UNIGRAM:
            known = {p: i for p, i in ordinary.items() if i not in unused}
            self._model: ScoreModel = Unigram(known, vocab.scores)
        else:
            self._model = bpe(ordinary, vocab.scores, unused)

    def coverage(self, special: Iterable[AddedToken]) -> Coverage | None:
        """None where the normaliser may delete text, or one unknown token stands for a stretch of it."""
        if self._bytes is None or self._charsmap is not None or self._vocab.remove_extra_whitespaces:
            return None
        swallowing = tuple(token.content for token in special if token.lstrip or token.rstrip)
        longest = max(len(text) for text in (*self._vocab.pieces, *(token.content for token in special)))
        return Coverage(longest, in_bytes=False, swallowing=swallowing)

    def __call__(self, text: str, inner: bool, symbols: bool) -> list[int]:
        """Ids of `text`; `inner`: it continues another. `symbols`: user-defined ones count."""
        normal = self.normalize(text, inner, symbols)
        ids: list[int] = []
        for part, token_id in self._parts(normal, symbols):
            ids += self._model.encode(part, self._unknown) if token_id is None else [token_id]
        return ids

    def _parts(self, text: str, symbols: bool) -> Iterable[tuple[str, int | None]]:
        if symbols:
            return self._symbols.split(text)
        return [(text, None)] if text else []

    def normalize(self, text: str, inner: bool = False, symbols: bool = True) -> str:
        """What SentencePiece's normaliser makes of `text`; `inner`: without dummy prefix, first space kept."""
        vocab = self._vocab
        space = SPACE_MARK if vocab.escape_whitespaces else " "
        extra = vocab.remove_extra_whitespaces
        if not extra and self._charsmap is None:
            if not text:
                return ""
            body = text.replace(" ", space)
        else:
            parts = list(self._prefixes(text, symbols))
            body = self._without_extra(parts, inner) if extra else "".join(parts)
            if not text or (extra and not body and all(part == " " for part in parts)):
                return ""
            body = body.replace(" ", space)
        if vocab.add_dummy_prefix and not inner and not vocab.whitespace_as_suffix:
            body = space + body
        if extra:
            body = body.rstrip(space)
        if vocab.add_dummy_prefix and vocab.whitespace_as_suffix:
            body += space
        return body

    def _prefixes(self, text: str, symbols: bool) -> Iterator[str]:
        for part, token_id in self._parts(text, symbols):
            if token_id is not None:
                yield part
            else:
                yield from self._charsmap.prefixes(part) if self._charsmap is not None else part

    @staticmethod
    def _without_extra(parts: Iterable[str], inner: bool) -> str:
        out: list[str] = []
        after_space = not inner
        for part in parts:
            kept = part.lstrip(" ") if after_space else part
            if kept:
                out.append(kept)
                after_space = kept.endswith(" ")
        return "".join(out)

    def _unknown(self, text: str) -> list[int]:
        """Ids of a stretch that no piece fits."""
        if self._bytes is not None:
            return [self._bytes[b] for b in text.encode("utf-8")]
        assert self.unknown_id is not None
        return [self.unknown_id]
