"""A gather between ranks: awake, asleep, and beside gloo in the same run.

    python -m benchmarks.micro.gather [--bytes 4096] [--ranks 2] [--turns 20000] [--rounds 5] --out FILE

Each rank is a process. In turns, round by round: ranks that wait awake (`spin`), ranks that sleep at once (`futex`: the
way it goes where others use the cores), two ranks whose memories are two and are connected by a relay over loopback, as
between hosts (`hosts`: relays that sleep at once, as they do; `hosts-spin`: relays that are awake for 200 us, as ranks
are), and, where torch is installed, gloo's all_gather over loopback. Microseconds of one gather, of rank 0; what came
is checked by the kernels' tests.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common import about, save
from rich.console import Console
from rich.table import Table

from penstock.ops.native.library import best_library
from penstock.parallel.comm import SPIN_US, SharedComm, shared_memory
from penstock.parallel.relay import HostRelay

AWAKE_US, ASLEEP_US = 1_000_000, 0


def ours(fd: int, rank: int, size: int, num_bytes: int, turns: int, spin_us: int) -> float:
    comm = SharedComm(fd, rank, size, spin_us=spin_us)
    library = best_library()
    assert library is not None, "no native kernels"
    taken_ns = library.pst_exchange_time(comm.exchange.address, num_bytes, turns)
    assert taken_ns > 0, "a slot holds it"
    return float(taken_ns) / turns / 1000


def between_hosts(port: int, rank: int, size: int, num_bytes: int, turns: int, spin_us: int) -> float:
    assert size == 2, "two hosts with a rank each"
    if rank == 0:
        with socket.create_server(("127.0.0.1", port)) as listener:
            sock = listener.accept()[0]
    else:
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    fd = shared_memory(size)
    comm, beside = (SharedComm(fd, rank, size, spin_us=us) for us in (SPIN_US, spin_us))
    os.close(fd)
    relay = HostRelay(beside.exchange, sock, gives=[rank], takes=[1 - rank], ended=lambda why: None)
    library = best_library()
    assert library is not None, "no native kernels"
    taken_ns = library.pst_exchange_time(comm.exchange.address, num_bytes, turns)
    assert taken_ns > 0, "a slot holds it"
    time.sleep(0.2)  # the other one has it, too
    relay.close()
    return float(taken_ns) / turns / 1000


def gloo(port: int, rank: int, size: int, num_bytes: int, turns: int) -> float:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    own = torch.full((num_bytes // 4,), float(rank))
    all_ = [torch.empty_like(own) for _ in range(size)]
    for _ in range(50):
        dist.all_gather(all_, own)
    began = time.perf_counter()
    for _ in range(turns):
        dist.all_gather(all_, own)
    taken_s = time.perf_counter() - began
    dist.destroy_process_group()
    return taken_s / turns * 1e6


def one(kind: str, size: int, num_bytes: int, turns: int, number: int) -> float:
    """Microseconds of a gather, of rank 0."""
    fd = shared_memory(size)
    command = [sys.executable, "-m", "benchmarks.micro.gather", "rank", kind, str(fd), str(29_500 + number)]
    try:
        running = [
            subprocess.Popen(
                [*command, str(rank), str(size), str(num_bytes), str(turns)], stdout=subprocess.PIPE, text=True,
                pass_fds=[fd],
            )
            for rank in range(size)
        ]  # fmt: skip
        said = [process.communicate(timeout=300)[0] for process in running]
    finally:
        os.close(fd)
    return float(said[0].strip().splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        kind, (fd, port, rank, size, num_bytes, turns) = sys.argv[2], map(int, sys.argv[3:])
        if kind == "gloo":
            print(gloo(port, rank, size, num_bytes, turns))
        elif kind.startswith("hosts"):
            print(between_hosts(port, rank, size, num_bytes, turns, ASLEEP_US if kind == "hosts" else SPIN_US))
        else:
            print(ours(fd, rank, size, num_bytes, turns, AWAKE_US if kind == "spin" else ASLEEP_US))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=4096, help="of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    kinds = [
        "spin",
        "futex",
        *(["hosts", "hosts-spin"] if args.ranks == 2 else []),
        *(["gloo"] if find_spec("torch") is not None else []),
    ]
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for round_ in range(args.rounds):
        for n, kind in enumerate(kinds if round_ % 2 == 0 else kinds[::-1]):
            turns = args.turns if kind in ("spin", "futex") else max(200, args.turns // 20)
            found[kind].append(one(kind, args.ranks, args.bytes, turns, round_ * len(kinds) + n))
    table = Table("kind", "median us", "least", "most", title=f"{args.bytes} bytes of each of {args.ranks} ranks")
    for kind, times in found.items():
        table.add_row(kind, *(f"{f(times):.2f}" for f in (statistics.median, min, max)))
    Console().print(table)
    if "gloo" not in found:
        print("torch is not installed: gloo was not measured")
    if args.out:
        save(args.out, {**about(), "bytes": args.bytes, "ranks": args.ranks, "us": found})


if __name__ == "__main__":
    main()
