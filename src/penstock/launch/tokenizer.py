"""Which tokenizer goes with a model: the one that came with it, or one the user names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.base.errors import ModelError
from penstock.core.model_spec import ModelSpec
from penstock.families.checkpoint import Checkpoint, TokenizerFiles
from penstock.families.folder import read_tokenizer_files, tokenizer_file
from penstock.formats.llama2c import looks_like_tokenizer

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer


def load_tokenizer(files: TokenizerFiles, spec: ModelSpec) -> Tokenizer | None:
    """None if the model came without one. Raises ModelError for a broken file, or one of another vocabulary."""
    # All kinds of tokenizers, and the library behind them: the engine of a server reads none.
    from penstock.launch.tokenizer_kinds import read_tokenizer_of

    if files.path is None and files.kind != "bytes":
        return None
    tokenizer = read_tokenizer_of(files, spec)
    if files.path is not None and tokenizer.vocab_size > spec.vocab_size:
        raise ModelError(
            f"the tokenizer {files.path.name!r} has ids up to {tokenizer.vocab_size - 1}, but the model has only "
            f"{spec.vocab_size} tokens; it belongs to another model"
        )
    return tokenizer


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
