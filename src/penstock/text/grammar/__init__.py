"""Structured output: what a client asks for, as text that llguidance turns into masks of allowed tokens.

`source` writes the text (`grammar_of`), `schema` refuses what would be ignored, `compile` makes matchers of it for one
vocabulary, `worker` is the process in which a server tries a grammar before it takes the request on, and
`runner.logits.grammar` applies it on the rank.

Free text up to a marker, then JSON of a schema, then free text again (tool calls):

>>> from penstock.text.grammar.schema import json_schema_check
>>> from penstock.text.grammar.source import lark_grammar, lark_json, lark_literal
>>> schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
>>> json_schema_check(schema, "tools[0].function.parameters")
>>> text = lark_grammar(
...     "start: (said call)* SAY\\n"
...     f"call: {lark_json(schema)} {lark_literal('</tool>')}\\n"
...     "SAY: /(.|\\\\n)*/ & ~/(.|\\\\n)*<tool>(.|\\\\n)*/\\n"
...     "said[lazy]: /(.|\\\\n)*<tool>/\\n"
... )

`text` goes into `StructuredOutputs` by `Compiled(text=text)`. A marker that is one token of the vocabulary is written
`<[id]>` in Lark; text that only spells it is another thing. Source of the grammars' form:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""
