"""What keeps other people's web pages from using a server that asks for no key.

A page can reach whatever its reader's browser can reach, this machine included. Two ways stand open to it without the
server's consent, and both are closed here: a name of its own that it lets point to this server (DNS rebinding), for
which the Host header gives it away, and a "simple" request, which browsers send anywhere without asking first, as long
as it does not call its body JSON. A key closes both as well, since no page of others knows it: with keys nothing is
checked.

Sources: RFC 9110, sections 7.2 and 15.5.20 (421); WHATWG Fetch, sections 2.2.2 (safelisted request headers) and 3.2;
W3C Fetch Metadata Request Headers, section 2.3 (Sec-Fetch-Site).
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import threading
from collections.abc import Mapping

from starlette.types import Scope

from penstock.config.server import ServerConfig
from penstock.server.errors import WireError

PROBES = ("/health", "/ready")
"""Answered under any name: they tell nothing, and who probes may not choose the name."""
_NAME = re.compile(r"[a-z0-9._-]{1,253}")
_SAFE = ("GET", "HEAD", "OPTIONS")


class WebGuard:
    """Who may use a server without a key: whoever calls it by its own name or address, and no page of another site."""

    def __init__(self, config: ServerConfig) -> None:
        own = socket.gethostname().lower()
        self._names = {"localhost", own, own.partition(".")[0] + ".local", config.host.lower()}
        if config.probe_host is not None:
            self._names.add(config.probe_host.lower())
        self._names |= {_plain(name).removeprefix("*") or "*" for name in config.names("allowed_hosts")}
        self._origins = {origin.rstrip("/").lower() for origin in config.names("allowed_origins")}

    def learn_full_name(self) -> None:
        """Add this machine's full name once DNS has told it, which may take long or never come."""

        def ask() -> None:
            with contextlib.suppress(OSError):
                self._names.add(socket.getfqdn().lower())

        threading.Thread(target=ask, name="penstock-full-name", daemon=True).start()

    def check(self, scope: Scope) -> None:
        """Raises WireError: 421 for a name that is not ours, 403 for what a page of another site has sent."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        host = headers.get(b"host", "")
        if path not in PROBES and not self._is_ours(host):
            name = _name_of(host)
            name = name if _NAME.fullmatch(name) else "NAME"  # somebody may paste it into a shell
            raise WireError(
                421, f"this server does not answer to the name in the Host header; if it is one of its names, start it "
                f"with --allowed-hosts {name}, or with keys (--api-keys-file)", code="unknown_host",
            )  # fmt: skip
        if scope["method"] not in _SAFE and not _is_json(headers.get(b"content-type", "")) and self._foreign(headers):
            raise WireError(
                403, "a page of another site may send only JSON, with Content-Type: application/json, and only if "
                "the server was started with --allowed-origins and the page's origin", code="cross_site",
            )  # fmt: skip

    def _is_ours(self, host: str) -> bool:
        name = _name_of(host)
        # Addresses cannot be made to point elsewhere, and names without a dot are nobody's to register.
        if (
            not name.strip("abcdefghijklmnopqrstuvwxyz0123456789-_")
            or "*" in self._names
            or name in self._names
            or name.endswith(".localhost")
        ):
            return True
        if any(name.endswith(known) for known in self._names if known.startswith(".")):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _foreign(self, headers: Mapping[bytes, str]) -> bool:
        """Whether a browser sent this for a page that is neither ours nor allowed."""
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if origin is not None and ("*" in self._origins or origin.lower() in self._origins):
            return False
        if site is not None:
            return site.strip().lower() not in ("same-origin", "none")
        return origin is not None and origin.lower().partition("://")[2] != headers.get(b"host", "").lower()


def _name_of(host: str) -> str:
    """The name or address in a Host header, without its port. A colon elsewhere is part of the name."""
    name = re.sub(r":[0-9]*$", "", host.strip())
    return name[1:-1] if name[:1] == "[" and name[-1:] == "]" else _plain(name)


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
