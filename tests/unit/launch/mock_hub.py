"""A mock of the Hugging Face Hub on real sockets: the answers of its API that a download needs, and a second server
that large files are redirected to, as the hub does. It can be told to misbehave, file by file."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

COMMIT, OLD = "a" * 40, "b" * 40
TOKEN = "hf_secret"
LARGE = (".safetensors", ".gguf", ".bin", ".h5", ".onnx", ".pt")


class MockHub(ThreadingHTTPServer):
    """`repos`: id -> commit -> folder. `log`: every file that was sent. `gated` ids need the token.

    `faults`: file -> what happens to it: "cut" (the connection breaks off half-way, `cuts` times), "endless" (bytes
    without an end), "spoiled" (others of the same number), "whole" (ranges are ignored), "slow" (16 KiB each 20 ms),
    "gone" (404). `listed`: id -> names beside those of the folder. `extra`: fields of the answer about a model.
    """

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.repos: dict[str, dict[str, Path]] = {}
        self.gated: set[str] = set()
        self.log: list[str] = []
        self.ranges: list[tuple[str, int]] = []
        self.tokens: list[tuple[str, str | None]] = []
        self.faults: dict[str, str] = {}
        self.cuts = 1
        self.listed: dict[str, list[str]] = {}
        self.extra: dict[str, Any] = {}
        self.broken = False
        self.store: MockHub | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: MockHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.server.broken:
            return self.answer(503)
        parts = unquote(self.path.split("?")[0]).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo, revision, name = "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main", None
        elif len(parts) < 5:
            return self.answer(404)  # what the library asks besides
        else:
            repo, revision, name = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        revisions = self.server.repos.get(repo)
        if revisions is None:
            return self.answer(404, X_Error_Code="RepoNotFound")
        if repo in self.server.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(403 if self.headers.get("Authorization") else 401, X_Error_Code="GatedRepo")
        names = {"main": next(iter(revisions)), "v1": OLD} | {commit: commit for commit in revisions}
        if names.get(revision) not in revisions:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        commit = names[revision]
        folder = revisions[commit]
        if name is None:
            return self.answer(200, json.dumps(self.about(repo, commit, folder)).encode())
        path = folder / name
        if not path.is_file() or self.server.faults.get(name) == "gone":
            return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        self.server.tokens.append((name, self.headers.get("Authorization")))
        if name.endswith(LARGE) and self.server.store is not None:
            return self.answer(
                302, Location=f"{self.server.store.url}/{quote(str(path), safe='')}", X_Repo_Commit=commit,
                X_Linked_Etag=f'"{sha256(path)}"', X_Linked_Size=str(path.stat().st_size),
            )  # fmt: skip
        return self.send_file(path, name)

    def about(self, repo: str, commit: str, folder: Path) -> dict[str, Any]:
        siblings: list[dict[str, Any]] = []
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            size = path.stat().st_size
            entry: dict[str, Any] = {"rfilename": str(path.relative_to(folder)), "size": size, "blobId": git_sha1(path)}
            if path.name.endswith(LARGE):
                entry["lfs"] = {"sha256": sha256(path), "size": size, "pointerSize": 134}
            siblings.append(entry)
        siblings += [{"rfilename": name, "size": 3, "blobId": "c" * 40} for name in self.server.listed.get(repo, [])]
        return {"_id": "1", "id": repo, "sha": commit, "private": False, "gated": False, "siblings": siblings,
                "cardData": {"license": "apache-2.0"}, **self.server.extra}  # fmt: skip

    def send_file(self, path: Path, name: str) -> None:
        owner = self.server
        body, start = path.read_bytes(), 0
        fault = owner.faults.get(name)
        wanted = self.headers.get("Range", "")
        if wanted and fault != "whole":
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        if self.command == "GET":
            owner.log.append(name)
            owner.ranges.append((name, start))
        if fault == "spoiled":
            body = bytes(byte ^ 1 for byte in body)
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{sha256(path)}"')
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        if fault == "endless":
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            if fault == "endless":
                while True:
                    self.wfile.write(b"x" * 65536)
            if fault == "cut" and owner.cuts > 0:
                owner.cuts -= 1
                self.wfile.write(body[start : start + (len(body) - start) // 2])
                self.close_connection = True
                return
            step = 16384 if fault == "slow" else 1 << 20
            for at in range(start, len(body), step):
                self.wfile.write(body[at : at + step])
                if fault == "slow":
                    time.sleep(0.02)
        except OSError:  # whoever asked has gone
            self.close_connection = True


class StoreHandler(Handler):
    """Where large files lie."""

    def do_GET(self) -> None:
        path = Path(unquote(self.path.lstrip("/")))
        self.server.tokens.append((path.name, self.headers.get("Authorization")))
        self.send_file(path, path.name)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git_sha1(path: Path) -> str:
    return hashlib.sha1(b"blob %d\0" % path.stat().st_size + path.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def running() -> Iterator[MockHub]:
    """The hub with its store, on threads, until the end of the context."""
    store, hub = MockHub(StoreHandler), MockHub()
    hub.store = store
    store.log, store.ranges, store.faults = hub.log, hub.ranges, hub.faults
    threads = [threading.Thread(target=s.serve_forever, kwargs={"poll_interval": 0.01}) for s in (hub, store)]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server in (hub, store):
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()
