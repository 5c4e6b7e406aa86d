"""`rest`: the datastore's file, its search, and what retrieval brings."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from penstock.base.errors import ConfigError, InputError, ModelError
from penstock.cli.main import main
from penstock.core.draft import NO_DRAFT
from penstock.drafters.datastore import ORDERED, SEPARATOR, Datastore, fingerprint, read, suffix_array, write
from penstock.drafters.rest import RestDrafter
from penstock.launch.llm import LLM
from tests.drafting import answer, ids, job, nano

MARK = fingerprint(lambda text: [ord(c) for c in text])


def store(tmp_path: Path, *texts: list[int], vocab: int = 50) -> Datastore:
    write(tmp_path / "store", texts, vocab, MARK)
    return read(tmp_path / "store", vocab, MARK)


def test_suffixes_are_sorted_as_far_as_anybody_looks() -> None:
    rng = random.Random(4)
    for alphabet, count in ((1, 40), (2, 300), (30, 300)):
        tokens = [rng.randrange(alphabet) for _ in range(count)]
        tokens[count // 2] = tokens[-1] = SEPARATOR
        order = suffix_array(np.array(tokens, np.int32)).tolist()
        assert order == sorted(range(count), key=lambda i: (tokens[i : i + ORDERED], i))


def test_a_search_finds_every_place_and_no_other(tmp_path: Path) -> None:
    rng = random.Random(5)
    texts = [[rng.randrange(3) for _ in range(rng.randrange(1, 60))] for _ in range(8)]
    data = store(tmp_path, *texts)
    for _ in range(500):
        pattern = [rng.randrange(4) for _ in range(rng.randint(1, 8))]
        low, high = data.find(pattern)
        got = sorted(tuple(data.follow(place, len(pattern), 4)) for place in range(low, high))
        n = len(pattern)
        want = [tuple(t[i + n : i + n + 4]) for t in texts for i in range(len(t) - n + 1) if t[i : i + n] == pattern]
        assert got == sorted(want), pattern
    assert data.find([-1]) == data.find([50]) == data.find([50, 1]) == (0, 0)


def test_the_longest_end_that_is_there_drafts_a_tree(tmp_path: Path) -> None:
    drafter = RestDrafter(store(tmp_path, [1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [1, 2, 3, 4, 6, 8], [9, 3, 4, 40]))
    (tree,) = drafter.propose([job([30, 1, 2, 3, 4])])
    assert tree.token_ids == [6, 5, 7, 8]
    assert tree.parents == [-1, -1, 0, 0]
    assert drafter.propose([job([30, 9, 3, 4])])[0].token_ids == [40]
    assert drafter.propose([job([30, 1, 2, 3, 4], chain_only=True)])[0].token_ids == [6, 7]
    assert drafter.propose([job([30, 1, 2, 3, 4], num_nodes=1)])[0].token_ids == [6]
    for text in ([4], [3, 30], [5, 6], [7]):
        assert drafter.propose([job(text)]) == [NO_DRAFT]


def test_the_longest_end_is_found_at_every_length(tmp_path: Path) -> None:
    text = list(range(40))
    drafter = RestDrafter(store(tmp_path, text))
    for length in range(2, 30):
        (low, high), found = drafter._longest([45, *text[5 : 5 + length]][-ORDERED:])
        assert high - low == 1
        assert found == min(length, ORDERED)


def spoiled(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_what_cannot_be_used_is_one_sentence_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "store"
    write(path, [[1, 2, 3, 4]], 50, MARK)
    good = path.read_bytes()
    assert read(path, 50, MARK).tokens.tolist() == [1, 2, 3, 4, SEPARATOR]
    assert read(path, 50, None).tokens.tolist() == [1, 2, 3, 4, SEPARATOR]
    for mark, vocab in ((fingerprint(lambda text: [1]), 50), (MARK, 51), (None, 51)):
        with pytest.raises(ConfigError, match=r"another tokenizer.*penstock datastore build"):
            read(path, vocab, mark)
    for data, why in (
        (good[:-4], "damaged: 164 bytes do not hold 5 tokens"),
        (good[:-1] + b"\x09", "checksum"),
        (good[:130] + b"\x01" + good[131:], "checksum"),
        (good[:8] + b"\x02" + good[9:], "version 2"),
        (good[:100], "no datastore"),
        (b"", "no datastore"),
        (b"x" * 500, "no datastore"),
    ):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=why) as error:
            read(path, 50, MARK)
        assert error.value.field == "speculative_config"
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="cannot read"):
        read(tmp_path / "nowhere", 50, MARK)
    with pytest.raises(ConfigError, match="not a regular file"):
        read(tmp_path, 50, MARK)
    with pytest.raises(InputError, match="0"):
        write(path, [[], []], 50, MARK)
    with pytest.raises(ModelError, match="cannot write"):
        write(tmp_path / "no" / "where", [[1]], 50, MARK)


def test_a_datastore_that_lies_is_refused(tmp_path: Path) -> None:
    """A right checksum over places and tokens that do not exist."""
    write(tmp_path / "store", [[1, 2, 60]], 50, MARK)
    with pytest.raises(ConfigError, match="do not exist"):
        read(tmp_path / "store", 50, MARK)


def test_the_engine_refuses_it_in_one_sentence(tmp_path: Path) -> None:
    for config in ({"method": "rest"}, {"method": "rest", "datastore": str(tmp_path / "none")}):
        with pytest.raises(ConfigError, match="datastore"):
            LLM(model="pico", speculative_config=config, max_model_len=256)


def test_D15_text_in_the_datastore_and_text_that_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens per step of both, built by the command, read by an engine; the tokens are those of plain decoding."""
    known, unknown = "Once upon a time there was a little fox who", "The old king looked at the sea and"
    told = nano().get_tokenizer().decode(answer(known, None, max_tokens=100).token_ids[0])
    text = tmp_path / "text"
    text.write_text(f"{known}{told}\nThe bird sang all day.\n")
    out = tmp_path / "store"
    assert main(["datastore", "build", "nano", "--text", str(text), "--out", str(out)]) == 0
    assert str(len(ids(text.read_text())) + 1) in capsys.readouterr().out
    encode = nano().get_tokenizer().encode_inner
    vocab = nano()._engine.spec.vocab_size
    drafter = RestDrafter(read(out, vocab, fingerprint(encode)))
    figures = {}
    for prompt in (known, unknown):
        plain = answer(prompt, None)
        drafted = answer(prompt, drafter, 16)
        assert drafted.token_ids == plain.token_ids
        figures[prompt] = drafted.per_step
    assert figures[known] >= 3, figures
    assert 1 <= figures[unknown] < 1.5, figures
    llm = LLM(model="pico", speculative_config={"method": "rest", "datastore": str(out)}, max_model_len=256)
    assert llm._engine.core.executor.runner.drafter.name == "rest"  # type: ignore[attr-defined]
