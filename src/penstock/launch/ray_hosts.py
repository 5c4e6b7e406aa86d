"""`--distributed-executor-backend ray`: the further hosts of `--nnodes`, or with engines of `--data-parallel-size`, are
nodes of a Ray cluster.

This process is the first host. Ray reserves processors on as many nodes (a placement group, each bundle on another
node) and keeps an actor on each of the others, which starts `penstock serve --headless` and watches it; an actor that
ends is made again, where there is room for its bundle. Steps, activations, keys and tokens go between our own processes
as they always do (`executor.nodes`, `launch.engine_hosts`); through Ray go the words of a command line and the hosts'
secret. Only hosts of the same build, kernels and model are taken, as without Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import tempfile
import threading
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.launch.ray_host import RankHostActor
from penstock.runner.shared_secret import read_secrets

PLACED_S = 60.0
"""The cluster has so long to reserve what the hosts need."""
ANSWERS_S = 5.0
"""Whether anybody listens at RAY_ADDRESS is known by then."""
_AGAIN_S = 2.0
"""Before a process that has ended is begun again."""
FIELD = "distributed_executor_backend"
log = logging.getLogger("penstock.ranks")


class RayHosts:
    """Hosts of ranks, or with an engine each, in a cluster, until `close`. `config`: the engine's, with the address and
    the secret they have."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises: ConfigError for Ray that is not there, a cluster that is not, or has too few nodes."""
        run = config.execution
        if run.nnodes < 2 and not run.num_elsewhere:
            raise ConfigError(
                f"{FIELD}: ray places the hosts of nnodes, and there is one, this process; give nnodes 2 or more (and "
                "tensor_parallel_size), or data_parallel_size 2 or more, or leave it away",
                field=FIELD,
            )
        self._run = run
        self._engines = run.num_elsewhere
        self._field = "data_parallel_size" if self._engines else "nnodes"
        self._ray = ray = _ray()
        self._began = not ray.is_initialized()
        if self._began:
            _join_cluster(ray)
        self._name = f"penstock-{os.getpid()}-{secrets.token_hex(4)}"
        self._secret_file: str | None = None
        self._group: Any = None
        self._actors: list[Any] = []
        self._watcher: threading.Thread | None = None
        self._closing = threading.Event()
        try:
            address = run.data_parallel_address if self._engines else run.master_addr
            if address == "127.0.0.1":
                address = ray.util.get_node_ip_address()
            secret = self._secret(run.ranks_secret_file)
            self.config = replace(
                config,
                execution=replace(
                    run, distributed_executor_backend="mp",
                    ranks_secret_file=run.ranks_secret_file or self._secret_file,
                    **self._whereabouts(address),
                ),
            )  # fmt: skip
            self._group = self._placed()
            for host in range(1, len(self._num_cpus)):
                self._actors.append(self._actor(host, secret))
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="penstock-ray", daemon=True)
        self._watcher.start()

    def _whereabouts(self, address: str) -> dict[str, Any]:
        """Settings that say where the hosts meet, and that this one is the first."""
        if not self._engines:
            return {"master_addr": address}
        return {"data_parallel_address": address, "data_parallel_size_local": self._run.size_here}

    @property
    def _num_cpus(self) -> list[int]:
        """Processors of each host, the first one's first."""
        run = self._run
        each = run.num_ranks // run.nnodes * (run.threads or 1)
        if self._engines:
            return [run.size_here * each, *[each] * self._engines]
        return [each] * run.nnodes

    def _secret(self, path: str | None) -> str:
        """Of a file that was given, or drawn, in a file that only this user can read."""
        if path is not None:
            read_secrets(Path(path), "ranks_secret_file")  # what is wrong with it is said here
            return Path(path).read_text().strip()
        secret = secrets.token_hex(32)
        number, self._secret_file = tempfile.mkstemp(prefix="penstock-ranks-")
        with open(number, "w") as out:
            out.write(secret + "\n")
        return secret

    def _placed(self) -> Any:
        """A placement group: processors for what runs on each host, the first one's on this node."""
        ray, wanted = self._ray, self._num_cpus
        nodes = [node for node in ray.nodes() if node["Alive"]]
        num_cpus = wanted[-1]
        fitting = [node for node in nodes if node["Resources"].get("CPU", 0) >= num_cpus]
        if len(fitting) < len(wanted) - (not wanted[0]):
            raise ConfigError(
                f"{self._field}: {len(wanted)} hosts of {num_cpus} processors each want as many nodes, and of the "
                f"cluster's {len(nodes)} have {len(fitting)} as many; add nodes (ray start --address ...), or use "
                "fewer hosts or threads",
                field=self._field,
            )
        here = ray.get_runtime_context().get_node_id()
        # Without an engine here a little of this node is reserved all the same: it is not to have another's.
        group = ray.util.placement_group(
            [{"CPU": float(cpus)} if cpus else {"CPU": 0.001} for cpus in wanted], strategy="STRICT_SPREAD",
            name=self._name, bundle_label_selector=[{"ray.io/node-id": here}, *[{}] * (len(wanted) - 1)],
        )  # fmt: skip
        if not group.wait(PLACED_S):
            ray.util.remove_placement_group(group)
            raise ConfigError(
                f"{self._field}: the cluster could not reserve {num_cpus} processors on each of {len(wanted)} nodes "
                f"within {PLACED_S:g} s: others have them (ray status says who); wait, add nodes, or use fewer hosts "
                "or threads",
                field=self._field,
            )
        return group

    def _actor(self, host: int, secret: str) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        run = self.config.execution
        words = ["serve", self.config.model.model, "--headless", *self._words(host)]
        words += ["--threads", str(run.threads)] if run.threads else []
        words += ["--revision", self.config.model.revision] if self.config.model.revision else []
        where = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=host)
        made = self._ray.remote(RankHostActor).options(
            num_cpus=0, max_restarts=-1, max_concurrency=3, scheduling_strategy=where,
            name=f"{self._name}-host-{host}",
        )  # fmt: skip
        return made.remote(words, secret)

    def _words(self, host: int) -> list[str]:
        run = self.config.execution
        if self._engines:
            said = {
                "size": run.data_parallel_size, "size-local": 1, "start-rank": run.size_here + host - 1,
                "address": run.data_parallel_address, "rpc-port": run.data_parallel_rpc_port,
            }  # fmt: skip
            return [word for name, value in said.items() for word in (f"--data-parallel-{name}", str(value))]
        return [
            "--tensor-parallel-size", str(run.tensor_parallel_size), "--nnodes", str(run.nnodes), "--node-rank",
            str(host), "--master-addr", run.master_addr, "--master-port", str(run.master_port),
        ]  # fmt: skip

    def pids(self) -> list[tuple[int, int]]:
        """Of each host's actor and its process. For tests and people."""
        return [tuple(found) for found in self._ray.get([actor.pids.remote() for actor in self._actors])]

    def _watch(self) -> None:
        """Begins a host's process, again when it has ended. One that will never be taken says why, each time."""
        ray = self._ray
        running = {actor.run.remote(): host for host, actor in enumerate(self._actors, 1)}
        while not self._closing.is_set() and running:
            done, _ = ray.wait(list(running), timeout=0.5)
            for ref in done:
                host = running.pop(ref)
                try:
                    status, said = ray.get(ref)
                    log.warning("host %d: its process ended with %d: %s", host, status, said or "it said nothing")
                except Exception as error:
                    if not self._closing.is_set():
                        log.warning("host %d: %s", host, str(error).strip().splitlines()[-1])
                if not self._closing.wait(_AGAIN_S):
                    running[self._actors[host - 1].run.remote()] = host

    def close(self) -> None:
        """Nothing of it is left in the cluster."""
        self._closing.set()
        ray = self._ray
        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)  # its process dies with it
        if self._watcher is not None:
            self._watcher.join(5)
        if self._group is not None:
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(self._group)
        if self._secret_file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._secret_file)
        if self._began:
            ray.shutdown()


def _ray() -> Any:
    if find_spec("ray") is None:
        raise ConfigError(
            f"{FIELD}: ray is not installed here; pip install 'penstock[ray]', or start the hosts by hand "
            "(--headless) and leave it away",
            field=FIELD,
        )
    import ray

    return ray


def _join_cluster(ray: Any) -> None:
    """RAY_ADDRESS, or the cluster that was started on this machine. None is started: its nodes would be this one."""
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        if (port := address.rpartition(":")[2]).isdigit() and "//" not in address:
            # Ray itself would try for minutes.
            socket.create_connection((address.rpartition(":")[0].strip("[]"), int(port)), ANSWERS_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{FIELD}: no Ray cluster answers ({str(error).strip().splitlines()[0]}); start one (ray start --head, and "
            "ray start --address on the others), or name it in RAY_ADDRESS",
            field=FIELD,
        ) from error
