"""Adapters by the names by which clients call them: loaded at the start, or while the server runs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from penstock.base.errors import ConfigError, InputError, ModelError
from penstock.config.lora import inside
from penstock.server.errors import WireError

if TYPE_CHECKING:
    from penstock.core.adapter import AdapterRef
    from penstock.launch.adapters import AdapterBook
    from penstock.text.limits import Limits

MAX_NAMES = 4096
_NAME = re.compile(r"[\w.:/@+-]{1,128}", re.ASCII)
_POLL_S = 0.02


class Adapters:
    """`root`: the folder below which adapters may be loaded while the server runs; None: none may.

    A name that is taken away has no new requests, and means another adapter only once its requests have ended.
    """

    def __init__(
        self, book: AdapterBook, known: Mapping[str, AdapterRef], root: str | None, taken: Iterable[str], limits: Limits
    ) -> None:
        """`known`: those that are there from the start; `taken`: names of the model itself; `limits`: of its engine."""
        self.book, self._root, self._taken, self._limits = book, root, frozenset(taken), limits
        self.names: dict[str, AdapterRef] = {}
        for name, ref in known.items():
            self._check_name(name)
            self.names[name] = replace(ref, name=name)
            limits.beside(self.names[name], "lora_modules")

    def of(self, name: str | None) -> AdapterRef | None:
        return None if name is None else self.names.get(name)

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise InputError(
                "lora_name: 1 to 128 letters, digits and . _ - : / @ + are needed", param="lora_name"
            )  # fmt: skip
        if name in self._taken:
            raise InputError(f"lora_name: {name} is the name of the model itself", param="lora_name")

    async def load(self, name: str, path: str) -> None:
        """Raises: InputError, WireError (404) if nothing may be loaded."""
        if self._root is None:
            raise WireError(404, "adapters are loaded below a folder that lora_root names, and the server was started "
                            "without one", code="not_found")  # fmt: skip
        self._check_name(name)
        try:
            folder = inside(self._root, path)
        except ConfigError as error:
            raise InputError(str(error), param="lora_path") from None
        self._check_free(name)
        try:
            ref = await asyncio.to_thread(self.book.read, folder)
        except ModelError as error:
            raise InputError(f"lora_path: {error}", param="lora_path") from None
        self._limits.beside(replace(ref, name=name), "lora_path")
        self._check_free(name)
        self.names[name] = replace(ref, name=name)

    async def adopt(self, name: str, folder: Path) -> None:
        """One that this server has made; a name that is loaded stays as it is. Raises: InputError, ModelError."""
        self._check_name(name)
        if name not in self.names:
            ref = await asyncio.to_thread(self.book.read, folder)
            self.names.setdefault(name, ref)

    def _check_free(self, name: str) -> None:
        if name in self.names:
            raise InputError(f"lora_name: the adapter {name} is loaded; unload it first", param="lora_name")
        if len(self.names) >= MAX_NAMES:
            raise InputError(f"lora_name: {MAX_NAMES} adapters are loaded; unload one first", param="lora_name")

    async def unload(self, name: str, streams: Iterable[Any]) -> None:
        """Waits for the requests that have it. Raises: WireError (404)."""
        if name not in self.names:
            raise WireError(404, f"the adapter {name[:80]!r} is not loaded", code="not_found", param="lora_name")
        del self.names[name]
        mine = [stream for stream in streams if adapter_name(stream) == name]
        while any(not stream.ended for stream in mine):
            await asyncio.sleep(_POLL_S)


def adapter_name(stream: Any) -> str | None:
    """Of a running request."""
    call = stream.call
    found: str | None = None if call is None else call.adapter_name
    return found
