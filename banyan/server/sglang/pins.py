"""/pin_prefix, /unpin_prefix, /pinned_prefixes: keep the KV pages of a prompt for a time.

A pin is a request for one token whose prompt pages are kept after its end. It is named by the `rid`
of that request, and belongs to the replica that ran it. Answers never hold the prompt.
"""

from dataclasses import replace

import msgspec

from banyan.base.errors import RequestError
from banyan.messages.events import PinFact
from banyan.server.errors import Json
from banyan.server.http.auth import digest
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.schema import typed
from banyan.server.sglang.generate import native_service
from banyan.server.state import ServerState

_ASK_S = 10.0
_MOST_S = 7 * 24 * 3600.0
_MOST_PRIORITY = 1 << 31


class PinRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`text` or `input_ids` is the prefix; `cache_salt`, `extra_key` and `lora_path` as in
    /generate."""

    text: str | None = None
    input_ids: list[int] | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    lora_path: str | None = None
    rid: str | None = None
    ttl_s: float = 3600.0
    """How long it stays, in seconds."""
    priority: int = 0
    """If memory runs out, the pin with the lowest priority is released first, and of equals the one
    that ends first."""
    api_key: str | None = None
    """API key of the owner, on a server with keys."""


class UnpinRequest(msgspec.Struct, frozen=True, kw_only=True):
    pin: str | None = None
    """Name that /pin_prefix returned; None = all pins."""


async def pin_prefix(exchange: HttpExchange, state: ServerState) -> None:
    """Compute a prompt, and keep its whole pages until `ttl_s` is over."""
    native = native_service(state.admit(), state)
    raw, size = await exchange.request.json_object(), len(exchange.request.body)
    unknown = sorted(set(raw) - set(PinRequest.__struct_fields__))
    if unknown:
        known = ", ".join(PinRequest.__struct_fields__)
        raise RequestError(f"{unknown[0]} is no field of a pin: {known}", param=unknown[0])
    asked = typed(raw, PinRequest)
    if not 0 < asked.ttl_s <= _MOST_S:
        raise RequestError(f"ttl_s must be in (0, {_MOST_S:.0f}].", param="ttl_s")
    if not -_MOST_PRIORITY <= asked.priority <= _MOST_PRIORITY:
        raise RequestError(f"priority must be in ±{_MOST_PRIORITY}.", param="priority")
    context = replace(exchange.context, tenant=_tenant_of(asked, state))
    body: Json = {k: v for k, v in raw.items() if k not in ("ttl_s", "priority", "api_key")}
    body["sampling_params"] = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
    request = await native.read(body, context, size)
    pin = {"pin_s": asked.ttl_s, "pin_priority": asked.priority}
    sequences = [
        replace(s, request=replace(s.request.with_message(**pin), route="pin"))
        for s in request.sequences
    ]
    with state.open.holding([s.request for s in sequences], exchange.context.tenant):
        answer = await native.answer(replace(request, sequences=sequences))
    meta = answer["meta_info"] if isinstance(answer, dict) else {}
    found: Json = {
        "pin": sequences[0].request.id,
        "prompt_tokens": len(sequences[0].request.prompt),
        "cached_tokens": meta.get("cached_tokens", 0) if isinstance(meta, dict) else 0,
        "ttl_s": asked.ttl_s,
        "priority": asked.priority,
    }
    await exchange.json(found)


async def unpin_prefix(exchange: HttpExchange, state: ServerState) -> None:
    """Release the pages of one pin or of all pins to normal eviction."""
    client = state.admit().client
    asked = typed(await exchange.request.optional_object(), UnpinRequest)
    if asked.pin == "":
        raise RequestError("pin must name one; without the field all are let go", param="pin")
    replies = await client.ask("unpin", _ASK_S, pin=asked.pin or "")
    count = sum(msgspec.json.decode(reply.body, type=int) for _, reply in replies if reply.ok)
    if asked.pin and not count:
        raise RequestError(f"there is no pin {asked.pin[:128]!r}", param="pin", status=404)
    await exchange.json({"unpinned": count})


async def pinned_prefixes(exchange: HttpExchange, state: ServerState) -> None:
    """Every pin: its name, tokens, pages and remaining seconds."""
    replies = await state.admit().client.ask("pins", _ASK_S)
    pins: list[Json] = [
        {**msgspec.structs.asdict(pin), "dp_rank": replica}
        for replica, reply in replies
        if reply.ok
        for pin in msgspec.json.decode(reply.body, type=list[PinFact])
    ]
    await exchange.json({"pins": pins})


def _tenant_of(asked: PinRequest, state: ServerState) -> bytes:
    """The owner of the pages: no key finds the pages of another."""
    if not state.keys.are_required:
        if asked.api_key is not None:
            raise RequestError("this server asks for no keys", param="api_key")
        return b""
    caller = state.keys.find(digest((asked.api_key or "").encode()))
    if caller is None:
        raise RequestError(
            "api_key must be the key of those who will use the prefix: nobody finds another's",
            param="api_key",
        )
    return caller.tenant
