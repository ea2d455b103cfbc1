"""How one family of routes writes: the frames of its streams and the bodies of its errors.

A route names its dialect, so that refusals that come before any handler are in it too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import orjson

from banyan.base.errors import RequestError
from banyan.server.errors import UNAUTHORIZED, Json, error_body, error_event


@dataclass(frozen=True, eq=False)
class Dialect:
    """Attributes:
    media: content type of a stream.
    frame: one event of a stream as bytes.
    end: what a stream ends with.
    error_body: of a request that is refused before anything was streamed.
    error_event: the last event of a stream that fails after it began.
    unauthorized: body of the answer to a missing or wrong key.
    """

    media: str
    frame: Callable[[Json], bytes]
    end: bytes
    error_body: Callable[[RequestError], Json]
    error_event: Callable[[RequestError], Json]
    unauthorized: Json


def _frame(body: Json) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(body)


OPENAI = Dialect(
    media="text/event-stream",
    frame=_frame,
    end=b"data: [DONE]\n\n",
    error_body=error_body,
    error_event=error_event,
    unauthorized=UNAUTHORIZED,
)
"""Of OpenAI's routes, and of all that have no dialect of their own."""
