"""Drafters that copy from the text itself or from a reference: `ngram`, `reference`; and what they are made of."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import ConfigError
from penstock.config.speculative import SpeculativeConfig, parse_speculative
from penstock.core.draft import NO_DRAFT, DraftJob, DraftTree
from penstock.core.sampling import TokenRules
from penstock.drafters.matches import ends_of
from penstock.drafters.ngram import NgramDrafter
from penstock.drafters.reference import ReferenceDrafter
from penstock.drafters.trie import Trie, likeliest
from tests.drafting import answer, appended, ids, job, removed

NOTE = "Tim had a red ball and a blue box. He put the ball in the box and gave it to his friend Sue."


def plain_ends(text: list[int], tail: list[int], least: int, most: int) -> tuple[list[int], int]:
    for n in range(min(most, len(tail)), least - 1, -1):
        found = [end for end in range(n, len(text)) if text[end - n : end] == tail[-n:]]
        if found:
            return found, n
    return [], 0


def test_ends_are_those_of_a_plain_search() -> None:
    rng = random.Random(3)
    for _ in range(300):
        text = [rng.randrange(3) for _ in range(rng.randrange(12))]
        tail = text if rng.random() < 0.5 else [rng.randrange(3) for _ in range(rng.randrange(6))]
        least = rng.randint(1, 3)
        most = rng.randint(least, 5)
        ends, length = ends_of(np.array(text, np.int32), np.array(tail, np.int32), least, most)
        assert (ends.tolist(), length) == plain_ends(text, tail, least, most)


def test_ngram_drafts_on_from_the_latest_longest_match() -> None:
    drafter = NgramDrafter(least=1, most=3)
    (tree,) = drafter.propose([job([1, 2, 3, 7, 8, 9, 2, 3, 5, 6, 1, 2, 3], num_nodes=2)])
    assert tree == DraftTree([7, 8], [-1, 0]), "three tokens beat two that came later"
    (tree,) = drafter.propose([job([5, 1, 4, 5, 2, 4, 5, 3, 6, 4, 5], num_nodes=1)])
    assert tree.token_ids == [3], "of equals, the latest"
    assert drafter.propose([job([1, 2, 3, 4])]) == [NO_DRAFT]
    assert NgramDrafter(least=2, most=3).propose([job([1, 2, 3, 1])]) == [NO_DRAFT]


def test_ngram_goes_round_where_the_text_does() -> None:
    (tree,) = NgramDrafter().propose([job([9, 1, 2, 1, 2, 1, 2], num_nodes=7, max_depth=5)])
    assert tree.token_ids == [1, 2, 1, 2, 1]


def test_ngram_has_the_names_of_vllm() -> None:
    config = parse_speculative({"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4})
    assert config is not None
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (2, 4)
    with pytest.raises(ConfigError, match="prompt_lookup_min 5 is more than prompt_lookup_max 4"):
        parse_speculative({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4})
    assert SpeculativeConfig(method="ngram").prompt_lookup_max == 3


def test_reference_follows_its_place_where_the_text_is_ambiguous() -> None:
    drafter = ReferenceDrafter()
    prompt = [7, 1, 7, 2, 7, 3, 7, 4]
    assert drafter.propose([job([*prompt, 7], 8, num_nodes=1)])[0].token_ids == [1]
    assert drafter.propose([job([*prompt, 7, 9, 9, 7], 8, num_nodes=1)])[0].token_ids == [1], "the place has not moved"
    assert drafter.propose([job([*prompt, 7, 9, 9, 7, 2], 8, num_nodes=1)])[0].token_ids == [7]
    assert drafter.propose([job([*prompt, 7, 9, 9, 7, 2, 9, 7], 8, num_nodes=1)])[0].token_ids == [3], "ahead of it"


def test_reference_copies_from_what_the_request_names() -> None:
    drafter = ReferenceDrafter()
    rules = TokenRules(reference=[4, 5, 6, 7])
    prompt = [5, 1, 1]
    assert drafter.propose([job([*prompt, 5], 3, rules=rules)])[0].token_ids == [6, 7]
    assert drafter.propose([job([*prompt, 1], 3, rules=rules, seq_id=2)]) == [NO_DRAFT], "not from the prompt"
    assert len(drafter.states) == 2
    drafter.track(removed(1))
    drafter.track(appended(2, [3], rollback=1))
    assert not drafter.states


def test_D32_copying_the_prompt_takes_half_the_steps_or_fewer() -> None:
    prompt = f"{NOTE} {NOTE} Tim had a red"
    plain = answer(prompt, None, max_tokens=60)
    copied = answer(prompt, ReferenceDrafter(), 10, max_tokens=60)
    assert copied.token_ids == plain.token_ids
    assert plain.num_steps == 60
    assert copied.per_step >= 2, copied
    sampled: dict[str, Any] = {"temperature": 0.8, "seed": 4, "max_tokens": 60}
    assert answer(prompt, ReferenceDrafter(), 10, **sampled).token_ids == answer(prompt, None, **sampled).token_ids


def test_D32_a_given_reference_is_copied() -> None:
    """What the model is about to say, given as the reference, is accepted nearly whole."""
    prompt = ids("Once upon a time")
    plain = answer(prompt, None, max_tokens=60)
    drafter = ReferenceDrafter()
    looked_up = drafter._copy
    reference = plain.token_ids[0][:50]

    def with_reference(job: DraftJob) -> DraftTree:
        return looked_up(job._replace(rules=TokenRules(reference=reference)))

    drafter._copy = with_reference  # type: ignore[method-assign]
    copied = answer(prompt, drafter, 10, max_tokens=60)
    assert copied.token_ids == plain.token_ids
    assert copied.num_steps <= 20, copied


def test_a_trie_shares_what_begins_alike() -> None:
    trie = Trie(num_nodes=5, max_depth=3)
    assert trie.add([1, 2, 3]) == 2
    assert trie.add([1, 4]) == 3
    assert trie.add([1, 2, 3]) == 2
    assert trie.add([1, 2, 3, 4]) is None, "too deep"
    assert trie.add([9, 8]) is None, "no room for all of it"
    assert trie.tree() == DraftTree([1, 2, 3, 4, 9], [-1, 0, 1, 0, -1])


def test_likeliest_paths_are_the_most_frequent() -> None:
    rng = random.Random(5)
    for _ in range(100):
        follows = [[rng.randrange(3) for _ in range(rng.randrange(6))] for _ in range(rng.randint(1, 12))]
        num_nodes, depth = rng.randint(1, 10), rng.randint(1, 5)
        tree = likeliest(follows, num_nodes, depth)
        counts = Counter(tuple(f[:n]) for f in follows for n in range(1, min(len(f), depth) + 1))
        assert len(tree.token_ids) == min(num_nodes, len(counts))
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tree.token_ids, tree.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert len(set(paths)) == len(paths)
        assert [round(p * len(follows)) for p in tree.probs] == [counts[path] for path in paths]
        chosen = sorted((counts[path] for path in paths), reverse=True)
        assert chosen == sorted(counts.values(), reverse=True)[: len(paths)], "no path left out is more frequent"
        assert likeliest(follows, num_nodes, depth, chain_only=True).is_chain
        assert min([1.0, *likeliest(follows, num_nodes, depth, least=0.4).probs]) >= 0.4
