"""The one request validator. Every front end calls it; nothing behind it checks again.

Each check that fails raises InputError with `param` (the field, as the client wrote it) and a message that gives the
value and the range, and for lengths both numbers. What a client wrote is quoted with at most 60 characters.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from penstock.base.errors import InputError
from penstock.core.adapter import AdapterRef, namespace_of
from penstock.core.kv_hints import KVHint
from penstock.core.qoe import Expected
from penstock.core.request import Request, module_taint
from penstock.core.sampling import (
    BeamSearchParams,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputs,
    TokenRules,
)
from penstock.text.encoding import TOO_LONG
from penstock.text.grammar.lead import tokens_to_think
from penstock.text.grammar.source import Compiled, grammar_of, kind_of
from penstock.text.limits import Limits
from penstock.text.pooling import NO_TEXT, check_pooling
from penstock.text.tokenizer import Tokenizer

MIN_REPETITION_PENALTY = 1e-6
"""It divides logits: by less, they may leave float32."""
MAX_TEMPERATURE = 100.0
MAX_LENGTH_PENALTY = 100.0
MAX_LOGPROB_IDS = 1024
MAX_PATTERN, MAX_PATTERN_TOKENS = 256, 4096
"""Of repetition_detection: tokens of a pattern, and of all its repetitions. They are compared after every token."""
SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1

_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
)


def validate_sampling(params: SamplingParams, *, limits: Limits) -> None:
    """Everything that can be judged without the prompt. Raises: InputError."""
    if not isinstance(params, SamplingParams):
        raise InputError(f"sampling parameters must be SamplingParams, not {type(params).__name__}", param="params")
    _integer("n", params.n, 1, limits.max_n)
    _real("temperature", params.temperature, 0, MAX_TEMPERATURE)
    _real("top_p", params.top_p, 0, 1, open_low=True)
    _integer("top_k", params.top_k, -1, limits.vocab_size)
    _real("min_p", params.min_p, 0, 1)
    _real("presence_penalty", params.presence_penalty, -2, 2)
    _real("frequency_penalty", params.frequency_penalty, -2, 2)
    _real("repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, 100)
    if params.max_tokens is not None:
        _integer("max_tokens", params.max_tokens, 1, limits.max_model_len)
    _integer("min_tokens", params.min_tokens, 0, limits.max_model_len)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InputError(
            f"min_tokens is {params.min_tokens}, but max_tokens is {params.max_tokens}; it may be at most that",
            param="min_tokens",
        )
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None:
            all_allowed = limits.max_logprobs < 0 or limits.max_logprobs >= limits.vocab_size
            high = limits.vocab_size if all_allowed else limits.max_logprobs
            _integer(name, value, -1 if all_allowed else 0, high)
    if params.seed is not None:
        _integer("seed", params.seed, SEED_MIN, SEED_MAX)
    for name in _FLAGS:
        _flag(name, getattr(params, name))
    _stops(params, limits)
    _ids("stop_token_ids", params.stop_token_ids, limits.vocab_size, limits.max_stop_token_ids)
    _ids("allowed_token_ids", params.allowed_token_ids, limits.vocab_size, limits.vocab_size)
    if params.allowed_token_ids is not None and len(params.allowed_token_ids) == 0:
        raise InputError(
            f"allowed_token_ids is empty; give 1 to {limits.vocab_size} ids, or leave it out", param="allowed_token_ids"
        )
    _ids("logprob_token_ids", params.logprob_token_ids, limits.vocab_size, MAX_LOGPROB_IDS)
    if params.logprob_token_ids and params.logprobs:
        raise InputError(
            "logprob_token_ids take the place of the likeliest tokens that logprobs ask for; give one of the two",
            param="logprob_token_ids",
        )
    _logit_bias(params.logit_bias, limits)
    _bad_words(params.bad_words, limits)
    if params.repetition_detection is not None:
        _repetition(params.repetition_detection)
    if params.structured_outputs is not None:
        kind_of(params.structured_outputs)
        if not params.detokenize:
            raise InputError("structured_outputs need text: they cannot be used with detokenize false",
                             param="structured_outputs")  # fmt: skip


def _repetition(asked: RepetitionDetectionParams) -> None:
    name = "repetition_detection"
    if not isinstance(asked, RepetitionDetectionParams):
        raise InputError(f"{name} must be RepetitionDetectionParams, not {_show(asked)}", param=name)
    _integer(f"{name}.max_pattern_size", asked.max_pattern_size, 0, MAX_PATTERN)
    if asked.max_pattern_size:
        _integer(f"{name}.min_pattern_size", asked.min_pattern_size, 0, asked.max_pattern_size)
        _integer(f"{name}.min_count", asked.min_count, 2, MAX_PATTERN_TOKENS // asked.max_pattern_size)


def validate_beam(params: BeamSearchParams, *, limits: Limits) -> None:
    """Raises: InputError."""
    if not isinstance(params, BeamSearchParams):
        raise InputError(f"beam parameters must be BeamSearchParams, not {type(params).__name__}", param="params")
    # 2 * width candidates are taken per step, so that width of them survive an end of sequence.
    _integer("beam_width", params.beam_width, 1, max(1, min(limits.max_beam_width, limits.vocab_size // 2)))
    _integer("max_tokens", params.max_tokens, 1, limits.max_model_len)
    _real("temperature", params.temperature, 0, MAX_TEMPERATURE)
    _real("length_penalty", params.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    _flag("ignore_eos", params.ignore_eos)
    _flag("include_stop_str_in_output", params.include_stop_str_in_output)


def validate_prompt_ids(
    ids: Sequence[int], limits: Limits, max_tokens: int | None = None, min_tokens: int = 0, *, param: str = "prompt"
) -> int:
    """Check a prompt of ids; the number of tokens that may be generated (`max_tokens`, or all that is left).

    Raises: InputError. A prompt is never cut.
    """
    if max_tokens is not None:
        _integer("max_tokens", max_tokens, 1, limits.max_model_len)
    _sequence(param, ids)
    if len(ids) == 0:
        raise InputError(f"{param} is empty; it must have at least 1 token", param=param)
    room, what = limits.context
    if len(ids) >= room:
        raise InputError(
            f"{param} has {len(ids)} tokens, but {what} {room} tokens, of which at least 1 must be left to generate: "
            f"at most {room - 1} are possible",
            param=param,
            code=TOO_LONG,
        )
    _all_ids(param, ids, limits.vocab_size)
    left = room - len(ids)
    if max_tokens is not None and max_tokens > left:
        raise InputError(
            f"{param} has {len(ids)} tokens and max_tokens is {max_tokens}, together {len(ids) + max_tokens}, but "
            f"{what} {room} tokens: max_tokens may be at most {left}",
            param="max_tokens",
            code=TOO_LONG,
        )
    if min_tokens > (left if max_tokens is None else max_tokens):
        raise InputError(
            f"min_tokens is {min_tokens}, but {param} has {len(ids)} tokens and {what} {room} tokens: at most {left} "
            "are left",
            param="min_tokens",
        )
    return left if max_tokens is None else int(max_tokens)


def validate_reference(ids: Sequence[int], limits: Limits, *, param: str = "prediction") -> list[int]:
    """Ids of a predicted output, which may fill the context and no more. Raises: InputError."""
    _sequence(param, ids)
    if len(ids) > limits.max_model_len:
        raise InputError(
            f"{param} has {len(ids)} tokens; the context holds {limits.max_model_len}, more are not possible",
            param=param,
        )
    _all_ids(param, ids, limits.vocab_size)
    return list(map(int, ids))


def make_rules(
    params: SamplingParams, tokenizer: Tokenizer | None, limits: Limits, *, seed: int = 0, reference: Sequence[int] = ()
) -> TokenRules:
    """Checked parameters -> ids and plain numbers. `seed` serves requests that bring none. Raises: InputError."""
    stop_ids = [*map(int, params.stop_token_ids or ()), *(() if params.ignore_eos else limits.eos_token_ids)]
    return TokenRules(
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=max(0, int(params.top_k)),
        min_p=float(params.min_p),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        repetition_penalty=float(params.repetition_penalty),
        min_tokens=int(params.min_tokens),
        stop_ids=list(dict.fromkeys(stop_ids)),
        logit_bias={int(k): float(v) for k, v in (params.logit_bias or {}).items()},
        bad_sequences=[list(ids) for ids in bad_sequences(tuple(params.bad_words or ()), tokenizer, limits.vocab_size)],
        allowed_ids=None if params.allowed_token_ids is None else list(map(int, params.allowed_token_ids)),
        num_logprobs=0 if params.logprob_token_ids else _num_logprobs(params.logprobs, limits),
        logprob_ids=list(map(int, params.logprob_token_ids or ())),
        num_prompt_logprobs=_num_logprobs(params.prompt_logprobs, limits),
        seed=int(seed if params.seed is None else params.seed),
        grammar=_grammar(params.structured_outputs, tokenizer),
        thought=params.structured_outputs.thought if isinstance(params.structured_outputs, Compiled) else None,
        reference=validate_reference(reference, limits),
    )


def build_request(
    request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams | BeamSearchParams, *,
    limits: Limits, tokenizer: Tokenizer | None = None, seed: int = 0, priority: int = 0, namespace: bytes = b"",
    taint: str = "", arrival_s: float = 0.0, param: str = "prompt", reference: Sequence[int] = (),
    slo_tpot_s: float | None = None, slo_ttft_s: float | None = None, hints: Sequence[KVHint] = (),
    modules: Sequence[int] = (), recompute: float = 0.0, adapter: AdapterRef | None = None,
    reader: Expected | None = None,
) -> Request:  # fmt: skip
    """Check everything; the request the engine takes. `param` names the prompt in errors. Raises: InputError.

    `reference`: ids of a text that the output is likely to repeat. `reader`: what whoever reads the output as it comes
    expects. The others: see `Request`.
    """
    beam: BeamSearchParams | None = None
    if isinstance(params, BeamSearchParams):
        validate_beam(params, limits=limits)
        beam = params
        params = SamplingParams(
            temperature=params.temperature, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )  # fmt: skip
    if not limits.generates:
        raise InputError(NO_TEXT, param="model")
    validate_sampling(params, limits=limits)
    limits = limits.beside(adapter)
    max_tokens = validate_prompt_ids(prompt_token_ids, limits, params.max_tokens, params.min_tokens, param=param)
    if not modules and limits.module_chunk:
        modules, recompute = (
            range(limits.module_chunk, len(prompt_token_ids), limits.module_chunk),
            limits.module_recompute,
        )
    if modules and modules[-1] >= len(prompt_token_ids):
        raise InputError(f"{param} is empty behind the last module of prompt_cache; it must have at least 1 token",
                         param=param)  # fmt: skip
    rules = make_rules(params, tokenizer, limits, seed=seed, reference=reference)
    if rules.thought is not None:
        thought = msgspec.structs.replace(rules.thought, most=tokens_to_think(max_tokens, rules.thought))
        rules = msgspec.structs.replace(rules, thought=thought)
    if adapter is not None:
        rules = msgspec.structs.replace(rules, adapter=adapter)
    entries = len(prompt_token_ids) * (rules.num_prompt_logprobs + 1)
    if entries > limits.max_prompt_logprob_entries:
        raise InputError(
            f"prompt_logprobs of {rules.num_prompt_logprobs} for {len(prompt_token_ids)} prompt tokens are {entries} "
            f"entries; at most {limits.max_prompt_logprob_entries} are possible",
            param="prompt_logprobs",
        )
    _logprob_entries(rules.num_logprobs + len(rules.logprob_ids), params.n, max_tokens, limits)
    return Request(
        request_id=request_id, prompt_token_ids=list(map(int, prompt_token_ids)), rules=rules, n=int(params.n),
        max_tokens=max_tokens, stop_token_ids=list(map(int, params.stop_token_ids or ())),
        eos_token_ids=[] if params.ignore_eos else list(limits.eos_token_ids), beam=beam, priority=priority,
        namespace=namespace_of(namespace, adapter), taint=module_taint(taint, list(modules), recompute),
        arrival_s=arrival_s, slo_tpot_s=slo_tpot_s, slo_ttft_s=slo_ttft_s,
        expected_ttft_s=None if reader is None else reader.ttft_s, expected_tds=None if reader is None else reader.tds,
        repetition=_watched(params, beam),
        hints=_hints(hints, params, beam),
        modules=list(modules) if len(modules) > 1 else [], recompute=recompute if len(modules) > 1 else 0.0,
    )  # fmt: skip


def _hints(hints: Sequence[KVHint], params: SamplingParams, beam: BeamSearchParams | None) -> list[KVHint]:
    if any(hint.action == "prefetch" for hint in hints) and (
        beam is not None or params.n > 1 or params.prompt_logprobs is not None
    ):
        raise InputError("kv_hints: a request that prefetches makes no token: it has no n, beams or prompt_logprobs",
                         param="kv_hints")  # fmt: skip
    return list(hints)


def _watched(params: SamplingParams, beam: BeamSearchParams | None) -> RepetitionDetectionParams | None:
    asked = params.repetition_detection
    return asked if asked is not None and asked.max_pattern_size and beam is None else None


def build_pooling_request(
    request_id: str, prompt_token_ids: Sequence[int], pooling: str, *, limits: Limits, priority: int = 0,
    namespace: bytes = b"", arrival_s: float = 0.0, param: str = "prompt", adapter: AdapterRef | None = None,
) -> Request:  # fmt: skip
    """Check everything; the request for a pooled hidden state. Nothing is generated, so it may fill the context.

    Raises: InputError.
    """
    check_pooling(pooling, limits)
    _sequence(param, prompt_token_ids)
    room, what = limits.beside(adapter).context
    if not 1 <= len(prompt_token_ids) <= room:
        raise InputError(
            f"{param} has {len(prompt_token_ids)} tokens; at least 1 is needed, and {what} {room} tokens",
            param=param,
            code=TOO_LONG,
        )
    _all_ids(param, prompt_token_ids, limits.vocab_size)
    return Request(
        request_id=request_id, prompt_token_ids=list(map(int, prompt_token_ids)), rules=TokenRules(adapter=adapter),
        max_tokens=1, pooling=pooling, priority=priority, namespace=namespace_of(namespace, adapter),
        arrival_s=arrival_s,
    )  # fmt: skip


def stop_strings(params: SamplingParams) -> list[str]:
    """`stop` as a list."""
    return [params.stop] if isinstance(params.stop, str) else list(params.stop or ())


def _grammar(asked: StructuredOutputs | None, tokenizer: Tokenizer | None) -> str | None:
    if asked is None:
        return None
    if tokenizer is None or tokenizer.table is None:
        raise InputError(
            "structured_outputs need a tokenizer whose tokens are bytes, and this engine runs without one",
            param="structured_outputs",
        )
    return grammar_of(asked)


def _logprob_entries(num: int, n: int, max_tokens: int, limits: Limits) -> None:
    """Those of an answer that comes in one piece are all kept until its end."""
    entries, most = n * max_tokens * (num + 1), limits.max_logprob_entries
    if most is not None and entries > most:
        raise InputError(
            f"logprobs of {num} for {n} x {max_tokens} tokens (n x max_tokens) may come to {entries} entries; at most "
            f"{most} are possible here: with this n, max_tokens may be at most {most // (n * (num + 1))}",
            param="logprobs",
        )


def _num_logprobs(asked: int | None, limits: Limits) -> int:
    if asked is None:
        return -1
    return limits.vocab_size if asked < 0 else int(asked)


@lru_cache(maxsize=64)
def bad_sequences(words: tuple[str, ...], tokenizer: Tokenizer | None, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Each word as a text begins with it, and behind a space where that is another token (as vLLM does).

    Raises: InputError.
    """
    out: list[list[int]] = []
    for n, word in enumerate(words):
        if tokenizer is None:
            raise InputError("bad_words need a tokenizer, and this engine runs without one", param="bad_words")
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        out.append(bare)
        if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
            out.append(spaced)
        for ids in (bare, spaced):
            if not ids or not all(0 <= i < vocab_size for i in ids):
                raise InputError(
                    f"bad_words[{n}] is {_show(word)}, which is not made of tokens in [0, {vocab_size})",
                    param="bad_words",
                )
    return tuple(dict.fromkeys(map(tuple, out)))


