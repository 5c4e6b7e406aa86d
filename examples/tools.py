"""A tool call, run here and answered: the loop that an agent is made of.

    penstock serve MODEL                # in another terminal; a model whose template shows tools
    pip install openai && python tools.py

`tool_choice` names the tool, so even a model that never saw tools writes a call that fits; leave it out ("auto") with a
model that knows them.
"""

import json
import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
model = client.models.list().data[0].id
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


def get_weather(city, days):
    return {"city": city, "sky": ["sun"] * days}


messages = [{"role": "user", "content": "How will the weather be in Oslo?"}]
named = {"type": "function", "function": {"name": "get_weather"}}
answer = client.chat.completions.create(
    model=model, messages=messages, tools=[WEATHER], tool_choice=named, max_tokens=200
)
message = answer.choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls:
    print("calls", call.function.name, call.function.arguments)
    result = get_weather(**json.loads(call.function.arguments))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
answer = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER], max_tokens=64)
print("says", repr(answer.choices[0].message.content))
