"""Dialects: the response format of each API, its stream frames and its error bodies.

Each route has a dialect, so that errors before the handler have its format too. Sources: the public
references of the Messages API, the Responses API and Ollama's API.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import orjson

from banyan.base.errors import RequestError
from banyan.server.errors import UNAUTHORIZED, Json, error_body, error_event


@dataclass(frozen=True, eq=False)
class Dialect:
    """Attributes:
    media: content type of a stream.
    frame: encodes one event of a stream.
    end: the last bytes of a stream.
    error_body: body of an error before anything was streamed.
    error_event: last event of a stream that fails.
    unauthorized: body for a missing or wrong key.
    """

    media: str
    frame: Callable[[Json], bytes]
    end: bytes
    error_body: Callable[[RequestError], Json]
    error_event: Callable[[RequestError], Json]
    unauthorized: Json


def _frame(body: Json) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(body)


def _named_frame(body: Json) -> bytes:
    """An event that carries its type's name."""
    return b"event: %b\ndata: %b\n\n" % (str(body["type"]).encode(), orjson.dumps(body))


class FrameTemplate:
    """A frame whose text is filled in later; faster than encoding a frame for each token.

    Args:
        frame: a frame whose text is `FrameTemplate.GAP`. Nothing after it may come from a client,
            which could have sent the same text before it.
    """

    GAP = "\x00gap\x00"

    def __init__(self, frame: bytes) -> None:
        self._before, gap, self._after = frame.rpartition(orjson.dumps(self.GAP))
        assert gap, "the frame has no gap"

    def fill(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, orjson.dumps(text), self._after)


OPENAI = Dialect(
    media="text/event-stream",
    frame=_frame,
    end=b"data: [DONE]\n\n",
    error_body=error_body,
    error_event=error_event,
    unauthorized=UNAUTHORIZED,
)
"""The dialect of OpenAI's routes and of all routes without their own."""


_ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}

_TOO_LONG = "prompt is too long"
"""Clients look for these words, shorten their history and go on."""


def _anthropic_error(error: RequestError) -> Json:
    text = str(error)
    if error.code == "context_length_exceeded":
        text = f"{_TOO_LONG}: {text}"
    return _anthropic_body(error.status, text)


def _anthropic_body(status: int, text: str) -> Json:
    other = "api_error" if status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(status, other)
    return {"type": "error", "error": {"type": kind, "message": text}}


ANTHROPIC = Dialect(
    media="text/event-stream",
    frame=_named_frame,
    end=b"",
    error_body=_anthropic_error,
    error_event=_anthropic_error,
    unauthorized=_anthropic_body(
        401, "the key in x-api-key or in Authorization: Bearer is missing or wrong"
    ),
)
"""Events carry their type's name; errors are {"type": "error", "error": {"type", "message"}}."""


def _ollama_error(error: RequestError) -> Json:
    return {"error": str(error)}


def _line(body: Json) -> bytes:
    return orjson.dumps(body) + b"\n"


OLLAMA = Dialect(
    media="application/x-ndjson",
    frame=_line,
    end=b"",
    error_body=_ollama_error,
    error_event=_ollama_error,
    unauthorized={"error": "unauthorized"},
)
OLLAMA_VERSION = "0.12.11"
"""Release of Ollama with these routes. Clients compare it with their minimum."""
"""One JSON object a line; errors are {"error": text}."""


def _error_event(error: RequestError) -> Json:
    """The last event of a stream that breaks where no response.failed could be sent."""
    return {
        "type": "error",
        "code": error.code,
        "message": str(error),
        "param": error.param or None,
        "sequence_number": 0,
    }


RESPONSES = replace(OPENAI, frame=_named_frame, error_event=_error_event)
"""Events carry their type's name; errors before a stream are like the other OpenAI routes'."""
