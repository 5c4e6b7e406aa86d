"""A drafter of your own: a function that says what may come next. It can save time, and cannot change a token.

    python my_drafter.py

This one knows a text that answers tend to quote, as a retriever would. A server finds it with
`--plugin my_drafter.py --speculative-config '{"method": "function", "function": "my_drafter:draft"}'`.
"""

from penstock import LLM, SamplingParams

KNOWN = []
"""Token ids of the text; filled below."""


def draft(token_ids, num_tokens):
    """Prompt and output so far -> at most `num_tokens` ids that may follow."""
    for size in range(4, 0, -1):
        tail = token_ids[-size:]
        for at in range(len(KNOWN) - size):
            if KNOWN[at : at + size] == tail:
                return KNOWN[at + size : at + size + num_tokens]
    return []


if __name__ == "__main__":
    import my_drafter  # the engine imports it by this name, which is not the script's own

    greedy = SamplingParams(temperature=0, max_tokens=48)
    prompt = "Once upon a time"
    plain = LLM("nano")
    expected = plain.generate(prompt, greedy)[0].outputs[0].token_ids
    my_drafter.KNOWN[:] = plain.get_tokenizer().encode(prompt) + list(expected)
    llm = LLM("nano", speculative_config={"method": "function", "function": "my_drafter:draft"})
    out = llm.generate(prompt, greedy)[0]
    stats = [engine.engine.core.stats.num_steps for engine in (plain, llm)]
    print(f"steps: {stats[0]} without drafts, {stats[1]} with them")
    print("same tokens:", list(out.outputs[0].token_ids) == list(expected))
