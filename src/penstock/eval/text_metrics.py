"""Scores of a text against references, as the papers that report them compute them. All from 0 to 1.

Tokens, smoothing and the choice among references follow the implementations that papers name, so that figures can be
put beside theirs: sacreBLEU for BLEU, the `rouge-score` package for ROUGE-1, ROUGE-2 and ROUGE-L.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import comb, exp, log

from penstock.eval.answers import exact, f1, num_in_order

MAX_ORDER = 4
_ENTITIES = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))
_SPLITS = (
    (re.compile(r"([\{-\~\[-\` -\&\(-\+\:-\@\/])"), r" \1 "),
    (re.compile(r"([^0-9])([\.,])"), r"\1 \2 "),
    (re.compile(r"([\.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)
_WORD = re.compile(r"[a-z0-9]+")
Ngram = tuple[str, ...]


# -- BLEU --------------------------------------------------------------------------------------------------------


def tokens_13a(text: str) -> list[str]:
    """Tokens as mteval-v13a cuts western languages: case and punctuation are kept.

    Source: Post, A Call for Clarity in Reporting BLEU Scores, arXiv 1804.08771, section 4.
    """
    text = text.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, character in _ENTITIES:
        text = text.replace(entity, character)
    text = f" {text} "
    for pattern, into in _SPLITS:
        text = pattern.sub(into, text)
    return text.split()


def bleu(texts: Sequence[str], references: Sequence[Sequence[str]], *, effective_order: bool = False) -> float:
    """BLEU of a corpus: `references[i]` are those of `texts[i]`. Counts of all texts are added before they are divided.

    An order without a match counts 1 / 2^k of a match for the k-th such order (exponential smoothing, sacreBLEU's
    default). `effective_order`: orders that no text is long enough for do not count, as for a single sentence.
    Source: Papineni et al., BLEU, ACL 2002, section 2.
    """
    matched, possible = [0] * MAX_ORDER, [0] * MAX_ORDER
    length = wanted = 0
    for text, accepted in zip(texts, references, strict=True):
        words, others = tokens_13a(text), [tokens_13a(other) for other in accepted]
        length += len(words)
        wanted += min((abs(len(other) - len(words)), len(other)) for other in others)[1]
        for order in range(1, MAX_ORDER + 1):
            most: Counter[Ngram] = Counter()
            for other in others:
                most |= _ngrams(other, order)
            found = _ngrams(words, order)
            matched[order - 1] += (found & most).total()
            possible[order - 1] += found.total()
    if not any(matched):
        return 0.0
    total, orders, smooth = 0.0, 0, 1.0
    for hits, of in zip(matched, possible, strict=True):
        if of == 0:
            if effective_order:
                break
            return 0.0
        if hits == 0:
            smooth *= 2
        total += log(hits / of if hits else 1 / (smooth * of))
        orders += 1
    return exp(total / orders) * (1.0 if length >= wanted else exp(1 - wanted / length))


def sentence_bleu(text: str, accepted: Iterable[str]) -> float:
    """BLEU of one text, up to the longest order that it has."""
    return bleu([text], [list(accepted)], effective_order=True)


# -- ROUGE -------------------------------------------------------------------------------------------------------


def rouge_n(text: str, accepted: Iterable[str], order: int) -> float:
    """The best F1 of common sequences of `order` words over the references. Source: Lin, ROUGE, 2004, section 2."""
    words = _words(text)
    return max(_overlap(_ngrams(words, order), _ngrams(_words(other), order)) for other in accepted)


def rouge_l(text: str, accepted: Iterable[str]) -> float:
    """The best F1 of the longest common subsequence of words. Source: Lin, ROUGE, 2004, section 3.1."""
    words = _words(text)
    return max(_f(num_in_order(words, other), len(words), len(other)) for other in map(_words, accepted))


def rouge_su(text: str, accepted: Iterable[str], gap: int = 4) -> float:
    """The best F1 of words and of pairs of words with at most `gap` others between them, in their order (ROUGE-SU4).

    Source: Lin, ROUGE, 2004, section 5; words themselves count, in place of pairs with a mark of the beginning.
    """
    pairs = _skips(_words(text), gap)
    return max(_overlap(pairs, _skips(_words(other), gap)) for other in accepted)


# -- edits, ranks, samples, averages -----------------------------------------------------------------------------


def edit_similarity(text: str, other: str) -> float:
    """1 - Levenshtein's distance over the length of the longer text; 1 for two empty ones."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(text, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return 1 - row[-1] / max(1, len(text), len(other))


