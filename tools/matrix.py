"""docs/matrix.md: which switches and features have been tried together.

    python tools/pairs.py             try every pair of switches (docs/pairs.tsv), some minutes
    python tools/matrix.py            write the page, from that table and from the law tests themselves
    python tools/matrix.py --check    say whether the page is up to date (exit status 1 if not)

A *law* is a test that runs an engine and compares every token with a naive oracle. This tool reads the source of each
law (no test is run): which values the knobs of its engines are drawn from, which requests it makes, what it does to
them meanwhile. Two features that take part in one law are combined by it, because it draws each independently of the
other. The page follows from the table and the tests alone; nothing in it is typed by hand except the names.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "matrix.md"
HARNESS = "tests/engine/harness.py"
sys.path.insert(0, str(ROOT))
from tests import specs  # noqa: E402
from tools import pairs as switch_pairs  # noqa: E402
from tools.switches import SWITCHES  # noqa: E402


@dataclass(frozen=True)
class Law:
    """A test, and which other definitions of its file it is made of.

    `requests`: ids of the entries of `workload` that it submits ("*": all; "!beam": all but that one); None: the
    requests are written in `parts`. `models`: names in tests/specs.py ("*": all); `mock`: what the mock of
    tests/engine/fake_model.py plays instead.
    """

    test: str
    parts: tuple[str, ...] = ()
    requests: tuple[str, ...] | None = None
    models: tuple[str, ...] = ()
    mock: frozenset[str] = frozenset()


MACHINE = "tests/engine/test_laws_machine.py"
MODELS = "tests/engine/test_laws_models.py"
LAWS = (
    Law(f"{MACHINE}::TestEngineLaws", ("knobs", "rules_of_chance", "EngineMachine"), mock=frozenset({"mock"})),
    Law(f"{MACHINE}::TestSlotEngineLaws", ("knobs", "rules_of_chance", "EngineMachine", "SlotEngineMachine"),
        mock=frozenset({"mock", "slots"})),
    Law(f"{MACHINE}::TestWindowEngineLaws", ("knobs", "rules_of_chance", "EngineMachine", "WindowEngineMachine"),
        mock=frozenset({"mock", "window", "attention"})),
    Law(f"{MACHINE}::TestWindowsOnlyEngineLaws",
        ("knobs", "rules_of_chance", "EngineMachine", "WindowsOnlyEngineMachine"),
        mock=frozenset({"mock", "window", "slots"})),
    Law(f"{MODELS}::test_tokens_do_not_depend_on_anything_but_the_request", ("draw_knobs", "in_turmoil", "CONTROLS"),
        ("*",), ("*",)),
    Law(f"{MODELS}::test_A08_forced_preemption_at_every_step_index", (), ("greedy", "n", "masked"),
        ("llama_gqa", "slots", "latent", "windowed", "all_windowed", "mamba", "mamba2_hybrid", "rwkv4", "rwkv7")),
    Law(f"{MODELS}::test_8_bit_kv_obeys_the_same_laws", ("draw_knobs", "in_turmoil", "CONTROLS"), ("*",),
        ("llama_gqa", "slots", "latent", "windowed", "scores")),
    Law(f"{MODELS}::test_kv_of_fewer_bits_obeys_the_same_laws", (), ("!beam",), ("llama_gqa",)),
    Law(f"{MODELS}::test_logprobs_equal_the_naive_ones", (), ("logprobs",), ("llama_gqa", "slots", "mamba2", "rwkv7")),
    Law(f"{MODELS}::test_abort_storm_leaves_the_others_alone", (), ("!beam",), ("llama_gqa",)),
    Law(f"{MODELS}::test_online_attention_serves_the_same_greedy_tokens", (), None, ("llama_gqa",)),
)  # fmt: skip


@dataclass
class Seen:
    """What a law tries: knob -> values, field of a request -> values, kinds of layers per model, and its source."""

    knobs: dict[str, set[Any]] = field(default_factory=dict)
    fields: dict[str, set[Any]] = field(default_factory=dict)
    models: list[frozenset[str]] = field(default_factory=list)
    text: str = ""


Test = Callable[[Seen], bool]


def knob(name: str, holds: Callable[[Any], bool]) -> Test:
    return lambda seen: any(holds(value) for value in seen.knobs.get(name, ()))


def asks(name: str) -> Test:
    return lambda seen: name in seen.fields


def does(kind: str) -> Test:
    return lambda seen: re.search(rf'"{kind}"', seen.text) is not None


def swaps(seen: Seen) -> bool:
    """Whether sequences may be swapped: the mode is asked for, and the host has room for them."""
    wanted = "swap" in seen.knobs.get("preemption", ())
    return wanted and any(isinstance(n, int) and n > 0 for n in seen.knobs.get("host_blocks", ()))


@dataclass(frozen=True)
class Feature:
    """`excludes`: the knob it is one value of; an engine has one value per knob, so such features never meet.

    `kind`: for features of models, the kind of layer; two of them meet in one model only.
    """

    name: str
    test: Test
    excludes: str = ""
    kind: str = ""


def layers(name: str, kind: str) -> Feature:
    return Feature(name, lambda seen: any(kind in model for model in seen.models), kind=kind)


GROUPS: dict[str, tuple[Feature, ...]] = {
    "Memory": (
        Feature("radix prefix tree", knob("prefix_cache", lambda v: v == "radix"), "prefix_cache"),
        Feature("hash-chain prefix cache", knob("prefix_cache", lambda v: v == "hash"), "prefix_cache"),
        Feature("no prefix cache", knob("prefix_cache", lambda v: v == "none"), "prefix_cache"),
        Feature("LRU eviction", knob("eviction", lambda v: v == "lru"), "eviction"),
        Feature("FIFO eviction", knob("eviction", lambda v: v == "fifo"), "eviction"),
        Feature("LFU eviction", knob("eviction", lambda v: v == "lfu"), "eviction"),
        Feature("eviction by priority", knob("eviction", lambda v: v == "priority"), "eviction"),
        Feature("eviction by FLOPs saved", knob("eviction", lambda v: v == "flops"), "eviction"),
        Feature("states kept at branches", knob("checkpoint_rule", lambda v: v == "branch"), "checkpoint_rule"),
        Feature("block of 1 token", knob("block_size", lambda v: v == 1), "block_size"),
        Feature("blocks of 2 to 16", knob("block_size", lambda v: isinstance(v, int) and v > 1), "block_size"),
        Feature("16-bit KV", knob("kv_dtype", lambda v: v in ("bfloat16", "float16")), "kv_dtype"),
        Feature("8-bit KV", knob("kv_dtype", lambda v: v == "int8"), "kv_dtype"),
    ),
    "Scheduling": (
        Feature("policy fcfs", knob("policy", lambda v: v == "fcfs"), "policy"),
        Feature("policy prefill-first", knob("policy", lambda v: v == "prefill-first"), "policy"),
        Feature("policy static", knob("policy", lambda v: v == "static"), "policy"),
        Feature("policy dynamic", knob("policy", lambda v: v == "dynamic"), "policy"),
        Feature("policy priority", knob("policy", lambda v: v == "priority"), "policy"),
        Feature("policy cache-aware", knob("policy", lambda v: v == "cache-aware"), "policy"),
        Feature("policy andes", knob("policy", lambda v: v == "andes"), "policy"),
        Feature("policy splitfuse", knob("policy", lambda v: v == "splitfuse"), "policy"),
        Feature("chunked prefill", knob("budget", lambda v: isinstance(v, int) and v <= 16)),
        Feature("long-prefill threshold", knob("threshold", lambda v: isinstance(v, int) and v > 0)),
        Feature("two steps in flight", knob("depth", lambda v: isinstance(v, int) and v > 1), "depth"),
        Feature("encoded messages (wire)", knob("wire", lambda v: v is True)),
    ),
    "Requests": (
        Feature("temperature, top-k, top-p, min-p", asks("temperature")),
        Feature(
            "masks, bias, penalties", lambda seen: bool({"bad_sequences", "repetition_penalty"} & set(seen.fields))
        ),
        Feature("several samples (n)", lambda seen: any(v != 1 for v in seen.fields.get("n", ()))),
        Feature("beam search", lambda seen: any(v is not None for v in seen.fields.get("beam_width", ()))),
        Feature("logprobs, prompt logprobs", asks("num_prompt_logprobs")),
    ),
    "Disturbances": (
        Feature("preemption", does("preempt")),
        Feature("preemption by swap", swaps),
        Feature("ragged tables", does("ragged")),
        Feature("taint", does("taint")),
        Feature("abort", lambda seen: re.search(r"\bAbort\(", seen.text) is not None),
        Feature("prefix cache reset", does("reset_prefix_cache")),
    ),
    "Models": (
        layers("mock model", "mock"),
        layers("attention layers (MHA, GQA, MQA)", "attention"),
        layers("slot layers (recurrent)", "slots"),
        layers("latent layers (MLA)", "latent"),
        layers("sliding-window layers", "window"),
        Feature("online-softmax attention", knob("attention", lambda v: v == "ref-online"), "attention"),
    ),
}
FEATURES = tuple(feature for group in GROUPS.values() for feature in group)


# -- reading the tests ---------------------------------------------------------------------------------------------


@cache
def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def definition(path: str, name: str) -> ast.stmt:
    """The top-level function, class or assignment called `name`. Raises ValueError if it is not there."""
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return node
    raise ValueError(f"{path} has no {name}; LAWS in tools/matrix.py must follow the tests")


def source(path: str, node: ast.AST) -> str:
    return ast.get_source_segment((ROOT / path).read_text(encoding="utf-8"), node) or ""


def literals(node: ast.AST, given: dict[str, ast.AST]) -> set[Any]:
    """Every constant in an expression: of `sampled_from([1, 2])`, `rng.choice([...])`, or of a parameter's list."""
    if isinstance(node, ast.Name):
        return literals(given[node.id], {}) if node.id in given else set()
    text = ast.unparse(node)
    if text == "st.booleans()" or "random() <" in text:
        return {True, False}
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}


