"""Dialect: the response format of an API: the frames of its streams and the bodies of its errors.

Each route has a dialect, so that errors before the handler have its format too.
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
