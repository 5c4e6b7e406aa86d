"""Whatever path is asked for, answers have a request id and errors have OpenAI's shape."""

from __future__ import annotations

import httpx


def test_an_unknown_path_is_an_error_object_with_a_request_id(http: httpx.Client) -> None:
    answer = http.get("/v1/nothing", headers={"x-request-id": "mine"})
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"] == "mine"


def test_anthropics_paths_have_anthropics_errors(http: httpx.Client) -> None:
    assert http.get("/v1/messages/nothing").json()["type"] == "error"