def _stops(params: SamplingParams, limits: Limits) -> None:
    if params.stop is None:
        return
    if not isinstance(params.stop, str):
        _sequence("stop", params.stop, "a string or a list of strings")
    _texts("stop", stop_strings(params), limits.max_stops, limits.max_stop_chars)
    if stop_strings(params) and not params.detokenize:
        raise InputError("stop needs text: it cannot be used with detokenize false", param="stop")


def _bad_words(words: Any, limits: Limits) -> None:
    if words is None:
        return
    _sequence("bad_words", words, "a list of strings")
    _texts("bad_words", words, limits.max_bad_words, limits.max_bad_word_chars)
    chars, most = sum(map(len, words)), limits.max_bad_words_chars
    if chars > most:
        raise InputError(f"bad_words have {chars} characters together; at most {most} are possible", param="bad_words")
    for n, word in enumerate(words):
        if not word.strip():
            raise InputError(f"bad_words[{n}] is blank; it must have 1 to {limits.max_bad_word_chars} characters",
                             param="bad_words")  # fmt: skip


def _texts(name: str, texts: Sequence[Any], most: int, longest: int) -> None:
    if len(texts) > most:
        raise InputError(f"{name} has {len(texts)} strings; at most {most} are possible", param=name)
    for n, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"{name}[{n}] must be a string, not {_show(text)}", param=name)
        if not 1 <= len(text) <= longest:
            raise InputError(f"{name}[{n}] has {len(text)} characters; 1 to {longest} are possible", param=name)
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise InputError(f"{name}[{n}] holds a lone surrogate, which no text has", param=name)


