"""Heads for multi-token prediction that ship in a checkpoint: no token changes, and drafts are what the head says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.base.errors import ConfigError
from penstock.drafters.mtp import MtpDrafter
from penstock.families.registry import open_model
from penstock.formats.gguf import read_gguf
from penstock.ops.native.library import best_library
from penstock.weights.load import load_weights
from tests.ggml import write_gguf
from tests.heads import CONFIGS, SIZE, write
from tests.models.gguf_writer import write_with_head
from tests.paged import Paged

native_only = pytest.mark.skipif(best_library() is None, reason="no native library was built")
each_ops = pytest.mark.parametrize("ops", ["ref", pytest.param("native", marks=native_only)])
each_layout = pytest.mark.parametrize("case", CONFIGS)
FIXED = {"method": "mtp", "controller": "fixed", "num_speculative_tokens": 3}


def made(folder: Path, ops: str, speculation: Any = FIXED, **more: Any) -> LLM:
    given = speculation if speculation is None else json.dumps(speculation)
    options: dict[str, Any] = {"max_model_len": 128, "block_size": 16, "skip_tokenizer_init": True}
    return LLM(model=str(folder), ops=ops, speculative_config=given, **options | more)


def rules(length: int, count: int, **more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=length, temperature=(0.0, 0.8)[i % 2], seed=i, ignore_eos=True, **more)
        for i in range(count)
    ]


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, SIZE, n).tolist() for n in lengths]


def texts(llm: LLM, given: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate([{"prompt_token_ids": p} for p in given], params)]


def drafter_of(llm: LLM) -> MtpDrafter:
    drafter = llm.engine.core.executor.runner.drafter  # type: ignore[attr-defined]
    assert isinstance(drafter, MtpDrafter), "it has failed"
    return drafter


@each_layout
@each_ops
def test_no_token_changes(case: str, ops: str, tmp_path: Path) -> None:
    """Random weights; greedy and sampled rows, prompts longer than a block, in chunks, then out of the prefix cache."""
    write(tmp_path, case)
    plain = made(tmp_path, ops, {"method": "none"}, max_num_batched_tokens=32)
    llm = made(tmp_path, ops, max_num_batched_tokens=32)
    assert plain.engine.core.executor.runner.drafter is None  # type: ignore[attr-defined]
    given = prompts((40, 1, 17, 16, 5))
    want = texts(plain, given, rules(20, 5))
    assert texts(llm, given, rules(20, 5)) == want
    assert llm.engine.core.stats.num_draft_tokens > 20
    longer = [given[0] + [7, 8, 9], given[0][:35] + given[1], given[2]]
    assert texts(llm, longer, rules(12, 3)) == texts(plain, longer, rules(12, 3))
    assert texts(llm, given, rules(20, 5)) == want
    drafter_of(llm)


@each_layout
@each_ops
@pytest.mark.parametrize("right", ["token", "hidden"])
def test_a_head_that_is_right_is_always_right(case: str, ops: str, right: str, tmp_path: Path) -> None:
    """Of a model whose next token follows from the newest: every draft is accepted, from the first token on, whether
    the head looks at the embedding or at the hidden state; as it is if prompts come in chunks."""
    write(tmp_path, case, right=right)
    plain, llm = (made(tmp_path, ops, s, max_num_batched_tokens=24) for s in ({"method": "none"}, FIXED))
    given, params = prompts((40, 2, 17)), [SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)] * 3
    assert texts(llm, given, params) == texts(plain, given, params)
    stats = llm.engine.core.stats
    assert stats.num_draft_tokens == stats.num_accepted_tokens > 0
    # One token comes with the prompt, the others in steps of four.
    assert stats.num_drafts == 3 * -(-23 // 4)


GGUF = {"deepseek_v3": "deepseek2", "glm4_moe": "glm4moe", "qwen3_next": "qwen3next", "qwen3_5": "qwen35"}


@pytest.mark.parametrize("case", GGUF)
@each_ops
@pytest.mark.parametrize("right", ["", "token", "hidden"])
def test_the_block_behind_the_layers_of_a_gguf_file_is_the_head(
    case: str, ops: str, right: str, tmp_path: Path
) -> None:
    """The same weights as in the folder; found without being asked for, and no token changes."""
    folder = open_model(write(tmp_path / "folder", case, right=right))
    assert folder.head is not None
    parts = [
        (c.spec, {n: np.array(a) for n, a in load_weights(c, c.spec, "float32").items()}) for c in (folder, folder.head)
    ]
    (spec, weights), (head, own) = parts
    path = write_with_head(tmp_path / "m.gguf", spec, weights, head, own, GGUF[case])
    found = open_model(path).head
    assert found is not None
    read = load_weights(found, found.spec, "float32")
    if case == "deepseek_v3":
        assert read["layers.0.k_b"].shape == (24, 12), "halves of kv_b"
    else:
        offset = 0.0 if head.final_norm is None else head.final_norm.offset
        for name, array in read.items():
            norm = name.endswith("norm") and not name.endswith("head_norm")
            np.testing.assert_allclose(array, own[name] + (offset if norm else 0.0), atol=1e-6)
    given, params = prompts((40, 2, 17)), [SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)] * 3
    plain, llm = (made(path, ops, s, max_num_batched_tokens=24) for s in ({"method": "none"}, FIXED))
    assert (
        texts(llm, given, params)
        == texts(plain, given, params)
        == texts(made(tmp_path / "folder", ops, {"method": "none"}, max_num_batched_tokens=24), given, params)
    )
    stats = llm.engine.core.stats
    assert stats.num_draft_tokens > 0
    assert not right or stats.num_draft_tokens == stats.num_accepted_tokens
    drafter_of(llm)
    assert {d.name: d.value for d in made(path, ops, None).engine.plan.decisions}["speculative_config"] == "mtp"


def test_a_gguf_file_without_its_head_has_none(tmp_path: Path) -> None:
    folder = open_model(write(tmp_path / "folder", "glm4_moe"))
    assert folder.head is not None
    (spec, weights), (head, own) = [
        (c.spec, {n: np.array(a) for n, a in load_weights(c, c.spec, "float32").items()}) for c in (folder, folder.head)
    ]
    path = write_with_head(tmp_path / "m.gguf", spec, weights, head, own, "glm4moe")
    gguf = read_gguf(path)
    for missing in ("nextn.eh_proj.weight", "nextn.enorm.weight", "attn_q.weight", "ffn_down_exps.weight"):
        tensors = {n: ("F32", np.zeros(ref.shape, np.float32)) for n, ref in gguf.tensors.items()
                   if n != f"blk.2.{missing}"}  # fmt: skip
        assert open_model(write_gguf(tmp_path / "less.gguf", gguf.metadata, tensors)).head is None
    tensors = {n: ("F32", np.zeros(ref.shape, np.float32)) for n, ref in gguf.tensors.items() if "shared_head" not in n}
    found = open_model(write_gguf(tmp_path / "less.gguf", gguf.metadata, tensors)).head
    assert found is not None
    assert found.weights["final_norm"].tensor.name == "output_norm.weight", "the model's own stands in"


@each_ops
def test_preempted_rows_go_on_as_they_were(ops: str, tmp_path: Path) -> None:
    write(tmp_path, "glm4_moe")
    given, params = prompts((30, 28, 26, 24)), rules(40, 4)
    want = texts(made(tmp_path, ops, {"method": "none"}), given, params)
    for mode, more in (("recompute", {}), ("swap", {"swap_space": 0.01})):
        llm = made(
            tmp_path, ops, num_gpu_blocks_override=14, preemption_mode=mode, schedule_conservativeness=0.0, **more
        )
        assert texts(llm, given, params) == want
        assert llm.engine.core.stats.num_preemptions > 0
        drafter_of(llm)


@each_layout
def test_samples_and_penalties(case: str, tmp_path: Path) -> None:
    """Several samples of a prompt, which fork its pages, and logits that are changed by what was generated."""
    write(tmp_path, case)
    given = prompts((21, 33, 18))
    params = [
        SamplingParams(max_tokens=15, temperature=1.0, n=3, seed=4, ignore_eos=True),
        SamplingParams(max_tokens=18, temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.3, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=0.9, seed=1, n=2, top_p=0.8, ignore_eos=True),
    ]
    found = []
    for speculation in ({"method": "none"}, FIXED):
        llm = made(tmp_path, "ref", speculation)
        outputs = llm.generate([{"prompt_token_ids": p} for p in given], params)
        found.append([[list(c.token_ids) for c in o.outputs] for o in outputs])
    assert found[0] == found[1]
    drafter_of(llm)


@native_only
def test_a_rank_in_a_process_of_its_own_has_it(tmp_path: Path) -> None:
    write(tmp_path, "glm4_moe", right="hidden")
    given, params = prompts((20, 9)), rules(12, 2)
    llm = made(tmp_path, "native", executor="multiproc")
    assert texts(llm, given, params) == texts(made(tmp_path, "native", {"method": "none"}), given, params)
    assert llm.engine.core.stats.num_accepted_tokens > 0


def test_an_answer_goes_on_in_the_next_turn(tmp_path: Path) -> None:
    """A prompt whose blocks were decoded without drafts: what the head has not run it catches up with."""
    write(tmp_path, "deepseek_v3", right="hidden")
    fixed = FIXED | {"disable_by_batch_size": 1}
    llm = made(tmp_path, "ref", fixed)
    first = prompts((18, 20))
    answers = texts(llm, first, [SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)] * 2)
    before = llm.engine.core.stats.num_draft_tokens
    turn = [first[0] + answers[0] + [5, 9]]
    params = [SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)]
    assert texts(llm, turn, params) == texts(made(tmp_path, "ref", {"method": "none"}), turn, params)
    stats = llm.engine.core.stats
    assert stats.num_draft_tokens - before > 10
    assert drafter_of(llm).num_pairs >= len(turn[0])


def test_the_head_of_a_config_without_weights_is_planned(tmp_path: Path) -> None:
    from penstock.families.registry import read_model

    write(tmp_path, "qwen3_next")
    (tmp_path / "model.safetensors").unlink()
    head = read_model(tmp_path / "config.json").head
    assert head is not None
    assert head.spec.pair is not None
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 0}))
    assert read_model(tmp_path / "config.json").head is None


@pytest.mark.parametrize("name", ["deepseek_mtp", "qwen3_next_mtp", "mimo_mtp"])
def test_names_of_vllm_mean_the_same(name: str) -> None:
    from penstock.config.speculative import parse_speculative

    found = parse_speculative({"method": name, "num_speculative_tokens": 1})
    assert found is not None
    assert (found.method, found.num_speculative_tokens) == ("mtp", 1)


def test_it_is_found_and_offered_to_the_controller(tmp_path: Path) -> None:
    write(tmp_path, "mimo")
    llm = made(tmp_path, "ref", None)
    drafter_of(llm)
    decided = {d.name: d for d in llm.engine.plan.decisions}
    assert decided["speculative_config"].value == "mtp"
    assert "predicts further tokens" in decided["speculative_config"].why
    assert decided["draft_model"].value == "mtp"
    assert llm.engine.core.scheduler.drafts is not None
    assert llm.engine.core.scheduler.drafts.name == "adaptive"


def test_without_a_head_there_is_none(tmp_path: Path) -> None:
    """A checkpoint whose layers beyond the last were left out, all or some of them: it runs, and says so if asked."""
    from safetensors.numpy import load_file, save_file

    write(tmp_path, "glm4_moe")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert open_model(tmp_path).head is not None
    del tensors["model.layers.2.eh_proj.weight"]
    save_file(tensors, path)
    assert open_model(tmp_path).head is None
    assert made(tmp_path, "ref", None).engine.core.scheduler.drafts is None
    with pytest.raises(ConfigError, match="checkpoint has none"):
        made(tmp_path, "ref")


def test_trees_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "mimo")
    with pytest.raises(ConfigError, match="drafts chains"):
        made(tmp_path, "ref", FIXED | {"tree": "k-ary"})


class Naive:
    """The head by itself: every pair of a text from the model's own hidden states, then its own drafts, in caches that
    nobody else has."""

    def __init__(self, folder: Path) -> None:
        checkpoint = open_model(folder)
        assert checkpoint.head is not None
        self.spec, self.head = checkpoint.spec, checkpoint.head.spec
        self.weights = load_weights(checkpoint, self.spec, "float32")
        self.own = dict(load_weights(checkpoint.head, self.head, "float32"))

    def hidden(self, text: list[int]) -> Any:
        """[T, E] of the model."""
        return self._states(Paged(self.spec, self.weights), text)

    def drafts(self, text: list[int], count: int) -> list[int]:
        before = np.concatenate([np.zeros((1, SIZE), np.float32), self.hidden(text[:-1])])
        tokens = list(text)
        for _ in range(count):
            assert self.head.pair is not None
            halves = [self._norm(self.weights["embed"][tokens], "token_norm"), self._norm(before, "hidden_norm")]
            table = np.concatenate(halves[::-1] if self.head.pair.hidden_first else halves, axis=1)
            head = msgspec.structs.replace(self.head, pair=msgspec.structs.replace(self.head.pair, rows=len(tokens)))
            states = self._states(Paged(head, self.own | {"embed": table}), list(range(len(tokens))))
            tokens.append(int((states[-1] @ self.weights["lm_head"].T).argmax()))
            before = np.concatenate([before, states[-1:]])
        return tokens[len(text) :]

    def _norm(self, x: Any, name: str) -> Any:
        norm = self.head.final_norm
        assert norm is not None
        return x / np.sqrt((x * x).mean(1, keepdims=True) + norm.eps) * (self.own[name] + norm.offset)

    @staticmethod
    def _states(paged: Paged, tokens: list[int]) -> Any:
        """Hidden states [T, E] of a new sequence, in one step."""
        found = []
        run, program = paged.program.run, paged.program

        def keep(plan: Any, planes: Any) -> Any:
            rows = np.arange(len(tokens), dtype=np.int32)
            found.append(program.run_pooling(replace(plan, hidden_indices=rows), planes)[1])
            return np.zeros((len(plan.logits_indices), paged.spec.vocab_size), np.float32)

        program.run = keep
        paged.run({0: (tokens, [len(tokens) - 1])})
        program.run = run
        return found[0]


@each_layout
def test_drafts_are_what_the_head_says(case: str, tmp_path: Path) -> None:
    """Random weights, prompts in chunks and two rows at once: every first draft of every step, whatever was accepted
    before, is that of the head over the whole text, and so are those behind it."""
    write(tmp_path, case, seed=3)
    llm, naive = made(tmp_path, "ref", max_num_batched_tokens=24), Naive(tmp_path)
    drafter, compared = drafter_of(llm), 0
    propose = drafter.propose

    def spy(jobs: Any) -> Any:
        nonlocal compared
        trees = propose(jobs)
        for job, tree in zip(jobs, trees, strict=True):
            if tree.token_ids and len(job.tokens) % 3 == 0:
                assert tree.token_ids == naive.drafts(job.tokens.tolist(), len(tree.token_ids))
                compared += 1
        return trees

    drafter.propose = spy  # type: ignore[method-assign]
    texts(llm, prompts((30, 5, 9)), [SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)] * 3)
    assert drafter_of(llm) is drafter, "it has failed"
    assert compared > 5


def test_published_names(tmp_path: Path) -> None:
    """As the published checkpoints of these families call what a head adds to a layer."""
    behind = {"enorm", "hnorm", "eh_proj", "shared_head.norm"}
    wanted = {
        "deepseek_v3": {f"model.layers.2.{name}" for name in behind} | {"model.layers.2.self_attn.kv_b_proj"},
        "glm4_moe": {f"model.layers.2.{name}" for name in behind} | {"model.layers.2.mlp.gate"},
        "mimo": {
            f"model.mtp_layers.0.{name}"
            for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "self_attn.q_proj")
        },
        "qwen3_next": {
            "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0.mlp.gate",
            "mtp.layers.0.self_attn.q_proj", "mtp.layers.0.mlp.shared_expert_gate",
        },
        "qwen3_5": {"mtp.fc", "mtp.norm", "mtp.layers.0.input_layernorm", "mtp.layers.0.mlp.down_proj"},
    }  # fmt: skip
    for case, names in wanted.items():
        head = open_model(write(tmp_path / case, case)).head
        assert head is not None
        assert {f"{name}.weight" for name in names} <= {ref.tensor.name for ref in head.weights.values()}
