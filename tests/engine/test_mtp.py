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
from penstock.backends.native.obstacle import native_obstacle
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
from tests.sampled import grid, some

native_only = pytest.mark.skipif(best_library() is None, reason="no native library was built")
NATIVE = pytest.param("native", marks=native_only)
OPS = ["ref", "torch", NATIVE]
each_ops = pytest.mark.parametrize("ops", OPS)
each_layout = pytest.mark.parametrize("case", CONFIGS)
FIXED = {"method": "mtp", "controller": "fixed", "num_speculative_tokens": 3}


def made(folder: Path, ops: str, speculation: Any = FIXED, **more: Any) -> LLM:
    if ops == "native" and native_obstacle(open_model(folder).spec) is not None:
        pytest.skip("there are no native kernels for this model")
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


@pytest.mark.parametrize(("case", "ops"), grid(CONFIGS, [NATIVE]) + some(grid(CONFIGS, OPS[:2])))
def test_no_token_changes(case: str, ops: str, tmp_path: Path) -> None:
    """Random weights; greedy and sampled rows, prompts longer than a block, in chunks, then out of the prefix cache."""
    write(tmp_path, case)
    plain = made(tmp_path, ops, {"method": "none"}, max_num_batched_tokens=32)
    llm = made(tmp_path, ops, max_num_batched_tokens=32)
    assert plain.engine.core.executor.runner.drafter is None  # type: ignore[attr-defined]
    given, length = prompts((40, 1, 17, 16, 5)), 8 if ops == "torch" else 20
    want = texts(plain, given, rules(length, 5))
    assert texts(llm, given, rules(length, 5)) == want
    assert llm.engine.core.stats.num_draft_tokens > length
    if ops == "torch":  # a row at a time
        drafter_of(llm)
        return
    longer = [given[0] + [7, 8, 9], given[0][:35] + given[1], given[2]]
    assert texts(llm, longer, rules(12, 3)) == texts(plain, longer, rules(12, 3))
    assert texts(llm, given, rules(20, 5)) == want
    drafter_of(llm)


@pytest.mark.parametrize(
    ("case", "ops", "right"),
    some(grid(CONFIGS, [NATIVE], ["token", "hidden"])) + some(grid(CONFIGS, OPS[:2], ["token", "hidden"])),
)
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


@pytest.mark.parametrize(("case", "ops", "right"), some(grid(GGUF, OPS, ["", "token", "hidden"])))
def test_the_block_behind_the_layers_of_a_gguf_file_is_the_head(
    case: str, ops: str, right: str, tmp_path: Path
) -> None:
    """The same weights as in the folder; found without being asked for, and no token changes."""
    folder = open_model(write(tmp_path / "folder", case, right=right))
    assert folder.heads
    parts = [
        (c.spec, {n: np.array(a) for n, a in load_weights(c, c.spec, "float32").items()})
        for c in (folder, folder.heads[0])
    ]
    (spec, weights), (head, own) = parts
    path = write_with_head(tmp_path / "m.gguf", spec, weights, head, own, GGUF[case])
    (found,) = open_model(path).heads
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
    decided = {d.name: d.value for d in made(path, ops, None).engine.plan.decisions}["speculative_config"]
    assert decided == ("none" if ops == "torch" else "mtp"), "on torch a head drafts if it is asked to"


def test_a_gguf_file_without_its_head_has_none(tmp_path: Path) -> None:
    folder = open_model(write(tmp_path / "folder", "glm4_moe"))
    assert folder.heads
    (spec, weights), (head, own) = [
        (c.spec, {n: np.array(a) for n, a in load_weights(c, c.spec, "float32").items()})
        for c in (folder, folder.heads[0])
    ]
    path = write_with_head(tmp_path / "m.gguf", spec, weights, head, own, "glm4moe")
    gguf = read_gguf(path)
    for missing in ("nextn.eh_proj.weight", "nextn.enorm.weight", "attn_q.weight", "ffn_down_exps.weight"):
        tensors = {n: ("F32", np.zeros(ref.shape, np.float32)) for n, ref in gguf.tensors.items()
                   if n != f"blk.2.{missing}"}  # fmt: skip
        assert open_model(write_gguf(tmp_path / "less.gguf", gguf.metadata, tensors)).heads == ()
    tensors = {n: ("F32", np.zeros(ref.shape, np.float32)) for n, ref in gguf.tensors.items() if "shared_head" not in n}
    (found,) = open_model(write_gguf(tmp_path / "less.gguf", gguf.metadata, tensors)).heads
    assert found is not None
    assert found.weights["final_norm"].tensor.name == "output_norm.weight", "the model's own stands in"


