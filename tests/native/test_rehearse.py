"""PST_REHEARSE and attention to what it chose: close to the reference, and the same bits in any company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.base.bf16 import F32
from penstock.core.selection import TokenReads
from penstock.eval.rehearsal import CountedAttention
from penstock.model.emitter import Reading
from tests import specs
from tests.native.running import each_isa, pytestmark_native
from tests.native.test_model import native
from tests.paged import Paged

pytestmark = pytestmark_native

IDS = tuple(int(x) for x in np.random.default_rng(2).integers(3, 60, 290))
FIRST = 270
READS = TokenReads(share=0.3, recent=3, reach=0.05)


def turns_of(share: float) -> list[F32] | None:
    spec, _ = specs.make("llama_gqa")
    m: Any = spec.layers[0].mixer
    shape = (len(spec.layers), m.num_kv_heads, m.head_dim, m.head_dim)
    made = np.linalg.qr(np.random.default_rng(1).standard_normal(shape))[0].astype(np.float32)
    return None if share == 1.0 else [np.ascontiguousarray(t[..., : round(share * m.head_dim)]) for t in made]


def paged(isa: str, reads: TokenReads = READS, **more: Any) -> Paged:
    reading = Reading(tokens=reads, turns=turns_of(reads.rank))
    made = native("llama_gqa", isa, reading=reading, max_tokens=300, **more)
    made.choose_from["a"] = FIRST
    return made


@each_isa
@pytest.mark.parametrize("rank", [1.0, 0.5])
def test_B18_native_choice_is_the_references(isa: str, rank: float) -> None:
    """Behind more than a chunk of keys: as many tokens are read, and logits are near."""
    reads = TokenReads(share=0.3, recent=3, reach=0.2, rank=rank)
    spec, weights = specs.make("llama_gqa")
    counted = CountedAttention()
    reference = Paged(spec, weights, reading=Reading(tokens=reads, turns=turns_of(rank)), attention=counted)
    reference.choose_from["a"] = FIRST
    want, plain = (made.chunked("a", IDS, (FIRST, 1)) for made in (reference, Paged(spec, weights)))
    own = paged(isa, reads)
    got = own.chunked("a", IDS, (FIRST, 1))
    np.testing.assert_allclose(got, want, atol=2e-3)
    assert np.abs(want[FIRST:] - plain[FIRST:]).max() > 0.02
    program: Any = own.program
    read, seen = program.tokens_read
    m: Any = spec.layers[0].mixer
    assert seen == m.num_kv_heads * (len(spec.layers) - 1) * sum(range(FIRST + 1, len(IDS) + 1))
    assert seen == counted.fetched.all
    assert abs(read - counted.fetched.chosen) <= 0.02 * read < 0.3 * seen


@each_isa
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_B18_a_full_budget_changes_no_bit(isa: str, kv_dtype: str) -> None:
    plain = native("llama_gqa", isa, kv_dtype=kv_dtype, max_tokens=300).chunked("a", IDS, (FIRST, 1))
    got = paged(isa, TokenReads(recent=3, reach=0.0), kv_dtype=kv_dtype).chunked("a", IDS, (FIRST, 1))
    np.testing.assert_array_equal(got, plain)
    assert not np.array_equal(paged(isa, kv_dtype=kv_dtype).chunked("a", IDS, (FIRST, 1)), plain)


@each_isa
def test_B18_bits_do_not_depend_on_company_pages_cuts_or_threads(isa: str) -> None:
    want = paged(isa).chunked("a", IDS, (FIRST, 1))
    for n, sizes in enumerate([(290,), (100, 173, 3, 1, 9), (269, 1, 20)]):
        got = paged(isa, seed=n + 1, threads=n + 1, block_size=(2, 16, 8)[n]).chunked("a", IDS, sizes)
        np.testing.assert_array_equal(got, want)
    other = paged(isa, seed=9, threads=2)
    other.choose_from |= {"b": 9, "c": 40}
    parts = [np.array(other.run({"b": (IDS[:9], [0]), "a": (IDS[:FIRST], range(FIRST))})["a"])]
    parts.append(np.array(other.run({"a": (IDS[FIRST : FIRST + 3], range(3)), "c": (IDS[:50], [0])})["a"]))
    alone = ({seq: ([i], [0]) for seq in "cab"} for i in IDS[FIRST + 3 :])
    parts += [np.array(other.run(work)["a"]) for work in alone]
    np.testing.assert_array_equal(np.concatenate(parts), want)
