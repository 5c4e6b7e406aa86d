"""What the guard of a keyless server lets through, header by header; through sockets: `tests/api/test_web_guard.py`."""

from __future__ import annotations

import pytest

from penstock.config.server import ServerConfig
from penstock.server.errors import WireError
from penstock.server.transport.web_guard import WebGuard


def status(guard: WebGuard, path: str = "/v1/models", method: str = "GET", root: str = "", **headers: str) -> int:
    """200, or what the guard refuses with. Header names are written with underscores."""
    listed = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    try:
        guard.check({"headers": listed, "path": path, "method": method, "root_path": root})
    except WireError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [("a.wild.example", 200), ("b.a.wild.example", 200), ("wild.example", 421), ("xwild.example", 421)],
)
def test_a_star_stands_for_what_is_before_the_dot(host: str, expected: int) -> None:
    assert status(WebGuard(ServerConfig(allowed_hosts="*.wild.example")), host=host) == expected


def test_probes_are_answered_under_any_name_behind_a_path_too() -> None:
    guard = WebGuard(ServerConfig(root_path="/llm"))
    assert status(guard, "/llm/health", root="/llm", host="any.example") == 200
    assert status(guard, "/llm/v1/models", root="/llm", host="any.example") == 421


def test_the_name_of_the_probes_listener_is_ours() -> None:
    assert status(WebGuard(ServerConfig(probe_host="probes.example")), host="probes.example") == 200
    assert status(WebGuard(ServerConfig()), host="probes.example") == 421


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_links_on_other_pages_lead_to_ours(method: str) -> None:
    guard = WebGuard(ServerConfig())
    assert status(guard, "/", method, host="localhost", sec_fetch_site="cross-site") == 200
    assert status(guard, "/", "DELETE", host="localhost", sec_fetch_site="cross-site") == 403


def test_all_origins_can_be_allowed() -> None:
    signs = {"host": "localhost", "origin": "https://any.example", "sec_fetch_site": "cross-site"}
    assert status(WebGuard(ServerConfig(allowed_origins="*")), "/x", "POST", **signs) == 200
    assert status(WebGuard(ServerConfig(allowed_origins="https://x.example")), "/x", "POST", **signs) == 403


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("application/ld+json", 200), ("Application/JSON; a=b", 200), ("text/x+json", 403), ("application/jsonx", 403)],
)
def test_only_types_that_need_the_servers_leave_pass(kind: str, expected: int) -> None:
    signs = {"host": "localhost", "origin": "https://any.example", "content_type": kind}
    assert status(WebGuard(ServerConfig()), "/x", "POST", **signs) == expected