@each_ops
@pytest.mark.parametrize("case", ["glm4_moe", "mimo x4"])
def test_preempted_rows_go_on_as_they_were(case: str, ops: str, tmp_path: Path) -> None:
    if ops == "torch" and case != "mimo x4":
        pytest.skip("once is enough where rows are run one by one")
    write(tmp_path, case)
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
@pytest.mark.parametrize("case", ["glm4_moe", "mimo x4"])
def test_a_rank_in_a_process_of_its_own_has_it(case: str, tmp_path: Path) -> None:
    write(tmp_path, case, right="hidden")
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
    (head,) = read_model(tmp_path / "config.json").heads
    assert head.spec.pair is not None
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 0}))
    assert read_model(tmp_path / "config.json").heads == ()


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
    assert len(open_model(tmp_path).heads) == 1
    del tensors["model.layers.2.eh_proj.weight"]
    save_file(tensors, path)
    assert open_model(tmp_path).heads == ()
    assert made(tmp_path, "ref", None).engine.core.scheduler.drafts is None
    with pytest.raises(ConfigError, match="checkpoint has none"):
        made(tmp_path, "ref")


def test_on_torch_it_drafts_if_it_is_asked_to(tmp_path: Path) -> None:
    write(tmp_path, "mimo")
    decided = {d.name: d for d in made(tmp_path, "torch", None).engine.plan.decisions}
    assert decided["speculative_config"].value == "none"
    assert "if it is asked" in decided["speculative_config"].why


def test_pairs_go_to_where_a_device_has_its_table(tmp_path: Path) -> None:
    """What is written for a model on torch, not into its weights' memory, is what it reads."""
    import torch

    from penstock.backends.gpu.backend import TorchBackend

    (head,) = open_model(write(tmp_path, "mimo")).heads
    weights = dict(load_weights(head, head.spec, "float32"))
    assert head.spec.pair is not None
    table = np.random.default_rng(2).standard_normal((head.spec.pair.rows, 2 * SIZE)).astype(np.float32)
    ids = [3, 200, 4, 90]
    want = Paged(head.spec, weights | {"embed": table}).run({0: (ids, [1, 3])})[0]
    paged = Paged(head.spec, weights | {"embed": np.zeros_like(table)}).on(TorchBackend(torch.device("cpu")))
    for first in (0, 100):
        paged.program.put_rows(first, table[first : first + 156])
    assert np.abs(paged.run({0: (ids, [1, 3])})[0] - want).max() < 1e-5


def test_trees_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "mimo")
    with pytest.raises(ConfigError, match="drafts chains"):
        made(tmp_path, "ref", FIXED | {"tree": "k-ary"})


