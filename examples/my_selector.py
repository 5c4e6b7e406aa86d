"""A KV selector of your own: which tokens of its context a sequence keeps when it may keep only some.

    python my_selector.py
    penstock serve --plugin my_selector.py --kv-selector every-nth --kv-budget 25%

This one keeps every n-th token beside the first and the last ones, whatever they are: a baseline for those that have a
paper. Selectors give up accuracy: `penstock cap` says how much.
"""

import numpy as np

from penstock import LLM, SamplingParams
from penstock.select import KV_SELECTORS, Traits
from penstock.select.slots import TokenSelector, best_of_each


class EveryNth(TokenSelector):
    name = "every-nth"
    per_head = False

    def select(self, at, lines):
        step = max(1, at.num_tokens // at.budget)
        return best_of_each(at, lines, self.options, lambda line: (line.positions % step == 0).astype(np.float32))


KV_SELECTORS.add("every-nth", f"{__name__}:EveryNth", Traits(per_head=False))

if __name__ == "__main__":
    hay = "The cat sat by the fire. The dog lay on the mat. " * 12
    prompt = f"{hay}The pass key is 48213. Remember it. {hay}What is the pass key? The pass key is"
    greedy = SamplingParams(temperature=0, max_tokens=8)
    for selector in ("none", "every-nth", "snapkv"):
        settings = {} if selector == "none" else {"kv_selector": selector, "kv_budget": "25%"}
        llm = LLM("nano", **settings)
        text = llm.generate(prompt, greedy)[0].outputs[0].text
        print(f"{selector:10} {text!r}")
