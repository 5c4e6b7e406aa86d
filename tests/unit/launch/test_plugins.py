"""`plugin`: files and modules of the user's, in every process that looks names up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import penstock, process

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
SELECT = ("--kv-selector", "every-nth", "--kv-budget", "100%", "--ops", "blas")
POLICY = """
from penstock.sched.policy import POLICIES
from penstock.sched.policy.fcfs import Fcfs

class Mine(Fcfs):
    name = "mine"

POLICIES.add("mine", f"{__name__}:Mine")
"""


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return process("run", "nano", "-p", "Once upon a time", "--max-tokens", "8", "--temperature", "0", *args)


@pytest.mark.parametrize(
    ("example", "settings"),
    [
        ("my_policy", ("--scheduling-policy", "shortest")),
        ("my_selector", SELECT),
        ("my_selector", (*SELECT, "--executor", "multiproc")),
        ("my_drafter", ("--speculative-config", '{"method": "function", "function": "my_drafter:draft"}')),
    ],
)  # fmt: skip
def test_what_examples_add_is_found(example: str, settings: tuple[str, ...]) -> None:
    assert run(*settings).returncode == 1, "it would be there without the plugin"
    plain, done = run(), run("--plugin", str(EXAMPLES / f"{example}.py"), *settings)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == plain.stdout


def test_commands_that_only_plan_and_simulate_take_it_too() -> None:
    mine = ("--plugin", str(EXAMPLES / "my_policy.py"), "--scheduling-policy", "shortest")
    assert process("plan", "nano", *mine).returncode == 0
    assert "given by --plugin" in process("serve", "nano", "--explain", *mine).stdout
    trace = ("--trace", "synthetic:poisson?rate=2&prompt=32&output=8&requests=10")
    two = f"{EXAMPLES / 'my_policy.py'},{EXAMPLES / 'my_drafter.py'}"
    done = process(
        "sim",
        "--device",
        "l4",
        *trace,
        "--max-model-len",
        "4096",
        "--plugin",
        two,
        "--scheduling-policy",
        "fcfs,shortest",
    )
    assert done.returncode == 0, done.stderr
    assert "shortest" in done.stdout


def test_the_environment_a_file_of_settings_and_a_module_name_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "parts.py").write_text(POLICY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT / 'src'}")
    assert run("--plugin", "package.parts", "--scheduling-policy", "mine").returncode == 0
    settings = tmp_path / "settings.toml"
    settings.write_text('[execution]\nplugin = "package.parts"\n')
    assert run("--config", str(settings), "--scheduling-policy", "mine").returncode == 0
    monkeypatch.setenv("PENSTOCK_PLUGIN", "package.parts")
    assert run("--scheduling-policy", "mine").returncode == 0


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("absent.py", None, "absent.py' is no Python file; name a FILE.py"),
        ("folder/absent", None, "is no Python file"),
        ("absent", None, "there is no module 'absent'; put its folder on PYTHONPATH, or name a FILE.py"),
        ("no-name", None, "'no-name' is no name of a module"),
        ("json.py", "", "is called like another module (json); rename the file"),
        ("numpy.py", "", "is called like another module (numpy); rename the file"),
        ("my-policy.py", "", "cannot be the name of a module; use letters, digits and _"),
        ("bad.py", "x = 1\ny = (", "fails when it is imported: SyntaxError: '(' was never closed (line 2)"),
        ("bad.py", "x = 1\n\n1 / 0", "fails when it is imported: ZeroDivisionError: division by zero (line 3)"),
        ("bad.py", "import absent_one", "ModuleNotFoundError: No module named 'absent_one' (line 1)"),
        ("bad.py", "raise SystemExit(3)", "fails when it is imported: SystemExit: 3 (line 1)"),
        ("bad.py", "def f():\n    raise ValueError('a\\nb')\n\nf()", "ValueError: a b (line 2)"),
        ("bad.py", POLICY.replace('"mine", f', '"fcfs", f'), "scheduling_policy 'fcfs' is registered twice (line 8)"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    given = str(tmp_path / name) if name.endswith(".py") else name
    for command in (("run", "nano", "-p", "x"), ("serve", "nano", "--port", "0")):
        done = penstock(*command, "--plugin", given)  # what fails leaves nothing behind in this process
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("penstock: error: plugin: ")
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_each_is_imported_once_and_one_that_failed_may_be_tried_again(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(f"open({str(tmp_path / 'log')!r}, 'a').write('x')\n")
    (tmp_path / "bad.py").write_text("1 / 0")
    script = f"""
import json, sys
from penstock.base.errors import ConfigError
from penstock.launch.plugins import load_plugins
load_plugins("{tmp_path}/counted.py, {tmp_path}/counted.py")
load_plugins("{tmp_path}/counted.py")
load_plugins(None)
try:
    load_plugins("{tmp_path}/bad.py")
except ConfigError:
    open("{tmp_path}/bad.py", "w").write("GOOD = 1")
load_plugins("{tmp_path}/bad.py")
import bad
print(json.dumps([bad.GOOD, open("{tmp_path}/log").read()]))
"""
    done = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [1, "x"]


def test_parts_that_are_not_what_they_should_be_are_told(tmp_path: Path) -> None:
    text = (
        POLICY
        + """
class Bare:
    name = "bare"

class Asking(Fcfs):
    def __init__(self, size):
        pass

POLICIES.add("bare", f"{__name__}:Bare")
POLICIES.add("asking", f"{__name__}:Asking")
POLICIES.add("absent", f"{__name__}:Absent")
POLICIES.add("nowhere", "no_such_module:Policy")
"""
    )
    (tmp_path / "parts.py").write_text(text)
    script = f"""
import json
from penstock.base.errors import ConfigError
from penstock.launch.plugins import load_plugins
from penstock.sched.policy import POLICIES, make_policy
load_plugins("{tmp_path}/parts.py")
assert make_policy("mine").name == "mine"
for name in ("bare", "asking", "absent", "nowhere"):
    try:
        make_policy(name)
    except ConfigError as error:
        print(error)
try:
    POLICIES.add("x", "no.colon")
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    bare, asking, absent, nowhere, target = done.stdout.splitlines()
    assert bare.startswith("scheduling policy 'bare' has no displaces, max_rows, spare, packs, begin_step, key, order")
    assert "inherit from penstock.sched.policy.fcfs.Fcfs" in bare
    assert asking.startswith("scheduling policy 'asking' cannot be made: ")
    assert "registered as parts:Absent, which cannot be had: module 'parts' has no attribute 'Absent'" in absent
    assert "registered as no_such_module:Policy, which cannot be had: No module named 'no_such_module'" in nowhere
    assert target == "scheduling_policy 'x': 'no.colon' is not of the form package.module:attribute"
