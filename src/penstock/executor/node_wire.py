"""How hosts of one model meet: who may, and what both have to have alike before a rank of one computes for the other.

Every connection begins in the same way, whatever it is for. Both know a secret; each proves it by an HMAC over a number
that the other has just drawn, the host that connects first, so that who has not the secret learns nothing. What is said
then is msgpack in frames with MACs (`runner.block_wire.Channel`). No pickle.

    host                        lead (node_rank 0)
    preface (magic, version)
                                preface, 32 drawn bytes
    32 drawn bytes, proof
                                proof
    Joins
                                HostAnswer

After that a connection for steps, or for what ranks give each other, has bytes of its own protocol, unsigned.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.base.errors import ConfigError, EngineError
from penstock.base.hashing import digest
from penstock.engine import wire
from penstock.executor.messages import FromRank, ToRank
from penstock.families.registry import open_model
from penstock.formats.files import quoted
from penstock.ops.native.content_key import content_key
from penstock.ops.native.library import best_library, libraries
from penstock.runner.block_wire import Channel, PeerError, lost, receive_exactly
from penstock.runner.shared_secret import read_secrets

VERSION = 1
_MAGIC = b"PSTRANK"
PREFACE = _MAGIC + bytes([VERSION])
MOST_BYTES = 16 << 20
"""Of a frame before ranks run: a rank's description is some kilobytes."""
WITHIN_S = 10.0
"""The longest that an answer may take while hosts meet."""
_DRAWN, _PROOF = 32, 32
_SAY = 0
FIELD = "ranks_secret_file"
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A host that has lost its power says nothing any more: it is found out after 25 s."""
_UNSENT_MS = 25_000


class Alike(msgspec.Struct, frozen=True, array_like=True):
    """What two hosts must have alike: messages and version, instruction set and kernels' file, model, sizes."""

    build: str
    isa: str
    kernels: str
    model: str
    ranks: int
    hosts: int


class Joins(msgspec.Struct, frozen=True, array_like=True):
    """What a host connects for. `host`: its node_rank. `node`: it has come, and waits. In a `group` that began:
    `relay`: what ranks give each other; `steps`, `aside`: the two sockets of rank `rank` (`executor.multiproc`), in
    whose process `exchange` is the descriptor of memory, and `own` settings of that host."""

    what: Literal["node", "relay", "steps", "aside"]
    host: int
    group: str = ""
    rank: int = -1
    exchange: int = -1
    model: str = ""
    own: dict[str, Any] = {}


class HostAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`problem`: why not, in a sentence; "": welcome. `for_good`: to come again makes no sense."""

    problem: str = ""
    for_good: bool = False


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """Start these ranks. `group`: the name of this beginning; `config`: the lead's settings."""

    group: str
    first: int
    count: int
    config: dict[str, Any]


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """One of the host's ranks has ended, and so all of them. `status`: as of `subprocess.Popen`."""

    rank: int
    status: int


class HostRefusedError(EngineError):
    """The lead does not take this host, for good."""


def alike(model: str, ranks: int, hosts: int) -> Alike:
    """`model`: folder or file of the weights, which are hashed whole (`ops.native.content_key`). Raises ModelError, and
    EngineError without native kernels."""
    checkpoint = open_model(model)
    files = sorted({tensor.path for weight in checkpoint.weights.values() for tensor in weight.tensors})
    identity = content_key(files, "ranks", repr(checkpoint.spec))
    library = best_library()
    if library is None:
        raise EngineError("ranks on several hosts need native kernels, and there are none")
    isa = library.pst_isa_name().decode()
    messages = wire.identity(ToRank, FromRank, Joins, HostAnswer, Begin, Ended)
    return Alike(messages, isa, digest(libraries()[isa].read_bytes()).hex(), identity, ranks, hosts)


def difference(lead: Alike, host: list[Any], number: int) -> str:
    """Why ranks of `host` (an `Alike`, undecoded) cannot compute for the lead's; "": they can."""
    theirs = dict(zip(Alike.__struct_fields__, host, strict=False))
    version, other = (str(said).partition("-")[0] for said in (lead.build, theirs.get("build")))
    if theirs.get("build") != lead.build:
        return (
            f"host {number} has another build of Penstock ({other}) than the lead ({version}); install the same on both"
        )
    if theirs.get("isa") != lead.isa:
        return (
            f"host {number} computes with {theirs.get('isa')} and the lead with {lead.isa}, whose bits differ; set "
            "PENSTOCK_CPU_ISA to one that both have"
        )
    if theirs.get("kernels") != lead.kernels:
        return f"host {number} has native kernels of another build than the lead; install the same on both"
    if theirs.get("model") != lead.model:
        return f"host {number} has another model than the lead; give both the same files"
    if (theirs.get("ranks"), theirs.get("hosts")) != (lead.ranks, lead.hosts):
        return (
            f"host {number} was started for {theirs.get('ranks')} ranks on {theirs.get('hosts')} hosts, and the lead "
            f"for {lead.ranks} on {lead.hosts}; give both the same tensor_parallel_size and nnodes"
        )
    return ""


