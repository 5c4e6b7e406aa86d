"""`--fault` at the sites of the store: whatever happens to its files, the text is the same and nobody waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.page_ops import DISK
from penstock.core.sampling import SamplingParams
from penstock.engine import faults
from penstock.engine.faults import SITES, Faults
from penstock.runner import block_files
from penstock.runner.block_files import BlockFiles
from tests.engine.harness import Knobs, fake_engine, request, run
from tests.engine.naive import fake_logits, generate
from tests.engine.processes import nano, running, within

FAULTS = [f"{site}:{kind}:2+" for site, kinds in SITES.items() if site[:6] == "store-" for kind in kinds]
TEXT = [3 + i * 7 % 23 for i in range(50)]
LONG = [3 + i * 7 % 200 for i in range(150)]


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if "kill" not in fault])
def test_a_fault_of_the_store_changes_no_token(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines one after the other over one folder, each with the fault at every other time; texts that begin alike."""
    happened = Faults.of([fault])
    monkeypatch.setattr(faults, "SLOW_S", 0.02)
    monkeypatch.setattr(block_files, "RETRY_S", 0.01)
    monkeypatch.setattr(BlockFiles, "trouble", staticmethod(happened.at_store))
    lost = refused = 0
    for _ in range(3):
        core, _ = fake_engine(Knobs(block_size=4, budget=64, kv_offload=f"disk:{tmp_path / 'kv'},1GiB"))
        for n in range(4):
            r = request([*TEXT[: 50 - 6 * n], 7 + n], max_tokens=6)
            assert run(core, [r])[r.request_id].tokens[0] == generate(fake_logits, r)[0]
        files = core.executor._runner.storage.outside.tiers[DISK]  # type: ignore[attr-defined]
        files.close()
        run(core, [request([5], max_tokens=1)])
        assert core.kv.stored is not None
        core.kv.stored.tiers[0].index.check_invariants()
        lost, refused = lost + core.kv.stored.tiers[0].num_lost, refused + core.kv.stored.tiers[0].num_refused
    site, kind, _ = fault.split(":")
    assert happened._counts[site] >= 2, "nothing has happened"
    if site == "store-read" and kind != "slow":
        assert lost > 0
    if kind in ("error", "full") and site in ("store-write", "store-rename"):
        assert refused > 0
    assert not list((tmp_path / "kv").glob("*/*/.*")), "half written"
    assert all(p.stat().st_mode & 0o077 == 0 for p in (tmp_path / "kv").rglob("*") if "/about" not in str(p))


@within(120)
async def test_an_engine_process_has_the_faults_of_its_store(tmp_path: Path) -> None:
    """Killed where a whole file is about to get its name; the next one answers, and knows what was written."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    config = nano(kv_offload=f"disk:{tmp_path / 'kv'}")
    async with running(nano()) as plain:
        expected = (await plain.complete("a", LONG, params)).outputs[0].token_ids
    async with running(config, faults=["store-rename:kill:2"], stall_s=60) as own:
        for name in ("a", "b"):
            assert (await own.complete(name, LONG, params)).outputs[0].token_ids == expected
        await own.until(lambda: own.client.num_restarts == 1, 60)
