"""OpenAI's client: a conversation, streamed, with its usage.

penstock serve                      # in another terminal
pip install openai && python openai_chat.py
"""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Tell me about the sea."}],
    max_tokens=64,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n[{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens]")
