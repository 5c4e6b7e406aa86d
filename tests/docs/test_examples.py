"""Every program of examples/ runs against nano and prints what it is there to show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from tests.api.conftest import bundled
from tests.unit.server.test_parsing_templates import HERMES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHOWN = {
    "anthropic_messages": r"\S.*\n\[(end_turn|max_tokens), \d+ \+ \d+ tokens\]\n",
    "batch": r"completed 3 of 3\nTom: .+\nPolly: .+\nDorothy: .+\n",
    # How often drafts are asked for follows measured times: on a busy machine hardly ever.
    "my_drafter": r"steps: 48 without drafts, (\d|[1-4]\d) with them\nsame tokens: True\n",
    "my_policy": r"fcfs: .* order \[0, 1, 2\]\nshortest: .* order \[1, 2, 0\]\nsame texts: True\n",
    "my_selector": r"none       ' 48213.*'\nevery-nth  '(?! 48213).*\nsnapkv     .+\n",
    "openai_chat": r"\S.*\n\[\d+ \+ \d+ tokens\]\n",
    "simulate": r"Azure .*fcfs.*prefill-first.*TTFT p99.*",
    "stream": r"\S.*\n\[(length|stop), \d+ tokens\]\n",
    "structured": r"\{'city': '(Oslo|Rome)', 'people': \d+\}\n(yes|no)\n20\d\d-\d\d\n",
    "tools": r"calls get_weather \{.*\"days\"\s*:\s*[1-7].*\}\nsays .+\n",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """With a template that shows tools, which nano's own does not; it is what nano was taught otherwise."""
    config = serve_from_kwargs(
        model=bundled(), port=0, max_model_len=1024, num_gpu_blocks_override=256, chat_template=HERMES,
        files_dir=str(tmp_path_factory.mktemp("files")),
    )  # fmt: skip
    with LiveServer(config) as live:
        yield live


def test_there_is_a_test_for_every_example() -> None:
    there = {path.stem for path in EXAMPLES.glob("*.py")}
    assert there == set(SHOWN)
    listed = re.findall(r"\((\w+)\.py\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(there)


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_an_example_runs(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    env = dict(os.environ, COLUMNS="120", HF_HUB_OFFLINE="1")
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    if "BASE_URL" in source:
        url = request.getfixturevalue("server").url
        env |= {"OPENAI_BASE_URL": f"{url}/v1", "ANTHROPIC_BASE_URL": url}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(SHOWN[name], done.stdout, re.DOTALL), done.stdout
    if name == "simulate":
        assert "<svg" in (tmp_path / "simulation.html").read_text(encoding="utf-8")
