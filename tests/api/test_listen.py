"""Sockets: a port is claimed once, at once, and what cannot be had is one sentence."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.config.server import ServerConfig
from penstock.server.admission.arguments import key_places
from penstock.server.transport.connections import Connections, network_of
from penstock.server.transport.listen import bind


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def test_a_port_that_is_bound_and_does_not_listen_yet_is_taken() -> None:
    port = free_port()
    first = bind(ServerConfig(port=port))
    try:
        with pytest.raises(ConfigError, match="choose another with --port"):
            bind(ServerConfig(port=port))
        with pytest.raises(ConfigError, match="choose another with --probe-port"):
            bind(ServerConfig(port=0, probe_port=port))
        first.listen()
        with pytest.raises(ConfigError, match=f"port: {port} is in use"):
            bind(ServerConfig(port=port))
    finally:
        first.close()
    bind(ServerConfig(port=port)).close()


def test_a_port_that_somebody_took_in_between_is_one_sentence() -> None:
    mine = bind(ServerConfig(port=0))
    mine.main.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(mine.main.getsockname())
        other.listen()
        with pytest.raises(ConfigError, match="choose another with --port"):
            mine.listen()
    mine.close()


def test_connections_of_a_server_that_has_ended_keep_nobody_from_its_port() -> None:
    first = bind(ServerConfig(port=0))
    first.listen()
    port = first.main.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    served, _ = first.main.accept()
    served.close()  # the side that closes first is the one that waits
    client.close()
    first.close()
    second = bind(ServerConfig(port=port))
    second.listen()
    second.close()


def test_any_port_twice_and_both_ports_are_different() -> None:
    one, two = bind(ServerConfig(port=0, probe_port=0)), bind(ServerConfig(port=0, probe_port=0))
    assert len({sock.getsockname()[1] for sock in one.all + two.all}) == 4
    one.close()
    two.close()


def test_a_unix_socket_is_one_servers(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    first = bind(ServerConfig(uds=path))
    with pytest.raises(ConfigError, match="another server listens"):
        bind(ServerConfig(uds=path))
    assert os.path.exists(path), "it is still the first one's"
    first.listen()
    with pytest.raises(ConfigError, match="another server listens"):
        bind(ServerConfig(uds=path))
    first.close()
    assert os.listdir(tmp_path) == []
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    bind(ServerConfig(uds=path)).close()
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(path)
        foreign.listen()
        with pytest.raises(ConfigError, match="another server listens"):
            bind(ServerConfig(uds=path))
    os.unlink(path)
    assert os.listdir(tmp_path) == []


def test_what_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("text")
    with pytest.raises(ConfigError, match="is no socket"):
        bind(ServerConfig(uds=str(path)))
    assert path.read_text() == "text"
    with pytest.raises(ConfigError, match="too long"):
        bind(ServerConfig(uds=str(tmp_path / ("x" * 150))))
    assert os.listdir(tmp_path) == ["precious"]


def test_keys_are_found_among_arguments() -> None:
    line = b"serve\0--api-key\0one,two\0--admin-api-key=three\0--port\0--api-keys-file\0f\0"
    assert [line[a:b] for a, b in key_places(line)] == [b"one,two", b"three"]
    assert key_places(b"") == []


def test_keys_are_gone_from_the_list_of_processes() -> None:
    script = (
        "from penstock.server.admission.arguments import hide_keys; hide_keys();"
        "print(open('/proc/self/cmdline').read())"
    )  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", script, "--api-key", "sk-secret", "--port", "1"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "sk-secret" not in run.stdout + run.stderr
    assert "*********" in run.stdout
    assert "PENSTOCK_API_KEY" in run.stderr


class Waiting:
    def __init__(self, *, busy: bool = False) -> None:
        self.closed = False
        self._busy = busy

    def give_way(self) -> bool:
        self.closed = not self._busy
        return self.closed


def test_one_address_has_its_share_and_silent_ones_go_before_those_that_asked() -> None:
    room = Connections(8)
    kept, silent = Waiting(), [Waiting() for _ in range(5)]
    assert room.most_of_one == 6
    for one in (kept, *silent):
        assert room.enter(one, ("10.0.0.1", 1))
    room.works(kept)
    room.rests(kept)
    assert room.enter(Waiting(), ("10.0.0.1", 2))
    assert silent[0].closed
    assert [kept.closed, silent[1].closed] == [False, False]
    busy = [Waiting() for _ in range(2)]
    for one in busy:
        assert room.enter(one, ("10.0.0.2", 1))
        room.works(one)
    assert room.enter(Waiting(), ("10.0.0.3", 1)), "of whoever waits"
    assert len(room) == 8
    full = Connections(2)
    for one in busy:
        assert full.enter(one, None)
        full.works(one)
    assert not full.enter(Waiting(), None)
    assert (full.num_refused, len(full)) == (1, 2)


def test_who_counts_as_one() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert network_of("fe80::1%eth0") == network_of("fe80::2")
