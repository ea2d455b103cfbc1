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


class Mold:
    """Frames that differ in one text.

    Args:
        frame: one of them, in which that text is `Mold.GAP`; nothing behind it comes from a client,
            who may have written the same before it.
    """

    GAP = "\x00gap\x00"

    def __init__(self, frame: bytes) -> None:
        self._before, gap, self._behind = frame.rpartition(orjson.dumps(self.GAP))
        assert gap, "the frame has no gap"

    def fill(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, orjson.dumps(text), self._behind)


OPENAI = Dialect(
    media="text/event-stream",
    frame=_frame,
    end=b"data: [DONE]\n\n",
    error_body=error_body,
    error_event=error_event,
    unauthorized=UNAUTHORIZED,
)
"""Of OpenAI's routes, and of all that have no dialect of their own."""
