"""The frames and errors of the Responses routes: events that carry their type's name."""

from dataclasses import replace

import orjson

from banyan.base.errors import RequestError
from banyan.server.errors import Json
from banyan.server.http.dialect import OPENAI


def _frame(body: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(body["type"]).encode(), orjson.dumps(body))


def _error_event(error: RequestError) -> Json:
    """The last event of a stream that breaks where no response.failed could be sent."""
    return {
        "type": "error",
        "code": error.code,
        "message": str(error),
        "param": error.param or None,
        "sequence_number": 0,
    }


RESPONSES = replace(OPENAI, frame=_frame, error_event=_error_event)
"""Events carry their type's name; errors before a stream are like the other OpenAI routes'."""