def parameters(node: ast.stmt) -> dict[str, ast.AST]:
    """Argument -> the expression its values come from, for parametrised tests and hypothesis rules."""
    out: dict[str, ast.AST] = {}
    for decorator in getattr(node, "decorator_list", []):
        if not isinstance(decorator, ast.Call):
            continue
        if ast.unparse(decorator.func) == "pytest.mark.parametrize":
            names, values = decorator.args[:2]
            if isinstance(names, ast.Constant):
                out[str(names.value)] = values
            elif isinstance(names, ast.Tuple) and ast.unparse(values).startswith(("some(product(", "some(grid(")):
                axes = values.args[0].args  # type: ignore[attr-defined]
                out |= {ast.literal_eval(name): axis for name, axis in zip(names.elts, axes, strict=True)}
        out |= {k.arg: k.value for k in decorator.keywords if k.arg}
    for loop in ast.walk(node):  # for budget, block_size in ((4, 4), (256, 16)):
        if isinstance(loop, ast.For) and isinstance(loop.target, ast.Tuple) and isinstance(loop.iter, ast.Tuple):
            columns = zip(*[row.elts for row in loop.iter.elts if isinstance(row, ast.Tuple)], strict=True)
            for target, column in zip(loop.target.elts, columns, strict=False):
                if isinstance(target, ast.Name):
                    out[target.id] = ast.Tuple(list(column), ast.Load())
    return out


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    """Calls of `name`, also as `st.builds(name, ...)`."""
    found = []
    for n in ast.walk(node):
        if isinstance(n, ast.Call):
            by = ast.unparse(n.func)
            if by == name or (by == "st.builds" and n.args and ast.unparse(n.args[0]) == name):
                found.append(n)
    return found


