"""Error bodies: flat fields as in SGLang, and `error` as in OpenAI."""

from http import HTTPStatus

from banyan.base.errors import RequestError

Json = dict[str, object]

UNAUTHORIZED: Json = {"error": "Unauthorized"}

RETRY_AFTER_S = 5
"""Retry-After if there is no estimate."""


def type_of(status: int) -> str:
    """Name of a status as SGLang spells it: 400 -> BadRequestError."""
    try:
        name = HTTPStatus(status).phrase.title().replace(" ", "").replace("-", "")
    except ValueError:
        name = "Unknown"
    return name if name.endswith("Error") else name + "Error"


def error_body(error: RequestError) -> Json:
    """Body of an error before anything was streamed."""
    message = str(error)
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "object": "error",
        "message": message,
        "type": type_of(error.status),
        "param": error.param or None,
        "code": error.status,
        "error": {
            "message": message,
            "type": kind,
            "param": error.param or None,
            "code": error.code,
        },
    }


def error_event(error: RequestError) -> Json:
    """The event before [DONE] of a stream that fails."""
    return {
        "error": {
            "object": "error",
            "message": str(error),
            "type": type_of(error.status),
            "param": error.param or None,
            "code": error.status,
            "reason": error.code,
            "retryable": error.status in (429, 503),
        }
    }


def unavailable(text: str, code: str = "unavailable") -> RequestError:
    return RequestError(text, status=503, code=code)


def internal(request_id: str) -> RequestError:
    """An unexpected exception. The log has the details under the same id."""
    return RequestError(
        "Internal server error",
        status=500,
        code="internal_error",
        hint=f"Look for request {request_id} in the server's log",
    )