def _logit_bias(bias: Any, limits: Limits) -> None:
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        raise InputError(f"logit_bias must be an object from token id to number, not {_show(bias)}", param="logit_bias")
    if len(bias) > limits.max_logit_bias:
        raise InputError(
            f"logit_bias has {len(bias)} entries; at most {limits.max_logit_bias} are possible", param="logit_bias"
        )
    for token_id, value in bias.items():
        _integer("logit_bias", token_id, 0, limits.vocab_size - 1, what="a token id of logit_bias")
        _real("logit_bias", value, -100, 100, what=f"logit_bias[{token_id}]")


def _ids(name: str, ids: Any, vocab_size: int, most: int) -> None:
    if ids is None:
        return
    _sequence(name, ids)
    if len(ids) > most:
        raise InputError(f"{name} has {len(ids)} ids; at most {most} are possible", param=name)
    _all_ids(name, ids, vocab_size)


def _all_ids(name: str, ids: Sequence[Any], vocab_size: int) -> None:
    for n, token_id in enumerate(ids):
        # Plain integers, the usual case, at full speed: prompts are long.
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            _integer(name, token_id, 0, vocab_size - 1, what=f"{name}[{n}]")


def _sequence(name: str, value: Any, what: str = "a list of token ids") -> None:
    # A NumPy array is no Sequence, but has what is needed.
    listlike = isinstance(value, Sequence) or (hasattr(value, "__len__") and hasattr(value, "dtype"))
    if not listlike or isinstance(value, str | bytes | bytearray):
        raise InputError(f"{name} must be {what}, not {_show(value)}", param=name)


