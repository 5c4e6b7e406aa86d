"""A model's tokenizer, by the kind of its files."""

from __future__ import annotations

from penstock.core.model_spec import ModelSpec
from penstock.families.checkpoint import TokenizerFiles
from penstock.formats.gguf import read_gguf
from penstock.formats.llama2c import read_tokenizer
from penstock.formats.sentencepiece import read_sentencepiece
from penstock.formats.ternary import read_pair_tokenizer
from penstock.formats.vocab_files import read_bpe, read_rwkv_vocab, read_tiktoken
from penstock.text.byte_bpe import bpe_tokenizer, tiktoken_tokenizer
from penstock.text.gguf import tokenizer_from_gguf
from penstock.text.pairs import pair_tokenizer
from penstock.text.sentencepiece import ScoredPieces, sentencepiece_tokenizer
from penstock.text.tokenizer import Tokenizer
from penstock.text.world import byte_tokenizer, world_tokenizer


def read_tokenizer_of(files: TokenizerFiles, spec: ModelSpec) -> Tokenizer:
    """Raises: ModelError for a broken file."""
    if files.kind == "bytes":
        return byte_tokenizer()
    path = files.path
    assert path is not None, f"a tokenizer of kind {files.kind} has a file"
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
