"""Weights and LoRA adapters: update, read and label weights; load and unload adapters."""

import asyncio
import os
from dataclasses import replace

import msgspec

from banyan.base.errors import ConfigError, RequestError
from banyan.base.log import logger, printable
from banyan.engine_client.data_parallel import agreed
from banyan.hub.remote_instance import (
    ENGINE,
    SeedFiles,
    SeedReply,
    SentFile,
    WeightSender,
    legal_ports,
)
from banyan.lora.adapter_files import AdapterPlace, checked_name
from banyan.messages.events import Reply
from banyan.server.embeddings import refuse_fields
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.schema import typed
from banyan.server.state import ServerState

log = logger(__name__)

_MAX_NAME = 1000
LOAD_S = 1800.0
"""Longest wait for weights or an adapter, and for the last request of an adapter to end."""
_MAX_PATH = 4096
_MOST_SENDERS = 8


class WeightsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The last three fields are accepted without effect: they describe the usual behavior, or
    nothing that exists here."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True
    keep_pause: bool = False
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False


class WeightRequest(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    truncate_size: int | str = 100
    """Rows; a text if it comes in the query."""


class VersionRequest(msgspec.Struct, frozen=True, kw_only=True):
    new_version: str
    abort_all_requests: bool = True


async def update_weights_from_disk(exchange: HttpExchange, state: ServerState) -> None:
    """Load the weights of another checkpoint of the same model; 400 if that fails."""
    service = state.admit()
    raw = await exchange.request.json_object()
    refuse_fields(raw, WeightsRequest.__struct_fields__, exchange.context, is_strict=True)
    asked = typed(raw, WeightsRequest)
    if asked.load_format not in (None, "auto"):
        raise RequestError("load_format must be auto.", param="load_format")
    path, flush, client = asked.model_path, asked.flush_cache, service.client
    holds = asked.abort_all_requests and not state.paused
    if holds:  # so that requests which come meanwhile wait for the new weights
        await client.control("pause")
    try:
        if asked.abort_all_requests:
            await client.control("abort_all")
        is_paused = holds or state.paused
        reply = await agreed(
            client, "update_weights", LOAD_S, is_paused, path=path, flush_cache=flush
        )
        if reply.ok:  # before any answer of the new weights
            _set_version(state, asked.weight_version)
    finally:
        if holds:
            await client.control("resume")
    if reply.ok:
        state.awaits_weights = False
        state.seed_files = SeedFiles(path)
        log.info("weights taken path=%s", printable(path))
    stats = service.client.stats
    body = {
        "success": reply.ok,
        "message": reply.text,
        "num_paused_requests": stats.running + stats.waiting if state.paused else 0,
    }
    await exchange.json(body, 200 if reply.ok else 400)


class SendGroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The group's ranks are always the seed and one new server."""

    ports: str
    """Separated by commas."""
    master_address: str = ""
    group_rank: int = 1
    world_size: int = 2
    group_name: str = "weight_send_group"
    backend: str = "nccl"


class SendWeightsRequest(msgspec.Struct, frozen=True, kw_only=True):
    ports: str = ""
    master_address: str = ""
    group_rank: int = 1
    world_size: int = 2
    group_name: str = "weight_send_group"
    backend: str = "nccl"


async def init_weights_send_group(exchange: HttpExchange, state: ServerState) -> None:
    """Listen on ports for a new server that takes the weights of this one."""
    state.admit()
    asked = typed(await exchange.request.json_object(), SendGroupRequest)
    if (ports := legal_ports(asked.ports)) is None or asked.backend != "nccl":
        raise RequestError("ports must be different ports, and backend nccl.", param="ports")
    senders = state.weight_senders
    for name in [name for name, sender in senders.items() if not sender.is_open]:
        del senders[name]
    if asked.group_name in senders or len(senders) >= _MOST_SENDERS:
        raise RequestError(f"Weights are being sent already: {printable(', '.join(senders), 200)}.")
    if len(asked.group_name) > _MAX_NAME:
        raise RequestError(f"group_name has {len(asked.group_name)} characters.")
    files = state.seed_files.listed
    sender = WeightSender(state.seed_files, state.config.server.host, ports, is_once=True)
    senders[asked.group_name] = sender
    await _seed_reply(exchange, state, sender, files)


async def send_weights(exchange: HttpExchange, state: ServerState) -> None:
    """Send the weights to the new server that has connected; 400 if not all were sent."""
    state.admit()
    asked = typed(await exchange.request.json_object(), SendWeightsRequest)
    sender = state.weight_senders.get(asked.group_name)
    if sender is None or asked.group_name == ENGINE:
        raise RequestError(f"There is no group {printable(asked.group_name, 80)!r}.")
    try:
        text = await asyncio.to_thread(sender.send)
    finally:
        state.weight_senders.pop(asked.group_name, None)
    log.info("weights sent: %s", text)
    await exchange.json({"success": True, "message": text})


async def transfer_engine_info(exchange: HttpExchange, state: ServerState) -> None:
    """Where new servers take the weights of this one, and the list of its files."""
    state.admit()
    if not state.config.model.is_seed:
        raise RequestError(
            "This server is no seed.",
            hint="Start it with --remote-instance-weight-loader-start-seed-via-transfer-engine.",
        )
    files, host = state.seed_files.listed, state.config.server.host
    sender = state.weight_senders.get(ENGINE)
    if sender is None or sender.files is not state.seed_files:  # others were loaded since
        if sender is not None:
            sender.close()
        sender = state.weight_senders[ENGINE] = WeightSender(state.seed_files, host, [0], False)
    await _seed_reply(exchange, state, sender, files)


async def _seed_reply(
    exchange: HttpExchange, state: ServerState, sender: WeightSender, files: list[SentFile]
) -> None:
    version = state.config.model.weight_version
    reply = SeedReply(True, "Connect.", files, sender.token, sender.port, version)
    await exchange.json(msgspec.to_builtins(reply))


async def get_weights_by_name(exchange: HttpExchange, state: ServerState) -> None:
    """The first rows of a tensor as lists of numbers; `name` is its name in the checkpoint."""
    asked = typed(await exchange.request.optional_object(), WeightRequest)
    rows = asked.truncate_size
    if not (isinstance(rows, int) or rows.isascii() and rows.isdecimal() and len(rows) <= 9):
        raise RequestError("truncate_size must be a whole number.", param="truncate_size")
    if int(rows) < 1:
        raise RequestError("truncate_size must be at least 1.", param="truncate_size")
    if len(asked.name) > _MAX_NAME:
        raise RequestError(f"name has {len(asked.name)} characters.", param="name")
    client = state.admit().client
    reply = await client.control("read_weight", LOAD_S, name=asked.name, rows=int(rows))
    if not reply.ok:
        raise RequestError(reply.text)
    await exchange.whole(reply.body, 200, "application/json")


async def update_weight_version(exchange: HttpExchange, state: ServerState) -> None:
    """Change the label of the weights that clients see."""
    service = state.admit()
    asked = typed(await exchange.request.json_object(), VersionRequest)
    if asked.abort_all_requests:
        await service.client.control("abort_all")
    _set_version(state, asked.new_version)
    text = "The version of the weights has been changed."
    await exchange.json({"success": True, "message": text, "new_version": asked.new_version})


def _set_version(state: ServerState, version: str | None) -> None:
    if version is not None:
        model = replace(state.config.model, weight_version=version)
        state.config = replace(state.config, model=model)


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadRequest(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: str


async def load_adapter(exchange: HttpExchange, state: ServerState) -> None:
    """Load an adapter; 400 if that fails."""
    state.admit()
    raw = await exchange.request.json_object()
    refuse_fields(raw, LoadRequest.__struct_fields__, exchange.context, is_strict=True)
    await _answer(exchange, state, await load(state, typed(raw, LoadRequest)))


async def load(state: ServerState, asked: LoadRequest) -> Reply:
    """Load an adapter, which requests may name afterwards.

    Raises:
        RequestError: the server has no adapters, or the name or path cannot be used.
    """
    service = state.admit()
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
        await service.client.control("unload_adapter", LOAD_S, name=place.name)  # where it loaded
    return reply


async def unload_adapter(exchange: HttpExchange, state: ServerState) -> None:
    state.admit()
    raw = await exchange.request.json_object()
    refuse_fields(raw, UnloadRequest.__struct_fields__, exchange.context, is_strict=True)
    await _answer(exchange, state, await unload(state, typed(raw, UnloadRequest).lora_name))


async def unload(state: ServerState, lora_name: str) -> Reply:
    """Refuse new requests for an adapter, and unload it when its last request has ended.

    Raises:
        RequestError: there is no such adapter.
    """
    service = state.admit()
    _require_adapters(state)
    name = state.adapters.named(lora_name, "lora_name")
    reply = await service.client.control("unload_adapter", LOAD_S, name=name)
    if reply.ok:
        state.adapters.remove(name)
        log.info("adapter unloaded name=%s", name)
    return reply


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
