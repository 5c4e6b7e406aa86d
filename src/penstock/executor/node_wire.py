"""How hosts of one model meet: who may, and what both have to have alike before one computes for the other: ranks of
one engine (`executor.nodes`), or engines of one server (`launch.engine_hosts`).

Every connection begins in the same way, whatever it is for. Both know a secret; each proves it by an HMAC over a number
that the other has just drawn, the host that connects first, so that who has not the secret learns nothing. What is said
then is msgpack in frames with MACs (`runner.block_wire.Channel`). No pickle.

    host                        lead (node_rank 0, or the server)
    preface (magic, version)
                                preface, 32 drawn bytes
    32 drawn bytes, proof
                                proof
    Joins (of engines: EngineJoins)
                                HostAnswer

After that a connection for steps, for what ranks give each other, or of an engine, has bytes of its own protocol,
unsigned.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.base.errors import ConfigError, EngineError
from penstock.base.hashing import digest
from penstock.core.engine_host import FromEngineHost, ToEngineHost
from penstock.core.messages import FromEngine, ToEngine
from penstock.engine import wire
from penstock.executor.messages import FromRank, ToRank
from penstock.families.registry import open_model
from penstock.formats.files import quoted
from penstock.ops.native.content_key import content_key
from penstock.ops.native.library import best_library, libraries
from penstock.runner.block_wire import Channel, PeerError, lost, receive_exactly
from penstock.runner.shared_secret import read_secrets

VERSION = 1


@dataclass(frozen=True)
class Meeting:
    """What hosts meet for. `magic`: the first bytes of it. `lead`: who listens, in sentences; `nobody`: another program
    listens there; `address`, `port`: the settings that say where."""

    magic: bytes
    lead: str
    nobody: str
    address: str
    port: str

    @property
    def preface(self) -> bytes:
        return self.magic + bytes([VERSION])


RANKS = Meeting(
    b"PSTRANK", "the lead", "no lead of ranks listens there; give the lead's master_addr and master_port",
    "master_addr", "master_port",
)  # fmt: skip
ENGINES = Meeting(
    b"PSTENGN", "the server",
    "no server that takes engines listens there; give its data_parallel_address and data_parallel_rpc_port",
    "data_parallel_address", "data_parallel_rpc_port",
)  # fmt: skip
PREFACE = RANKS.preface
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
    """What two hosts must have alike: messages and version, instruction set and kernels' file, model; of ranks also how
    many on how many hosts."""

    build: str
    isa: str
    kernels: str
    model: str
    ranks: int = 1
    hosts: int = 1


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


class EngineJoins(msgspec.Struct, frozen=True, array_like=True):
    """What a host with engines connects for. `host`: engine `number` of the server's `size` may run there. `engine`: it
    runs, and this is its connection, as the one who began `group` asked. `name`: of the machine. `own`: settings that
    the host has for itself; `given`: others that were given there, which have to be the server's."""

    what: Literal["host", "engine"]
    number: int
    size: int
    group: str = ""
    name: str = ""
    own: dict[str, Any] = {}
    given: dict[str, Any] = {}


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
    isa, kernels = _kernels()
    if not isa:
        raise EngineError("ranks on several hosts need native kernels, and there are none")
    messages = wire.identity(ToRank, FromRank, Joins, HostAnswer, Begin, Ended)
    return Alike(messages, isa, kernels, _content(model, "ranks"), ranks, hosts)


def alike_engines(model: str) -> Alike:
    """The same of a host with engines of a server. Raises ModelError."""
    return Alike(alike_messages(), *_kernels(), _content(model, "engines"))


def alike_messages() -> str:
    """Version and messages of a host with engines."""
    return wire.identity(ToEngine, FromEngine, EngineJoins, HostAnswer, ToEngineHost, FromEngineHost)


def _kernels() -> tuple[str, str]:
    """Instruction set, and hash of the kernels' file; empty without native kernels."""
    library = best_library()
    if library is None:
        return "", ""
    isa = library.pst_isa_name().decode()
    return isa, digest(libraries()[isa].read_bytes()).hex()


def terms() -> str:
    """What another host needs to meet with this one, for people: equal on both, or they do not."""
    isa, kernels = _kernels()
    version, _, messages = alike_messages().partition("-")
    native = f"{isa} kernels {kernels[:8]}" if isa else "no native kernels"
    return f"Penstock {version} (messages {messages[:8]}), {native}"


def _content(model: str, use: str) -> str:
    checkpoint = open_model(model)
    files = sorted({tensor.path for weight in checkpoint.weights.values() for tensor in weight.tensors})
    return content_key(files, use, repr(checkpoint.spec))


