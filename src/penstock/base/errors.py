"""One exception tree. Every message says what is wrong and what to change."""

from __future__ import annotations


class PenstockError(Exception):
    """Base of every error Penstock raises on purpose."""


class InputError(PenstockError, ValueError):
    """A request that cannot be served as written (HTTP: 400).

    `param` names the field, as the client wrote it, that has to change; `code` is OpenAI's word for the mistake, if it
    has one.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelError(PenstockError):
    """A model folder or file that is broken, hostile or not one Penstock can run. One sentence, no traceback needed."""


class UnsupportedError(ModelError):
    """A well-formed model that needs something Penstock does not have; the message names the missing part."""


class ConfigError(PenstockError, ValueError):
    """An engine setting that is out of range or contradicts another. `field` is the setting's name."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class CapacityError(ConfigError):
    """What was asked for does not fit this machine; the message gives the smallest change that fits."""


class EngineError(PenstockError):
    """The engine could not finish a request for a reason that is not the client's fault (HTTP: 500)."""


class RankGoneError(EngineError):
    """The process that a rank lived in has ended, and the engine with it. `killed`: perhaps by somebody outside."""

    def __init__(self, message: str, *, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


class EngineGoneError(EngineError):
    """The engine is gone, and not through the request: the same one may succeed later, or elsewhere (HTTP: 503)."""


class ConvictedError(EngineError):
    """Engines died of this request: to send it again, here or elsewhere, only does harm (HTTP: 500, not retryable)."""


class RefusedError(PenstockError):
    """A request that is in order but will not be served, or not now (HTTP: `status`).

    Attributes:
        status: 401, 403, 404, 408, 409, 413, 415, 422, 429, 431, 499, 501, 503 or 504.
        code: OpenAI's `code`, a word such as "rate_limit_exceeded"; None if there is no word for it.
        type: OpenAI's `type`; by default what belongs to the status.
        retry_after_s: when trying again makes sense, as a draft; None if it does not.
        param: the field that has to change, if it is one field's fault.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str | None = None,
        type: str | None = None,
        retry_after_s: float | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.type = type
        self.retry_after_s = retry_after_s
        self.param = param
