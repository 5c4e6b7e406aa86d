"""OpenAI's batches: a file of requests that run when nobody waits.

    penstock serve                      # in another terminal
    pip install openai && python batch.py

Without a server: `penstock batch requests.jsonl -o answers.jsonl`.
"""

import json
import os
import time

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
model = client.models.list().data[0].id
lines = [
    {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": model, "prompt": f"Once upon a time {name}", "max_tokens": 16},
    }
    for name in ("Tom", "Polly", "Dorothy")
]
data = "\n".join(json.dumps(line) for line in lines).encode()
file = client.files.create(file=("requests.jsonl", data), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
print(batch.status, batch.request_counts.completed, "of", batch.request_counts.total)
for line in client.files.content(batch.output_file_id).text.splitlines():
    answer = json.loads(line)
    print(f"{answer['custom_id']}: {answer['response']['body']['choices'][0]['text']!r}")