def secret_of(path: str | None, address: str) -> bytes:
    """What hosts share; without a file nothing, which is enough on one machine. Raises ConfigError."""
    if path is not None:
        return read_secrets(Path(path), FIELD).connection
    if not is_loopback(address):
        raise ConfigError(
            f"{FIELD}: other hosts can reach {address}, so ranks need a secret there: a file of one line (openssl rand "
            "-hex 32), the same on each host; without one master_addr has to be 127.0.0.1",
            field=FIELD,
        )
    return b"penstock ranks on one machine"


def is_loopback(address: str) -> bool:
    """Raises ConfigError for a name that nobody knows."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"master_addr: {quoted(address)} is not known: {error}", field="master_addr") from error
    return all(ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback for info in found)


def listen(address: str, port: int) -> socket.socket:
    """Raises ConfigError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=128)
    except OSError as error:
        why = "it is taken" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise ConfigError(
            f"master_port: {address} port {port} cannot be listened to: {why}; name an address of this host and a "
            "port that is free, the same on all hosts",
            field="master_port",
        ) from error


def join(address: str, port: int, secret: bytes, own: Alike, joins: Joins) -> Channel:
    """A connection that the lead has agreed to. Raises HostRefusedError, PeerError (lost, slow, version, secret,
    busy)."""
    try:
        sock = socket.create_connection((address, port), WITHIN_S)
    except OSError as error:
        raise lost(error) from error
    try:
        return _join(sock, secret, own, joins)
    except BaseException:
        sock.close()
        raise


def _join(sock: socket.socket, secret: bytes, own: Alike, joins: Joins) -> Channel:
    _prepare(sock)
    _send(sock, PREFACE)
    hello = bytes(receive_exactly(sock, len(PREFACE), WITHIN_S))
    if hello[: len(_MAGIC)] != _MAGIC:
        raise PeerError("version", "no lead of ranks listens there; give the lead's master_addr and master_port")
    if hello != PREFACE:
        raise PeerError("version", f"the lead speaks version {hello[-1]} of the protocol, and this host {VERSION}")
    theirs, ours = bytes(receive_exactly(sock, _DRAWN, WITHIN_S)), secrets.token_bytes(_DRAWN)
    _send(sock, ours + _proof(secret, b"host", theirs, ours))
    try:
        answer = bytes(receive_exactly(sock, _PROOF, WITHIN_S))
    except PeerError as error:
        raise PeerError("secret", "the lead did not accept the secret") from error
    if not hmac.compare_digest(answer, _proof(secret, b"lead", theirs, ours)):
        raise PeerError("secret", "the lead has another secret")
    keys = [_proof(secret, way, theirs, ours) for way in (b"to lead", b"to host")]
    channel = Channel(sock, keys[0], keys[1], WITHIN_S)
    say(channel, [own, joins])
    joined = hear(channel, HostAnswer)
    if joined.problem:
        raise HostRefusedError(joined.problem) if joined.for_good else PeerError("busy", joined.problem)
    return channel


def admit(sock: socket.socket, secret: bytes) -> tuple[Channel, list[Any], Any]:
    """The lead's part: the channel, the host's `Alike` and its `Joins`, both undecoded. It is to be answered with a
    HostAnswer. Raises PeerError."""
    _prepare(sock)
    hello = receive_exactly(sock, len(PREFACE), WITHIN_S)
    if hello[: len(_MAGIC)] != _MAGIC:
        raise PeerError("version", "it does not speak the protocol of ranks")
    ours = secrets.token_bytes(_DRAWN)
    _send(sock, PREFACE + ours)
    if hello != PREFACE:
        raise PeerError("version", f"it speaks version {hello[-1]} of the protocol, and this side version {VERSION}")
    answer = receive_exactly(sock, _DRAWN + _PROOF, WITHIN_S)
    theirs, proof = bytes(answer[:_DRAWN]), bytes(answer[_DRAWN:])
    if not hmac.compare_digest(proof, _proof(secret, b"host", ours, theirs)):
        raise PeerError("secret", "it has another secret")
    _send(sock, _proof(secret, b"lead", ours, theirs))
    keys = [_proof(secret, way, ours, theirs) for way in (b"to host", b"to lead")]
    channel = Channel(sock, keys[0], keys[1], WITHIN_S)
    said = hear(channel, list)
    if len(said) != 2 or not isinstance(said[0], list):
        raise PeerError("version", "it says something else than a host of ranks would")
    return channel, said[0], said[1]


def say(channel: Channel, message: Any) -> None:
    """Raises PeerError."""
    channel.send(_SAY, msgspec.msgpack.encode(message))


def hear(channel: Channel, kind: Any) -> Any:
    """The next message, a `kind`. Raises PeerError, also for anything else."""
    number, data = channel.receive(MOST_BYTES)
    try:
        if number == _SAY:
            return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError:
        pass
    raise PeerError("version", "it says something that this build does not know")


def _prepare(sock: socket.socket) -> None:
    """Small frames go at once, and a host that has lost its power is found out."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (*_KEEPALIVE, (socket.TCP_USER_TIMEOUT, _UNSENT_MS)):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _proof(secret: bytes, role: bytes, of_lead: bytes, of_host: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + of_lead + of_host, "sha256")


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.settimeout(WITHIN_S)
        sock.sendall(data)
    except OSError as error:
        raise lost(error) from error
