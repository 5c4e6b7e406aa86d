"""TLS: files are checked before anything starts, taken up when they change, and may ask clients for certificates."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.base.errors import ConfigError
from penstock.config import serve_from_kwargs
from penstock.config.server import ServerConfig
from penstock.server.live import LiveServer
from penstock.server.transport import tls as tls_module
from penstock.server.transport.tls import open_tls
from tests.api.conftest import bundled

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed pair for 127.0.0.1."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout",
         str(key), "-out", str(cert), "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


@pytest.fixture
def pairs(tmp_path: Path) -> dict[str, tuple[Path, Path]]:
    return {name: certificate(tmp_path, name) for name in ("first", "second", "client")}


def subject(url: str, ca: Path, client: tuple[Path, Path] | None = None) -> str:
    host, port = url.removeprefix("https://").split(":")
    context = ssl.create_default_context(cafile=str(ca))
    if client is not None:
        context.load_cert_chain(*client)
    with (
        socket.create_connection((host, int(port)), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname=host) as sock,
    ):
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        if not sock.recv(4096).startswith(b"HTTP/1.1 200"):
            raise ConnectionError("no answer")
        found = sock.getpeercert()
        assert found is not None
        names: Any = found["subject"]
        return str(dict(pair for rdn in names for pair in rdn)["commonName"])


def test_a_rotated_certificate_is_used_without_a_restart(
    pairs: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 64; also a half-written pair, which must not break the next handshake."""
    monkeypatch.setattr(tls_module, "CHECK_S", 0.05)
    cert, key = tmp_path / "live.pem", tmp_path / "live.key"
    shutil.copy(pairs["first"][0], cert)
    shutil.copy(pairs["first"][1], key)
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", engine_in_process=True, max_model_len=64, num_gpu_blocks_override=8,
        ssl_certfile=str(cert), ssl_keyfile=str(key), ssl_ca_certs=str(pairs["client"][0]),
    )  # fmt: skip
    with LiveServer(config) as live:
        assert live.url.startswith("https://")
        client = pairs["client"]
        assert subject(live.url, pairs["first"][0], client) == "first"
        with pytest.raises((ssl.SSLError, ConnectionError)):
            subject(live.url, pairs["first"][0])  # no client certificate
        with pytest.raises((ssl.SSLError, ConnectionError)):
            subject(live.url, pairs["first"][0], pairs["second"])  # one that nobody vouches for
        with pytest.raises(httpx.HTTPError):
            httpx.get(live.url.replace("https", "http") + "/health")
        assert live.server is not None
        assert live.loop is not None
        tls = live.server.parts["tls"]
        shutil.copy(pairs["second"][0], cert)  # the key is still the old one
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.15), live.loop).result()
        assert subject(live.url, pairs["first"][0], client) == "first"
        shutil.copy(pairs["second"][1], key)
        for _ in range(100):
            if tls.num_rotations:
                break
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.02), live.loop).result()
        assert subject(live.url, pairs["second"][0], client) == "second"


def test_bad_files_are_one_clear_error(pairs: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    (cert, key), (_, other) = pairs["first"], pairs["second"]
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    locked = tmp_path / "locked.key"
    subprocess.run(["openssl", "ec", "-in", str(key), "-out", str(locked), "-aes256", "-passout", "pass:x"],
                   check=True, capture_output=True)  # fmt: skip
    for files, needle in [
        ({"ssl_certfile": str(tmp_path / "none.pem")}, "cannot be read"),
        ({"ssl_certfile": str(tmp_path)}, "cannot be read"),
        ({"ssl_certfile": str(text), "ssl_keyfile": str(key)}, "not a PEM"),
        ({"ssl_certfile": str(cert)}, "not a PEM"),
        ({"ssl_certfile": str(cert), "ssl_keyfile": str(other)}, "not a PEM"),
        ({"ssl_certfile": str(cert), "ssl_keyfile": str(locked)}, "unencrypted"),
        ({"ssl_certfile": str(cert), "ssl_keyfile": str(key), "ssl_ca_certs": str(text)}, "holds no PEM"),
        ({"ssl_keyfile": str(key)}, "without ssl_certfile"),
        ({"ssl_ca_certs": str(cert)}, "without ssl_certfile"),
    ]:
        with pytest.raises(ConfigError, match=needle):
            open_tls(ServerConfig(**files))  # type: ignore[arg-type]
    assert open_tls(ServerConfig()) is None
