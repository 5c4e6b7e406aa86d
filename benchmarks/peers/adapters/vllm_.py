"""vLLM's CPU engine, stepped by hand so that every token has its time.

The model is the folder itself (bf16) or `<model>-<precision>` (compressed tensors). Options: `eager` (no compilation).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from peer_worker import Engine, Recorder, Request, file_bytes, serve


class Vllm(Engine):
    def start(self, model: str, precision: str, threads: int, options: dict[str, Any]) -> None:
        import vllm

        folder = Path(model if precision == "bf16" else f"{model}-{precision}")
        self.vllm, self.version, self.count = vllm, str(vllm.__version__), 0
        positions = json.loads((folder / "config.json").read_text("utf-8"))["max_position_embeddings"]
        self.llm = vllm.LLM(
            str(folder), dtype="bfloat16", max_model_len=min(2048, positions), max_num_seqs=64,
            max_num_batched_tokens=2048, enable_prefix_caching=True, skip_tokenizer_init=True, seed=0,
            disable_log_stats=True,
            enforce_eager=bool(options.get("eager")),
        )  # fmt: skip
        self.weight_bytes = file_bytes(*folder.glob("*.safetensors"))

    def run(self, requests: list[Request], recorder: Recorder) -> None:
        engine = self.llm.llm_engine
        numbers = {}
        for number, (prompt, new) in enumerate(requests):
            params = self.vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
            name = f"peer-{self.count}"
            self.count += 1
            numbers[name] = number
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                number = numbers[output.request_id]
                recorder.add(number, list(output.outputs[0].token_ids)[len(recorder.tokens[number]) :])

    def processes(self) -> list[int]:
        """The engine core runs in processes of its own."""
        found, todo = [], [os.getpid()]
        while todo:
            pid = todo.pop()
            for file in Path(f"/proc/{pid}/task").glob("*/children"):
                children = [int(child) for child in file.read_text().split()]
                found += children
                todo += children
        return found


if __name__ == "__main__":
    serve(Vllm())
