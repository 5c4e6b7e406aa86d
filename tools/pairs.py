"""docs/pairs.tsv: every pair of switches, tried on a two-layer model. `python tools/matrix.py` makes the page of it.

    python tools/pairs.py               try all pairs (minutes), and write the table
    python tools/pairs.py KV            only pairs with a switch whose name holds this text; the others stay as they are

Exact switches must give the tokens of the plain engine. Lossy ones must give the same tokens alone and in a batch, with
a cold and a warm prefix cache, and together with an exact switch those that they give by themselves. A pair that the
engine refuses by a ConfigError is a conflict, with its sentence.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "pairs.tsv"
sys.path.insert(0, str(ROOT))
from tools.switches import BY_BLOCKS, MODEL, Switch, counted, possible, present  # noqa: E402

MOST_GAINS = 60
EXACT, LOSSY, CONFLICT, DIFFERS, VARIES, FAILS = "exact", "lossy", "conflict", "differs", "varies", "fails"
Found = tuple[list[list[int]], bool] | tuple[str, str]
"""Tokens and whether they are the same everywhere; or a verdict and a sentence."""


@dataclass(frozen=True)
class Pair:
    """A row of the table; of a switch by itself, twice its name.

    `said`: the sentence of a conflict, or what differs. `kv`: KV memory of one request; `at_once`: most sequences in
    one memory; `steps`: of a batch; all over the plain engine's, empty where not counted.
    """

    first: str
    second: str
    verdict: str
    said: str = ""
    kv: str = ""
    at_once: str = ""
    steps: str = ""


class Bench:
    """Engines over the two-layer model, one at a time, and what single switches gave."""

    SMALL: ClassVar[dict[str, Any]] = {
        "max_model_len": 256, "block_size": 16, "num_gpu_blocks_override": 64, "max_num_seqs": 4,
        "max_num_batched_tokens": 64, "threads": 1,
    }  # fmt: skip

    def __init__(self, files: Path) -> None:
        from penstock import LLM, LoRARequest
        from penstock.eval.sample import SAMPLE

        self.files = files
        llm = LLM(MODEL, **self.SMALL)
        ids = llm.get_tokenizer().encode(SAMPLE)
        # Two begin alike, the third repeats itself, as drafts and prefix caches like it.
        self.prompts = [ids[:70], [*ids[:40], *ids[200:240]], [*ids[300:330], *ids[300:330]]]
        self.many = [ids[i : i + 96] for i in range(0, 800, 100)]
        self._alone: dict[str, Found] = {}
        make_files(files, llm)
        self.adapters = [LoRARequest("a", 1, str(files / "adapter")), None, LoRARequest("a", 1, str(files / "adapter"))]
        self.plain = self.tokens({})
        self.plain_counts = self.counts({})

    def engine(self, settings: dict[str, Any], **more: Any) -> Any:
        from penstock import LLM

        given = self.SMALL | settings | more
        if settings.get("enable_chunked_prefill") is False:
            given["max_num_batched_tokens"] = 256
        for name in ("speculative_config", "kv_selector_config"):
            if isinstance(text := given.get(name), str):
                given[name] = text.replace("{files}", str(self.files))
        return LLM(MODEL, **given)

    def tokens(self, settings: dict[str, Any]) -> tuple[list[list[int]], bool]:
        """Greedy tokens of the prompts in a batch, and whether they are the same alone and the second time."""
        from penstock import SamplingParams

        llm = self.engine(settings)
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)

        own = self.adapters if settings.get("enable_lora") else [None] * len(self.prompts)
        adapters = dict(zip(map(tuple, self.prompts), own, strict=True))

        def ask(prompts: list[list[int]]) -> list[list[int]]:
            asked = [adapters[tuple(ids)] for ids in prompts]
            given = {"lora_request": asked} if any(asked) else {}
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, **given)
            wrong = next((o.error for o in outputs if o.error is not None), None)
            if wrong is not None:
                raise RuntimeError(wrong)
            return [o.outputs[0].token_ids for o in outputs]

        first = ask(self.prompts)
        alone = [ask([ids])[0] for ids in self.prompts]
        return first, first == alone == ask(self.prompts)

    def counts(self, settings: dict[str, Any]) -> tuple[float, float, float]:
        """Bytes of one request at its end, most sequences at once in the memory of four plain ones, steps of eight."""
        from penstock import SamplingParams
        from penstock.eval.cap.speed import held_bytes

        memory: dict[str, Any] = {"max_model_len": 112, "max_num_seqs": 16, "num_gpu_blocks_override": 4 * 7}
        num_bytes = self.engine({}, **memory).engine.plan.kv_bytes
        llm = self.engine(settings, **(memory | {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": num_bytes}))
        engine = llm.engine
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
        steps = llm.stream({"prompt_token_ids": self.many[0]}, params)
        held = [held_bytes(engine.core.kv, engine.plan.block_size) for _ in steps]
        before = engine.core.stats.num_steps
        llm.generate([{"prompt_token_ids": ids} for ids in self.many], params)
        stats = engine.core.stats
        return next((float(n) for n in reversed(held) if n), 1.0), float(stats.peak_running), stats.num_steps - before

    def alone(self, switch: Switch) -> Found:
        if switch.name not in self._alone:
            self._alone[switch.name] = self._try(switch.settings)
        return self._alone[switch.name]

    def _try(self, settings: dict[str, Any]) -> Found:
        from penstock.base.errors import ConfigError

        try:
            return self.tokens(settings)
        except ConfigError as error:
            return CONFLICT, str(error)
        except Exception as error:  # whatever it is, it belongs into the table
            return FAILS, f"{type(error).__name__}: {error}"

    def single(self, a: Switch) -> Pair:
        return Pair(a.name, a.name, *self._judge(a, a, self.alone(a)))

    def pair(self, a: Switch, b: Switch) -> Pair:
        verdict, said = self._judge(a, b, self._try(a.settings | b.settings))
        if not counted(a, b) or verdict not in (EXACT, LOSSY):
            return Pair(a.name, b.name, verdict, said)
        gains = [n / m for n, m in zip(self.counts(a.settings | b.settings), self.plain_counts, strict=True)]
        return Pair(a.name, b.name, verdict, said, *(f"{gain:.2f}" for gain in gains))

    def _judge(self, a: Switch, b: Switch, found: Found) -> tuple[str, str]:
        tokens, same = found
        if isinstance(tokens, str):
            return tokens, " ".join(str(same).replace(str(self.files), "FILES").split())
        if not same:
            return VARIES, "other tokens alone, in a batch or with cached prefixes"
        if a.exact and b.exact:
            return (EXACT, "") if tokens == self.plain[0] else (DIFFERS, "other tokens than the plain engine's")
        if a.exact != b.exact:
            lossy = b if a.exact else a
            if lossy.name in BY_BLOCKS and "block_size" in (a.settings | b.settings):
                return LOSSY, "goes by whole blocks: other tokens with blocks of another size"
            by_itself = self.alone(lossy)[0]
            if not isinstance(by_itself, str) and tokens != by_itself:
                return DIFFERS, f"other tokens than {lossy.name} gives by itself"
        return LOSSY, ""


def make_files(folder: Path, llm: Any) -> None:
    """What some drafters read: a store of texts, and heads with random weights of the model's size; and an adapter."""
    import numpy as np
    from safetensors.numpy import save_file

    from penstock.drafters.datastore import fingerprint, write
    from penstock.eval.sample import SAMPLE
    from penstock.families.registry import open_model
    from penstock.formats.safetensors import read_safetensors
    from penstock.launch.hub import local_path
    from penstock.weights.load import fingerprint as mark
    from penstock.weights.load import load_weights

    encode = llm.get_tokenizer().encode_inner
    write(folder / "texts", [encode(SAMPLE)], llm.engine.spec.vocab_size, fingerprint(encode))
    checkpoint = open_model(local_path(MODEL))
    base = mark(load_weights(checkpoint.weights, checkpoint.spec, llm.engine.plan.dtype))
    size, rng = llm.engine.spec.hidden_size, np.random.default_rng(0)
    heads = [[float(rng.random()) for _ in range(layer.mixer.num_kv_heads)] for layer in llm.engine.spec.layers]
    (folder / "heads.json").write_text(json.dumps({"fingerprint": base, "measured": "not at all", "scores": heads}))
    pairs = {}
    for name, t in read_safetensors(local_path(MODEL) / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            for part, shape in (("A", (4, t.shape[1])), ("B", (t.shape[0], 4))):
                own = (0.2 * rng.standard_normal(shape)).astype(np.float32)
                pairs[f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight"] = own
    (folder / "adapter").mkdir()
    save_file(pairs, folder / "adapter" / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(said))
    for kind in ("medusa", "eagle"):
        there = local_path("nano").parent / f"nano-{kind}"
        config = json.loads((there / "config.json").read_text(encoding="utf-8"))
        old = config["hidden_size"]
        (folder / kind).mkdir()
        (folder / kind / "config.json").write_text(json.dumps(config | {"base": base, "hidden_size": size}))
        tensors = {
            name: (0.1 * rng.standard_normal([_scaled(n, name, old, size) for n in t.shape])).astype(np.float32)
            for name, t in read_safetensors(there / "model.safetensors").items()
        }
        save_file(tensors, folder / kind / "model.safetensors")


def _scaled(n: int, name: str, old: int, new: int) -> int:
    """A dimension of a head's tensor for a model of another size; eagle's heads are 32 wide, whatever the model's."""
    if name == "distance" and n == old // 32:
        return new // 32
    return n // old * new if n % old == 0 else n


def try_all(only: str = "") -> list[Pair]:
    """In the order of the list; pairs without `only` in a name are taken from the table, where they are there."""
    switches = present()
    old = {(p.first, p.second): p for p in read()} if only else {}
    wanted = [(a, a) for a in switches] + [(a, b) for a, b in combinations(switches, 2) if possible(a, b)]
    out = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for i, (a, b) in enumerate(wanted, 1):
            kept = old.get((a.name, b.name))
            if kept is None or only in a.name or only in b.name:
                kept = bench.single(a) if a is b else bench.pair(a, b)
            out.append(kept)
            if i % 100 == 0:
                print(f"{i} of {len(wanted)}", file=sys.stderr)
    if sum(bool(p.kv) for p in out) > MOST_GAINS:
        print(f"more than {MOST_GAINS} gains: choose fewer headline switches", file=sys.stderr)
    return out


def read() -> list[Pair]:
    """The table. Raises OSError."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [Pair(*line.split("\t")) for line in lines[1:]]


def save(pairs: list[Pair]) -> None:
    names = [f.name for f in fields(Pair)]
    rows = ["\t".join(names), *("\t".join(getattr(p, n) for n in names) for p in pairs)]
    TABLE.write_text("\n".join(rows) + "\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    pairs = try_all(argv[0] if argv else "")
    save(pairs)
    for p in pairs:
        if p.verdict in (DIFFERS, VARIES, FAILS):
            print(f"{p.first} + {p.second}: {p.verdict}: {p.said}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
