"""llama.cpp or ik_llama.cpp as a library: whichever of llama-cpp-python and ik-llama-cpp-python this interpreter has.

No server between the engine and its tokens, so these are the fastest figures that it can have. Several requests go
together: every step decodes one token of each that runs, and fills the batch with prompts that wait.

Options: `context` (tokens of all sequences), `slots`; `model` and `run`, fields of the library's own model and context
parameters (`{"model": {"repack_tensors": true, "use_mmap": false}}` is ik's -rtr). The model is a GGUF file, or
`<model>-<precision>.gguf`.
"""

from __future__ import annotations

import importlib.metadata
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from peer_worker import Engine, Recorder, Request, file_bytes, serve

try:
    from ik_llama_cpp import _ctypes_api as api

    NAME = "ik-llama-cpp-python"
except ImportError:
    import llama_cpp as api

    NAME = "llama-cpp-python"
IS_IK = NAME.startswith("ik")
BATCH = 2048
Entry = tuple[int, int, int, bool]
"""(token, its position, the request's number, whether the logits behind it are wanted)."""


class Ggml(Engine):
    def start(self, model: str, precision: str, threads: int, options: dict[str, Any]) -> None:
        file = Path(model) if model.endswith(".gguf") else Path(f"{model}-{precision}.gguf")
        api.llama_backend_init()
        wanted = api.llama_model_default_params()
        _set(wanted, options.get("model", {}))
        self.model = api.llama_model_load_from_file(str(file).encode(), wanted)
        if not self.model:
            raise RuntimeError(f"{NAME} could not load {file}")
        run = api.llama_context_default_params()
        run.n_ctx, run.n_batch, run.n_ubatch = int(options.get("context", 32768)), BATCH, 512
        run.n_seq_max = int(options.get("slots", 32))
        run.n_threads = run.n_threads_batch = threads
        _set(run, {} if IS_IK else {"kv_unified": True})
        _set(run, options.get("run", {}))
        self.context = api.llama_init_from_model(self.model, run)
        if not self.context:
            raise RuntimeError(f"{NAME} could not make a context of {run.n_ctx} tokens")
        vocab = api.llama_model_get_vocab(self.model)
        self.vocab_size = api.llama_vocab_n_tokens(vocab)
        self.batch = api.llama_batch_init(BATCH, 0, 1)
        self.weight_bytes = file_bytes(file)
        self.version = f"{NAME} {importlib.metadata.version(NAME)}"

    def run(self, requests: list[Request], recorder: Recorder) -> None:
        self._forget()
        waiting = deque(
            (token, at, number, at == len(prompt) - 1)
            for number, (prompt, _) in enumerate(requests)
            for at, token in enumerate(prompt)
        )
        running: list[Entry] = []
        while waiting or running:
            step = running + [waiting.popleft() for _ in range(min(len(waiting), BATCH - len(running)))]
            running = []
            for (_, at, number, _), token in self._step(step):
                recorder.add(number, [token])
                if len(recorder.tokens[number]) < requests[number][1]:
                    running.append((token, at + 1, number, True))

    def _step(self, entries: list[Entry]) -> list[tuple[Entry, int]]:
        """(entry, the likeliest next token) of those whose logits are wanted."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, at, number, is_last) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, at, is_last
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, number
        status = api.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")
        return [(entry, self._best(i)) for i, entry in enumerate(entries) if entry[3]]

    def _best(self, row: int) -> int:
        logits = api.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())

    def _forget(self) -> None:
        """All sequences: nothing of a prompt is answered from the run before."""
        if IS_IK:
            api.llama_kv_cache_clear(self.context)
        else:
            api.llama_memory_clear(api.llama_get_memory(self.context), False)


def _set(params: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if name not in dict(params._fields_):
            raise RuntimeError(f"{NAME} has no parameter {name!r}")
        setattr(params, name, value)


if __name__ == "__main__":
    serve(Ggml())
