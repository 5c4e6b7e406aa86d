"""What a KV cache saves and takes, by formulas, against what an engine really runs and holds. Rows K13, K11.

With t_c tokens cached and t more to come, keys and values of L layers with h heads of d_k and d_v: saved are
2 E L h (d_k + d_v) t_c t FLOPs of their products (E: hidden size), taken are 2 L h (d_k + d_v) t_c bytes at 16 bits.
"""

from __future__ import annotations

import pytest

from penstock.core.batch import SchedulerOutput
from penstock.core.model_spec import Attention, ModelSpec
from penstock.core.sampling import SamplingParams
from penstock.core.step_shape import shape_of
from penstock.engine.record import Recorder
from penstock.launch.llm import LLM
from penstock.plan.devices import device_preset
from penstock.plan.flops import model_work
from penstock.plan.operators import operators

CACHED, NEW = 224, 16


class Counting(Recorder):
    """FLOPs of steps as they are scheduled: of keys and values, and all."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec, self.device = spec, device_preset("cpu-2core")
        self.work = model_work(spec, "bfloat16")
        self.keys_and_values = self.all = 0

    def submitted(self, output: SchedulerOutput) -> None:
        shape = shape_of(output.scheduled)
        found = operators(self.spec, self.work, shape, self.device, "bfloat16")
        self.keys_and_values += sum(o.flops for o in found if o.name in ("k", "v"))
        self.all += sum(o.flops for o in found)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("nano", dtype="bfloat16", enable_prefix_caching=False, block_size=16, max_model_len=512)


def counted(llm: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[Counting, list[int]]:
    """What the engine ran for these, one after the other, and all tokens that it said."""
    core = llm._engine.core
    core.recorder = counting = Counting(llm._engine.spec)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    said: list[int] = []
    try:
        for prompt in prompts:
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
            said += output.outputs[0].token_ids
    finally:
        core.recorder = None
    return counting, said


def per_token(llm: LLM) -> int:
    """L h (d_k + d_v)."""
    mixers = [layer.mixer for layer in llm._engine.spec.layers]
    assert all(isinstance(m, Attention) for m in mixers)
    return sum(2 * m.num_kv_heads * m.head_dim for m in mixers if isinstance(m, Attention))


def test_K13_what_the_cache_saves_follows_the_formula_within_ten_percent(llm: LLM) -> None:
    """Without a cache every token is asked for anew, behind the whole text: the same tokens, and what they cost."""
    prompt = [7 + i % 200 for i in range(CACHED)]
    cached, said = counted(llm, [prompt], NEW)
    naive, again = counted(llm, [prompt + said[:i] for i in range(NEW)], 1)
    assert again == said, "the cache changed a token"
    saved = naive.keys_and_values - cached.keys_and_values
    # The first token computes its prompt with a cache too: it serves the NEW - 1 that follow.
    formula = 2 * llm._engine.spec.hidden_size * per_token(llm) * CACHED * (NEW - 1)
    assert saved == pytest.approx(formula, rel=0.1)
    assert naive.all > 5 * cached.all, "it is not keys and values alone that need not be computed again"


def test_K13_a_cached_token_takes_two_bytes_of_every_key_and_value(llm: LLM) -> None:
    """By the books, in the memory itself, and in blocks for a text, within ten percent and a block."""
    plan, core = llm._engine.plan, llm._engine.core
    formula = 2 * per_token(llm)
    assert sum(group.token_bytes(plan.block_size) for group in plan.groups) == formula
    storage = core.executor.runner.storage  # type: ignore[attr-defined]
    (pages,) = storage.num_pages
    layers = plan.groups[0].pages_per_slab
    held = sum(plane.nbytes for plane in storage.planes[0].values())
    assert held / (pages / layers * plan.block_size) == formula
    pool, used = core.kv.pools[0], []

    class Watching(Counting):
        def submitted(self, output: SchedulerOutput) -> None:
            used.append(pool.num_slabs - pool.num_free)

    core.recorder = Watching(llm._engine.spec)
    try:
        llm.generate([{"prompt_token_ids": [5] * CACHED}], SamplingParams(temperature=0.0, max_tokens=1))
    finally:
        core.recorder = None
    measured = max(used) * plan.groups[0].slab_bytes(plan.block_size)
    assert formula * CACHED <= measured <= formula * CACHED * 1.1 + plan.groups[0].slab_bytes(plan.block_size)
