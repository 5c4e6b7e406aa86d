"""Several models from flags, a file and keyword arguments; what each has of its own, and what is wrong."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import ConfigError
from penstock.config import serve_from_kwargs
from penstock.config.load import add_arguments, names_a_model, serve_from_args
from penstock.config.several import seconds_of


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser, model_positional=True, server=True)
    return parser.parse_args(list(words))


def served(*words: str) -> Any:
    return serve_from_args(parsed(*words), {})


def test_flags_name_models_beside_the_first() -> None:
    config = served("a", "--model", "b=/path/to=b", "--model", "c=c", "--max-num-seqs", "3", "--max-model-len", "64",
                    "--keep-alive", "-1")  # fmt: skip
    assert config.engine.model.model == "a"
    assert [(one.name, one.config.engine.model.model) for one in config.models] == [("b", "/path/to=b"), ("c", "c")]
    own = config.models[0].config
    assert (own.engine.scheduler.max_num_seqs, own.engine.model.max_model_len) == (3, None)
    assert own.server.keep_alive == "-1"


def test_the_first_named_model_is_the_first_if_no_other_is() -> None:
    config = served("--model", "b=path", "--model", "c=other")
    assert (config.engine.model.model, config.server.served_model_name) == ("path", "b")
    assert [one.name for one in config.models] == ["c"]
    assert names_a_model(parsed("--model", "b=path"))


def test_a_path_with_an_equals_sign_stays_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    assert served("--model", str(folder)).engine.model.model == str(folder)


def test_tables_give_each_model_settings_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        '[model]\nmodel = "a"\n[scheduler]\nmax_num_seqs = 5\n[server]\nkeep_alive = "1h"\nmodels_memory = 3\n'
        '[models.b]\nmodel = "x"\nmax_model_len = 99\nkeep_alive = 30\nmax_num_queued_reqs = 7\n'
        '[models."org/c"]\nmodel = "y"\nmax_num_seqs = 2\n'
    )
    config = served("--config", str(file), "--model", "d=z")
    b, c, d = (one.config for one in config.models)
    assert (b.engine.model.max_model_len, b.server.keep_alive, b.server.max_num_queued_reqs) == (99, "30", 7)
    assert (b.engine.scheduler.max_num_seqs, c.engine.scheduler.max_num_seqs) == (5, 2)
    assert (c.server.keep_alive, d.engine.model.model) == ("1h", "z")
    assert serve_from_kwargs(config=str(file), models={"d": "z"}) == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[models.b]\nmax_num_seqs = 2\n", r"\[models.b\]: has no model; name its folder or file"),
        ('[models.b]\nmodel = "x"\nport = 2\n', r"\[models.b\] port: belongs into the table \[server\]"),
        ('[models.b]\nmodel = "x"\nmax_seqs = 2\n', r"\[models.b\] max_seqs: unknown setting; did you mean"),
        ('[models."b c"]\nmodel = "x"\n', "'b c' cannot name a model"),
        ('[models]\nb = "x"\n', r"\[models.b\]: must be a table"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        served("a", "--config", str(file))


def test_a_name_that_two_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="two models are called b; give one of them another name"):
        served("a", "--model", "b=x", "--model", "b=y")


def test_times_to_stay_are_those_of_ollama() -> None:
    assert [seconds_of(text) for text in (300, "300", "5m", "1h30m", "90s", "0", 1.5)] == [
        300,
        300,
        300,
        5400,
        90,
        0,
        1.5,
    ]
    assert seconds_of("-1") == seconds_of(-1) == seconds_of("-1m") == math.inf
    for wrong in ("", "soon", "5x", "nan", "inf"):
        with pytest.raises(ValueError, match="must be seconds, a time such as 90s"):
            seconds_of(wrong)
    with pytest.raises(ConfigError, match="keep_alive: must be seconds"):
        serve_from_kwargs(model="a", keep_alive="soon")
