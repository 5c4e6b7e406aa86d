"""tools/train: the interpreter computes what the engine does, exercises are right and kept apart."""

from __future__ import annotations

import json
import random
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from penstock.text.template import encode_chat
from penstock.text.tokenizer import Tokenizer as PenstockTokenizer
from tests import specs
from tests.oracle import NaiveModel

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from train import skills
from train.interpreter import SpecModule
from train.recipes import RECIPES, VOCAB
from train.tokenizer import SPECIAL, TEMPLATE, save_tokenizer, train_tokenizer

UNSUPPORTED = {
    "mamba", "mamba2", "mamba2_hybrid", "rwkv4", "rwkv5", "rwkv6", "qrwkv6", "rwkv7", "experts", "delta", "short_conv",
    "lightning", "indexed", "gated_lru", "mlstm", "diagonal", "retention", "shared",
    "streams",
    "entries",
    "key_bias", "fixed_experts", "blocks", "gated_diagonal",
}  # fmt: skip
"""Specs that nothing here trains: state space models, RWKV and their like, sparse experts, an indexer's choice, entries
of several tokens."""
GENTLE = {"sandwich": 0.5, "slots": 0.5}
"""Specs whose large weights blow rounding up: any two float32 computations of them, both right, differ by about 1e-4
or more (float64 shows it). Their layers' matrices are scaled down for this test."""
PROSE = " ".join(
    f"The {a} {b} went to the {c}. It was {d} there."
    for a in ("red", "old", "small") for b in ("dog", "man", "cat") for c in ("hill", "sea") for d in ("cold", "warm")
)  # fmt: skip


# -- interpreter -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in specs.ALL if n not in UNSUPPORTED])
def test_the_interpreter_computes_what_the_engine_does(name: str) -> None:
    spec, weights = specs.make(name)
    by = np.float32(GENTLE.get(name, 1.0))
    weights = {n: w * by if w.ndim == 2 and n.startswith("layers.") else w for n, w in weights.items()}
    tokens = np.random.default_rng(2).integers(0, spec.vocab_size, 70)
    module = SpecModule(spec, spec.max_position)
    module.load(weights)
    with torch.no_grad():
        got = module(torch.from_numpy(np.stack([tokens, tokens[::-1]])))[0].numpy()
    want = NaiveModel(spec, weights).logits(tokens.tolist())
    assert want.std() > 0.2
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_the_interpreter_cannot_do_it_refuses(name: str) -> None:
    spec, _ = specs.make(name)
    with pytest.raises(NotImplementedError, match="no trainable form"):
        SpecModule(spec, spec.max_position)(torch.zeros(1, 3, dtype=torch.long))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipes_compute_alike(name: str) -> None:
    """As they are initialised, but with norms and other vectors away from their first values."""
    spec = RECIPES[name]
    module = SpecModule(spec, 128)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(3.0) if p.ndim == 2 else p.add_(
                0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
            )
        tokens = np.random.default_rng(0).integers(0, VOCAB, 24)
        got = module(torch.from_numpy(tokens)[None])[0].numpy()
    weights = {n: p.detach().numpy() for n, p in module.named_weights().items()}
    want = NaiveModel(spec, weights, max_model_len=128).logits(tokens.tolist())
    assert want.std() > 0.2
    np.testing.assert_allclose(got, want, atol=1e-4)


# -- recipes ---------------------------------------------------------------------------------------------------------


def test_recipes_have_the_declared_sizes() -> None:
    nano, pico = RECIPES["nano"].num_params, RECIPES["pico"].num_params
    assert 3e6 <= nano <= 7e6
    assert 2 * nano <= 16e6, "nano ships: at most 16 MB in bfloat16"
    assert nano / 14 <= pico <= nano / 7, "pico is about a tenth of it"
    for name, spec in RECIPES.items():
        assert spec.vocab_size == VOCAB <= 2**12
        assert spec.max_position >= 2048
        if name.startswith("nano"):
            assert 3e6 <= spec.num_params <= 7e6, name


# -- exercises -------------------------------------------------------------------------------------------------------


def noise(rng: random.Random, size: int) -> str:
    start = rng.randrange(max(1, len(PROSE) - size))
    return PROSE[start : start + size]


def made(name: str, split: skills.Split, n: int = 300) -> list[skills.Exercise]:
    rng = random.Random(f"{name} {split}")
    return [skills.SKILLS[name](rng, split, 40 + 5 * (i % 200), noise) for i in range(n)]


