"""/v1/files: the inputs of batches come here, and their outputs are fetched here."""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from banyan.base.errors import RequestError
from banyan.base.thread_pool import off_loop
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange
from banyan.server.http.multipart import Part, read_form
from banyan.server.state import ServerState
from banyan.server.store.files import StoredFile
from banyan.server.store.folder import owner_of

T = TypeVar("T")

PURPOSE = "batch"
MAX_PAGE = 10_000
_OWN_FIELDS = ("file", "purpose")


async def files(exchange: HttpExchange, state: ServerState) -> None:
    """List the files, or take a new one."""
    if exchange.method == "POST":
        await _upload(exchange, state)
    else:
        await _list(exchange, state)


async def file(exchange: HttpExchange, state: ServerState) -> None:
    """One file: show it, delete it, or give its content."""
    store = (await state.storage.ready_if_used()).files
    id, _, verb = exchange.tail.partition("/")
    owner = owner_of(exchange.context.tenant)
    stored = store.find(id, owner)
    if verb == "content" and exchange.method != "DELETE":
        async with aclosing(store.pieces(stored)) as pieces:
            await exchange.pieces(pieces, stored.num_bytes, "application/octet-stream")
    elif verb:
        raise RequestError(f"no route below a file: {verb[:40]!r}", status=404, code="not_found")
    elif exchange.method == "DELETE":
        _check_unused(state, id)
        await store.remove(id, owner)
        await exchange.json({"id": id, "object": "file", "deleted": True})
    else:
        await exchange.json(_shown(stored))


def page(
    items: Sequence[T], query: dict[str, str], id_of: Callable[[T], str], limit: int
) -> tuple[list[T], bool]:
    """(page, whether more follow) of a list, oldest first, by `limit`, `after` and `order`."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(f"order must be asc or desc, got {order[:20]!r}", param="order")
    text = query.get("limit", str(limit))
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= MAX_PAGE:
        raise RequestError(f"limit must be in [1, {MAX_PAGE}], got {text[:20]!r}", param="limit")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after := query.get("after"):
        ids = [id_of(item) for item in ordered]
        if after not in ids:
            raise RequestError(f"after names nothing here: {after[:80]!r}", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    return ordered[: int(text)], len(ordered) > int(text)


def listed(bodies: list[Json], has_more: bool) -> Json:
    """A page of a list as the API shows it."""
    return {
        "object": "list",
        "data": bodies,
        "first_id": bodies[0]["id"] if bodies else None,
        "last_id": bodies[-1]["id"] if bodies else None,
        "has_more": has_more,
    }


async def _upload(exchange: HttpExchange, state: ServerState) -> None:
    body, kind = exchange.body, exchange.header(b"content-type")
    parts = await off_loop(len(body) + len(kind), lambda: read_form(body, kind))
    for name in {p.name.partition("[")[0]: None for p in parts}:
        if name not in _OWN_FIELDS:
            exchange.context.warn_or_refuse(name, "not used")
    purpose = _only(parts, "purpose").text
    if purpose != PURPOSE:
        raise RequestError(
            f"purpose must be {PURPOSE!r}, got {purpose[:40]!r}; files serve batches only here",
            param="purpose",
        )
    given = _only(parts, "file")
    if not given.content:
        raise RequestError("the file is empty", param="file")
    store = (await state.storage.ready()).files
    name, owner = given.filename or "upload.jsonl", owner_of(exchange.context.tenant)
    stored = await store.add(name, purpose, given.content, owner)
    await exchange.json(_shown(stored))


async def _list(exchange: HttpExchange, state: ServerState) -> None:
    found = (await state.storage.ready_if_used()).files.all(owner_of(exchange.context.tenant))
    if purpose := exchange.query.get("purpose"):
        found = [f for f in found if f.purpose == purpose]
    shown, has_more = page(found, exchange.query, lambda f: f.id, MAX_PAGE)
    await exchange.json(listed([_shown(f) for f in shown], has_more))


def _only(parts: list[Part], name: str) -> Part:
    found = [p for p in parts if p.name == name]
    if len(found) != 1:
        raise RequestError(f"the form must have one field {name!r}, got {len(found)}", param=name)
    return found[0]


def _check_unused(state: ServerState, id: str) -> None:
    """RequestError 409 while a batch still reads the file."""
    for batch in state.storage.batches.batches.values():
        if batch.input_file_id == id and not batch.is_over:
            raise RequestError(
                f"the batch {batch.id} still reads this file",
                status=409,
                code="file_in_use",
                hint="Wait for its end, or cancel it",
            )


def _shown(stored: StoredFile) -> Json:
    return {
        "id": stored.id,
        "object": "file",
        "bytes": stored.num_bytes,
        "created_at": stored.created_at,
        "filename": stored.filename,
        "purpose": stored.purpose,
        "status": "processed",
    }
