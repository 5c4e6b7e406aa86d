"""How byte-level vocabularies cut a text into words before merging: one pattern for each, by the names GGUF gives them.

A vocabulary is only itself with its own pattern, so an unknown name is refused, never drafted.
Source: the tokenizer.json of the models named, as `llama-vocab.cpp` of github.com/ggml-org/llama.cpp quotes them, and
`openai_public.py` of github.com/openai/tiktoken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

from penstock.base.errors import UnsupportedError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CASELESS + _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _CASELESS + _WORDS + r"\p{N}" + _REST
_QWEN35 = _CASELESS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
_GPT4O = _CASED % (_CASELESS + "?", _CASELESS + "?") + r"\p{N}{1,3}" + _TAIL
_TEKKEN = _CASED % ("", "") + r"\p{N}" + _TAIL
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA_CPP_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"


@dataclass(frozen=True)
class SplitPattern:
    """`patterns` are applied one after the other, each to what the one before left together.

    `whole_words`: a word that is a token as it stands is that token, whatever the merges say.
    `begins_with_bos`: the models put BOS before a text unless they say otherwise.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    begins_with_bos: bool = False


_PATTERNS = {
    "gpt-2": SplitPattern((_GPT2,)),
    "default": SplitPattern((_LLAMA_CPP_PUNCTUATION, _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "llama-bpe": SplitPattern((_LLAMA3,), whole_words=True, begins_with_bos=True),
    "cl100k": SplitPattern((_LLAMA3,), whole_words=True),
    "o200k": SplitPattern((_GPT4O,), whole_words=True),
    "qwen": SplitPattern((_QWEN2,), whole_words=True),
    "dbrx": SplitPattern((_LLAMA3,)),
    "qwen2": SplitPattern((_QWEN2,)),
    "qwen35": SplitPattern((_QWEN35,)),
    "gpt-4o": SplitPattern((_GPT4O,)),
    "tekken": SplitPattern((_TEKKEN,), whole_words=True, begins_with_bos=True),
    "deepseek-v3": SplitPattern((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3)),
    "starcoder": SplitPattern((r"\p{N}", _GPT2)),
    "falcon": SplitPattern((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
}
_SAME = {
    "gpt-2": "phi-2 mpt olmo jais exaone4 trillion",
    "llama-bpe": "llama3 llama-v3 falcon3 pixtral",
    "dbrx": "smaug-bpe glm4 chatglm-bpe",
    "qwen2": "deepseek-r1-qwen stablelm2 megrez hunyuan",
    "gpt-4o": "llama4",
    "starcoder": "refact command-r smollm codeshell exaone minerva-7b",
}
PATTERNS: Mapping[str, SplitPattern] = _PATTERNS | {
    name: _PATTERNS[first] for first, names in _SAME.items() for name in names.split()
}


def split_pattern(name: str) -> SplitPattern:
    """Raises: UnsupportedError for a name that is not known."""
    found = PATTERNS.get(name)
    if found is None:
        raise UnsupportedError(
            f"texts are split by the pattern {name[:60]!r}, which is not known; known are {', '.join(sorted(PATTERNS))}"
        )
    return found


def pre_tokenizer(pattern: SplitPattern) -> Any:
    """The library's pre-tokenizer that splits so and then writes bytes as characters."""
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in pattern.patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
