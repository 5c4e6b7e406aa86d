"""What all tests share: nothing that they could see, only what would cost each of them time."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import certifi
import pytest

from tests.sampled import chosen
from tests.unproven import ROOT, unproven


def pytest_configure(config: pytest.Config) -> None:
    """Where a shell started this in the background, interrupts are ignored, and children would ignore theirs."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "sampled(least, pairs): a run tries a sample of the cases (tests/sampled.py)")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nine thousand tests and the modules they import stay to the end: no collection of garbage looks at them again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:], left_out = chosen(items)
    if left_out:
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session", autouse=True)
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An HTTP client that is made reads the authorities of the whole world, which takes it 40 ms; no test asks one."""
    text, end = Path(certifi.where()).read_text(encoding="utf-8"), "-----END CERTIFICATE-----\n"
    path = tmp_path_factory.mktemp("authorities") / "one.pem"
    path.write_text(text[text.index("-----BEGIN") : text.index(end) + len(end)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    """Last of all: what this run did not show, so that "passed" is not read as more than it says."""
    yield
    skipped = [(r.nodeid, str(r.longrepr[2])) for r in terminalreporter.stats.get("skipped", []) if r.longrepr]
    if skipped:
        table = (ROOT / "docs" / "catalogue.tsv").read_text(encoding="utf-8")
        terminalreporter.section("not shown by this run")
        for line in unproven(skipped, table):
            terminalreporter.line(line)
