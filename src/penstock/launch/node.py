"""`penstock serve MODEL --headless --node-rank N`: a host that runs ranks for the engine of another one."""

from __future__ import annotations

import logging
import signal
import sys

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.executor.node_agent import NodeAgent
from penstock.executor.node_wire import alike, secret_of
from penstock.launch.hub import local_path
from penstock.launch.progress import loading
from penstock.plan.ranks import ranks_of_host

log = logging.getLogger("penstock.ranks")


def run_node(config: EngineConfig) -> int:
    """Until a signal to end. Raises: ConfigError, ModelError (the model), EngineError if the lead will not have it."""
    run = config.execution
    size, hosts, host = run.tensor_parallel_size, run.nnodes, run.node_rank
    if run.data_parallel_size > 1:
        raise ConfigError(
            "headless: a host with engines of data_parallel_size has a data_parallel_start_rank, the number of its "
            "first engine; give it",
            field="data_parallel_start_rank",
        )
    if not 0 < host < hosts or size % hosts:
        raise ConfigError(
            f"headless: this host has node_rank {host} of nnodes {hosts} and {size} ranks in all; give node_rank 1 or "
            "above, and tensor_parallel_size and nnodes as on the host with node_rank 0",
            field="node_rank",
        )
    secret = secret_of(run.ranks_secret_file, run.master_addr)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))
    with loading("downloading") as progress:
        path = local_path(config.model.model, config.model.revision, progress)
    own = {**config.as_kwargs(), "model": str(path)}
    agent = NodeAgent(run.master_addr, run.master_port, secret, alike(str(path), size, hosts), host, own)
    ranks = ranks_of_host(host, size, hosts)
    log.info("host %d of %d, for ranks %d ... %d", host, hosts, ranks[0], ranks[-1])
    try:
        agent.run()
    except KeyboardInterrupt:
        return 0
    return 0
