"""`LLM.stream`: tokens as they come, in this process, without a server.

python stream.py [MODEL]
"""

import sys

from penstock import LLM, SamplingParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "nano")
shown = ""
for out in llm.stream("Once upon a time", SamplingParams(temperature=0.8, seed=1, max_tokens=60)):
    text = out.outputs[0].text
    print(text[len(shown) :], end="", flush=True)
    shown = text
print(f"\n[{out.outputs[0].finish_reason}, {len(out.outputs[0].token_ids)} tokens]")