def solve_needle(prompt: str) -> str:
    context, question = prompt.rsplit("\n\n", 1)
    facts = re.findall(r"(pass key|magic number|secret code of \w+) is (\d+)\.", context)
    assert len(dict(facts)) == len(facts)
    (value,) = [value for what, value in facts if question.endswith(f"The {what} is")]
    return str(value) + "."


def solve_lookup(prompt: str) -> str:
    lines, question = prompt.split("\n\n")
    pairs = [line.split(": ") for line in lines.split("\n")]
    (key,) = re.findall(r"^The value of (\w+) is$", question)
    (value,) = [v for k, v in pairs if k == key]
    return value + "."


def solve_two_hop(prompt: str) -> str:
    facts, question = prompt.split("\n\n")
    has = {thing: who for who, thing in re.findall(r"(\w+) has the (\w+)\.", facts)}
    where = dict(re.findall(r"(\w+) is in the (\w+)\.", facts))
    assert len(set(has.values())) == len(has) == len(where) == len(set(where.values()))
    (thing,) = re.findall(r"^Who has the (\w+), and where\? The \1 is with$", question)
    return f"{has[thing]} in the {where[has[thing]]}."


def solve_passage(prompt: str) -> str:
    story, question = prompt.split("\n\n")
    match = re.match(
        r"On (\w+), (\w+) went to the (\w+) and found a (\w+) (\w+)\. \2 gave it to (\w+)\. \6 was very happy", story
    )
    assert match is not None
    day, name, place, colour, thing, other = match.groups()
    assert name != other
    answers = {
        f"What did {name} find? {name} found": f"a {colour} {thing}.",
        f"Where did {name} go? {name} went to": f"the {place}.",
        f"What colour was the {thing}? It was": f"{colour}.",
        f"Who got the {thing}? It was given to": f"{other}.",
        f"When did {name} go to the {place}? It was on": f"{day}.",
    }  # fmt: skip
    return answers[question]


def solve_copy(prompt: str) -> str:
    return prompt.removeprefix("Repeat: ").removesuffix("\nAgain:") + "."


def solve_arithmetic(prompt: str) -> str:
    match = re.fullmatch(r"(\d{1,2}) ([+-]) (\d{1,2}) =", prompt)
    assert match is not None
    a, sign, b = match.groups()
    return f"{int(a) + int(b) if sign == '+' else int(a) - int(b)}."


def solve_json(prompt: str) -> str:
    match = re.fullmatch(r"(\w+) is (\d+) years old and likes the (\w+)\. Write as JSON with ([\w, ]+):", prompt)
    assert match is not None
    record: dict[str, Any] = dict(zip(("name", "age", "likes"), match.groups()[:3], strict=True))
    record["age"] = int(record["age"])
    return json.dumps({key: record[key] for key in match[4].split(", ")})


SOLVERS = {
    "needle": solve_needle, "lookup": solve_lookup, "two-hop": solve_two_hop, "passage": solve_passage,
    "copy": solve_copy, "arithmetic": solve_arithmetic, "json": solve_json,
}  # fmt: skip


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", skills.SKILLS)
def test_answers_are_right(name: str, split: skills.Split) -> None:
    exercises = made(name, split)
    for e in exercises:
        assert e.skill == name
        assert e.answer == SOLVERS[name](e.prompt)
        for question, answer in e.more:
            alone = name in ("arithmetic", "json")  # these have no context in common
            context = e.prompt.rsplit("\n\n", 1)[0]
            assert answer == SOLVERS[name](question if alone else f"{context}\n\n{question}")
    assert len({e.prompt for e in exercises}) > 100


def test_depth_is_where_the_fact_stands() -> None:
    for split in ("train", "test"):
        for e in made("needle", split):
            if e.more:
                continue  # other facts moved it
            context = e.prompt.rsplit("\n\n", 1)[0]
            match = re.search(r"[A-Z][^.]*\d{4,6}\.( Remember it\.| Do not forget it\.)?", context)
            assert match is not None
            rest = len(context) - len(match[0])
            assert e.depth == pytest.approx(match.start() / max(1, rest), abs=0.05 if rest > 60 else 1)
        for e in made("lookup", split):
            lines = e.prompt.split("\n\n")[0].split("\n")
            key = e.prompt.split()[-2]
            assert e.depth == lines.index(f"{key}: {e.answer[:-1]}") / len(lines)


