"""llama.cpp or ik_llama.cpp as a library: whichever of llama-cpp-python and ik-llama-cpp-python this interpreter has.

No server between the engine and its tokens, so these are the fastest figures that it can have. Several requests go
together: every step decodes one token of each that runs, and fills the batch with prompts that wait.

What a request begins with is not computed again where the first request of the run before has begun with it, too. ik's
flash attention ends with an assertion where a batch holds two sequences, so with several slots ik runs without it.

Options: `context` (tokens of all sequences), `slots`, `prefix_cache` (true if not said); `model` and `run`, fields of
the library's own model and context parameters (`{"model": {"repack_tensors": true, "use_mmap": false}}` is ik's -rtr).
The model is a GGUF file, or `<model>-<precision>.gguf`.
"""

from __future__ import annotations

import ctypes
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
KEPT = 0
"""The sequence that outlives a run; requests are the ones behind it."""
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
        run.n_seq_max = int(options.get("slots", 32)) + 1
        run.n_threads = run.n_threads_batch = threads
        if IS_IK:
            run.flash_attn = int(options.get("slots", 32)) == 1
        else:
            run.kv_unified = True
        _set(run, options.get("run", {}))
        self.context = api.llama_init_from_model(self.model, run)
        if not self.context:
            raise RuntimeError(f"{NAME} could not make a context of {run.n_ctx} tokens")
        vocab = api.llama_model_get_vocab(self.model)
        self.vocab_size = api.llama_vocab_n_tokens(vocab)
        self.keeps_prefix = bool(options.get("prefix_cache", True))
        self.kept: list[int] = []  # what sequence KEPT holds
        self.batch = api.llama_batch_init(BATCH, 0, 1)
        self.weight_bytes = file_bytes(file)
        self.version = f"{NAME} {importlib.metadata.version(NAME)}"

    def run(self, requests: list[Request], recorder: Recorder) -> None:
        waiting: deque[Entry] = deque()
        for number, (prompt, _) in enumerate(requests):
            begin = self._shared(prompt)
            _copy(self.context, KEPT, number + 1, begin)
            waiting += [(prompt[at], at, number, at == len(prompt) - 1) for at in range(begin, len(prompt))]
        running: list[Entry] = []
        while waiting or running:
            step = running + [waiting.popleft() for _ in range(min(len(waiting), BATCH - len(running)))]
            running = []
            for (_, at, number, _), token in self._step(step):
                recorder.add(number, [token])
                if len(recorder.tokens[number]) < requests[number][1]:
                    running.append((token, at + 1, number, True))
        self._keep(requests[0][0] + recorder.tokens[0][:-1], len(requests))

    def _step(self, entries: list[Entry]) -> list[tuple[Entry, int]]:
        """(entry, the likeliest next token) of those whose logits are wanted."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, at, number, is_last) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, at, is_last
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, number + 1
        status = api.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")
        return [(entry, self._best(i)) for i, entry in enumerate(entries) if entry[3]]

    def _best(self, row: int) -> int:
        logits = api.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())

    def _shared(self, prompt: list[int]) -> int:
        """How many tokens of a prompt are in the cache; the last one is computed always, for its logits."""
        same = (at for at, (a, b) in enumerate(zip(prompt[:-1], self.kept, strict=False)) if a != b)
        return next(same, min(len(prompt) - 1, len(self.kept)))

    def _keep(self, tokens: list[int], num_requests: int) -> None:
        """Of the first request what is asked for, and nothing else."""
        self.kept = tokens if self.keeps_prefix else []
        _remove(self.context, KEPT)
        _copy(self.context, KEPT + 1, KEPT, len(self.kept))
        for number in range(num_requests):
            _remove(self.context, number + 1)


def _copy(context: Any, source: int, target: int, length: int) -> None:
    """Sequence `target` shares the first `length` cells of `source`; a state is one cell whatever the length, so
    nothing is asked for where nothing is shared."""
    if not length:
        return
    if IS_IK:
        api._lib.llama_kv_cache_seq_cp(ctypes.c_void_p(context), source, target, 0, length)
    else:
        api.llama_memory_seq_cp(api.llama_get_memory(context), source, target, 0, length)


def _remove(context: Any, number: int) -> None:
    if IS_IK:
        api._lib.llama_kv_cache_seq_rm(ctypes.c_void_p(context), number, -1, -1)
    else:
        api.llama_memory_seq_rm(api.llama_get_memory(context), number, -1, -1)


def _set(params: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if name not in dict(params._fields_):
            raise RuntimeError(f"{NAME} has no parameter {name!r}")
        setattr(params, name, value)


if __name__ == "__main__":
    serve(Ggml())
