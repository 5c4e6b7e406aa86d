"""What `speculative_config` holds: a JSON object, as in vLLM, checked field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.base.errors import ConfigError
from penstock.config.setting import Section, setting, settings_of

VERIFIERS = ("match", "speculative-sampling", "multi-step", "spectr", "typical", "bild")
TREES = ("chain", "k-ary", "sequoia", "opt", "grown")
CONTROLLERS = ("adaptive", "fixed")
_MTP = ("deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "mimo_mtp", "mimo_v2_mtp")
"""What vLLM calls the one method mtp, by family."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig(Section):
    """How to draft and how to verify. Only `verifier` can change what is generated, and by default it does not."""

    method: str = setting("", "The drafter: who drafts.", allow_empty=True)
    model: str | None = setting(None, "Draft model: folder, file or id; more than one, with commas, for specinfer.")
    num_speculative_tokens: int | None = setting(
        None,
        "Drafts for one sequence in one step, at most; by default the drafter's own number.",
        minimum=1,
        maximum=63,
    )
    max_depth: int = setting(63, "Drafts on one path of a tree, at most.", minimum=1, maximum=63)
    controller: str = setting(
        "adaptive",
        "Who decides how many. adaptive: as many as pay, by measured acceptance and cost, or none. fixed: always "
        "num_speculative_tokens.",
        choices=CONTROLLERS,
    )
    verifier: str = setting(
        "match",
        "What makes a draft right. match: it is the model's own token, drawn or greedy; the output is what it is "
        "without speculation. speculative-sampling (chains), multi-step, spectr (trees): the same distribution, other "
        "draws. typical, bild: other outputs, faster: lossy.",
        choices=VERIFIERS,
    )
    threshold: float = setting(
        0.3,
        "typical: share of the entropy-dependent bound; bild: largest -ln p of a token that is let pass.",
        above=0.0,
    )
    fallback: float = setting(0.6, "bild: the draft model stops where its likeliest token is less likely.", minimum=0)
    tree: str = setting(
        "chain",
        "Shape of a draft model's drafts. chain; k-ary: the same width at each level; sequoia: the best fixed shape "
        "for measured acceptance; opt, grown: by the draft model's own probabilities, at each step.",
        choices=TREES,
    )
    branches: int = setting(2, "k-ary: drafts behind each.", minimum=1, maximum=8)
    prompt_lookup_min: int = setting(1, "ngram: shortest suffix that is looked up.", minimum=1, maximum=64)
    prompt_lookup_max: int = setting(3, "ngram: longest suffix that is looked up.", minimum=1, maximum=64)
    disable_by_batch_size: int = setting(
        0, "fixed: no drafts while more sequences than this decode; 0: no such limit.", minimum=0
    )
    suffix_decoding_max_tree_depth: int = setting(
        24, "suffix: longest suffix that is looked up.", minimum=1, maximum=64
    )
    suffix_decoding_max_cached_requests: int = setting(
        10_000, "suffix: outputs of ended requests that are remembered.", minimum=0
    )
    suffix_decoding_min_token_prob: float = setting(
        0.1, "suffix: a draft is made if it followed at least so often.", minimum=0, maximum=1
    )
    store_bytes: int = setting(64 << 20, "suffix: memory for what is remembered.", minimum=0)
    datastore: str | None = setting(None, "rest: the file that `penstock datastore` has written.")
    function: str | None = setting(
        None, "function: your own drafter, as module:name; called with the tokens so far and how many to draft."
    )
    heads: str | None = setting(None, "medusa, eagle: folder of the trained heads; early-exit: of an adapter.")
    exit_layer: int | None = setting(None, "early-exit: the layer behind which the draft is read.", minimum=1)
    skip_layers: str | None = setting(
        None, "self-draft: layers that the draft leaves out, as 3,4,7; by default every second one of the middle."
    )
    window: int = setting(8, "jacobi, lookahead: tokens that are drafted side by side.", minimum=1, maximum=32)
    ngram_size: int = setting(3, "lookahead: tokens of an n-gram of its pool.", minimum=2, maximum=8)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.method:
            raise ConfigError(
                'speculative_config: method is missing; for example {"method": "ngram"}', field="speculative_config"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min {self.prompt_lookup_min} is more than prompt_lookup_max "
                f"{self.prompt_lookup_max}",
                field="speculative_config",
            )


def parse_speculative(given: str | Mapping[str, Any] | None) -> SpeculativeConfig | None:
    """`speculative_config` as a text or an object; None for the method "none". Raises ConfigError naming the field that
    is wrong."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return None
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(
                f'speculative_config: is not JSON: {error}; for example {{"method": "ngram"}}',
                field="speculative_config",
            ) from None
    if not isinstance(given, Mapping):
        raise ConfigError('speculative_config: must be an object, as {"method": "ngram"}', field="speculative_config")
    known = {item.name: item for item in settings_of(SpeculativeConfig)}
    for name in given:
        if name not in known:
            raise ConfigError(
                f"speculative_config: {name}: unknown; known: {', '.join(known)}", field="speculative_config"
            )
    if given.get("method") == "none":
        return None
    if given.get("method") in _MTP:
        given = {**given, "method": "mtp"}
    try:
        return SpeculativeConfig(**given)
    except ConfigError as error:
        text = str(error)
        text = text if text.startswith("speculative_config") else f"speculative_config: {text}"
        raise ConfigError(text, field="speculative_config") from None
