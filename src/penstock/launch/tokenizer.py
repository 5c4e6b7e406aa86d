"""Which tokenizer goes with a model: the one that came with it, or one the user names."""

from __future__ import annotations

from pathlib import Path

from penstock.base.errors import ModelError
from penstock.core.model_spec import ModelSpec
from penstock.families.checkpoint import Checkpoint, TokenizerFiles
from penstock.families.folder import read_tokenizer_files
from penstock.formats.llama2c import looks_like_tokenizer, read_tokenizer
from penstock.text.tokenizer import Tokenizer


def load_tokenizer(files: TokenizerFiles, spec: ModelSpec) -> Tokenizer | None:
    """None if the model came without one. Raises ModelError for a broken file, or one of another vocabulary."""
    if files.path is None:
        return None
    if files.kind == "llama2c":
        bos = spec.bos_token_id if spec.bos_token_id is not None else 1
        eos = spec.eos_token_ids[0] if spec.eos_token_ids else 2
        return Tokenizer.from_pieces(read_tokenizer(files.path, spec.vocab_size), bos, eos)
    tokenizer = Tokenizer.from_hf(files.path, files.config)
    if tokenizer.vocab_size > spec.vocab_size:
        raise ModelError(
            f"the tokenizer {files.path.name!r} has ids up to {tokenizer.vocab_size - 1}, but the model has only "
            f"{spec.vocab_size} tokens; it belongs to another model"
        )
    return tokenizer


def named_tokenizer(path: str, checkpoint: Checkpoint) -> TokenizerFiles:
    """The tokenizer at `path`: a folder with tokenizer.json, that file itself, or a llama2.c tokenizer.

    Chat template and special tokens come from beside it where it has them, else from the model. Raises ModelError.
    """
    given = Path(path)
    if given.is_dir():
        return read_tokenizer_files(given, sorted(entry.name for entry in given.iterdir()))
    if not given.is_file():
        raise ModelError(f"there is no tokenizer at {path!r}")
    own = checkpoint.tokenizer
    if given.suffix == ".json":
        return TokenizerFiles("hf", given, own.config, own.chat_template)
    if looks_like_tokenizer(given, checkpoint.spec.vocab_size):
        return TokenizerFiles("llama2c", given, own.config, own.chat_template)
    raise ModelError(
        f"{path!r} is neither a tokenizer.json nor a llama2.c tokenizer of {checkpoint.spec.vocab_size} tokens"
    )
