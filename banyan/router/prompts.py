"""Read the prompt of a request, as text or as token ids, so that a policy can choose a worker.

Validating the request is the worker's task. Text is converted to token ids by a worker, because
only workers have a tokenizer and a chat template.
"""

import asyncio
from collections.abc import Sequence

import orjson

from banyan.base.json_types import is_list, is_object
from banyan.base.thread_pool import off_loop
from banyan.router.upstream import Headers, WorkerLost, WorkerUnreachable
from banyan.router.worker import Worker
from banyan.scheduler.prefix_hashes import BLOCK_BYTES, MAX_BLOCKS
from banyan.server.http.limits import MAX_CONTAINERS, MAX_VALUES

PROMPT_FIELDS = (
    "instructions",
    "system",
    "tools",
    "messages",
    "prompt",
    "text",
    "input_ids",
    "input",
)
"""Fields that hold prompt text in the supported APIs, roughly in the order the model reads them."""
MOST_BYTES = BLOCK_BYTES * MAX_BLOCKS
_THREAD_BYTES = 256 << 10
"""Larger bodies are parsed off the event loop; this size takes under a millisecond."""


async def prompt_of(body: bytes) -> bytes:
    """The first MOST_BYTES of the prompt, or of the body if it cannot be parsed."""
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


_MOST_BODY_BYTES = 256 << 10
"""Larger bodies are routed by their text alone."""
_MOST_ANSWER_BYTES = 8 << 20
_TIMEOUT_S = 2.0
_MOST_ID = (1 << 31) - 1
_OWN = ("cache_salt", "extra_key", "lora_path", "input_embeds")
"""Fields that separate the prefixes of a request from other requests."""
_CHAT = ("messages", "tools", "chat_template_kwargs", "continue_final_message")


async def tokens_of(body: bytes, headers: Headers, worker: Worker) -> list[int]:
    """Token ids of the prompt, from the body or from the /tokenize route of `worker`.

    Empty if unknown: a batch, separated prefixes, invalid ids, or no answer from the worker.
    """
    question = question_of(body)
    if is_list(question):
        return _ids(question)
    if not question:
        return []
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            own = [(name, value) for name, value in headers if name == b"authorization"]
            own.append((b"content-type", b"application/json"))
            answer = await worker.upstream.send("POST", b"/tokenize", own, orjson.dumps(question))
            reply: object = orjson.loads(await answer.whole(_MOST_ANSWER_BYTES))
    except (WorkerUnreachable, WorkerLost, TimeoutError, orjson.JSONDecodeError):
        return []
    found = reply.get("tokens") if answer.status == 200 and is_object(reply) else None
    return _ids(found) if is_list(found) else []


def _ids(found: Sequence[object]) -> list[int]:
    """The token ids; empty if one is invalid, because a worker refuses such a prompt."""
    ids = [token for token in found if type(token) is int and 0 <= token <= _MOST_ID]
    return ids if len(ids) == len(found) else []


def question_of(body: bytes) -> object:
    """The token ids in the body, or the body of a /tokenize request; None if there is neither."""
    if len(body) > _MOST_BODY_BYTES:
        return None
    try:
        fields: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not is_object(fields) or any(fields.get(name) for name in _OWN):
        return None
    for name in ("input_ids", "prompt", "text"):
        given = fields.get(name)
        if isinstance(given, str) and name != "input_ids":
            return {"prompt": given}
        if is_list(given) and given and all(type(token) is int for token in given):
            return given
    if is_list(fields.get("messages")):
        return {name: fields[name] for name in _CHAT if fields.get(name)}
    return None
