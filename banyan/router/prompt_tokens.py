"""The tokens of a request, for a router that knows what its workers hold. Words are turned into
tokens by a worker, which has the tokenizer and the template.
"""

import asyncio
from collections.abc import Sequence

import orjson

from banyan.base.json_types import is_list, is_object
from banyan.router.upstream import Headers, Lost, NotReached
from banyan.router.worker import Worker

_MOST_BODY_BYTES = 256 << 10
"""Of a larger one the beginning is guessed about."""
_MOST_ANSWER_BYTES = 8 << 20
_TIMEOUT_S = 2.0
_MOST_ID = (1 << 31) - 1
_OWN = ("cache_salt", "extra_key", "lora_path", "input_embeds")
"""Fields that give a request prefixes of its own."""
_CHAT = ("messages", "tools", "chat_template_kwargs", "continue_final_message")


async def tokens_of(body: bytes, headers: Headers, worker: Worker) -> list[int]:
    """Empty where they are not known: a batch, prefixes of its own, ids that no model has, a worker
    that does not say."""
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
            said: object = orjson.loads(await answer.whole(_MOST_ANSWER_BYTES))
    except (NotReached, Lost, TimeoutError, orjson.JSONDecodeError):
        return []
    found = said.get("tokens") if answer.status == 200 and is_object(said) else None
    return _ids(found) if is_list(found) else []


def _ids(found: Sequence[object]) -> list[int]:
    """Token ids; empty where one of them is none. The worker refuses such a prompt."""
    ids = [token for token in found if type(token) is int and 0 <= token <= _MOST_ID]
    return ids if len(ids) == len(found) else []


def question_of(body: bytes) -> object:
    """Its token ids, or what /tokenize is asked; None where there is neither."""
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
