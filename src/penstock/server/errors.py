"""Errors in the shape that the client of a path expects: OpenAI's, unless `_SHAPES` knows better."""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.base.errors import ConvictedError, EngineError, EngineGoneError, InputError, PenstockError, RefusedError
from penstock.core.sampling import GRAMMAR_STUCK
from penstock.text.encoding import TOO_LONG

log = logging.getLogger("penstock.server")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BUSY = (errno.EMFILE, errno.ENFILE)
_BROKEN = (errno.EIO, errno.EROFS)
TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 409: "conflict_error", 413: "invalid_request_error",
    415: "invalid_request_error", 421: "invalid_request_error", 422: "invalid_request_error",
    429: "rate_limit_error", 431: "invalid_request_error",
    500: "server_error", 501: "not_implemented_error", 503: "overloaded_error", 504: "timeout_error",
    505: "invalid_request_error", 507: "server_error",
}  # fmt: skip
_ANTHROPIC = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class WireError(Exception):
    """Status, headers and body, ready to send. `extra`: what stands beside "error" in OpenAI's shape.

    `retry`: False tells OpenAI's and Anthropic's clients not to send it again by themselves, as they would after a 5xx.
    """

    def __init__(self, status: int, message: str, *, type: str | None = None, code: str | None = None,
                 param: str | None = None, retry_after_s: float | None = None,
                 extra: dict[str, Any] | None = None, retry: bool = True) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.extra = extra or {}
        self.type = type or TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.retry_after_s = retry_after_s
        self.retry = retry

    def body(self, path: str = "") -> dict[str, Any]:
        for begins, shape in _SHAPES:
            if path.startswith(begins):
                return shape(self)
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error, **self.extra}

    def headers(self) -> dict[str, str]:
        headers = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if not self.retry:
            headers["x-should-retry"] = "false"
        return headers


def _anthropic(error: WireError) -> dict[str, Any]:
    kind = _ANTHROPIC.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    # Anthropic's has no code: its clients know by these words that a conversation has to be made shorter.
    said = f"prompt is too long: {error.message}" if error.code == TOO_LONG else error.message
    return {"type": "error", "error": {"type": kind, "message": said}}


def _ollama(error: WireError) -> dict[str, Any]:
    return {"error": error.message}


def _llama_server(error: WireError) -> dict[str, Any]:
    return {"error": {"code": error.status, "message": error.message, "type": error.type, "param": error.param}}


def _tgi(error: WireError) -> dict[str, Any]:
    """`error_type` is what Hugging Face's clients make their exceptions of."""
    kind = {429: "overloaded", 503: "overloaded"}.get(
        error.status, "validation" if error.status < 500 else "generation"
    )
    return {"error": error.message, "error_type": kind}


_SHAPES: tuple[tuple[str, Callable[[WireError], dict[str, Any]]], ...] = (
    ("/v1/messages", _anthropic), ("/api/", _ollama), ("/completion", _llama_server), ("/infill", _llama_server),
    ("/generate", _tgi),
)  # fmt: skip
"""How the paths of other families of clients begin, and what they read."""


def wire_error(error: BaseException) -> WireError:
    """Any exception as an answer. What is not ours tells the client nothing of its insides."""
    match error:
        case WireError():
            return error
        case RefusedError():
            return WireError(error.status, str(error), type=error.type, code=error.code, param=error.param,
                             retry_after_s=error.retry_after_s)  # fmt: skip
        case InputError():
            return WireError(400, str(error), param=error.param, code=error.code)
        case msgspec.ValidationError() | msgspec.DecodeError():
            return WireError(400, f"the request body is not what this path takes: {error}")
        case EngineGoneError():
            return WireError(503, str(error), code="engine_unavailable", retry_after_s=5.0)
        case ConvictedError():
            return WireError(500, str(error), code="request_convicted", retry=False)
        case EngineError() if str(error).startswith(GRAMMAR_STUCK):  # the client's grammar, not the engine
            return WireError(400, f"{error}; make it simpler", code="grammar_error", param="structured_outputs")
        case EngineError():
            return WireError(500, str(error), code="engine_error")
        case PenstockError():
            return WireError(500, str(error))
        case OSError() if (told := trouble(error)) is not None:
            status, code, sentence = told
            return WireError(status, sentence, code=code, retry_after_s=5.0 if status == 503 else None)
    return WireError(500, "an internal error; the server's log says more", code="internal_error")


def told(error: Exception) -> WireError:
    """As `wire_error`; what nobody expected goes to the log."""
    answer = wire_error(error)
    if answer.code == "internal_error":
        log.error("a stream failed", exc_info=error)
    return answer


def trouble(error: OSError) -> tuple[int, str, str] | None:
    """(HTTP status, code, sentence) of what a disk refuses; None for every other error."""
    if error.errno in _FULL:
        return 507, "insufficient_storage", "the server's disk is full; try again when there is room, or delete files"
    if error.errno in _BUSY:
        return 503, "too_many_open_files", "the server has no file descriptor left; try again in a moment"
    if error.errno in _BROKEN:
        return 500, "storage_error", f"the server's disk cannot be written or read ({errno.errorcode[error.errno]})"
    return None
