"""What a client may ask of decoding. Names and defaults are vLLM's."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from penstock.core.adapter import AdapterRef

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy (vLLM's `_SAMPLING_EPS`)."""


GRAMMAR_STUCK = "the grammar cannot go on"
"""How the error begins that ends a row whose grammar, though it compiles, cannot be followed any further."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What the output must look like; exactly one is set. Names are vLLM's.

    Attributes:
        json: a JSON schema, as an object or as its text: the output is one JSON value of it. True and False, the
            schemas that allow everything and nothing, are not taken.
        regex: the whole output matches it. No look-around and no back-references.
        choice: the output is one of these texts.
        grammar: a context-free grammar: llguidance's Lark syntax, or rules of the form `root ::= ...` (GBNF).
        json_object: the output is one JSON object, of any shape.
        structural_tag: reserved; refused by the validator.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class RepetitionDetectionParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False
):  # fmt: skip
    """When a sample is taken to run in circles: its newest tokens are one pattern, `min_count` times in a row. It then
    ends with the finish reason "repetition". Names are vLLM's.

    Attributes:
        max_pattern_size: longest pattern, in tokens; 0: nothing is looked for.
        min_pattern_size: shortest; 0 is 1.
        min_count: times, at least 2.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def found(self, token_ids: array[int], start: int) -> bool:
        """Whether what is behind position `start` ends in such a pattern. By tokens alone, so that batches, replays and
        drafts change nothing."""
        known = len(token_ids)
        longest = min(self.max_pattern_size, (known - start) // max(self.min_count, 1))
        last = token_ids[-1]
        for size in range(max(1, self.min_pattern_size), longest + 1):
            # Nearly always the first comparison is the last one. What equals itself moved by `size` repeats by `size`.
            if token_ids[-1 - size] == last:
                reach = known - size * self.min_count
                if token_ids[reach : known - size] == token_ids[reach + size :]:
                    return True
        return False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How to choose the next token. Checked once, by `text.validate`, for every front end.

    Attributes:
        n: samples per prompt; they share the prompt's KV blocks.
        temperature: 0 is greedy.
        top_p, top_k, min_p: truncations of the distribution; 1.0, 0 (or -1) and 0.0 switch them off.
        presence_penalty, frequency_penalty: subtracted from logits of tokens generated so far.
        repetition_penalty: divides positive and multiplies negative logits of tokens of prompt and output.
        max_tokens: generated tokens at most; None fills the context.
        min_tokens: end-of-sequence, stop ids and stop strings do not end the sample before this many tokens.
        stop: strings that end the sample; cut off unless `include_stop_str_in_output`.
        stop_token_ids: ids that end the sample.
        ignore_eos: go on after the model's end-of-sequence token.
        logprobs: log-probabilities of this many likeliest tokens per position (0: only the chosen one); -1 is all.
        logprob_token_ids: ids whose log-probabilities are given instead of the likeliest tokens', in this order.
        prompt_logprobs: the same for each prompt token.
        seed: same seed, same tokens, whatever else runs; None lets the engine choose and keep one.
        logit_bias: token id -> number added to its logit.
        bad_words: texts that must not be generated.
        allowed_token_ids: if given, the only ids that may be generated.
        skip_special_tokens, spaces_between_special_tokens: how output ids become text.
        detokenize: False leaves `text` empty.
        structured_outputs: a schema, regex, choice or grammar that the output must satisfy.
        repetition_detection: end a sample that runs in circles; None: the server's default, by default none.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None
    repetition_detection: RepetitionDetectionParams | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def tells_logprobs(self) -> bool:
        return self.logprobs is not None or bool(self.logprob_token_ids)


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Beam search, with vLLM's names.

    `length_penalty` divides a hypothesis' score by length ** length_penalty. `temperature` has no effect, as in
    vLLM: hypotheses are scored by raw log-probabilities.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False


class Thought(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What precedes an answer that a grammar binds, and is ended in time for the answer.

    Attributes:
        opening: what the output begins with if it is a thought; "" if the prompt has opened it.
        close: the text that ends it.
        closing: ids of that text.
        most: tokens of output from which on only `closing` may follow, unless the thought has ended.
    """

    opening: str = ""
    close: str = ""
    closing: list[int] = []
    most: int = 0


class TokenRules(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """SamplingParams reduced to ids, with every text resolved: all that a rank needs to choose a token.

    `bad_sequences` are token sequences whose last token is masked after the others. `stop_ids` holds
    stop_token_ids and, unless ignored, the model's end-of-sequence ids: masked while fewer than `min_tokens`
    tokens have been generated.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_ids: list[int] = []
    logit_bias: dict[int, float] = {}
    bad_sequences: list[list[int]] = []
    allowed_ids: list[int] | None = None
    num_logprobs: int = -1
    """-1: none; 0: the chosen token's; k: also the k likeliest."""
    num_prompt_logprobs: int = -1
    seed: int = 0
    grammar: str | None = None
    """llguidance's form of what the output must look like (`text.grammar`); None: free."""
    reference: list[int] = []
    """Text that the output is likely to repeat (OpenAI's `prediction`); drafters may copy from it."""
    thought: Thought | None = None
    """What may come before the answer, if `grammar` lets a thought come first."""
    logprob_ids: list[int] = []
    """Whose log-probabilities are told instead of the likeliest ones'; `num_logprobs` is 0 then."""
    adapter: AdapterRef | None = None
    """What changes the model's products for this request."""

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE
