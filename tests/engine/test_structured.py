"""Structured outputs through the whole engine: the bundled model at temperature 1, and everything they meet."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.base.errors import InputError
from penstock.core.output import CompletionOutput
from penstock.core.request import Control
from penstock.core.sampling import StructuredOutputs
from penstock.launch.bundled import bundled_model
from penstock.runner.logits import ORDER

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"(Mon|Tue|Wed), \d{2}:\d{2}"


def start(**settings: Any) -> LLM:
    path = bundled_model("nano")
    assert path is not None
    return LLM(str(path), **{"ops": "blas", "max_model_len": 512, "num_gpu_blocks_override": 256, **settings})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    return start()


def params(seed: int = 0, **more: Any) -> SamplingParams:
    asked = StructuredOutputs(**{k: more.pop(k) for k in ("json", "regex", "choice", "grammar") if k in more})
    return SamplingParams(**{"seed": seed, "max_tokens": 120, "structured_outputs": asked, **more})


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and len(value["tags"]) <= 3
        and set(value["tags"]) <= {"red", "green", "blue"}
    )


def checked(outputs: list[Any], good: Any) -> int:
    """How many samples ended by themselves; each of them is `good`."""
    samples: list[CompletionOutput] = [s for output in outputs for s in output.outputs]
    ended = [s for s in samples if s.finish_reason == "stop"]
    assert all(good(s.text) for s in ended), [s.text for s in ended if not good(s.text)]
    assert {s.finish_reason for s in samples} <= {"stop", "length"}
    return len(ended)


def test_j09_every_output_of_many_seeds_is_as_asked(llm: LLM) -> None:
    """Catalogue row J09: 100 % of outputs parse against the schema."""
    asked = [params(seed, json=SCHEMA) for seed in range(12)]
    asked += [params(seed, json=SCHEMA, n=4, temperature=1.3, presence_penalty=1.0) for seed in range(2)]
    assert checked(llm.generate(["A person: "] * len(asked), asked), is_person) >= 12
    asked = [params(seed, regex=REGEX) for seed in range(12)]
    assert checked(llm.generate(["At "] * 12, asked), lambda text: re.fullmatch(REGEX, text)) == 12
    choices = ["left", "right", "no answer"]
    asked = [params(seed, choice=choices) for seed in range(12)]
    outputs = llm.generate(["Go "] * 12, asked)
    assert checked(outputs, lambda text: text in choices) == 12
    assert len({o.outputs[0].text for o in outputs}) > 1
    gbnf = 'root ::= item ("," item)*\nitem ::= [a-z]{1,6}'
    asked = [params(seed, grammar=gbnf, max_tokens=200) for seed in range(4)]
    assert checked(llm.generate(["Words: "] * 4, asked), lambda text: re.fullmatch("[a-z]{1,6}(,[a-z]{1,6})*", text))


def test_unconstrained_company_keeps_its_tokens() -> None:
    """Catalogue row J09: tokens of others are unaffected. With `ref`, company changes no bit of a logit."""
    llm = start(ops="ref", max_model_len=128)
    free = SamplingParams(seed=3, max_tokens=12)
    alone = llm.generate("Once upon", free)[0].outputs[0]
    together = llm.generate(["Once upon", "x", "y"], [free, params(1, json=SCHEMA, max_tokens=12), params(regex="a*")])
    assert together[0].outputs[0].token_ids == alone.token_ids


def test_any_object_is_an_object(llm: LLM) -> None:
    asked = SamplingParams(seed=2, max_tokens=60, structured_outputs=StructuredOutputs(json_object=True))
    assert checked(llm.generate(["{"] * 4, asked), lambda text: isinstance(json.loads(text), dict)) >= 0


def test_it_composes(llm: LLM) -> None:
    """Penalties, bias, bad words, allowed ids, logprobs, stop strings, min_tokens, ignore_eos."""
    tokenizer = llm.get_tokenizer()
    yes = tokenizer.encode("left")[0]
    out = llm.generate("Go ", params(choice=["left", "right"], logit_bias={yes: 100.0}, logprobs=2))[0].outputs[0]
    assert out.text == "left"
    assert out.logprobs is not None
    assert len(out.logprobs) == len(out.token_ids)
    out = llm.generate("Go ", params(choice=["left", "right"], bad_words=["left", "l", "le"]))[0].outputs[0]
    assert out.text == "right"
    out = llm.generate("Go ", params(choice=["aaaa"], repetition_penalty=2.0, frequency_penalty=2.0))[0].outputs[0]
    assert out.text == "aaaa"
    out = llm.generate("Go ", params(regex="[a-z]+ [a-z]+", stop=[" "]))[0].outputs[0]
    assert re.fullmatch("[a-z]+", out.text)
    out = llm.generate("Go ", params(regex="[a-z]{3}!?", min_tokens=60))[0].outputs[0]
    assert (out.finish_reason, bool(re.fullmatch("[a-z]{3}!?", out.text))) == ("stop", True)
    for sample in llm.generate("Go ", params(choice=["left", "right"], ignore_eos=True, n=3))[0].outputs:
        assert (sample.text in ("left", "right"), sample.finish_reason) == (True, "stop")
        assert not set(sample.token_ids) & set(tokenizer.eos_ids)


def test_row_23_everything_at_once(llm: LLM) -> None:
    asked = params(
        5, json=SCHEMA, n=2, temperature=1.5, top_p=0.95, top_k=50, min_p=0.01, presence_penalty=1.0, logprobs=3,
        frequency_penalty=0.5, repetition_penalty=1.3, min_tokens=5, bad_words=["hello"], logit_bias={5: -3.0},
        stop=["never this"],
    )  # fmt: skip
    assert checked(llm.generate("A person: ", asked), is_person) >= 1


def test_row_28_a_dead_end_ends_the_request(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("left")
    output = llm.generate("Go ", params(choice=["right"], allowed_token_ids=ids))[0]
    assert output.outputs[0].finish_reason == "error"
    assert output.error is not None
    assert "structured_outputs" in output.error
    assert llm.generate("Go ", params(choice=["right"]))[0].outputs[0].text == "right"


def test_an_output_that_is_complete_at_once(llm: LLM) -> None:
    output = llm.generate("Go ", params(choice=[""], ignore_eos=True, n=3))[0]
    assert [(s.index, s.text, s.token_ids, s.finish_reason) for s in output.outputs] == [
        (n, "", [], "stop") for n in range(3)
    ]
    stats = llm.engine.core.kv.stats()
    llm.reset_prefix_cache()
    assert not llm.engine.core.groups
    assert stats.groups


def tokens(llm: LLM, *, preempt: bool = False) -> list[list[int]]:
    """Three requests' tokens, with a preemption of each in the middle if so asked."""
    asked = [params(seed, json=SCHEMA, n=2, max_tokens=40) for seed in range(3)]
    if not preempt:
        return [s.token_ids for o in llm.generate(["A person: "] * 3, asked) for s in o.outputs]
    found = []
    for one in asked:
        last = None
        for step, output in enumerate(llm.stream("A person: ", one)):
            if step in (3, 9, 10):
                llm.engine.core.add(Control(kind="preempt", request_id=output.request_id))
            last = output
        assert last is not None
        found += [s.token_ids for s in last.outputs]
    return found


