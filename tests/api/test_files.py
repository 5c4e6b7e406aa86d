"""/v1/files, by the official client and by bytes."""

from __future__ import annotations

import io
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from tests.api.conftest import bundled


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files") / "store"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", max_model_len=256, num_gpu_blocks_override=64,
        files_dir=str(folder), max_files_bytes=100_000,
    )  # fmt: skip
    with LiveServer(config) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client
        for file in client.files.list():
            client.files.delete(file.id)


def upload(client: openai.OpenAI, data: bytes, name: str = "in.jsonl") -> openai.types.FileObject:
    return client.files.create(file=(name, io.BytesIO(data)), purpose="batch")


def test_a_file_comes_back_as_it_was_sent(client: openai.OpenAI, folder: Path) -> None:
    data = bytes(range(256)) * 300 + b"\r\n--x"
    made = upload(client, data)
    assert (made.bytes, made.filename, made.purpose, made.object) == (len(data), "in.jsonl", "batch", "file")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == data
    (tenant,) = folder.iterdir()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (folder, tenant)}
    assert modes == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in tenant.iterdir()} == {0o600}


def test_lists_go_page_by_page_and_deleted_files_are_gone(client: openai.OpenAI) -> None:
    ids = [upload(client, b"x%d" % i).id for i in range(5)]
    first = client.files.list(limit=2)
    assert (len(first.data), first.has_more) == (2, True)
    assert {file.id for file in first} == set(ids)  # the client turns the pages
    assert client.files.delete(ids[0]).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(ids[0])
    with pytest.raises(openai.NotFoundError):
        client.files.content(ids[0])


def test_what_is_too_much_is_refused_and_leaves_nothing(client: openai.OpenAI, folder: Path) -> None:
    upload(client, b"a" * 60_000)
    with pytest.raises(openai.APIStatusError, match="more than 100000 bytes") as refused:
        upload(client, b"a" * 60_000)
    assert refused.value.status_code == 413
    (tenant,) = folder.iterdir()
    assert not list(tenant.glob("upload-*"))
    upload(client, b"a" * 30_000)


@pytest.mark.parametrize(
    ("name", "kept"),
    [("../../etc/passwd", "passwd"), ("a\\b\\c.jsonl", "c.jsonl"), ("..", "upload"), ("na\nme\r", "name"),
     ('q"u.jsonl', 'q"u.jsonl'), ("ä" * 300, "ä" * 255)],
)  # fmt: skip
def test_names_are_only_names(client: openai.OpenAI, name: str, kept: str) -> None:
    made = upload(client, b"x", name)
    assert made.filename == kept
    assert client.files.content(made.id).read() == b"x"


@pytest.mark.parametrize("file_id", ["file-0", "../x", "file-" + "0" * 24, "%2e%2e%2fetc", "file-" + "A" * 24])
def test_ids_are_never_paths(server: LiveServer, file_id: str) -> None:
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
        assert httpx.get(server.url + path).status_code == 404


def form(boundary: str, *parts: bytes) -> bytes:
    mark = b"--" + boundary.encode()
    return b"".join(mark + b"\r\n" + part + b"\r\n" for part in parts) + mark + b"--\r\n"


FILE = b'content-disposition: form-data; name="file"; filename="a"\r\n\r\nx'
PURPOSE = b'content-disposition: form-data; name="purpose"\r\n\r\nbatch'


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("application/json", b"{}", "multipart/form-data"),
        ("multipart/form-data", b"x", "boundary"),
        ("multipart/form-data; boundary=b", form("b", PURPOSE), "no file"),
        ("multipart/form-data; boundary=b", form("b", FILE), "purpose must be"),
        ("multipart/form-data; boundary=b", form("b", FILE, PURPOSE.replace(b"batch", b"assistants")), "purpose"),
        ("multipart/form-data; boundary=b", form("b", FILE, FILE, PURPOSE), "more than one file"),
        ("multipart/form-data; boundary=b", form("b", FILE[:-1], PURPOSE), "empty"),
        ("multipart/form-data; boundary=b", form("b", FILE, PURPOSE)[:-6], "cut off"),
        ("multipart/form-data; boundary=b", form("b", PURPOSE + b"h" * 5000, FILE), "longer than"),
        ("multipart/form-data; boundary=b", form("b", *[PURPOSE] * 40), "more than 32 parts"),
        ("multipart/form-data; boundary=b", b"z" * 20_000, "begin with its boundary"),
    ],
)
def test_broken_forms_are_errors(server: LiveServer, folder: Path, kind: str, body: bytes, said: str) -> None:
    answer = httpx.post(server.url + "/v1/files", content=body, headers={"content-type": kind})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert not list(folder.glob("*/upload-*"))