class Naive:
    """The heads by themselves: every pair of a text from the model's own hidden states, then their own drafts, in
    caches that nobody else has."""

    def __init__(self, folder: Path) -> None:
        checkpoint = open_model(folder)
        self.spec, self.heads = checkpoint.spec, [head.spec for head in checkpoint.heads]
        self.weights = load_weights(checkpoint, self.spec, "float32")
        self.own = [dict(load_weights(head, head.spec, "float32")) for head in checkpoint.heads]

    def hidden(self, text: list[int]) -> Any:
        """[T, E] of the model."""
        if not text:
            return np.zeros((0, SIZE), np.float32)
        return self._states(Paged(self.spec, self.weights), text)

    def drafts(self, text: list[int], count: int) -> tuple[list[int], list[float]]:
        """Head k follows head k - 1 through the whole text, and makes the k-th draft; the last makes all others. With
        what each head gives its draft."""
        nothing, last = np.zeros((1, SIZE), np.float32), len(self.heads) - 1
        reads, said = [np.concatenate([nothing, self.hidden(text[:-1])])], []
        for k in range(len(self.heads)):
            said.append(self.head(k, text, reads[k]))
            reads.append(np.concatenate([nothing, said[k][:-1]]))
        tokens, chosen = [*text], [self._choose(said[0][-1])]
        for d in range(1, count):
            tokens.append(chosen[-1][0])
            k = min(d, last)
            # All that the head before has said of the text and its drafts, or one more of its own.
            reads[k] = np.concatenate([nothing, said[d - 1]] if d <= last else [reads[k], said[k][-1:]])
            said[k] = self.head(k, tokens, reads[k])
            chosen.append(self._choose(said[k][-1]))
        return [token for token, _ in chosen], [prob for _, prob in chosen]

    def head(self, k: int, tokens: list[int], before: Any) -> Any:
        """[T, E]: what head k says behind each token, from the states before them."""
        spec, own = self.heads[k], self.own[k]
        assert spec.pair is not None
        halves = [
            self._norm(self.weights["embed"][tokens], spec, own["token_norm"]),
            self._norm(before, spec, own["hidden_norm"]),
        ]
        table = np.concatenate(halves[::-1] if spec.pair.hidden_first else halves, axis=1)
        longer = msgspec.structs.replace(spec, pair=msgspec.structs.replace(spec.pair, rows=len(tokens)))
        return self._states(Paged(longer, own | {"embed": table}), list(range(len(tokens))))

    def _choose(self, state: Any) -> tuple[int, float]:
        logits = state @ self.weights["lm_head"].T
        weights = np.exp(logits - logits.max())
        return int(logits.argmax()), float(weights.max() / weights.sum())

    @staticmethod
    def _norm(x: Any, spec: Any, weight: Any) -> Any:
        norm = spec.final_norm
        return x / np.sqrt((x * x).mean(1, keepdims=True) + norm.eps) * (weight + norm.offset)

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
                tokens, probs = naive.drafts(job.tokens.tolist(), len(tree.token_ids))
                assert tree.token_ids == tokens
                assert tree.probs == pytest.approx(probs, abs=1e-5)
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
        "qwen3_5 seeing": {"mtp.fc", "mtp.norm", "mtp.layers.0.self_attn.q_proj", "mtp.layers.0.mlp.down_proj"},
        "deepseek_v3 x2": {f"model.layers.{n}.{name}" for n in (2, 3) for name in behind},
        "mimo x4": {f"model.mtp_layers.{k}.input_proj" for k in range(4)},
        "mimo_v2_flash x3": {
            f"model.mtp.layers.{k}.{name}" for k in range(3)
            for name in (
                "enorm", "hnorm", "eh_proj", "final_layernorm", "pre_mlp_layernorm", "input_layernorm",
                "self_attn.q_proj", "mlp.down_proj",
            )
        },
    }  # fmt: skip
    for case, names in wanted.items():
        heads = open_model(write(tmp_path / case, case)).heads
        assert {f"{name}.weight" for name in names} <= {
            ref.tensor.name for head in heads for ref in head.weights.values()
        }


def test_several_heads_and_what_is_loaded_of_them(tmp_path: Path) -> None:
    """As many as make drafts; each has weights and cache groups of its own, and the plan says so."""
    from safetensors.numpy import load_file, save_file

    write(tmp_path, "mimo_v2_flash x3")
    llm = made(tmp_path, "ref", FIXED | {"num_speculative_tokens": 2})
    assert len(drafter_of(llm).heads) == 2
    decided = {d.name: d.value for d in llm.engine.plan.decisions}
    assert (decided["draft_model[0]"], decided["draft_model[1]"]) == ("mtp", "mtp-2")
    assert [len(draft.groups) for draft in llm.engine.plan.drafts] == [1, 1]
    assert len({g for draft in llm.engine.plan.drafts for g in draft.groups}) == 2
    # One of them is not whole: those before it draft, with as many drafts.
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.mtp.layers.1.hnorm.weight"]
    save_file(tensors, path)
    llm = made(tmp_path, "ref")
    assert len(drafter_of(llm).heads) == 1
    texts(llm, prompts((9,)), rules(6, 1))
    assert llm.engine.core.stats.num_draft_tokens > llm.engine.core.stats.num_drafts
