"""Anthropic's client against the same server: a message, streamed.

penstock serve                      # in another terminal
pip install anthropic && python anthropic_messages.py
"""

import os

from anthropic import Anthropic

client = Anthropic(base_url=os.environ.get("ANTHROPIC_BASE_URL", "http://127.0.0.1:8000"), api_key="none")
model = client.models.list().data[0].id
with client.messages.stream(
    model=model, max_tokens=64, messages=[{"role": "user", "content": "I would like to order a pizza."}]
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
    done = stream.get_final_message()
print(f"\n[{done.stop_reason}, {done.usage.input_tokens} + {done.usage.output_tokens} tokens]")
