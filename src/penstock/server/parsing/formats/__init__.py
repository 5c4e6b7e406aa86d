"""The formats by name. A new one is a file here and a line in this table."""

from __future__ import annotations

from penstock.server.parsing.formats import (
    bare,
    deepseek_v3,
    gemma4,
    glm45,
    gpt_oss,
    granite,
    hermes,
    internlm,
    kimi_k2,
    llama3_json,
    mistral,
    openai,
    phi4_mini_json,
    pythonic,
    qwen3_coder,
)
from penstock.server.parsing.reader import Format, Thoughts

_ALL = (
    qwen3_coder, glm45, hermes, kimi_k2, deepseek_v3, mistral, gemma4, gpt_oss, internlm, phi4_mini_json, granite,
    pythonic, llama3_json, openai, bare,
)  # fmt: skip
FORMATS: dict[str, Format] = {module.FORMAT.name: module.FORMAT for module in _ALL}
"""Where a chat template fits several, the first is taken: the more special come first."""

ALIASES = {
    "qwen3_xml": "qwen3_coder", "llama4_json": "llama3_json", "llama4_pythonic": "pythonic", "olmo3": "pythonic",
    "deepseek_v31": "deepseek_v3", "glm47": "glm45", "granite-20b-fc": "granite", "harmony": "gpt_oss",
}  # fmt: skip
"""Other names, most of them vLLM's."""

_THINK = ("<think>", "</think>")
THOUGHTS: dict[str, Thoughts] = {
    thoughts.name: thoughts
    for thoughts in (
        Thoughts("mistral", "[THINK]", "[/THINK]", anywhere=True, signs=(("[THINK]",),)),
        Thoughts("kimi", "◁think▷", "◁/think▷", signs=(("◁think▷",), ("◁/think▷",))),
        Thoughts("gemma4", "<|channel>thought", "<channel|>", anywhere=True, signs=(("<|channel>thought",),)),
        Thoughts("granite", "Here is my thought process:", "Here is my response:",
                 signs=(("Here is my thought process",),)),
        Thoughts("qwen3", *_THINK, signs=(("<think>",), ("</think>",))),
        Thoughts("deepseek_r1", *_THINK),
        Thoughts("glm45", *_THINK),
        Thoughts("kimi_k2", *_THINK),
    )
}  # fmt: skip
