"""OpenVINO GenAI's continuous batching pipeline, stepped by hand so that every token has its time.

The model is the folder `<model>-ov-<precision>` from `optimum-cli export openvino`, or a GGUF file, which this engine
reads, too: `<model>-<precision>.gguf`, or the model itself. Options: `cache_gib`, `prefix_cache` (true if not said).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peer_worker import Engine, Recorder, Request, file_bytes, serve


class OpenVino(Engine):
    def start(self, model: str, precision: str, threads: int, options: dict[str, Any]) -> None:
        import openvino_genai as genai

        given = [Path(model), Path(f"{model}-{precision}.gguf")]
        file = next((path for path in given if path.suffix == ".gguf" and path.is_file()), None)
        source = file or Path(f"{model}-ov-{precision}")
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = int(options.get("cache_gib", 1))
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = bool(options.get("prefix_cache", True))
        self.genai = genai
        self.pipe = genai.ContinuousBatchingPipeline(
            str(source), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads, "CACHE_DIR": ""}
        )
        self.version = str(genai.__version__)
        self.weight_bytes = file_bytes(file or source / "openvino_model.bin")
        self.count = 0

    def _config(self, new: int) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos, config.do_sample = True, False
        return config

    def run(self, requests: list[Request], recorder: Recorder) -> None:
        import numpy as np
        import openvino

        handles = []
        for prompt, new in requests:
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self.pipe.add_request(self.count, ids, self._config(new)))
            self.count += 1
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
            for number, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        recorder.add(number, list(output.generated_ids))


if __name__ == "__main__":
    serve(OpenVino())