def _integer(name: str, value: Any, low: int, high: int, *, what: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InputError(f"{what or name} must be an integer from {low} to {high}, not {_show(value)}", param=name)
    number: Any = value
    if not low <= number <= high:
        raise InputError(f"{what or name} must be from {low} to {high}, not {_show(value)}", param=name)


def _real(name: str, value: Any, low: float, high: float, *, open_low: bool = False, what: str = "") -> None:
    bounds = f"{'above' if open_low else 'from'} {low:g} {'and at most' if open_low else 'to'} {high:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InputError(f"{what or name} must be a number {bounds}, not {_show(value)}", param=name)
    number: Any = value
    # NaN fails every comparison.
    if not (low < number <= high if open_low else low <= number <= high):
        raise InputError(f"{what or name} must be {bounds}, not {_show(value)}", param=name)


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, not {_show(value)}", param=name)


def _show(value: Any) -> str:
    """A client's value in a message, in at most about 60 characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, numbers.Integral):
        size = int(value).bit_length()
        return str(int(value)) if size <= 128 else f"an integer of {size} bits"
    if isinstance(value, numbers.Real):
        return f"{float(value):g}"
    if isinstance(value, str):
        return repr(value[:40]) + ("..." if len(value) > 40 else "")
    return f"a {type(value).__name__}"