def defaults() -> dict[str, Any]:
    """The knobs of tests/engine/harness.py as they are if a test does not turn them."""
    body = definition(HARNESS, "Knobs")
    assert isinstance(body, ast.ClassDef)
    return {
        n.target.id: ast.literal_eval(n.value)
        for n in body.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name) and n.value is not None
    }


def kinds_of(names: tuple[str, ...]) -> list[frozenset[str]]:
    """Kinds of layers of each model of tests/specs.py that is named ("*": all)."""
    called = {"Attention": "attention", "Latent": "latent"}
    chosen = specs.ALL if names == ("*",) else names
    mixers = [[layer.mixer for layer in specs.make(name)[0].layers] for name in chosen]
    return [
        frozenset("window" if getattr(m, "window", None) else called.get(type(m).__name__, "slots") for m in model)
        for model in mixers
    ]


@cache
def look(law: Law) -> Seen:
    """Everything one law tries."""
    path, _, test = law.test.partition("::")
    seen = Seen(models=[law.mock] if law.mock else kinds_of(law.models))
    nodes = [
        definition(path, name) for name in (*law.parts, *([] if law.parts and test.startswith("Test") else [test]))
    ]
    if test.startswith("Test"):
        definition(path, test)
    seen.text = "\n".join(source(path, node) for node in nodes)
    turned: list[dict[str, set[Any]]] = []
    for node in nodes:
        given = parameters(node)
        turned += [{k.arg: literals(k.value, given) for k in call.keywords if k.arg} for call in calls(node, "Knobs")]
    for values in turned or [{}]:
        for name, default in defaults().items():
            seen.knobs.setdefault(name, set()).update(values.get(name, {default}))
    if law.requests is None:
        for node in nodes:
            _take_requests(seen, node)
    else:
        _take_workload(seen, path, law.requests)
    return seen


