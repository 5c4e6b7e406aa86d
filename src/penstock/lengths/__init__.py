"""How long an output will be, told before it begins. One file each; add a line here to add one.

A name may carry knobs, the arguments of the predictor's constructor: `history:quantile=0.9`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.base.errors import ConfigError
from penstock.base.knobs import knobs
from penstock.base.registry import Registry
from penstock.core.protocols import LengthPredictor

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

LENGTH_PREDICTORS: Registry[Callable[..., LengthPredictor], None] = Registry("length_predictor")
LENGTH_PREDICTORS.add("asked", "penstock.lengths.asked:AskedPredictor")
LENGTH_PREDICTORS.add("history", "penstock.lengths.history:HistoryPredictor")
LENGTH_PREDICTORS.add("learned", "penstock.lengths.learned:LearnedPredictor")
LENGTH_PREDICTORS.add("oracle", "penstock.lengths.oracle:OraclePredictor")


def make_predictor(name: str, tokenizer: Tokenizer | None = None) -> LengthPredictor:
    """The predictor called `name`, or `name:knob=value,knob=value`. Those that speak with the model get `tokenizer`.

    Raises ConfigError, naming the choices, for an unknown predictor or knob, and for a value that makes no sense.
    """
    kind, _, given = name.partition(":")
    build: Any = LENGTH_PREDICTORS.get(kind)
    made: LengthPredictor = build(**knobs(build, f"length predictor {kind!r}", LENGTH_PREDICTORS.what, given))
    if hasattr(made, "tokenizer"):
        made.tokenizer = tokenizer
    return made


def refused(why: str) -> ConfigError:
    return ConfigError(f"length_predictor: {why}", field=LENGTH_PREDICTORS.what)
