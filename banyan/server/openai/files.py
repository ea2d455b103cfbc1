"""/v1/files: uploads and downloads the files of batches; parses multipart/form-data (RFC 7578)."""

import re
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import unquote

from banyan.base.errors import RequestError
from banyan.base.thread_pool import off_loop
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange
from banyan.server.state import ServerState
from banyan.server.store.files import StoredFile
from banyan.server.store.folder import owner_of

T = TypeVar("T")

PURPOSE = "batch"
MAX_PAGE = 10_000
_OWN_FIELDS = ("file", "purpose")


MAX_PARTS = 32
MAX_HEAD_BYTES = 8 << 10
"""Longest head of a part, and longest Content-Type of a form."""

MAX_BOUNDARY = 70
"""Characters (RFC 2046)."""

_HEAD_END = b"\r\n\r\n"
_DISPOSITION = re.compile(r"content-disposition:[ \t]*form-data[ \t]*(?=;|$)", re.IGNORECASE)
_FORM = re.compile(r"[ \t]*multipart/form-data[ \t]*(?=;|$)", re.IGNORECASE)
_PARAMETER = re.compile(r';[ \t]*([\w*-]{1,32})=(?:"((?:[^"\\]|\\.)*)"|([^";\s]+))[ \t]*', re.ASCII)
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True)
class Part:
    """One part of a form. `filename` is None for a plain field."""

    name: str
    filename: str | None
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")


async def files(exchange: HttpExchange, state: ServerState) -> None:
    """List the files, or take a new one."""
    if exchange.request.method == "POST":
        await _upload(exchange, state)
    else:
        await _list(exchange, state)


async def file(exchange: HttpExchange, state: ServerState) -> None:
    """One file: show it, delete it, or give its content."""
    store = (await state.storage.ready_if_used()).files
    id, _, verb = exchange.request.tail.partition("/")
    owner = owner_of(exchange.context.tenant)
    stored = store.find(id, owner)
    if verb == "content" and exchange.request.method != "DELETE":
        async with aclosing(store.pieces(stored)) as pieces:
            await exchange.pieces(pieces, stored.num_bytes, "application/octet-stream")
    elif verb:
        raise RequestError(f"no route below a file: {verb[:40]!r}", status=404, code="not_found")
    elif exchange.request.method == "DELETE":
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
    body, kind = exchange.request.body, exchange.request.header(b"content-type")
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
    if purpose := exchange.request.query.get("purpose"):
        found = [f for f in found if f.purpose == purpose]
    shown, has_more = page(found, exchange.request.query, lambda f: f.id, MAX_PAGE)
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


def read_form(body: bytes, content_type: str) -> list[Part]:
    """The parts of a form, in order.

    Args:
        content_type: header of the request, with the boundary.

    Raises:
        RequestError: the body is malformed or exceeds a limit.
    """
    kind = _FORM.match(content_type) if len(content_type) <= MAX_HEAD_BYTES else None
    boundary = _parameters(content_type, kind.end()).get("boundary", "") if kind else ""
    if not 0 < len(boundary) <= MAX_BOUNDARY:
        raise _refusal(
            "the body must be multipart/form-data with a boundary of at most "
            f"{MAX_BOUNDARY} characters"
        )
    mark = b"\r\n--" + boundary.encode("latin-1", "replace")
    pieces = (b"\r\n" + body).split(mark, MAX_PARTS + 2)
    if len(pieces) < 2 or len(pieces) > MAX_PARTS + 2:
        raise _refusal(f"the form must have 1 to {MAX_PARTS} parts")
    if not pieces[-1].startswith(b"--"):
        raise _refusal("the form is not ended by its boundary")
    return [_part(piece) for piece in pieces[1:-1]]


def _part(piece: bytes) -> Part:
    end = piece.find(_HEAD_END, 0, MAX_HEAD_BYTES + len(_HEAD_END))
    if end < 0:
        raise _refusal(f"a part of the form has no head of at most {MAX_HEAD_BYTES} bytes")
    lines = piece[:end].decode("utf-8", "replace").split("\r\n")
    found = next((m for m in map(_DISPOSITION.match, lines) if m), None)
    if found is None:
        raise _refusal("a part of the form has no Content-Disposition")
    fields = _parameters(found.string, found.end())
    if "name" not in fields:
        raise _refusal("a part of the form has no name")
    return Part(fields["name"], _filename(fields), piece[end + len(_HEAD_END) :])


def _parameters(line: str, at: int) -> dict[str, str]:
    """The parameters of a header value from position `at`, up to the first malformed one."""
    found: dict[str, str] = {}
    while match := _PARAMETER.match(line, at):
        name, quoted, plain = match.groups()
        value = plain if quoted is None else _ESCAPED.sub(r"\1", quoted)
        found.setdefault(name.lower(), value)
        at = match.end()
    return found


def _filename(fields: dict[str, str]) -> str | None:
    """The name of the file, also in the form of RFC 5987 (charset'language'percent-encoded)."""
    charset, _, rest = fields.get("filename*", "").partition("'")
    if charset.lower() == "utf-8" and "'" in rest:
        return unquote(rest.partition("'")[2])
    return fields.get("filename")


def _refusal(text: str) -> RequestError:
    return RequestError(text, code="invalid_form")
