"""`penstock ...` as a person types it: in a process of its own, or, where only words and status matter, in this one."""

from __future__ import annotations

import contextlib
import io
import logging
import subprocess
import sys

import pytest

from penstock.cli.main import main


def process(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """As a process: what is imported, how it exits and what reaches a real pipe count. It takes a second."""
    return subprocess.run(
        [sys.executable, "-m", "penstock", *args], input=stdin, capture_output=True, text=True, timeout=120
    )


def penstock(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The same without a new interpreter. What `main` does not catch is raised here, in place of a traceback."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        patch.setattr(logging.root, "handlers", [])  # as in a new process: what is logged goes to standard error
        patch.setattr(logging.root, "level", logging.root.level)
        try:
            status = main(args)
        except SystemExit as end:  # argparse
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    return subprocess.CompletedProcess(["penstock", *args], status, out.getvalue(), err.getvalue())
