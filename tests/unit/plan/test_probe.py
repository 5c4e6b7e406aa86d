"""plan.probe against made-up machines: folders that look like /proc and /sys/fs/cgroup."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.plan import probe

GIB = 1024**3
KIB_PER_GIB = 1024**2

MEMINFO = f"MemTotal:       {16 * KIB_PER_GIB} kB\nMemFree: 1 kB\nMemAvailable:   {12 * KIB_PER_GIB} kB\n"
CPUINFO = "processor : 0\nflags\t\t: fpu sse2 avx2 avx512f\n\nprocessor : 1\nflags\t\t: fpu sse2 avx2\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    base = {"proc/meminfo": MEMINFO, "proc/cpuinfo": CPUINFO}
    for name, text in (base | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_cgroups_the_machine_speaks(tmp_path: Path) -> None:
    machine = probe(tree(tmp_path, {}), affinity=6, arch="AMD64")
    assert machine.num_cores == 6
    assert (machine.memory_bytes, machine.available_bytes) == (16 * GIB, 12 * GIB)
    assert machine.arch == "x86_64"
    assert machine.flags == {"fpu", "sse2", "avx2"}, "only what every core has"


def test_arm_features(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/cpuinfo": "processor : 0\nFeatures : fp asimd bf16\n"})
    machine = probe(root, affinity=1, arch="arm64")
    assert (machine.arch, machine.flags) == ("aarch64", frozenset({"fp", "asimd", "bf16"}))


def test_cgroup_v2_limits_and_working_set(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/pod/box/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/pod/box/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/pod/box/memory.stat": f"anon 5\nactive_file 9\ninactive_file {2 * GIB}\n",
        },
    )
    machine = probe(root, affinity=8)
    assert machine.num_cores == 2, "2.5 cores are two threads"
    assert machine.memory_bytes == 4 * GIB
    assert machine.available_bytes == 3 * GIB, "limit - (use - file pages that are dropped first)"


def test_cgroup_v2_outer_groups_bind_too(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/cpu.max": "100000 100000\n",
            "sys/fs/cgroup/pod/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{GIB}\n",
        },
    )
    machine = probe(root, affinity=8)
    assert (machine.num_cores, machine.memory_bytes, machine.available_bytes) == (1, 2 * GIB, GIB)


@pytest.mark.parametrize("shown", ["/../../outside", "/host/path/that/is/not/mounted", "/"])
def test_cgroup_v2_inside_a_container(tmp_path: Path, shown: str) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{shown}\n",
            "sys/fs/cgroup/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
        },
    )
    machine = probe(root, affinity=8)
    assert (machine.num_cores, machine.memory_bytes) == (3, GIB)


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_cgroup_v1(tmp_path: Path, folder: str) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/\n",
            f"sys/fs/cgroup/{folder}/box/cpu.cfs_quota_us": "150000\n",
            f"sys/fs/cgroup/{folder}/box/cpu.cfs_period_us": "50000\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{8 * GIB}\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{7 * GIB}\n",
            "sys/fs/cgroup/memory/box/memory.stat": f"total_inactive_file {GIB}\n",
        },
    )
    machine = probe(root, affinity=8)
    assert (machine.num_cores, machine.memory_bytes, machine.available_bytes) == (3, 8 * GIB, 2 * GIB)


def test_cgroup_v1_without_limits(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n3:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        },
    )
    machine = probe(root, affinity=8)
    assert (machine.num_cores, machine.available_bytes) == (8, 12 * GIB)


def test_use_above_the_limit_leaves_nothing(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "100\n",
            "sys/fs/cgroup/memory.current": "200\n",
        },
    )
    assert probe(root, affinity=1).available_bytes == 0


def test_a_quota_below_one_core_is_one_core(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "10000 100000\n"})
    assert probe(root, affinity=4).num_cores == 1


@pytest.mark.parametrize("junk", ["", "\x00\xff", "max", "a b c\n: : :\n", "0::\n", ":::::"])
def test_junk_is_ignored(tmp_path: Path, junk: str) -> None:
    names = ["proc/self/cgroup", "sys/fs/cgroup/cpu.max", "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.stat"]
    machine = probe(tree(tmp_path, dict.fromkeys(names, junk)), affinity=4)
    assert (machine.num_cores, machine.memory_bytes) == (4, 16 * GIB)


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    machine = probe(tmp_path)
    assert machine.num_cores >= 1
    assert 0 < machine.available_bytes <= machine.memory_bytes
    assert machine.flags == frozenset()


def test_this_machine() -> None:
    machine = probe()
    assert machine.num_cores >= 1
    assert 0 < machine.available_bytes <= machine.memory_bytes
    assert machine.arch