def difference(lead: Alike, host: list[Any], number: int, meeting: Meeting = RANKS) -> str:
    """Why ranks or engines of `host` (an `Alike`, undecoded) cannot compute for the lead's; "": they can."""
    theirs = dict(zip(Alike.__struct_fields__, host, strict=False))
    version, other = (str(said).partition("-")[0] for said in (lead.build, theirs.get("build")))
    who, whose = (f"host {number}" if meeting is RANKS else f"the host of engine {number}"), meeting.lead
    if theirs.get("build") != lead.build:
        return f"{who} has another build of Penstock ({other}) than {whose} ({version}); install the same on both"
    if theirs.get("isa") != lead.isa:
        return (
            f"{who} computes with {theirs.get('isa')} and {whose} with {lead.isa}, whose bits differ; set "
            "PENSTOCK_CPU_ISA to one that both have"
        )
    if theirs.get("kernels") != lead.kernels:
        return f"{who} has native kernels of another build than {whose}; install the same on both"
    if theirs.get("model") != lead.model:
        return f"{who} has another model than {whose}; give both the same files"
    if (theirs.get("ranks"), theirs.get("hosts")) != (lead.ranks, lead.hosts):
        return (
            f"host {number} was started for {theirs.get('ranks')} ranks on {theirs.get('hosts')} hosts, and the lead "
            f"for {lead.ranks} on {lead.hosts}; give both the same tensor_parallel_size and nnodes"
        )
    return ""


def secret_of(path: str | None, address: str, meeting: Meeting = RANKS) -> bytes:
    """What hosts share; without a file nothing, which is enough on one machine. Raises ConfigError."""
    if path is not None:
        secret = read_secrets(Path(path), FIELD).connection
        return secret if meeting is RANKS else hmac.digest(secret, meeting.magic, "sha256")
    if not is_loopback(address, meeting):
        what = "ranks" if meeting is RANKS else "engines"
        raise ConfigError(
            f"{FIELD}: other hosts can reach {address}, so {what} need a secret there: a file of one line (openssl "
            f"rand -hex 32), the same on each host; without one {meeting.address} has to be 127.0.0.1",
            field=FIELD,
        )
    return b"penstock ranks on one machine"


def is_loopback(address: str, meeting: Meeting = RANKS) -> bool:
    """Raises ConfigError for a name that nobody knows."""
    field = meeting.address
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{field}: {quoted(address)} is not known: {error}", field=field) from error
    return all(ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback for info in found)


def listen(address: str, port: int, meeting: Meeting = RANKS) -> socket.socket:
    """Raises ConfigError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=128)
    except OSError as error:
        why = "it is taken" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise ConfigError(
            f"{meeting.port}: {address} port {port} cannot be listened to: {why}; name an address of this host and a "
            "port that is free, the same on all hosts",
            field=meeting.port,
        ) from error


def join(
    address: str, port: int, secret: bytes, own: Alike, joins: Joins | EngineJoins, meeting: Meeting = RANKS
) -> Channel:
    """A connection that the lead has agreed to. Raises HostRefusedError, PeerError (lost, slow, version, secret,
    busy)."""
    try:
        sock = socket.create_connection((address, port), WITHIN_S)
    except OSError as error:
        raise lost(error) from error
    try:
        return _join(sock, secret, own, joins, meeting)
    except BaseException:
        sock.close()
        raise


def _join(
    sock: socket.socket, secret: bytes, own: Alike, joins: Joins | EngineJoins, meeting: Meeting
) -> Channel:  # fmt: skip
    _prepare(sock)
    preface, lead = meeting.preface, meeting.lead
    _send(sock, preface)
    hello = bytes(receive_exactly(sock, len(preface), WITHIN_S))
    if hello[: len(meeting.magic)] != meeting.magic:
        raise PeerError("version", meeting.nobody)
    if hello != preface:
        raise PeerError("version", f"{lead} speaks version {hello[-1]} of the protocol, and this host {VERSION}")
    theirs, ours = bytes(receive_exactly(sock, _DRAWN, WITHIN_S)), secrets.token_bytes(_DRAWN)
    _send(sock, ours + _proof(secret, b"host", theirs, ours))
    try:
        answer = bytes(receive_exactly(sock, _PROOF, WITHIN_S))
    except PeerError as error:
        raise PeerError("secret", f"{lead} did not accept the secret") from error
    if not hmac.compare_digest(answer, _proof(secret, b"lead", theirs, ours)):
        raise PeerError("secret", f"{lead} has another secret")
    keys = [_proof(secret, way, theirs, ours) for way in (b"to lead", b"to host")]
    channel = Channel(sock, keys[0], keys[1], WITHIN_S)
    say(channel, [own, joins])
    joined = hear(channel, HostAnswer)
    if joined.problem:
        raise HostRefusedError(joined.problem) if joined.for_good else PeerError("busy", joined.problem)
    return channel


def admit(sock: socket.socket, secret: bytes, meeting: Meeting = RANKS) -> tuple[Channel, list[Any], Any]:
    """The lead's part: the channel, the host's `Alike` and its `Joins`, both undecoded. It is to be answered with a
    HostAnswer. Raises PeerError."""
    _prepare(sock)
    preface = meeting.preface
    hello = receive_exactly(sock, len(preface), WITHIN_S)
    what = "ranks" if meeting is RANKS else "engines"
    if hello[: len(meeting.magic)] != meeting.magic:
        raise PeerError("version", f"it does not speak the protocol of {what}")
    ours = secrets.token_bytes(_DRAWN)
    _send(sock, preface + ours)
    if hello != preface:
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
        raise PeerError("version", f"it says something else than a host of {what} would")
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
