"""What the router reads of a request's body, to choose who gets it. To understand it, or to refuse
it, is for the worker.
"""

import orjson

from banyan.base.json_types import is_object
from banyan.base.thread_pool import off_loop
from banyan.scheduler.prefix_hashes import BLOCK_BYTES, MAX_BLOCKS
from banyan.server.http.limits import MAX_CONTAINERS, MAX_VALUES

PROMPT_FIELDS = (
    *("instructions", "system", "tools", "messages", "prompt", "text", "input_ids", "input"),
)
"""Where APIs put what a model reads, roughly in the order in which it does."""
MOST_BYTES = BLOCK_BYTES * MAX_BLOCKS
_THREAD_BYTES = 256 << 10
"""Larger bodies are read off the event loop; this takes under a millisecond."""


async def prompt_of(body: bytes) -> bytes:
    """The first MOST_BYTES of what a model reads of this request; of the body itself where that is
    not JSON, or more than a worker takes."""
    size = 0 if len(body) <= _THREAD_BYTES else len(body)
    return await off_loop(size, lambda: _prompt_of(body))


def _prompt_of(body: bytes) -> bytes:
    if body.count(b",") > MAX_VALUES or body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        return body[:MOST_BYTES]
    try:
        fields: object = orjson.loads(body)
        if not is_object(fields):
            return body[:MOST_BYTES]
        parts = [fields[name] for name in PROMPT_FIELDS if name in fields]
        return b"".join(map(_as_bytes, parts))[:MOST_BYTES]
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, UnicodeEncodeError):
        return body[:MOST_BYTES]


def _as_bytes(part: object) -> bytes:
    return part.encode() if isinstance(part, str) else orjson.dumps(part)
