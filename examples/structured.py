"""Answers that have a form, whatever the model: a JSON schema, a choice, a regular expression.

penstock serve                      # in another terminal
pip install openai && python structured.py
"""

import json
import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
model = client.models.list().data[0].id
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "people": {"type": "integer", "minimum": 0, "maximum": 9999999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


def ask(question, **more):
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=200, **more
    )
    return answer.choices[0].message.content


form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
print(json.loads(ask("Name a city and how many live there.", response_format=form)))
print(ask("Is the sea wet?", extra_body={"structured_outputs": {"choice": ["yes", "no"]}}))
print(ask("When?", extra_body={"structured_outputs": {"regex": r"20\d\d-(0[1-9]|1[0-2])"}}))
