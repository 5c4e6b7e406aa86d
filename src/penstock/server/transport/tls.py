"""TLS: the certificate files, checked before anything starts and taken up again when they change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from pathlib import Path

from penstock.base.errors import ConfigError
from penstock.config.server import ServerConfig

log = logging.getLogger("penstock.server")
CHECK_S = 2.0
_Stamp = tuple[tuple[int, int, int], ...]


class Tls:
    """A context that follows its files. New connections use the newest pair that was in order; open ones stay.

    Client authorities are added by a changed `ssl_ca_certs`; those taken out of it are trusted until a restart.
    """

    def __init__(self, certfile: str, keyfile: str | None, ca_certs: str | None) -> None:
        self._cert, self._key, self._ca = certfile, keyfile, ca_certs
        self._stamp = self._look()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.num_rotations = 0
        self._load(self.context)
        if ca_certs is not None:
            self.context.verify_mode = ssl.CERT_REQUIRED

    def _load(self, context: ssl.SSLContext) -> None:
        """Raises ConfigError."""
        for name, path in (("ssl_certfile", self._cert), ("ssl_keyfile", self._key), ("ssl_ca_certs", self._ca)):
            if path is None:
                continue
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise ConfigError(f"{name}: {path} cannot be read: {error.strerror}", field=name) from None
        try:
            # A password would be asked for on the terminal, which a server may not have.
            context.load_cert_chain(self._cert, self._key, password=lambda: b"")
        except (ssl.SSLError, OSError, ValueError) as error:
            key = self._key or self._cert
            raise ConfigError(
                f"ssl_certfile: {self._cert} and {key} are not a PEM certificate with its unencrypted key "
                f"({getattr(error, 'reason', None) or error})",
                field="ssl_certfile",
            ) from None
        if self._ca is not None:
            try:
                context.load_verify_locations(self._ca)
            except ssl.SSLError as error:
                raise ConfigError(
                    f"ssl_ca_certs: {self._ca} holds no PEM certificates ({error.reason or error})",
                    field="ssl_ca_certs",
                ) from None

    def _look(self) -> _Stamp:
        stamps = []
        for path in (self._cert, self._key, self._ca):
            if path is not None:
                try:
                    found = os.stat(path)
                    stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
                except OSError:
                    stamps.append((0, 0, 0))
        return tuple(stamps)

    def refresh(self) -> bool:
        """Take up changed files; True if that was done. Files that do not fit together leave everything as it was."""
        stamp = self._look()
        if stamp == self._stamp:
            return False
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # a half-loaded pair would break every handshake
            self._load(self.context)
        except ConfigError as error:
            log.error("the TLS files changed, but the old ones stay in use: %s", error)
            self._stamp = stamp
            return False
        self._stamp = stamp
        self.num_rotations += 1
        log.info("the TLS files changed and are in use")
        return True

    async def watch(self) -> None:
        """Refresh for ever."""
        while True:
            await asyncio.sleep(CHECK_S)
            self.refresh()


def open_tls(config: ServerConfig) -> Tls | None:
    """The server's TLS, or None if it is not configured. Raises ConfigError."""
    if config.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(config, name) is not None:
                raise ConfigError(f"{name}: is of no use without ssl_certfile", field=name)
        return None
    return Tls(config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)


class Watching:
    """Runs `Tls.watch` until `close`."""

    def __init__(self, tls: Tls) -> None:
        self._task = asyncio.get_running_loop().create_task(tls.watch())

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
