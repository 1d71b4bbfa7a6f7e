"""OpenAI's error objects, and which of our errors becomes which."""

from __future__ import annotations

import math

import msgspec
from starlette.responses import Response

from kvasir_peer.errors import BusyError, KvasirError, ModelFileError, NotReadyError, UsageError

INVALID = "invalid_request_error"
SERVER = "server_error"


class ErrorDetail(msgspec.Struct):
    """What went wrong.

    Attributes:
        message: one line for a person.
        type: kind of error, in OpenAI's words.
        param: the parameter it is about.
        code: a short stable word.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorObject(msgspec.Struct):
    """The body of an answer that is an error."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer that is an error.

    Args:
        message: one line: what, where, what to do.
        status: HTTP status.
        kind: OpenAI's ``type``.
        param: name of the parameter that is wrong.
        code: OpenAI's ``code``.
        retry_after: seconds after which asking again makes sense, where it does.
        headers: more headers.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(" ".join(message.split()), kind, param, code)
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))

    def body(self) -> bytes:
        """The error object as JSON."""
        return msgspec.json.encode(ErrorObject(self.detail))

    def response(self) -> Response:
        """The answer to send."""
        return Response(self.body(), self.status, self.headers, "application/json")


def api_error(error: KvasirError, *, param: str | None = None) -> ApiError:
    """The answer for one of our errors; what the client can mend is 4xx, what time mends has ``Retry-After``."""
    text = str(error)
    match error:
        case NotReadyError():
            return ApiError(
                text, status=503, kind=SERVER, code="model_not_ready", retry_after=error.retry_after
            )
        case BusyError():
            return ApiError(
                text,
                status=429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after=error.retry_after,
            )
        case UsageError() if not isinstance(error, ModelFileError):
            return ApiError(text, param=param)
        case _:
            return ApiError(text, status=500, kind=SERVER)
