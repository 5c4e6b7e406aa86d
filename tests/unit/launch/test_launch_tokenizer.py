"""Which tokenizer a model gets, from what lies in its folder or what the user names."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import msgspec
import pytest

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import ModelSpec
from penstock.families.checkpoint import Checkpoint, TokenizerFiles
from penstock.families.folder import read_tokenizer_files
from penstock.launch.tokenizer import load_tokenizer, named_tokenizer
from tests.shared import shared
from tests.specs import make
from tests.unit.text import text_vocabularies as vocabularies

FILES = {
    "tokenizer.model": ("sentencepiece", ("llama2", "tokenizer.model")),
    "vocab.json": ("bpe", ("gpt2", "vocab.json")),
    "merges.txt": ("", ("gpt2", "merges.txt")),
    "encoder.json": ("bpe", ("llama3.2", "encoder.json")),
    "vocab.bpe": ("", ("llama3.2", "vocab.bpe")),
    "cl100k_base.tiktoken": ("tiktoken", ("cl100k", "cl100k_base.tiktoken")),
    "rwkv_vocab_v20230424.txt": ("rwkv", ("rwkv", "rwkv_vocab_v20230424.txt")),
}
"""In the order of preference, behind tokenizer.json."""
TEXT = "Hello wörld 🦙, it's 12345\n\n  x"


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).symlink_to(shared("data", "tokenizers", *FILES[name][1]))
    return folder


def found(folder: Path) -> TokenizerFiles:
    return read_tokenizer_files(folder, sorted(path.name for path in folder.iterdir()))


def spec(vocab_size: int) -> ModelSpec:
    return msgspec.structs.replace(make("llama_gqa")[0], vocab_size=vocab_size)


def test_order_of_preference(tmp_path: Path):
    folder = fill(tmp_path / "m", *FILES)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false, "chat_template": "{{ x }}"}')
    assert found(folder).kind == "hf"
    (folder / "tokenizer.json").unlink()
    for name, (kind, _) in FILES.items():
        if kind:
            files = found(folder)
            assert (files.kind, files.path) == (kind, folder / name)
            assert (files.config["add_bos_token"], files.chat_template) == (False, "{{ x }}")
            assert (files.merges is not None) == (kind == "bpe")
        (folder / name).unlink()
    assert found(folder).kind == "none"
    assert "no tokenizer.json" in found(folder).reason


def test_half_pairs_and_several_files(tmp_path: Path):
    for name in ("vocab.json", "merges.txt", "encoder.json", "vocab.bpe"):
        folder = fill(tmp_path / name.replace(".", "-"), name)
        assert found(folder).kind == "none"
        with pytest.raises(ModelError, match="is half a tokenizer"):
            named_tokenizer(str(folder / name), checkpoint(folder))
    folder = fill(tmp_path / "two", "cl100k_base.tiktoken")
    (folder / "other.tiktoken").write_text("")
    with pytest.raises(ModelError, match="name one as tokenizer"):
        found(folder)


def checkpoint(folder: Path, vocab_size: int = 512) -> Checkpoint:
    files = TokenizerFiles("none", config={"add_bos_token": False}, chat_template="{{ own }}")
    return Checkpoint(folder, spec(vocab_size), {}, files)


@pytest.mark.parametrize(
    ("name", "size", "oracle"),
    [
        ("tokenizer.model", 32000, "llama2_spm"), ("vocab.json", 50257, "gpt2_pair"),
        ("merges.txt", 50257, "gpt2_pair"),
        ("cl100k_base.tiktoken", 100277, "cl100k"), ("rwkv_vocab_v20230424.txt", 65530, "world"),
    ],
)  # fmt: skip
def test_named_files_are_read(tmp_path: Path, name, size, oracle):
    folder = fill(tmp_path / "m", *(n for n in FILES if n in ("vocab.json", "merges.txt")))
    if not (folder / name).exists():
        fill(folder, name)
    files = named_tokenizer(str(folder / name), checkpoint(folder))
    assert (files.config, files.chat_template) == ({"add_bos_token": False}, "{{ own }}")
    tokenizer = load_tokenizer(files, spec(size))
    assert tokenizer is not None
    assert tokenizer.vocab_size == size
    assert tokenizer.encode(TEXT) == getattr(vocabularies, oracle)().encode(TEXT, add_special_tokens=False)
    with pytest.raises(ModelError, match="it belongs to another model"):
        load_tokenizer(files, spec(size - 1))


def test_a_folder_s_configuration_says_how_texts_are_split(tmp_path: Path):
    folder = fill(tmp_path / "m", "encoder.json", "vocab.bpe")
    (folder / "tokenizer_config.json").write_text(json.dumps(vocabularies.LLAMA3_CONFIG))
    tokenizer = load_tokenizer(found(folder), spec(128256))
    assert tokenizer is not None
    assert tokenizer.encode(TEXT) == vocabularies.llama3().encode(TEXT)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UnsupportedError, match="does not say how texts are split"):
        load_tokenizer(found(folder), spec(128256))


def test_gguf_files_have_their_tokenizer_in_them(tmp_path: Path):
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    tokens = ["<s>", *(repr(token)[2:-1] for _, token in sorted(vocabularies.world_tokens().items()))]
    entries = text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("rwkv")
    entries += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, len(tokens)) + b"".join(map(text, tokens))
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entries)
    files = named_tokenizer(str(path), checkpoint(tmp_path))
    assert files.kind == "gguf"
    tokenizer = load_tokenizer(files, spec(65536))
    assert tokenizer is not None
    assert tokenizer.encode(TEXT) == vocabularies.world().encode(TEXT)


def test_other_kinds(tmp_path: Path):
    assert load_tokenizer(TokenizerFiles("none"), spec(8)) is None
    tokenizer = load_tokenizer(TokenizerFiles("bytes"), spec(256))
    assert tokenizer is not None
    assert tokenizer.encode("a") == [97]
    shutil.copy(shared("models", "stories260K", "tok512.bin"), tmp_path / "any.bin")
    assert named_tokenizer(str(tmp_path / "any.bin"), checkpoint(tmp_path)).kind == "llama2c"
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ModelError, match="is neither a tokenizer"):
        named_tokenizer(str(tmp_path / "x.txt"), checkpoint(tmp_path))
    with pytest.raises(ModelError, match="there is no tokenizer at"):
        named_tokenizer(str(tmp_path / "nothing"), checkpoint(tmp_path))