def test_tokens_do_not_depend_on_how_it_runs() -> None:
    """Row by row (`ref`): depth, chunks, the masks' thread, preemption with all that had been generated."""
    plain = tokens(start(ops="ref"))
    assert len({tuple(t) for t in plain}) > 3
    assert tokens(start(ops="ref", depth=2, max_num_batched_tokens=64)) == plain
    ahead = start(ops="ref")
    ahead.engine.core.executor.runner.sampler.chain.processors[ORDER.index("grammar")]._threaded = True  # type: ignore[attr-defined]
    assert tokens(ahead) == plain
    preempted = start(ops="ref")
    # The offline seeds follow the requests' numbers, so they come in the same order.
    assert tokens(preempted, preempt=True) == plain
    assert preempted.engine.core.stats.num_preemptions > 4


def test_the_counters_of_the_compile_cache(llm: LLM) -> None:
    fresh = start(grammar_cache_bytes=400_000)
    for n in range(8):
        fresh.generate("x", params(choice=[f"a{n}", f"b{n}"]))
    fresh.generate(["x"] * 3, params(choice=["a7", "b7"]))
    stats = fresh.engine.core.stats
    assert (stats.num_grammar_hits, stats.num_grammar_misses) == (11, 8)
    assert 0 < stats.grammar_bytes <= 400_000


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (
            {"json": {"type": "object", "properties": {"a": {"sometimes": 1}}}},
            "structured_outputs.json.properties.a.sometimes",
        ),
        ({"json": {"items": {"pattern": "(?=a)"}}}, "structured_outputs.json.items"),
        ({"regex": "(a)\\1"}, "structured_outputs.regex"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"regex": "a", "detokenize": False}, "structured_outputs"),
    ],
)
def test_refused_before_anything_runs(llm: LLM, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(InputError) as caught:
        llm.generate("x", params(**asked))
    assert caught.value.param == param
    assert not llm.engine.core.has_work


def test_without_a_tokenizer() -> None:
    llm = start(skip_tokenizer_init=True)
    with pytest.raises(InputError, match="need a tokenizer"):
        llm.generate({"prompt_token_ids": [5]}, params(regex="a"))