def _take_requests(seen: Seen, node: ast.stmt) -> None:
    """Fields of the requests that a definition makes itself; `chance` of the state machine is read as a dictionary."""
    for scope in [node, *[n for n in ast.walk(node) if isinstance(n, ast.FunctionDef)]]:
        given = parameters(scope) if isinstance(scope, ast.stmt) else {}
        for call in calls(scope, "request"):
            for k in call.keywords:
                if k.arg:
                    seen.fields.setdefault(k.arg, set()).update(literals(k.value, given))
    for n in ast.walk(node):
        if isinstance(n, ast.keyword) and n.arg == "optional" and isinstance(n.value, ast.Dict):
            for key, value in zip(n.value.keys, n.value.values, strict=True):
                if isinstance(key, ast.Constant):
                    seen.fields.setdefault(str(key.value), set()).update(literals(value, {}))


def _take_workload(seen: Seen, path: str, wanted: tuple[str, ...]) -> None:
    by_id: dict[str, ast.Call] = {}
    for call in calls(definition(path, "workload"), "request"):
        names = {k.arg: k.value for k in call.keywords}
        by_id[str(ast.literal_eval(names["request_id"]))] = call
    left_out = {name[1:] for name in wanted if name.startswith("!")}
    chosen = set(by_id) - left_out if left_out or wanted == ("*",) else set(wanted)
    if missing := (chosen | left_out) - set(by_id):
        raise ValueError(f"workload of {path} has no request {', '.join(sorted(missing))}")
    for name in chosen:
        for k in by_id[name].keywords:
            if k.arg:
                seen.fields.setdefault(k.arg, set()).update(literals(k.value, {}))


# -- the page ------------------------------------------------------------------------------------------------------


def verdicts() -> list[tuple[str, str, str, str]]:
    """(feature, feature, test id, verdict) of every pair that some law tries."""
    out = []
    for law in LAWS:
        present = [f for f in FEATURES if f.test(look(law))]
        met = [(a, b) for a, b in combinations(present, 2) if not exclusive(a, b) and meet(a, b, law)]
        out += [(a.name, b.name, law.test, "exact") for a, b in met]
    return out


def exclusive(a: Feature, b: Feature) -> bool:
    return bool(a.excludes) and a.excludes == b.excludes


def meet(a: Feature, b: Feature, law: Law) -> bool:
    return not (a.kind and b.kind) or any({a.kind, b.kind} <= model for model in look(law).models)


def _cell(a: Feature, b: Feature, pairs: dict[frozenset[str], set[str]]) -> str:
    if a is b:
        return "\\"
    if exclusive(a, b):
        return ""
    return "exact" if pairs.get(frozenset((a.name, b.name))) else "-"


_HEAD = """\
# What combines with what

Generated by `python tools/pairs.py`, which tries pairs of switches, and `python tools/matrix.py`, which makes this
page. A test compares them. Do not edit.

## Pairs of switches

Every pair of switches was turned on in one engine, on the two-layer model that comes with the package (pico), with
three prompts, greedily: in a batch, alone, and again with what the prefix cache kept.

- **exact**: the tokens of the plain engine, each time.
- **lossy**: one of the two may change tokens. They are the same alone and in a batch, cold and warm; and together with
  an exact switch they are those that the lossy one gives by itself.
- a number: the engine refuses the pair, by the sentence of that number below.
- **differs**, **varies**, **fails**: it should not; listed below.
- empty: two values of one setting, which exclude each other.

The diagonal is the switch by itself. Gains, further below, are counted, not timed: of memory and steps less is better,
of sequences at once more is.
"""
_LAW_HEAD = """\
## Laws

Read from the source of the law tests. A *law* runs the engine and compares every token with a naive loop that has no
cache, no pages and no batch.

- **exact**: some law draws both features, each independently of the other, and every request must get the tokens (and
  finish reasons) of the naive loop.
- **-**: no law does. It may work; nobody has looked.
- empty: two values of one setting, which exclude each other.

Features of requests meet in one engine at one time; one request is either a beam search or has `n` samples. Kinds of
layers meet in one model.

The *mock model* ([fake_model.py](../tests/engine/fake_model.py)) writes token ids instead of keys and values and checks
every page it reads; it makes thousands of steps cheap. The other models are tiny and random
([specs.py](../tests/specs.py)). The op table `blas` is left out: it does not promise equal bits in every batch
([exactness](concepts/exactness.md)). So are the [memory baselines](concepts/memory-baselines.md), whose laws are in
[test_memory_baselines.py](../tests/engine/test_memory_baselines.py).
"""


