"""The rows of a step shared out over ranks (catalogue rows H05, H06, H08, H09, H10, H14), on reference operations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from penstock.backends.sequence import SequenceModel
from penstock.base.errors import CapacityError, ConfigError, EngineError, UnsupportedError
from penstock.parallel.messages import Messages
from penstock.parallel.sequence import SEQUENCE_METHODS
from penstock.parallel.sequence.ring import TILE, overlapped_seconds, passed_bytes
from penstock.parallel.sequence.shares import LAYOUTS, Holders
from penstock.parallel.team import RankTeam
from tests import specs
from tests.paged import Paged
from tests.sampled import grid, some
from tests.sequences import Played, Step, alone, difference, in_threads, mixed, play, prompt

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 8
"""Of llama_gqa."""
KV_BYTES = LAYERS * 2 * KV_HEADS * DIM * 4
"""That a token takes in all layers."""


def refused(name: str) -> str:
    """Why a tiny model cannot be shared out; nothing if it can."""
    from penstock.parallel.sequence.attention import check_graph

    try:
        check_graph(Paged(*specs.make(name), num_slabs=1).graph)
    except UnsupportedError as error:
        return str(error)
    return ""


FIT = [name for name in specs.ALL if not refused(name)]


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, RankTeam]]:
    with RankTeam(2) as two, RankTeam(4) as four:
        yield {2: two, 4: four}


def one_step(count: int, first: int = 0) -> list[Step]:
    """A prompt of `count` tokens in one step, the last logits wanted, behind a step of `first` others."""
    ids = prompt(first + count)
    steps: list[Step] = [({"a": (ids[:first], [first - 1])}, {})] if first else []
    return [*steps, ({"a": (ids[first:], [count - 1])}, {})]


def test_what_can_be_shared_out_and_what_is_refused_by_name() -> None:
    assert {"llama_gqa", "llama_mqa", "scores", "windowed", "shared_kv", "experts", "latent", "streams"} <= set(FIT)
    for name, op in (
        ("mamba", "causal_conv"), ("slots", "recurrent"), ("rwkv4", "token_shift"), ("indexed", "choose_tokens"),
        ("blocks", "attend_blocks"), ("delta", "causal_conv"), ("lightning", "retention"),
    ):  # fmt: skip
        assert f": {op} reads" in refused(name), refused(name)


@pytest.mark.parametrize(("name", "method"), some(grid(FIT, sorted(SEQUENCE_METHODS)), 48))
def test_every_kind_of_model_by_every_method(name: str, method: str) -> None:
    """Two ranks in threads; prompts in chunks, single tokens and two sequences."""
    nodes = Paged(*specs.make(name), num_slabs=1).graph.nodes
    heads = [value.heads for node in nodes if node.op == "attention" for value in node.inputs]
    kv_heads = {node.inputs[0].heads for node in nodes if node.op == "write_kv"}
    if method == "ulysses" and any(h and h % 2 for h in heads):
        pytest.skip("an odd number of heads")
    same_bits = SEQUENCE_METHODS.traits(method).same_bits and (method != "ulysses" or 1 not in kv_heads)
    want = alone(name, mixed())
    for played in in_threads(2, play, name, method, mixed()):
        worst = difference(played.logits, want)
        assert worst == 0 if same_bits else worst < 1e-4


@pytest.mark.parametrize("size", [2, 3, 4])
def test_H05_logits_are_those_of_one_process(teams: dict[int, RankTeam], size: int) -> None:
    """By gathering, bit for bit; by a ring, nearly."""
    want = alone("llama_gqa", mixed())
    for method, most in (("gather", 0.0), ("ring", 1e-4)):
        if size in teams:
            found = teams[size].run(play, "llama_gqa", method, mixed())
        else:
            with RankTeam(size) as team:
                found = team.run(play, "llama_gqa", method, mixed())
        for played in found:
            assert difference(played.logits, want) <= most


@pytest.mark.parametrize("size", [2, 4])
def test_H05_bytes_are_what_the_formula_says(teams: dict[int, RankTeam], size: int) -> None:
    """A rank gives its keys and values to each of the others, and the logits that it has."""
    count = 16 * size
    for method in ("gather", "ring"):
        found = teams[size].run(play, "llama_gqa", method, one_step(count))
        for rank, played in enumerate(found):
            logits = 61 * 4 * (size - 1) if rank == size - 1 else 0
            assert played.given.get("logits", 0) == logits
            assert played.given["kv"] == (size - 1) * (count // size) * KV_BYTES


@pytest.mark.parametrize("size", [2, 4])
def test_H05_a_rank_has_its_part_of_the_activations(teams: dict[int, RankTeam], size: int) -> None:
    """Exactly, of what operations leave behind. All that a step takes, blocks on their way and parts of sums among it,
    is somewhat more."""
    steps = one_step(512)
    (one,) = in_threads(1, play, "llama_mqa", "ring", steps, "", None, True)
    for method in ("ring", "gather"):
        for played in teams[size].run(play, "llama_mqa", method, steps, "", None, True):
            assert played.peak_bytes * size == one.peak_bytes
            assert played.traced_bytes < 1.65 * one.traced_bytes / size


@pytest.mark.parametrize("size", [2, 4])
def test_H06_bits_are_those_of_one_process(teams: dict[int, RankTeam], size: int) -> None:
    """Also where fewer heads of keys than ranks are."""
    for name in ("llama_gqa", "llama_mha"):
        want = alone(name, mixed())
        for played in teams[size].run(play, name, "ulysses", mixed()):
            assert difference(played.logits, want) == (0 if name == "llama_mha" else pytest.approx(0, abs=1e-4))


def test_H06_volume_per_rank_is_constant_where_ranks_and_length_grow_together(teams: dict[int, RankTeam]) -> None:
    """What a rank puts into the exchanges, its own part among it, is the same; of that (n - 1) / n go to others. What
    is gathered grows with n - 1."""
    own, volumes, gathered = 24, [], []
    for size in (2, 4):
        for played in teams[size].run(play, "llama_mha", "ulysses", one_step(own * size)):
            given = sum(bytes_ for label, bytes_ in played.given.items() if label != "logits")
            assert given == LAYERS * 4 * own * HEADS * DIM * 4 * (size - 1) // size
            volumes.append(given * size // (size - 1))
        gathered.append(teams[size].run(play, "llama_mha", "gather", one_step(own * size))[0].given["kv"])
    assert len(set(volumes)) == 1
    assert gathered[1] == 3 * gathered[0]


def test_H06_heads_that_ranks_cannot_share_out_are_refused_with_what_can() -> None:
    with pytest.raises(ConfigError, match="3 ranks cannot share out 4 heads of layer 0 evenly; use one of 1, 2, 4"):
        in_threads(3, play, "llama_mha", "ulysses", one_step(12))


@pytest.mark.parametrize("size", [2, 4])
def test_H08_ring_is_equal_and_each_rank_keeps_its_part(teams: dict[int, RankTeam], size: int) -> None:
    want = alone("llama_gqa", mixed())
    for played in teams[size].run(play, "llama_gqa", "ring", mixed()):
        assert difference(played.logits, want) < 1e-4
    count = 16 * size
    found = teams[size].run(play, "llama_gqa", "ring", one_step(count))
    assert [played.kv_bytes[-1] for played in found] == [count // size * KV_BYTES] * size


def test_H08_context_grows_with_the_ranks_at_the_same_memory_of_each(teams: dict[int, RankTeam]) -> None:
    room = 40
    for size in (1, 2, 4):

        def run(count: int, size: int = size) -> list[Played]:
            arguments = ("llama_gqa", "ring", one_step(count), "", room)
            return teams[size].run(play, *arguments) if size > 1 else in_threads(1, play, *arguments)

        want = alone("llama_gqa", one_step(room * size))
        for played in run(room * size):
            assert difference(played.logits, want) < 1e-4
            assert played.kv_bytes[-1] == room * KV_BYTES
        with pytest.raises(CapacityError, match=f"keep {room + 1} tokens and has room for {room}; use more ranks"):
            in_threads(size, play, "llama_gqa", "ring", one_step(room * size + 1), "", room)


def test_H08_blocks_travel_while_ranks_compute() -> None:
    """A block that is larger than what sockets hold is there before anybody has asked for it; and a ring sends a block
    before it computes with it."""
    block = np.arange(3 << 20, dtype=np.float32)

    def shifted(comm: Messages) -> float:
        coming = comm.shift((block + comm.rank,), [0, 1], "kv")
        while not coming.done():
            sum(range(1000))  # computes, and waits for nothing
        return float(coming.result()[0][0])

    assert in_threads(2, shifted) == [1.0, 0.0]
    for played in in_threads(4, play, "llama_gqa", "ring", one_step(64)):
        sent = [bytes_ for _, bytes_ in played.rounds]
        assert sent == [64 // 4 * KV_BYTES // LAYERS] * 3 + [0] + [64 // 4 * KV_BYTES // LAYERS] * 3 + [0]


def test_H09_striped_is_equal_in_the_order_of_the_text(teams: dict[int, RankTeam]) -> None:
    want = alone("llama_gqa", mixed())
    for size in (2, 4):
        for played in teams[size].run(play, "llama_gqa", "striped", mixed()):
            assert difference(played.logits, want) < 1e-4


@pytest.mark.parametrize("size", [2, 4, 8])
def test_H09_work_is_even_with_stripes_and_nearly_twice_the_mean_without(size: int) -> None:
    """Counted operations of attention. Runs of neighbours: the last rank has 2 - 1 / n of the mean."""
    count = 32 * size
    most: dict[str, float] = {}
    for method in ("ring", "striped", "pass_kv"):
        flops = [played.flops for played in in_threads(size, play, "llama_mqa", method, one_step(count))]
        most[method] = max(flops) / (sum(flops) / size)
        pairs = LAYERS * HEADS * count * (count + 1) // 2
        assert sum(flops) == 2 * 2 * DIM * pairs, "no pair twice, and none for nothing"
    assert most["striped"] < 1.05
    assert most["pass_kv"] < 1.05, "runs from both ends are even, too"
    assert most["ring"] == pytest.approx(2 - 1 / size, rel=0.02)


def test_H09_of_every_round_too() -> None:
    """Ranks wait for each other after each block, so the slowest of every round counts."""
    count, size = 256, 4
    slowest = {}
    for method in ("ring", "striped"):
        rounds = [played.rounds for played in in_threads(size, play, "llama_mqa", method, one_step(count))]
        slowest[method] = sum(max(flops for flops, _ in of_round) for of_round in zip(*rounds, strict=True))
    assert slowest["ring"] / slowest["striped"] == pytest.approx(2 - 1 / size, rel=0.05)


def test_H10_burst_is_equal(teams: dict[int, RankTeam]) -> None:
    for name in ("llama_gqa", "scores"):
        want = alone(name, mixed(80))
        for played in teams[2].run(play, name, "burst", mixed(80)):
            assert difference(played.logits, want) < 1e-4
    for played in teams[4].run(play, "llama_gqa", "burst", one_step(300)):
        assert difference(played.logits, alone("llama_gqa", one_step(300))) < 1e-4


def test_H10_scores_take_no_more_than_a_tile_however_long_the_text() -> None:
    taken: dict[str, list[int]] = {"burst": [], "striped": []}
    for method, found in taken.items():
        for count in (256, 512):
            found.append(max(p.workspace for p in in_threads(2, play, "llama_gqa", method, one_step(count))))
    assert taken["burst"] == [TILE * TILE * HEADS * 4] * 2
    assert taken["striped"][1] == 2 * taken["striped"][0]


def test_H10_simulated_overlap_hides_what_is_shorter() -> None:
    """Rounds as they were counted, on devices that do not exist: two buffers take the longer of both, one the sum."""
    (played, *_) = in_threads(4, play, "llama_gqa", "burst", one_step(256))
    flops, bytes_ = (sum(x) for x in zip(*played.rounds, strict=True))
    one, two = (overlapped_seconds(played.rounds, 1e9, bytes_ / flops * 1e9, buffers) for buffers in (1, 2))
    assert one == pytest.approx(2 * flops / 1e9)
    assert two < 0.8 * one
    assert overlapped_seconds(played.rounds, 1e9, 1e15, 2) == pytest.approx(flops / 1e9, rel=1e-3)
    assert overlapped_seconds([(8, 4), (2, 4), (6, 0)], 1, 1, 2) == 8 + 4 + 6
    assert overlapped_seconds([(8, 4), (2, 4), (6, 0)], 1, 1, 1) == 8 + 4 + 2 + 4 + 6


def test_H14_both_ways_are_equal(teams: dict[int, RankTeam]) -> None:
    want = alone("llama_gqa", mixed())
    for size in (2, 4):
        for method in ("pass_kv", "pass_q", "auto"):
            for played in teams[size].run(play, "llama_gqa", method, mixed()):
                assert difference(played.logits, want) < 1e-4


def test_H14_the_choice_gives_fewer_bytes_wherever_it_is_tried(teams: dict[int, RankTeam]) -> None:
    """New rows by cached ones, counted in processes: as predicted, and the choice is the smaller of both."""
    chosen = set()
    for new, cached in ((64, 0), (32, 32), (16, 48), (8, 56), (4, 60), (1, 63), (1, 7), (8, 8)):
        counted = {}
        for method in ("pass_kv", "pass_q", "auto"):
            found = teams[4].run(play, "llama_gqa", method, one_step(new, cached))
            counted[method] = sum(n for p in found for label, n in p.by_step[-1].items() if label != "logits")
        share = Holders(4, None, False)
        if cached:
            share.keep([share.share("a", cached, range(4), range(4), LAYOUTS["zigzag"])])
        step = share.share("a", new, range(4), range(4), LAYOUTS["zigzag"])
        kv, q = passed_bytes([step], range(4), (HEADS, DIM, DIM), 2 * KV_HEADS * DIM)
        assert (counted["pass_kv"], counted["pass_q"]) == (LAYERS * kv, LAYERS * q)
        assert counted["auto"] == min(counted["pass_kv"], counted["pass_q"])
        chosen.add("pass_kv" if kv <= q else "pass_q")
    assert chosen == {"pass_kv", "pass_q"}


def test_a_rank_that_ends_ends_the_others_and_nobody_waits() -> None:
    with RankTeam(3) as team:
        assert team.run(ranked) == [0, 1, 2]
        team.processes[1].kill()
        with pytest.raises(EngineError, match="rank"):
            team.run(play, "llama_gqa", "ring", mixed())


def test_a_sequence_that_has_ended_gives_its_room_back() -> None:
    def reused(comm: Messages) -> int:
        spec, weights = specs.make("llama_gqa")
        model = SequenceModel(Paged(spec, weights, num_slabs=1).graph, comm, "ring", capacity=10)
        for seq in ("a", "b"):
            with pytest.raises(CapacityError):
                model.run({seq: (prompt(21), [])})
            model.run({seq: (prompt(20), [])})
            assert model.holders(seq) == [0, 1]
            model.forget(seq)
            assert model.holders(seq) == []
        return model.held.num_bytes()

    assert in_threads(2, reused) == [0, 0]


def ranked(comm: Messages) -> int:
    return comm.rank


def test_bytes_that_are_no_message_are_refused() -> None:
    def tried(comm: Messages, bad: bytes) -> str:
        end = comm._end(1 - comm.rank)
        if comm.rank == 0:
            end.sendall(bad)
            return ""
        with pytest.raises(EngineError) as found:
            comm.receive(0).result()
        return str(found.value)

    for bad in BAD:
        assert "rank 0 sends" in in_threads(2, tried, bad)[1]


BAD = [b"GET / HT", b"PSRM\x02\x00\x01\x00", b"PSRM\x01\x00\xff\x00",
       b"PSRM\x01\x00\x01\x00" + bytes([9, 1, 0, 0]) + b"\x01\x00\x00\x00" * 4,
       b"PSRM\x01\x00\x01\x00" + bytes([0, 2, 0, 0]) + b"\xff\xff\xff\x7f" * 4]  # fmt: skip


def test_messages_keep_kinds_and_shapes_and_count_bytes() -> None:
    sent = (np.zeros((0, 3), np.float32), np.arange(6, dtype=np.int32).reshape(1, 2, 3), np.array([1.5]))

    def swapped(comm: Messages) -> tuple[list[tuple[str, tuple[int, ...]]], int]:
        got = comm.all_to_all([sent, sent], [0, 1], "x")[1 - comm.rank]
        assert np.array_equal(got[1], sent[1])
        return [(x.dtype.name, x.shape) for x in got], comm.given["x"]

    want = [("float32", (0, 3)), ("int32", (1, 2, 3)), ("float64", (1,))]
    assert in_threads(2, swapped) == [(want, 32)] * 2


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_layouts_give_every_token_to_one_rank_evenly(name: str) -> None:
    for count in (1, 2, 3, 7, 8, 9, 64):
        for size in (1, 2, 3, 4):
            whose = LAYOUTS[name](5, count, size)
            assert len(whose) == count
            counts = np.bincount(whose, minlength=size)
            assert counts.max() - counts.min() <= (2 if name == "zigzag" else 1)
