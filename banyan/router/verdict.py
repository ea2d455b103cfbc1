"""What an answer says of the worker that gave it: it works, it is at fault, or neither."""

import orjson

from banyan.base.json_types import is_object
from banyan.router.upstream import Answer, Headers
from banyan.server.http.exchange import OF_LOAD
from banyan.server.http.limits import DEADLINE

FAILED = (502, 503, 504)
"""Statuses that a worker at fault answers, or a proxy in front of it."""
_BUSY = (429, 529)
_NEUTRAL_CODES = (*OF_LOAD, "deadline_exceeded", "queue_timeout", "rate_limited")
"""Error codes of a worker that works and has too much to do, or too little time."""
_DEADLINE = DEADLINE.encode()


def speaks_for_worker(answer: Answer, body: bytes, asked: Headers) -> bool | None:
    """True: the worker works. False: it is at fault. None: it refused because of its load, or
    because the client gave it too little time.

    Args:
        body: of the answer, where that is known.
        asked: headers of the request.
    """
    if answer.status in _BUSY:
        return None
    if answer.status not in FAILED:
        return True
    if answer.status == 503 and answer.header(b"retry-after"):
        return None
    if answer.status == 504 and any(name == _DEADLINE for name, _ in asked):
        return None
    return None if _code_of(body) in _NEUTRAL_CODES else False


def _code_of(body: bytes) -> str:
    """The error code of an answer in the form of OpenAI or SGLang; "" where it has none."""
    try:
        found: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    error = found.get("error") if is_object(found) else None
    code = error.get("code") if is_object(error) else None
    if code is None and is_object(found):
        code = found.get("code")
    return code if isinstance(code, str) else ""
