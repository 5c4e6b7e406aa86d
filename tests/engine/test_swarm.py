"""H23: a model over servers of layers that are processes: chosen by latency, killed, replaced, lied to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.base.errors import ConfigError, EngineError, InputError
from penstock.cli.swarm import layers_of
from penstock.launch.block_server import listen
from penstock.launch.bundled import bundled_model
from penstock.ops.native.library import best_library
from penstock.runner.block_wire import PeerError
from penstock.runner.shared_secret import make_secret, read_secrets
from penstock.swarm.client import SwarmClient, text_of
from penstock.swarm.model import Layers, SwarmModel, open_swarm_model
from penstock.swarm.server import LayerServer
from penstock.swarm.wire import (
    ANNOUNCE,
    CLOSE,
    DIRECTORY,
    FACTS,
    LAYERS,
    LIST,
    OPEN,
    STEP,
    STEP_HEAD,
    Facts,
    Opening,
    Refused,
    SwarmOffer,
    asked,
    connect,
    hung_up,
    said,
    stepped,
)
from tests.command import penstock

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="sends signals"),
    pytest.mark.skipif(best_library() is None, reason="no native library was built: no C++17 compiler"),
]
LAYERS_OF_NANO = 6
PROMPT = "Once upon a time there was a little"
TOKENS = 40
SETTINGS = {"dtype": "float32", "max_model_len": 256, "threads": 1}
FLAGS = ["--dtype", "float32", "--max-model-len", "256", "--threads", "1"]


def nano() -> str:
    path = bundled_model("nano")
    assert path is not None
    return str(path)


class Swarm:
    """Processes: a directory, and servers by name."""

    def __init__(self, folder: Path) -> None:
        self.secret_file = folder / "secret"
        make_secret(self.secret_file)
        self.secret = read_secrets(self.secret_file).connection
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.begin("directory", "directory", "--listen", "127.0.0.1:0")
        self.directory = self.listens("directory")

    def serve(self, name: str, layers: str, *more: str, flags: list[str] = FLAGS) -> None:
        """Begin a server; `listens` waits for it."""
        self.begin(
            name, "serve", nano(), "--layers", layers, "--directory", self.directory, "--tokens", "1024", *flags, *more
        )

    def begin(self, name: str, action: str, *words: str) -> None:
        command = [sys.executable, "-m", "penstock", "swarm", action, "--secret-file", str(self.secret_file), *words]
        self.processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def listens(self, name: str) -> str:
        """Its address, once it listens."""
        process = self.processes[name]
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line, f"{name} has said nothing and ended with {process.wait()}"
        return line.rpartition(" ")[2]

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def offers(self, count: int) -> list[SwarmOffer]:
        """What the directory tells once so many are there."""
        channel = connect(self.directory, self.secret, DIRECTORY, 30.0)
        until_s = time.monotonic() + 60
        try:
            while True:
                found: list[SwarmOffer] = said(channel, LIST, list[SwarmOffer])
                if len(found) == count or time.monotonic() > until_s:
                    return found
                time.sleep(0.05)
        finally:
            hung_up(channel)

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)


@contextmanager
def swarm(folder: Path) -> Iterator[Swarm]:
    made = Swarm(folder)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def model() -> SwarmModel:
    return open_swarm_model(nano(), **SETTINGS)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """One server of all layers, whom nobody kills."""
    with swarm(tmp_path_factory.mktemp("calm")) as made:
        made.serve("all", "0:6")
        made.offers(1)
        yield made


@contextmanager
def client(model: SwarmModel, of: Swarm, **how: float) -> Iterator[SwarmClient]:
    made = SwarmClient(model, of.directory, of.secret, **({"within_s": 30.0} | how))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def alone() -> list[int]:
    """The tokens of one engine on one process."""
    llm = LLM(nano(), ops="native", **SETTINGS)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    (output,) = llm.generate([PROMPT], params)
    llm.engine.core.executor.close()
    return list(output.outputs[0].token_ids)


def ids_of(model: SwarmModel) -> list[int]:
    tokenizer = model.files.read()
    assert tokenizer is not None
    return tokenizer.encode(PROMPT)


def generated(of: SwarmClient, at: dict[int, Callable[[], None]] | None = None) -> list[int]:
    """`at`: what happens once so many tokens are there."""
    tokens: list[int] = []
    for token in of.generate(ids_of(of.model), TOKENS):
        tokens.append(token)
        if at is not None and len(tokens) in at:
            at[len(tokens)]()
    return tokens


def test_H23_generation_continues_with_the_same_tokens_after_servers_die(
    tmp_path: Path, model: SwarmModel, alone: list[int]
) -> None:
    """Killed in the middle, twice: another one that has these layers is given what the first was, then two that have
    them between them; the chain goes by latency, and the one that was far away is the last resort."""
    with swarm(tmp_path) as made:
        names: list[str] = []
        for name, layers, *more in (
            ("front", "0:3"), ("back", "2:6"), ("far", "2:6", "--delay-ms", "60"),
            ("front too", "0:4", "--delay-ms", "20"),
        ):  # fmt: skip
            made.serve(name, layers, *more)
            names.append(name)
        at = {made.listens(name): name for name in names}
        known = {offer.facts.server: at[offer.address] for offer in made.offers(4)}
        with client(model, made) as one:
            assert generated(one) == alone
            assert [(known[h.server], h.first, h.last) for h in one.counts.chains[0]] == [
                ("front", 0, one.counts.chains[0][0].last), ("back", one.counts.chains[0][0].last, 6)
            ]  # fmt: skip
            assert one.counts.replaced == 0
            assert generated(one, {9: lambda: made.kill("back"), 23: lambda: made.kill("front")}) == alone
            assert one.counts.replaced == 2
            assert one.counts.replayed > 2 * 9, "what was kept was sent again"
            used = [known[h.server] for chain in one.counts.chains[2:] for h in chain]
            assert used[0] == "far"
            assert used[1] == "front too"
            assert len(made.offers(2)) == 2, "who is gone is not found any more"


def test_H23_a_sequence_waits_for_a_server_that_comes_back(tmp_path: Path, model: SwarmModel, alone: list[int]) -> None:
    with swarm(tmp_path) as made:
        made.serve("front", "0:3")
        made.serve("back", "3:6")
        made.offers(2)

        def dies() -> None:
            made.kill("back")
            made.serve("half", "3:5")
            made.serve("other half", "5:6")

        with client(model, made) as one:
            assert generated(one, {5: dies}) == alone
            assert one.counts.waited_s > 0
            assert [(h.first, h.last) for h in one.counts.chains[-1]] == [(3, 5), (5, 6)], "two have them between them"


def test_H23_the_directory_may_die_too(tmp_path: Path, model: SwarmModel, alone: list[int]) -> None:
    """Running sequences do not need it; servers find it again when it is there."""
    with swarm(tmp_path) as made:
        made.serve("all", "0:6")
        made.offers(1)
        with client(model, made, patience_s=1.0) as one:
            assert generated(one, {3: lambda: made.kill("directory")}) == alone
            with pytest.raises(EngineError, match=r"no chain through layers 0 to 5 .* the directory at"):
                generated(one)
            made.begin("directory", "directory", "--listen", made.directory)
            made.listens("directory")
            assert len(made.offers(1)) == 1
            assert generated(one) == alone


def test_H23_without_anybody_for_some_layers_it_says_which(tmp_path: Path, model: SwarmModel) -> None:
    with swarm(tmp_path) as made:
        made.serve("front", "0:4")
        made.serve("stranger", "0:6", flags=["--dtype", "bfloat16", "--threads", "1"])
        made.offers(2)
        sentence = r"layers 4, 5; 1 servers have another model, settings or build"
        with client(model, made, patience_s=0.5) as one, pytest.raises(EngineError, match=sentence):
            generated(one)


def test_garbage_and_strangers_are_refused_and_nobody_else_notices(
    calm: Swarm, model: SwarmModel, alone: list[int]
) -> None:
    (offer,) = calm.offers(1)
    host, _, port = offer.address.rpartition(":")
    with client(model, calm) as one:
        tokens = one.generate(ids_of(model), TOKENS)
        got = [next(tokens) for _ in range(5)]
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(400), b"PSTSPAN\1" + os.urandom(64), b""):
            with socket.create_connection((host, int(port)), 30) as sock:
                sock.sendall(garbage)
                sock.settimeout(30)
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(4096):
                        pass
        with pytest.raises(PeerError, match=r"did not accept the secret|another secret"):
            connect(offer.address, bytes(32), LAYERS, 30.0)
        with pytest.raises(PeerError, match="instead of telling that it is a directory of a swarm"):
            connect(offer.address, calm.secret, DIRECTORY, 30.0)
        for kind, payload in (
            (OPEN, b"\xc1"), (STEP, b""), (STEP, STEP_HEAD.pack(1, 0, 9) + bytes(8)), (77, b""), (CLOSE, b"\x93"),
            (STEP, STEP_HEAD.pack(1, 0, 2**31)),
        ):  # fmt: skip
            channel = connect(offer.address, calm.secret, LAYERS, 30.0)
            channel.send(kind, payload)
            with pytest.raises(PeerError, match=r"closed|reset"):
                channel.receive()
            hung_up(channel)
        for kind, payload in (
            (FACTS, b""),
            (LIST, b"x"),
            (ANNOUNCE, b"\xc1"),
            (ANNOUNCE, b"\x92\xa1x\x96\xa0\xa0\5\5\0\0"),
        ):
            channel = connect(calm.directory, calm.secret, DIRECTORY, 30.0)
            channel.send(kind, payload)
            with pytest.raises(PeerError, match=r"closed|reset"):
                channel.receive()
            hung_up(channel)
        got += list(tokens)
    assert got == alone
    assert calm.offers(1) == [offer] or calm.offers(1)[0].facts.server == offer.facts.server


def test_what_a_server_does_not_do_it_says_in_a_sentence(calm: Swarm, model: SwarmModel) -> None:
    address = calm.offers(1)[0].address
    channel = connect(address, calm.secret, LAYERS, 30.0)
    idle_s = time.monotonic() + 30
    while (facts := said(channel, FACTS, Facts)).free_tokens != 1024 and time.monotonic() < idle_s:
        time.sleep(0.02)
    assert (facts.first, facts.last, facts.free_tokens, facts.identity) == (0, 6, 1024, model.identity)
    assert facts.row_s > 0

    def refuses(match: str, **changed: object) -> None:
        fields = {"session": 1, "identity": model.identity, "first": 1, "last": 3, "num_tokens": 64} | changed
        with pytest.raises(Refused, match=match):
            asked(channel, OPEN, Opening(**fields))

    refuses("another model, other settings or another build", identity="0" * 64)
    refuses("it has layers 0 to 5, not 3 to 6", first=3, last=7)
    refuses("1 to 256 tokens, not 257", num_tokens=257)
    for session in range(1, 5):
        asked(channel, OPEN, Opening(session, model.identity, 1, 3, 256))
    refuses("no room for 64 tokens more", session=9)
    refuses("session 1 is open already")
    rows = np.ones((3, model.width), np.float32)
    whole = stepped(channel, 1, 0, rows)
    assert np.array_equal(stepped(channel, 2, 0, rows[:1]), whole[:1])
    assert np.array_equal(stepped(channel, 2, 1, rows[1:]), whole[1:]), "by itself or in company"
    with pytest.raises(Refused, match="session 1 has 3 of 256 tokens, and is given 3 at 0"):
        stepped(channel, 1, 0, rows)
    with pytest.raises(Refused, match="session 7 is not open"):
        stepped(channel, 7, 0, rows)
    asked(channel, CLOSE, 1)
    with pytest.raises(Refused, match="session 1 is not open"):
        stepped(channel, 1, 3, rows)
    asked(channel, OPEN, Opening(1, model.identity, 2, 6, 256))  # other layers, in blocks that were used
    asked(channel, CLOSE, 2)
    asked(channel, OPEN, Opening(2, model.identity, 1, 3, 256))
    assert np.array_equal(stepped(channel, 2, 0, rows), whole), "in blocks that others had"
    hung_up(channel)
    other = connect(address, calm.secret, LAYERS, 30.0)
    until_s = time.monotonic() + 30
    while said(other, FACTS, Facts).free_tokens != 1024 and time.monotonic() < until_s:
        time.sleep(0.02)
    assert said(other, FACTS, Facts).free_tokens == 1024, "sequences end with their connection"
    hung_up(other)


def test_what_one_sequence_has_left_no_other_one_finds(model: SwarmModel) -> None:
    """Keys and values behind a sequence's end are never read; states are, where it begins."""
    secret = bytes(32)
    server = LayerServer(listen("127.0.0.1:0", anywhere=False), secret, Layers(model, 0, 2), num_tokens=64)
    thread = threading.Thread(target=server.serving.run)
    thread.start()
    channel = connect(server.serving.address, secret, LAYERS, 30.0)

    def used() -> float:
        return max(float(np.abs(array).max()) for planes in server._planes for array in planes.values())

    assert used() == 0, "what was measured with is gone"
    asked(channel, OPEN, Opening(1, model.identity, 0, 2, 64))
    stepped(channel, 1, 0, np.ones((40, model.width), np.float32))
    assert used() > 0
    asked(channel, CLOSE, 1)
    asked(channel, OPEN, Opening(2, model.identity, 0, 2, 64))
    assert used() == 0
    hung_up(channel)
    server.close()
    thread.join(30)


