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
_HAN = r"[一-龥\u0800-一\uac00-\ud7ff]+"
# The cased letters as DeepSeek's first tokenizers list them, and the marks of ASCII, of full width and around CJK text.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK_MARKS = r"[!-/:-~！-／：-～‘-‟\u3000-。]+"
_NO_HAN = "&&[^\\p{Han}]"
_KIMI_UPPER, _KIMI_LOWER = _UPPER[:-1] + _NO_HAN + "]", _LOWER[:-1] + _NO_HAN + "]"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CASELESS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CASELESS}?|\p{{N}}{{1,3}}" + _REST
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
    "deepseek-llm": SplitPattern(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            rf"\s?{_CJK_MARKS}",
            r"\s+$",
            _HAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": SplitPattern((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    "bloom": SplitPattern((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    "viking": SplitPattern((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
    "seed-coder": SplitPattern((_CASELESS + _WORDS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)),
    "bailingmoe": SplitPattern(
        (r"'(?i:[sdmt]|ll|ve|re)" + _WORDS + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
    ),
    "kimi-k2": SplitPattern((_KIMI,)),
    "falcon": SplitPattern((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
}
_SAME = {
    "gpt-2": "phi-2 mpt olmo jais exaone4 trillion gigachat a.x-4.0 mellum modern-bert granite-docling",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    "cl100k": "glm4 glm5",
    "dbrx": "smaug-bpe chatglm-bpe",
    "qwen2": "deepseek-r1-qwen stablelm2 megrez hunyuan kormo solar-open grok-2",
    "gpt-4o": "llama4 minimax-m2 kanana2",
    "starcoder": "refact command-r smollm codeshell exaone minerva-7b mellum2",
    "deepseek-v3": "hunyuan-dense joyai-llm",
    "bloom": "poro-chat gpt3-finnish",
    "bailingmoe": "bailingmoe2 llada-moe",
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
