"""The server's sockets: claimed before a model is loaded, opened when it can answer.

A port is bound without SO_REUSEADDR if that is possible: two sockets that both have it may be bound to one port as long
as neither listens, and whoever listens second would learn of it only after loading its model. It is set before
listening, so that the connections of this server do not keep the next one from the port.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.base.errors import ConfigError
from penstock.config import ServerConfig

BACKLOG = 2048


@dataclass
class Sockets:
    """`main` and, with `--probe-port`, `probe`. Bound, not listening."""

    main: socket.socket
    probe: socket.socket | None = None
    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def all(self) -> list[socket.socket]:
        return [self.main] if self.probe is None else [self.main, self.probe]

    def listen(self) -> None:
        """Raises ConfigError if somebody else has come to listen there since."""
        for sock, name in zip(self.all, ("port", "probe_port"), strict=False):
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.listen(BACKLOG)
            except OSError as error:
                raise _refusal(error, name, *sock.getsockname()[:2]) from None

    def close(self) -> None:
        for sock in self.all:
            sock.close()
        self.closing.close()


def bind(config: ServerConfig) -> Sockets:
    """Raises ConfigError that says what to change."""
    closing = contextlib.ExitStack()
    with contextlib.ExitStack() as undo:
        undo.callback(closing.close)
        if config.uds is not None:
            main = _bind_unix(config.uds, closing)
        else:
            main = _bind_port(config.host, config.port, "port")
        undo.callback(main.close)
        probe = None
        if config.probe_port is not None:
            probe = _bind_port(config.probe_host or config.host, config.probe_port, "probe_port")
        undo.pop_all()
    return Sockets(main, probe, closing)


def _bind_port(host: str, port: int, name: str) -> socket.socket:
    host_name = name.replace("port", "host")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"{host_name}: {host} is no address of this machine: {error.strerror}", field=host_name
        ) from None
    sock = socket.socket(family, kind, proto)
    try:
        try:
            sock.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # Connections of a server that has just ended hold the port as well, but only against this kind of claim.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except OSError as error:
        sock.close()
        raise _refusal(error, name, host, port) from None
    return sock


def _refusal(error: OSError, name: str, host: str, port: object = "") -> ConfigError:
    if name == "port" and port == "":  # a unix socket
        return ConfigError(f"uds: cannot listen on {host}: {error.strerror}", field="uds")
    if error.errno == errno.EADDRINUSE:
        flag = "--" + name.replace("_", "-")
        return ConfigError(
            f"{name}: {port} is in use on {host}; choose another with {flag} (0: any that is free)", field=name
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"{name}: {port} needs privileges; choose one from 1024", field=name)
    host_name = name.replace("port", "host")
    return ConfigError(f"{host_name}: cannot listen on {host}: {error.strerror}", field=host_name)


def _bind_unix(path: str, closing: contextlib.ExitStack) -> socket.socket:
    """`closing` gets what has to be undone when the server ends."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        closing.enter_context(_owned(path))
        if os.path.lexists(path):
            _take_away(path)
        sock.bind(path)
        closing.callback(_unlink, path)
        os.chmod(path, 0o600)
    except OSError as error:
        sock.close()
        raise ConfigError(f"uds: cannot listen on {path}: {error.strerror or error}", field="uds") from None
    except ConfigError:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def _owned(path: str) -> Iterator[None]:
    """Be the only server that has this path: a socket that does not listen yet looks like one that was left behind."""
    lock = path + ".lock"
    while True:
        number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(number)
            raise ConfigError(f"uds: another server listens on {path}; choose another path", field="uds") from None
        with contextlib.suppress(OSError):
            if os.stat(lock).st_ino == os.fstat(number).st_ino:
                break
        os.close(number)  # the server before has just taken its lock away
    try:
        yield
    finally:
        _unlink(lock)
        os.close(number)


def _take_away(path: str) -> None:
    """What a server that was killed has left. Raises ConfigError for anything else, OSError."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ConfigError(f"uds: {path} is there already and is no socket; choose another path", field="uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            asking.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise ConfigError(f"uds: another server listens on {path}; choose another path", field="uds")


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