def test_text_comes_as_from_an_engine(calm: Swarm, model: SwarmModel) -> None:
    llm = LLM(nano(), ops="native", **SETTINGS)
    (want,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=TOKENS))
    llm.engine.core.executor.close()
    with client(model, calm) as one:
        pieces: list[str] = []
        assert text_of(one, PROMPT, TOKENS, write=pieces.append) == list(want.outputs[0].token_ids)
        assert "".join(pieces) == want.outputs[0].text
        with pytest.raises(InputError, match="a prompt of 0 tokens"):
            next(one.generate([], 3))
        with pytest.raises(InputError, match="256 at most in all"):
            next(one.generate([5] * 256, 1))
    found = penstock(
        "swarm", "run", nano(), "--directory", calm.directory, "--secret-file", str(calm.secret_file), *FLAGS,
        "--prompt", PROMPT, "--max-tokens", str(TOKENS), "--stats",
    )  # fmt: skip
    assert found.stdout == want.outputs[0].text + "\n"
    assert "0:6 on" in found.stderr
    assert "0 links replaced" in found.stderr


def test_bad_words_are_refused_before_anything_begins(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    make_secret(secret)
    for text in ("0:7", "3:3", "4:2", "x:2", "2", "-1:2", ":", "0:99999999"):
        with pytest.raises(ConfigError, match=r"which has 6: 0:6 are all of them"):
            layers_of(text, LAYERS_OF_NANO)
    assert layers_of("0:6", LAYERS_OF_NANO) == (0, 6)
    for words, sentence in (
        (("run", nano(), "--directory", "nowhere", "--prompt", "x"), "'nowhere' is no HOST:PORT"),
        (("serve", nano(), "--layers", "0:9"), "--layers 0:9 names no layers of this model, which has 6"),
        (("serve", nano(), "--layers", "0:1", "--tokens", "0"), "--tokens is 1 or more"),
        (("serve", nano(), "--layers", "0:1", "--listen", "0.0.0.0:0"), "can be reached from other machines"),
        (("serve", nano(), "--layers", "0:1", "--kv-cache-dtype", "kivi2"), "a swarm computes with native kernels"),
    ):
        found = penstock("swarm", *words, "--secret-file", str(secret))
        assert found.returncode == 1
        assert sentence in found.stderr
    found = penstock("swarm", "run", nano(), "--prompt", "x", "--secret-file", str(tmp_path / "none"))
    assert "--secret-file" in found.stderr
    assert "cannot be read" in found.stderr
