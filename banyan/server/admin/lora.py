"""Adapters that come and go while the server runs: /load_lora_adapter and /unload_lora_adapter."""

import os

import msgspec

from banyan.base.errors import ConfigError, RequestError
from banyan.base.log import logger, printable
from banyan.lora.adapter_files import AdapterPlace, checked_name
from banyan.messages.events import Reply
from banyan.server.embeddings import refuse_fields
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.schema import typed
from banyan.server.state import ServerState

log = logger(__name__)

LOAD_S = 1800.0
"""Longest wait for an adapter to come, or for the last of its requests to end."""
_MAX_PATH = 4096


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadRequest(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: str


async def load_adapter(exchange: HttpExchange, state: ServerState) -> None:
    """Load an adapter that requests may name from then on; 400 when it cannot be."""
    service = state.admit()
    raw = await exchange.json_object()
    refuse_fields(raw, LoadRequest.__struct_fields__, exchange.context, is_strict=True)
    asked = typed(raw, LoadRequest)
    _require_adapters(state)
    place = _place_of(asked)
    if place.name in state.adapters or place.name == state.served_name:
        raise RequestError(
            f"There is a model or adapter {place.name!r} already.",
            param="lora_name",
            hint="Unload it first, or choose another name.",
        )
    reply = await service.client.control(
        "load_adapter", LOAD_S, name=place.name, path=place.path, pinned=place.is_pinned
    )
    if reply.ok:
        state.adapters.add(place)
        log.info("adapter loaded name=%s path=%s", place.name, printable(place.path, 200))
    elif sum(replica.alive for replica in service.client.replicas()) > 1:
        await service.client.control("unload_adapter", LOAD_S, name=place.name)  # where it came
    await _answer(exchange, state, reply)


async def unload_adapter(exchange: HttpExchange, state: ServerState) -> None:
    """Take no more requests for an adapter, and forget it once the last of them has ended."""
    service = state.admit()
    raw = await exchange.json_object()
    refuse_fields(raw, UnloadRequest.__struct_fields__, exchange.context, is_strict=True)
    asked = typed(raw, UnloadRequest)
    _require_adapters(state)
    name = state.adapters.named(asked.lora_name, "lora_name")
    reply = await service.client.control("unload_adapter", LOAD_S, name=name)
    if reply.ok:
        state.adapters.remove(name)
        log.info("adapter unloaded name=%s", name)
    await _answer(exchange, state, reply)


def _require_adapters(state: ServerState) -> None:
    if not state.adapters.is_enabled:
        raise RequestError(
            "This server has no adapters.",
            hint="Start it with --enable-lora.",
            code="not_available",
        )


def _place_of(asked: LoadRequest) -> AdapterPlace:
    if not asked.lora_path or len(asked.lora_path) > _MAX_PATH or "\0" in asked.lora_path:
        raise RequestError("lora_path must be the path of a folder.", param="lora_path")
    try:
        name = checked_name(asked.lora_name)
    except ConfigError as error:
        raise RequestError(error.text, param="lora_name", hint=error.hint) from None
    return AdapterPlace(name, os.path.abspath(asked.lora_path), asked.pinned)


async def _answer(exchange: HttpExchange, state: ServerState, reply: Reply) -> None:
    loaded = {place.name: place.path for place in state.adapters.places()}
    body = {
        "success": reply.ok,
        "error_message": None if reply.ok else reply.text,
        "message": reply.text,
        "loaded_adapters": loaded,
    }
    await exchange.json(body, 200 if reply.ok else 400)