def reciprocal_rank(ranked: Sequence[str], relevant: Iterable[str]) -> float:
    """1 over the place of the first relevant item, 0 without one. The mean over questions is MRR."""
    wanted = set(relevant)
    return next((1 / place for place, item in enumerate(ranked, 1) if item in wanted), 0.0)


def precision_recall(found: Iterable[str], relevant: Iterable[str]) -> tuple[float, float]:
    """(of what was found, the relevant part; of what is relevant, the part found). Nothing of nothing is all of it."""
    have, wanted = set(found), set(relevant)
    both = len(have & wanted)
    return (both / len(have) if have else float(not wanted)), (both / len(wanted) if wanted else 1.0)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that one of k samples is right, unbiased from n samples.

    Source: Chen et al., arXiv 2107.03374, section 2.1. Raises ValueError unless 1 <= k <= n and 0 <= right <= n.
    """
    if not (1 <= k <= num_samples and 0 <= num_right <= num_samples):
        raise ValueError(f"pass@{k} of {num_samples} samples with {num_right} right: needs 1 <= k <= n, right <= n")
    return 1 - comb(num_samples - num_right, k) / comb(num_samples, k)


def exponential_similarity(percent: float, right: float) -> float:
    """2^(-10 |p - r|) of two shares, given in percent: ES.

    Source: Shaham et al., ZeroSCROLLS, arXiv 2305.14196, section 2.3.
    """
    return float(2 ** (-10 * abs(percent - right) / 100))


def concordance_index(order: Sequence[int]) -> float:
    """Pairs that stand in the right order, of all pairs; `order` is a permutation of places: CI.

    Source: Shaham et al., ZeroSCROLLS, arXiv 2305.14196, section 2.3. Raises ValueError: no permutation, or fewer than
    two.
    """
    n = len(order)
    if n < 2 or len(set(order)) != n:
        raise ValueError("an order needs at least two places, each once")
    good = sum(order[i] < order[j] for i in range(n) for j in range(i + 1, n))
    return good / comb(n, 2)


def macro_average(scores: Sequence[float]) -> float:
    """The mean over tasks, each once (M-Avg)."""
    return sum(scores) / len(scores)


def geometric_average(scores: Sequence[float]) -> float:
    """The geometric mean over tasks (G-Avg); 0 if one of them is 0."""
    return exp(sum(log(score) for score in scores) / len(scores)) if min(scores) > 0 else 0.0


METRICS: dict[str, Callable[[str, list[str]], float]] = {
    "bleu": sentence_bleu,
    "rouge1": lambda text, accepted: rouge_n(text, accepted, 1),
    "rouge2": lambda text, accepted: rouge_n(text, accepted, 2),
    "rougeL": rouge_l,
    "rougeSU4": rouge_su,
    "em": exact,
    "f1": f1,
    "edit": lambda text, accepted: max(edit_similarity(text, other) for other in accepted),
}
"""Of one answer against references, by the name that tasks ask for."""


def _ngrams(words: Sequence[str], order: int) -> Counter[Ngram]:
    return Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))


def _skips(words: Sequence[str], gap: int) -> Counter[Ngram]:
    found: Counter[Ngram] = Counter((word,) for word in words)
    for i, word in enumerate(words):
        found.update((word, other) for other in words[i + 1 : i + 2 + gap])
    return found


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _overlap(found: Counter[Ngram], wanted: Counter[Ngram]) -> float:
    return _f((found & wanted).total(), found.total(), wanted.total())


def _f(common: int, found: int, wanted: int) -> float:
    return 2 * common / (found + wanted) if common else 0.0
