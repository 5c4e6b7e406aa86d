"""onnxruntime-genai: one left-padded batch to the longest prompt and answer (it has no continuous batching here).

The model is the folder `<model>-ort-<precision>` from `python -m onnxruntime_genai.models.builder`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peer_worker import Engine, Recorder, Request, file_bytes, serve

UNKNOWN = -1
"""Stands for the tokens of padded rows: padding is not masked, so their times are right and their ids are not."""


class OnnxRuntime(Engine):
    def start(self, model: str, precision: str, threads: int, options: dict[str, Any]) -> None:
        import onnxruntime_genai as genai

        folder = Path(f"{model}-ort-{precision}")
        file = folder / "genai_config.json"
        config = json.loads(file.read_text())
        config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
        file.write_text(json.dumps(config, indent=1))
        self.genai, self.version = genai, str(genai.__version__)
        self.model = genai.Model(str(folder))
        self.weight_bytes = file_bytes(*folder.glob("*.onnx"), *folder.glob("*.onnx.data"))

    def run(self, requests: list[Request], recorder: Recorder) -> None:
        import numpy as np

        longest = max(len(prompt) for prompt, _ in requests)
        steps = max(new for _, new in requests)
        params = self.genai.GeneratorParams(self.model)
        params.set_search_options(
            do_sample=False, max_length=longest + steps, min_length=longest + steps, batch_size=len(requests)
        )
        generator = self.genai.Generator(self.model, params)
        padded = [[1] * (longest - len(prompt)) + list(prompt) for prompt, _ in requests]
        generator.append_tokens(np.array(padded, dtype=np.int32))
        for step in range(steps):
            generator.generate_next_token()
            for number, token in enumerate(generator.get_next_tokens()):
                prompt, new = requests[number]
                if step < new:
                    recorder.add(number, [int(token) if len(prompt) == longest else UNKNOWN])


if __name__ == "__main__":
    serve(OnnxRuntime())
