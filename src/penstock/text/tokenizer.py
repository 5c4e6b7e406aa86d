"""Text to ids and back, whatever the vocabulary came from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken

from penstock.base.errors import InputError, ModelError, UnsupportedError
from penstock.text import score_bpe
from penstock.text.coverage import Coverage, coverage_of
from penstock.text.piece_backend import PieceBackend
from penstock.text.token_bytes import TokenBytes, table_for
from penstock.text.unlocked import encoded

MAX_FILE_BYTES = 256 << 20
MAX_TOKEN_ID = (1 << 24) - 1

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

T = TypeVar("T")


class Tokenizer:
    """One vocabulary. Safe to share between threads once built.

    Attributes:
        vocab_size: largest id + 1. A model may have more rows than its tokenizer has tokens.
        bos_id: id put before a text that begins a sequence, if the vocabulary names one.
        eos_ids: ids that end a sequence.
        special_ids: ids that `skip_special_tokens` leaves out.
        special_literals: the texts of these tokens; `encode` turns them into their ids, `encode_plain` never does.
        added_literals: texts of all added tokens, special or not (tool markers and the like), with their ids.
        bos_token, eos_token: their literals for chat templates; "" if there is none.
        table: ids as bytes; None for the few decoders that are not a table (see `detokenize`).
        coverage: how much of a text one token covers at most; None if nothing is known.
    """

    def __init__(
        self, backend: Any, *, bos_id: int | None = None, eos_ids: Iterable[int] = (),
        special_ids: Iterable[int] = (), prepend_bos: bool = False, append_eos: bool = False,
        pieces: list[str] | None = None,
    ) -> None:  # fmt: skip
        """`backend` is a `tokenizers.Tokenizer` or a `PieceBackend`."""
        self._backend = backend
        self._prepend_bos = prepend_bos
        self._append_eos = append_eos
        self._pieces = pieces
        added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        own = isinstance(backend, PieceBackend)
        ids = backend.ids() if own else backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size: int = max(max(ids, default=-1) + 1, len(pieces or ()))
        self.bos_id = bos_id
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_ids))
        self.special_ids = frozenset(special_ids) | frozenset(self.eos_ids) | {i for i, t in added.items() if t.special}
        if bos_id is not None:
            self.special_ids |= {bos_id}
        # The library itself names some added tokens in their normalised form (`▁<s>`).
        self._added = {i: t.content for i, t in added.items()}
        self.added_literals: dict[str, int] = {t.content: i for i, t in added.items()}
        self.special_literals = frozenset(t for t, i in self.added_literals.items() if i in self.special_ids)
        self.bos_token = self.id_to_piece(bos_id) if bos_id is not None else ""
        self.eos_token = self.id_to_piece(self.eos_ids[0]) if self.eos_ids else ""
        self.table: TokenBytes | None = backend.table if own else table_for(backend.decoder, self._piece_or_none)
        self.coverage: Coverage | None = backend.coverage if own else coverage_of(backend)
        self._plain: Any = backend.without_added() if own else _without_added(backend)
        self._forbidden = frozenset(self.added_literals.values()) - {_unknown_id(backend)}
        self._normalized = [t.content for t in added.values() if t.normalized and backend.normalizer is not None]
        self._newline: list[int] = backend.encode("\n", add_special_tokens=False).ids

    @classmethod
    def from_hf(cls, path: str | Path, config: Mapping[str, Any] | None = None) -> Tokenizer:
        """Read a `tokenizer.json`; `config` is the content of `tokenizer_config.json` (special tokens by name).

        `config` may also hold `bos_token_id` and `eos_token_id` (an id or a list), which beat the names.
        Raises: ModelError, one sentence, if the file is missing, broken or hostile.
        """
        path = Path(path)
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ModelError(f"{path.name} is larger than {MAX_FILE_BYTES >> 20} MiB")
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {path.name}: {_first_line(error)}") from None
        if config is not None and not isinstance(config, Mapping):
            raise ModelError(f"the tokenizer's configuration must be a JSON object, not {type(config).__name__}")
        return guarded(path.name, lambda: cls._from_json(text, dict(config or {})))

    @classmethod
    def _from_json(cls, text: str, config: dict[str, Any]) -> Tokenizer:
        backend = tokenizers.Tokenizer.from_str(text)
        # A limit set in the file would cut prompts silently.
        backend.no_truncation()
        backend.no_padding()
        return cls.from_backend(backend, config)

    @classmethod
    def from_backend(cls, backend: Any, config: Mapping[str, Any], prepend_bos: bool = False) -> Tokenizer:
        """A `tokenizers.Tokenizer` with the special tokens that `config`, as in `from_hf`, names.

        Raises: ModelError, or whatever the library does (see `guarded`).
        """
        added = {t.content: i for i, t in backend.get_added_tokens_decoder().items()}
        vocab = backend.get_vocab(with_added_tokens=True) | added
        if not vocab:
            raise ModelError("the vocabulary is empty")
        if max(vocab.values()) > MAX_TOKEN_ID:
            raise ModelError(f"the vocabulary holds id {max(vocab.values())}; at most {MAX_TOKEN_ID} is allowed")
        named = {name: literal for name in _NAMED_TOKENS if (literal := literal_of(config.get(name))) in vocab}
        extra = [
            literal_of(t) for key in ("additional_special_tokens", "extra_special_tokens") for t in _items(config, key)
        ]
        special = [t for t in [*named.values(), *extra] if t in vocab]
        backend.add_special_tokens(
            [AddedToken(t, normalized=False, special=True) for t in dict.fromkeys(special) if t not in added]
        )
        bos = config.get("bos_token_id", vocab.get(named.get("bos_token", "")))
        eos = config.get("eos_token_id", vocab.get(named.get("eos_token", "")))
        eos_ids = [eos] if isinstance(eos, int) else list(eos or ())
        for token_id in [*eos_ids, *([] if bos is None else [bos])]:
            if not isinstance(token_id, int) or not 0 <= token_id <= MAX_TOKEN_ID:
                raise ModelError(f"{token_id!r} is not a token id")
        special_ids = [vocab[t] for t in special]
        made = cls(backend, bos_id=bos, eos_ids=eos_ids, special_ids=special_ids, prepend_bos=prepend_bos)
        made.decode(made.encode("a"))  # some broken files only show when used
        return made

    @classmethod
    def from_pieces(cls, pieces: list[tuple[bytes, float]], bos_id: int, eos_id: int) -> Tokenizer:
        """A SentencePiece-BPE vocabulary given as (piece, score) by id, as llama2.c stores it.

        `encode` puts BOS first (unless `add_special_tokens` is False) and a space before the text, and turns the
        literals `<s>`, `</s>` and `<unk>` into their ids as Hugging Face tokenizers do; llama2.c has no text form for
        them. Raises: ModelError.
        """
        texts = score_bpe.read_pieces(pieces, bos_id, eos_id)
        backend = score_bpe.build(texts, [score for _, score in pieces], bos_id, eos_id)
        return guarded(
            "tokenizer table",
            lambda: cls(backend, bos_id=bos_id, eos_ids=[eos_id], prepend_bos=True, pieces=texts),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Literals of special tokens become those tokens. Raises: InputError if it cannot be encoded."""
        ids = self._run(self._backend, text, add_special_tokens)
        if add_special_tokens and self._prepend_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        return [*ids, self.eos_ids[0]] if add_special_tokens and self._append_eos and self.eos_ids else ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Ids of two texts with the special tokens around and between them, and which kind each token is of.

        Raises: InputError where the vocabulary has no such form.
        """
        if isinstance(self._backend, PieceBackend) or self._backend.post_processor is None:
            raise InputError("this tokenizer has no form for pairs of texts, which a cross-encoder needs")
        try:
            found = self._backend.encode(_checked(first), _checked(second))
        except Exception as error:
            raise InputError(f"the texts cannot be encoded: {_first_line(error)}") from None
        return found.ids, found.type_ids

    def count(self, text: str) -> int:
        """Tokens of `text`, without special ones around it. Raises: InputError if it cannot be encoded."""
        if isinstance(self._backend, PieceBackend):
            return len(self._run(self._backend, text, False))
        return len(self._encoding(self._backend, text, False))

    def encode_inner(self, text: str) -> list[int]:
        """Ids of a text that continues another: no BOS, and no space put in front."""
        if isinstance(self._backend, PieceBackend):
            return self._backend.encode_inner(_checked(text))
        # The dummy prefix goes before the newline, which is then cut off again.
        ids = self._run(self._backend, "\n" + text, False)
        n = len(self._newline)
        return ids[n:] if ids[:n] == self._newline else self.encode(text, add_special_tokens=False)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` read as nothing but text: no added token can come of it, whatever it spells.

        The unknown token may, where the vocabulary has no other way to write a character.
        Raises: InputError if only a special token could express it.
        """
        encoding = self._encoding(self._plain, text, False)
        ids: list[int] = encoding.ids
        if self._forbidden.isdisjoint(ids):
            return ids
        # Some merge lists spell a control piece; write that stretch character by character.
        out: list[int] = []
        for token_id, (start, end) in zip(ids, encoding.offsets, strict=True):
            out += [token_id] if token_id not in self._forbidden else self._spell(text[start:end])
        return out

    def _spell(self, text: str) -> list[int]:
        ids = [i for c in text for i in self._run(self._plain, c, False)]
        if not self._forbidden.isdisjoint(ids):
            raise InputError(f"the text {text[:40]!r} can only be written with a special token")
        return ids

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of `ids`; unknown ids are nothing.

        `spaces_between_special_tokens=False` matters for vocabularies without a decoder, whose tokens are joined by
        spaces: neighbouring special tokens are then written without one.
        """
        if self.table is not None:
            stream = self.table.stream()
            return stream.feed(self.visible(ids, skip_special_tokens)) + stream.finish()
        kept = [i for i in self.visible(ids, skip_special_tokens) if self._piece_or_none(i) is not None]
        if self._backend.decoder is not None or spaces_between_special_tokens:
            return str(self._backend.decode(kept, skip_special_tokens=False))
        out = ""
        for n, i in enumerate(kept):
            tight = n == 0 or (i in self.special_ids and kept[n - 1] in self.special_ids)
            out += self.id_to_piece(i) if tight else " " + self.id_to_piece(i)
        return out

    def visible(self, ids: Iterable[int], skip_special_tokens: bool) -> list[int]:
        """`ids` as plain integers, without special tokens if so asked."""
        special = self.special_ids if skip_special_tokens else ()
        return [int(i) for i in ids if i not in special]

    def id_to_piece(self, token_id: int) -> str:
        """The vocabulary's own spelling (`▁the`, `Ġthe`, `<0x0A>`); "" for ids it does not have."""
        return self._piece_or_none(token_id) or ""

    def token_text(self, token_id: int) -> str:
        """One token by itself, as answers name it: its text, with the space that a SentencePiece token begins with.

        Bytes that are no whole characters are written as `bytes:\\xe2\\x80` (OpenAI's way), so that no two of them look
        the same. "" for ids the vocabulary does not have.
        """
        if self.table is None:
            return self.decode([token_id], skip_special_tokens=False)
        data = self.table[token_id]
        if self.is_whole(token_id):
            return data.decode("utf-8")
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def is_whole(self, token_id: int) -> bool:
        """Whether a token is made of whole characters."""
        data = b"" if self.table is None else self.table[token_id]
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            return False
        return True

    def piece_to_id(self, piece: str) -> int | None:
        found: int | None = self.added_literals.get(piece, self._backend.token_to_id(piece))
        return found

    def hidden_literals(self, text: str) -> list[str]:
        """Literals of added tokens that `text` only spells after normalisation (full-width letters, say)."""
        if not self._normalized:
            return []
        normal = self._backend.normalizer.normalize_str(text)
        return [t for t in self._normalized if normal.count(t) > text.count(t)]

    def _piece_or_none(self, token_id: int) -> str | None:
        if self._pieces is not None and 0 <= token_id < len(self._pieces):
            return self._pieces[token_id]
        if token_id in self._added:
            return self._added[token_id]
        if not 0 <= token_id <= MAX_TOKEN_ID:
            return None
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

    def _run(self, backend: Any, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._encoding(backend, text, add_special_tokens).ids
        return ids

    @staticmethod
    def _encoding(backend: Any, text: str, add_special_tokens: bool) -> Any:
        text = _checked(text)
        try:
            return encoded(backend, text, add_special_tokens)
        except Exception as error:
            raise InputError(f"the text cannot be encoded: {_first_line(error)}") from None


def guarded(name: str, build: Callable[[], T]) -> T:
    """Run `build`; whatever goes wrong inside the Rust library, panics included, becomes one ModelError."""
    try:
        return build()
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error}") from None
    except (ModelError, InputError) as error:
        raise ModelError(f"{name}: {error}") from None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is no `Exception`
        raise ModelError(f"{name} is not a usable tokenizer: {_first_line(error)}") from None


def _checked(text: Any) -> str:
    if not isinstance(text, str):
        raise InputError(f"text to encode must be a string, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"the text has a lone surrogate at character {error.start}") from None
    return text


def _without_added(backend: Any) -> Any:
    """A second tokenizer around the same model, without added tokens: it cannot see a literal."""
    plain = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer"):
        if getattr(backend, part) is not None:
            setattr(plain, part, getattr(backend, part))
    return plain


def _unknown_id(backend: Any) -> int | None:
    """Id the model falls back to for text it cannot write."""
    if isinstance(backend, PieceBackend):
        return backend.unknown_id
    if isinstance(backend.model, tokenizers.models.Unigram):
        found: int | None = json.loads(backend.model.__getstate__()).get("unk_id")
        return found
    literal = getattr(backend.model, "unk_token", None)
    return backend.token_to_id(literal) if literal else None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:160]


def literal_of(token: Any) -> str:
    """A special token's text; configurations write it as a string or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _items(config: Mapping[str, Any], key: str) -> list[Any]:
    value = config.get(key)
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list) else []