def test_halves_share_nothing() -> None:
    """No names, things, places, colours; no numbers, codes, sums."""
    for train, test in zip(skills.words("train"), skills.words("test"), strict=True):
        assert not set(train) & set(test)
        assert min(len(train), len(test)) >= 2
    halves: dict[str, dict[str, set[str]]] = {}
    both: tuple[skills.Split, ...] = ("train", "test")
    for split in both:
        found: dict[str, set[str]] = defaultdict(set)
        for e in made("needle", split, 1000):
            found["numbers"].add(e.answer)
        for e in made("lookup", split, 300):
            for key, value in re.findall(r"^(\w+): (\d+)$", e.prompt, re.MULTILINE):
                found["codes"].add(key)
                found["numbers"].add(value + ".")
        for e in made("copy", split, 300):
            found["codes"] |= set(e.answer[:-1].split())
        for e in made("arithmetic", split, 3000):
            a, sign, b = e.prompt.split()[:3]
            found["sums"] |= {f"{a} {sign} {b}", f"{b} {sign} {a}" if sign == "+" else f"{a} {sign} {b}"}
        halves[split] = found
    assert set(halves["train"]) == {"numbers", "codes", "sums"}
    for kind, found in halves["train"].items():
        assert not found & halves["test"][kind], kind
        assert len(found) > 100
        assert len(halves["test"][kind]) > 100


def test_people_of_one_half_are_never_in_the_other() -> None:
    for split, others in (("train", skills.words("test")), ("test", skills.words("train"))):
        foreign = {word for kind in others for word in kind}
        for name in ("two-hop", "passage", "json"):
            for e in made(name, split):
                assert not foreign & set(re.findall(r"\w+", e.prompt + " " + e.answer))


# -- tokenizer -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    exercises = [e.prompt + " " + e.answer for name in skills.SKILLS for e in made(name, "train", 60)]
    save_tokenizer(train_tokenizer([PROSE * 5, *exercises]), out)
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    for token in tokenizer.get_vocab():
        assert len(token) == 1 or not re.search(r"[0-9]", token), token
    pieces = tokenizer.encode("pay 1234567 or a99b").tokens
    assert [p for p in pieces if p.isdigit()] == list("123456799")
    assert tokenizer.encode("2024").ids == [i for c in "2024" for i in tokenizer.encode(c).ids]
    assert any(len(token) > 4 for token in tokenizer.get_vocab()), "nothing was merged"


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == [0, 1, 2]
    for i, token in enumerate(SPECIAL):
        assert tokenizer.encode(token).ids == [i]
        assert tokenizer.encode(f"a{token}b").ids[1] == i
    assert tokenizer.get_vocab_size() <= VOCAB
    spec = RECIPES["nano"]
    assert (spec.bos_token_id, spec.eos_token_ids) == (0, (0, 2))


def test_a_chat_is_served_as_it_was_trained(folder: Path) -> None:
    """The template and the dialogue form of an exercise, after the mark that begins every document, are the same tokens
    by Penstock's own tokenizer."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = PenstockTokenizer.from_hf(folder / "tokenizer.json", config)
    for e in made("passage", "train", 20):
        before, answer, after = e.pieces(chat=True)[:3]
        messages = [{"role": "user", "content": e.prompt}]
        served = encode_chat(tokenizer, TEMPLATE, messages, add_generation_prompt=True)
        assert served == tokenizer.encode("<|endoftext|>" + before.text)
        assert answer.answer
        assert not before.answer
        messages.append({"role": "assistant", "content": e.answer})
        served = encode_chat(tokenizer, TEMPLATE, messages, add_generation_prompt=False)
        whole = "<|endoftext|>" + before.text + answer.text + after.text
        assert tokenizer.decode(served, skip_special_tokens=False) == whole


def test_the_mean_of_two_runs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    from train.average import average

    for name, value in (("a", 1.0), ("b", 3.0)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.full((2, 2), value, dtype=torch.bfloat16)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(name)
    average(tmp_path / "a", tmp_path / "b", tmp_path / "mean", 0.75)
    assert load_file(tmp_path / "mean" / "model.safetensors")["w"].tolist() == [[2.5, 2.5], [2.5, 2.5]]
    assert (tmp_path / "mean" / "config.json").read_text() == "b"
    save_file({"w": torch.zeros(2, 3)}, tmp_path / "b" / "model.safetensors")
    with pytest.raises(ValueError, match="same weights"):
        average(tmp_path / "a", tmp_path / "b", tmp_path / "mean", 0.5)
