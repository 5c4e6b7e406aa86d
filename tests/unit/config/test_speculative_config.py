"""`speculative_config`: what is wrong with it is one sentence that says what to change."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from penstock.base.errors import ConfigError
from penstock.cli.main import main
from penstock.config import from_kwargs
from penstock.config.load import add_arguments, from_args
from penstock.launch.bundled import bundled_model

GOOD = {"method": "ngram", "num_speculative_tokens": 5}

BAD: list[tuple[Any, str]] = [
    ("{method: ngram}", "is not JSON"),
    ("[1, 2]", "must be an object"),
    ('"ngram"', "must be an object"),
    ({"num_speculative_tokens": 5}, "method is missing"),
    ({}, "method is missing"),
    ({"method": 5}, "method: must be a text"),
    (GOOD | {"num_spec_tokens": 5}, "num_spec_tokens: unknown; known: method"),
    (GOOD | {"num_speculative_tokens": "5"}, "num_speculative_tokens: must be an integer"),
    (GOOD | {"num_speculative_tokens": True}, "num_speculative_tokens: must be an integer"),
    (GOOD | {"num_speculative_tokens": 0}, "num_speculative_tokens: must be at least 1, not 0"),
    (GOOD | {"num_speculative_tokens": 64}, "num_speculative_tokens: must be at most 63, not 64"),
    (GOOD | {"controller": "magic"}, "controller: must be one of"),
    (GOOD | {"verifier": "magic"}, "verifier: must be one of"),
    (GOOD | {"tree": "oak"}, "tree: must be one of"),
    (GOOD | {"prompt_lookup_min": 4, "prompt_lookup_max": 2}, "prompt_lookup_min 4 is more than prompt_lookup_max 2"),
]


@pytest.mark.parametrize(("given", "says"), BAD, ids=[says for _, says in BAD])
def test_bad_values_are_one_sentence(given: Any, says: str) -> None:
    with pytest.raises(ConfigError) as found:
        from_kwargs(model="m", speculative_config=given)
    text = str(found.value)
    assert "speculative_config" in text
    assert says in text
    assert "\n" not in text
    assert found.value.field == "speculative_config"


def test_an_unknown_method_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", "Once", "--max-tokens", "1", "-sc", '{"method": "crystal-ball"}']
    assert main(["run", str(bundled_model("nano")), *flags]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert "crystal-ball" in shown.err
    assert "ngram" in shown.err


@pytest.mark.parametrize("flag", ["--speculative-config", "-sc"])
def test_both_flags_are_the_setting(flag: str) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    config = from_args(parser.parse_args(["--model", "m", flag, json.dumps(GOOD)]))
    assert config.speculation is not None
    assert (config.speculation.method, config.speculation.num_speculative_tokens) == ("ngram", 5)
    assert config == from_kwargs(model="m", speculative_config=json.dumps(GOOD))


@pytest.mark.parametrize("given", [None, "", "  "])
def test_nothing_is_no_speculation(given: str | None) -> None:
    if given is None:
        assert from_kwargs(model="m", speculative_config=given).speculation is None
    else:
        with pytest.raises(ConfigError, match="must not be empty"):
            from_kwargs(model="m", speculative_config=given)
