"""Which tokenizer goes with a model: the one that came with it, or one the user names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.base.errors import ModelError
from penstock.core.model_spec import ModelSpec
from penstock.families.checkpoint import Checkpoint, TokenizerFiles
from penstock.families.folder import read_tokenizer_files, tokenizer_file
from penstock.formats.gguf import read_gguf
from penstock.formats.llama2c import looks_like_tokenizer, read_tokenizer
from penstock.formats.sentencepiece import read_sentencepiece
from penstock.formats.ternary import read_pair_tokenizer
from penstock.formats.vocab_files import read_bpe, read_rwkv_vocab, read_tiktoken
from penstock.text.byte_bpe import bpe_tokenizer, tiktoken_tokenizer
from penstock.text.gguf import tokenizer_from_gguf
from penstock.text.pairs import pair_tokenizer
from penstock.text.sentencepiece import ScoredPieces, sentencepiece_tokenizer
from penstock.text.tokenizer import Tokenizer
from penstock.text.world import byte_tokenizer, world_tokenizer


def load_tokenizer(files: TokenizerFiles, spec: ModelSpec) -> Tokenizer | None:
    """None if the model came without one. Raises ModelError for a broken file, or one of another vocabulary."""
    if files.kind == "bytes":
        return byte_tokenizer()
    if files.path is None:
        return None
    tokenizer = _read(files, files.path, spec)
    if tokenizer.vocab_size > spec.vocab_size:
        raise ModelError(
            f"the tokenizer {files.path.name!r} has ids up to {tokenizer.vocab_size - 1}, but the model has only "
            f"{spec.vocab_size} tokens; it belongs to another model"
        )
    return tokenizer


def _read(files: TokenizerFiles, path: Path, spec: ModelSpec) -> Tokenizer:
    if files.kind == "llama2c":
        bos = spec.bos_token_id if spec.bos_token_id is not None else 1
        eos = spec.eos_token_ids[0] if spec.eos_token_ids else 2
        return Tokenizer.from_pieces(read_tokenizer(path, spec.vocab_size), bos, eos)
    if files.kind == "sentencepiece":
        return sentencepiece_tokenizer(ScoredPieces(**vars(read_sentencepiece(path))), files.config, path.name)
    if files.kind == "bpe" and files.merges is not None:
        return bpe_tokenizer(*read_bpe(path, files.merges), files.config, name=path.name)
    if files.kind == "tiktoken":
        return tiktoken_tokenizer(read_tiktoken(path), path.stem, files.config)
    if files.kind == "rwkv":
        return world_tokenizer(read_rwkv_vocab(path))
    if files.kind == "pairs":
        return pair_tokenizer(*read_pair_tokenizer(path))
    if files.kind == "gguf":
        return tokenizer_from_gguf(read_gguf(path).metadata)
    return Tokenizer.from_hf(path, files.config)


def named_tokenizer(path: str, checkpoint: Checkpoint) -> TokenizerFiles:
    """The tokenizer at `path`: a folder with one, or a file of one (of a pair, either).

    Chat template and special tokens come from beside it where it has them, else from the model. Raises ModelError.
    """
    given = Path(path)
    if given.is_dir():
        return read_tokenizer_files(given, sorted(entry.name for entry in given.iterdir()))
    if not given.is_file():
        raise ModelError(f"there is no tokenizer at {path!r}")
    own = checkpoint.tokenizer
    found = tokenizer_file(given)
    if found is None and looks_like_tokenizer(given, checkpoint.spec.vocab_size):
        found = TokenizerFiles("llama2c", given)
    if found is None:
        raise ModelError(
            f"{path!r} is neither a tokenizer.json, tokenizer.model, vocab.json with merges.txt, .tiktoken, .gguf or "
            f"rwkv_vocab file nor a llama2.c tokenizer of {checkpoint.spec.vocab_size} tokens"
        )
    return replace(found, config=own.config, chat_template=own.chat_template, named_templates=own.named_templates)
