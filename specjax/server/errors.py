"""Errors as clients get them, in OpenAI's shape."""

import json
from typing import Any

from specjax.scheduling.loop import EngineFault
from specjax.scheduling.scheduler import QueueFullError

# a message may quote a value of the request, which may be as long as the request
MAX_MESSAGE = 1000
RETRY_SECONDS = 1
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer that is no success: HTTP status, and what OpenAI's ``error`` object says."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def is_temporary(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in (429, 503)

    def body(self) -> dict[str, Any]:
        message = str(self)
        if len(message) > MAX_MESSAGE:
            message = message[:MAX_MESSAGE] + "..."
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = KINDS.get(self.status, kind)
        error = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def json(self) -> bytes:
        return json.dumps(self.body()).encode()


def unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, code=code)


def api_error(error: Exception) -> ApiError | None:
    """What a client is told of an exception; ``None`` for one that is a defect of the server."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full")
        case EngineFault():
            return unavailable("the engine has failed; its log says why", "engine_failed")
        case RecursionError():  # of values that an error quotes, too
            return ApiError(400, "the request is nested too deeply")
    return None