def render() -> str:
    """The whole page."""
    pairs: dict[frozenset[str], set[str]] = {}
    for a, b, test, _ in verdicts():
        pairs.setdefault(frozenset((a, b)), set()).add(test)
    parts = [_HEAD, *_switches(switch_pairs.read()), _LAW_HEAD]
    for title, columns in GROUPS.items():
        rows = [[feature.name, *[_cell(feature, c, pairs) for c in columns]] for feature in FEATURES]
        parts.append(f"### {title} with everything\n\n" + _table(["", *[c.name for c in columns]], rows))
    parts.append(_laws())
    possible = [frozenset((a.name, b.name)) for a, b in combinations(FEATURES, 2) if not exclusive(a, b)]
    parts.append(f"{sum(pair in pairs for pair in possible)} of {len(possible)} pairs are covered.\n")
    return "\n".join(parts)


def _switches(tried: list[switch_pairs.Pair]) -> list[str]:
    """The tables of what was tried, refusals, what went wrong, and gains."""
    found = {frozenset((p.first, p.second)): p for p in tried}
    switches = [s for s in SWITCHES if any(s.name in pair for pair in found)]
    sentences = list(dict.fromkeys(p.said for p in tried if p.verdict == switch_pairs.CONFLICT))

    def cell(a: str, b: str) -> str:
        p = found.get(frozenset((a, b)))
        if p is None:
            return ""
        return str(sentences.index(p.said) + 1) if p.verdict == switch_pairs.CONFLICT else p.verdict

    out = []
    for family in dict.fromkeys(s.family for s in switches):
        columns = [s.name for s in switches if s.family == family]
        rows = [[s.name, *[cell(s.name, column) for column in columns]] for s in switches]
        out.append(f"### {family.capitalize()} with everything\n\n" + _table(["", *columns], rows))
    rows = [[str(i), _plain(said)] for i, said in enumerate(sentences, 1)]
    out.append("### Refusals\n\n" + _table(["", "what the engine says"], rows))
    wrong = [p for p in tried if p.verdict in (switch_pairs.DIFFERS, switch_pairs.VARIES, switch_pairs.FAILS)]
    rows = [[p.first, p.second, p.verdict, _plain(p.said)] for p in wrong]
    out.append("### What should not be\n\n" + (_table(["", "with", "", "how"], rows) if rows else "Nothing.\n"))
    gains = [[p.first, p.second, p.kv, p.at_once, p.steps] for p in tried if p.kv]
    head = ["", "with", "KV memory of a request", "at once, in one memory", "steps of a batch"]
    out.append("### Gains, over the plain engine\n\n" + _table(head, gains))
    counts = ", ".join(f"{n} {verdict}" for verdict, n in Counter(p.verdict for p in tried).items())
    out.append(f"{len(tried)} pairs of {len(switches)} switches: {counts}.\n")
    return out


def _plain(text: str) -> str:
    """A sentence that may stand in a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def _laws() -> str:
    rows = []
    for law in LAWS:
        path, _, test = law.test.partition("::")
        present = [f.name for f in FEATURES if f.test(look(law))]
        missing = [f.name for f in FEATURES if f.name not in present]
        rows.append([f"[{test}](../{path})", str(len(present)), ", ".join(missing)])
    return "### The laws\n\n" + _table(["law", "features", "not in it"], rows)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the page is up to date")
    args = parser.parse_args(argv)
    text = render()
    if not args.check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        print(f"docs/{PAGE.name} is not up to date: run python tools/matrix.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
