"""/v1/files."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from penstock.base.errors import InputError
from penstock.server.batches.files import GROWING, FileStore, Upload
from penstock.server.call import Tenant
from penstock.server.context import Server
from penstock.server.schema.files import FileDeleted, FileList, FileObject
from penstock.server.transport.multipart import Event, MultipartReader, Part, PartEnd, boundary_of
from penstock.server.transport.sse import as_json

T = TypeVar("T", bound=msgspec.Struct)
_WRITE_BYTES = 1 << 20
_MAX_FIELD_BYTES = 4096
_BYTES = "application/octet-stream"
_PURPOSES = ("batch", "fine-tune")


def parts_of(request: Request) -> tuple[Server, Tenant, FileStore]:
    server: Server = request.app.state.server
    return server, request.state.tenant, server.parts["files"]


def page(request: Request, items: list[T], default: int) -> tuple[list[T], bool]:
    """The part of a list that `after`, `limit` and `order` ask for, and whether there is more. Raises InputError."""
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InputError("order must be asc or desc", param="order")
    return part(items if order == "desc" else items[::-1], query.get("limit"), default, query.get("after"))


def part(listed: list[T], given: str | None, default: int, after: str | None) -> tuple[list[T], bool]:
    """`given` items of a list, `default` if that is None, behind the one called `after`. Raises InputError."""
    try:
        limit = int(default if given is None else given)
    except ValueError:
        limit = 0
    if not 1 <= limit <= 10_000:
        raise InputError("limit must be a whole number from 1 to 10000", param="limit")
    if after is not None:
        ids = [getattr(item, "id") for item in listed]  # noqa: B009  every struct here has one
        if after not in ids:
            raise InputError(f"there is nothing called {after[:64]!r} to go on after", param="after")
        listed = listed[ids.index(after) + 1 :]
    return listed[:limit], len(listed) > limit


class _Form:
    """What a form of one file and a few fields says, as it arrives."""

    def __init__(self, store: FileStore, tenant: Tenant) -> None:
        self._store, self._tenant = store, tenant
        self.fields: dict[str, str] = {}
        self.upload: Upload | None = None
        self.filename: str | None = None
        self._part: Part | None = None
        self._value = bytearray()
        self._pending = bytearray()

    async def take(self, event: Event) -> None:
        if isinstance(event, Part):
            await self._begin(event)
        elif isinstance(event, PartEnd):
            await self._end()
        elif self._part is not None and self._part.name == "file":
            self._pending += event
            if len(self._pending) >= _WRITE_BYTES:
                await self._write()
        else:
            self._value += event
            if len(self._value) > _MAX_FIELD_BYTES:
                raise InputError(f"the field is longer than {_MAX_FIELD_BYTES} bytes", param=self._name())

    async def _begin(self, part: Part) -> None:
        self._part = part
        self._value.clear()
        if part.name != "file":
            return
        if self.upload is not None:
            raise InputError("the form has more than one file", param="file")
        self.upload = await asyncio.to_thread(self._store.begin, self._tenant)
        self.filename = part.filename

    async def _end(self) -> None:
        if self._name() == "file":
            await self._write()
        else:
            self.fields[self._name()] = self._value.decode("utf-8", "replace")

    async def _write(self) -> None:
        assert self.upload is not None
        data = bytes(self._pending)
        self._pending.clear()
        await asyncio.to_thread(self.upload.write, data)

    def _name(self) -> str:
        return self._part.name[:64] if self._part is not None else ""


async def create(request: Request) -> Response:
    _, tenant, store = parts_of(request)
    reader = MultipartReader(boundary_of(request.headers.get("content-type", "")))
    form = _Form(store, tenant)
    try:
        async for chunk in request.stream():
            for event in reader.feed(chunk):
                await form.take(event)
        reader.close()
        if form.upload is None:
            raise InputError("the form has no file", param="file")
        purpose = form.fields.get("purpose")
        if purpose not in _PURPOSES:
            raise InputError("purpose must be 'batch' or 'fine-tune': other files are of no use here", param="purpose")
        return as_json(await asyncio.to_thread(form.upload.commit, form.filename, purpose))
    finally:
        if form.upload is not None:
            await asyncio.to_thread(form.upload.discard)


async def list_files(request: Request) -> Response:
    _, tenant, store = parts_of(request)
    files: list[FileObject] = await asyncio.to_thread(store.list, tenant)
    purpose = request.query_params.get("purpose")
    if purpose is not None:
        files = [file for file in files if file.purpose == purpose]
    shown, more = page(request, files, 10_000)
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return as_json(FileList(data=shown, has_more=more, first_id=first, last_id=last))


async def retrieve(request: Request) -> Response:
    _, tenant, store = parts_of(request)
    return as_json(await asyncio.to_thread(store.get, tenant, request.path_params["file_id"]))


async def content(request: Request) -> Response:
    _, tenant, store = parts_of(request)
    described = await asyncio.to_thread(store.get, tenant, request.path_params["file_id"])
    path = store.path(tenant, described.id)
    if described.status == GROWING:
        # Bytes that come while it is read, and half a line, would not be those that the header promised.
        length = {"content-length": str(described.bytes)}
        return StreamingResponse(first_bytes(path, described.bytes), media_type=_BYTES, headers=length)
    return FileResponse(path, media_type=_BYTES, filename=described.filename)


def first_bytes(path: Path, num_bytes: int) -> Iterator[bytes]:
    """As many of a file, in pieces."""
    if num_bytes:
        with path.open("rb") as file:
            while num_bytes and (piece := file.read(min(num_bytes, _WRITE_BYTES))):
                num_bytes -= len(piece)
                yield piece


async def delete(request: Request) -> Response:
    server, tenant, store = parts_of(request)
    file_id = request.path_params["file_id"]
    runner = server.parts.get("batches")
    in_use = (lambda: None) if runner is None else partial(runner.in_use, tenant, file_id)
    await asyncio.to_thread(store.delete, tenant, file_id, in_use)
    return as_json(FileDeleted(id=file_id))


ROUTES: list[BaseRoute] = [
    Route("/v1/files", create, methods=["POST"]),
    Route("/v1/files", list_files, methods=["GET"]),
    Route("/v1/files/{file_id}", retrieve, methods=["GET"]),
    Route("/v1/files/{file_id}", delete, methods=["DELETE"]),
    Route("/v1/files/{file_id}/content", content, methods=["GET"]),
]
