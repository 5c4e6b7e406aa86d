"""The last lines of a run: what it did not show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unproven import OTHER, ROOT, rows_of, unproven

TABLE = "id\tname\tpriority\tstatus\tswitch\tfile\ttest\tmeasured\nB07\tx\tP0\tworks\t\tf\ttests/a.py::test_b c\tm\n"


def test_rows_come_from_the_name_and_from_the_table() -> None:
    assert rows_of("tests/x.py::test_F01_F03_it[E12-a]", TABLE) == {"F01", "F03"}
    assert rows_of("tests/a.py::test_b[1]", TABLE) == {"B07"}
    assert rows_of("tests/a.py::test_bb", TABLE) == set()


def test_lines_are_grouped_by_what_is_missing() -> None:
    skipped = [
        ("tests/x.py::test_K19_a", "Skipped: /here/shared/data/traces/a.csv is not there"),
        ("tests/x.py::test_C82_b[1]", "Skipped: /here/shared/models/stories260K is not there"),
        (
            "tests/y.py::test_F01_c",
            "Skipped: /root/smollm2-135m-instruct.gguf is not there: python tools/models.py smollm2-135m",
        ),
        ("tests/z.py::test_d", "Skipped: could not import 'sentencepiece': No module"),
        ("tests/z.py::test_e", "Skipped: reads /proc"),
    ]
    assert unproven(skipped, TABLE) == [
        "2 tests for want of the folder shared beside the repository; of the catalogue's rows C82, K19",
        "1 test for want of a real small model (python tools/models.py); of the catalogue's row F01",
        "1 test for want of a library of the extra test",
        f"1 test for want of {OTHER}",
    ]
    assert unproven([], TABLE) == []


def test_a_run_ends_with_them(tmp_path: Path) -> None:
    """In a copy of what pytest needs, without the folder beside it."""
    root = tmp_path / "alone"
    for name in (
        "tests/conftest.py",
        "tests/sampled.py",
        "tests/shared.py",
        "tests/unproven.py",
        "tests/__init__.py",
        "docs/catalogue.tsv",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    (root / "tests/test_it.py").write_text(
        "from tests.shared import shared\n\ndef test_K19_it(): shared('data', 'x')\n\ndef test_other(): pass\n"
    )
    (root / "pytest.ini").write_text("[pytest]\naddopts = -ra\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"], cwd=root, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    *_, title, line, last = done.stdout.strip().splitlines()
    assert "not shown by this run" in title
    assert line == "1 test for want of the folder shared beside the repository; of the catalogue's row K19"
    assert "1 passed, 1 skipped" in last
