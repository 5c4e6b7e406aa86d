"""vLLM in an environment of its own, for `peers`: one JSON line in (prompt, tokens wanted), one out (tokens, times).

PYTHON_OF_VLLM vllm_worker.py MODEL '{"method": "ngram", ...}' | null
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes its log where our answers go
    import vllm

    llm = vllm.LLM(
        sys.argv[1], dtype="bfloat16", max_model_len=1024, max_num_seqs=1, skip_tokenizer_init=True, seed=0,
        enable_prefix_caching=False, disable_log_stats=True, enforce_eager=True,
        speculative_config=json.loads(sys.argv[2]),
    )  # fmt: skip
    print(json.dumps({"version": vllm.__version__}), file=out, flush=True)
    engine = llm.llm_engine
    for i, line in enumerate(sys.stdin):
        asked = json.loads(line)
        params = vllm.SamplingParams(temperature=0, max_tokens=asked["count"], ignore_eos=True, detokenize=False)
        engine.add_request(str(i), {"prompt_token_ids": asked["prompt"]}, params)
        tokens: list[int] = []
        first = last = 0.0
        while engine.has_unfinished_requests():
            for output in engine.step():
                last = time.perf_counter()
                if not tokens:
                    first, at_first = last, len(output.outputs[0].token_ids)
                tokens = list(output.outputs[0].token_ids)
        rate = (len(tokens) - at_first) / (last - first)
        print(json.dumps({"tokens": tokens, "rate": rate}), file=out, flush=True)


if __name__ == "__main__":
    main()
