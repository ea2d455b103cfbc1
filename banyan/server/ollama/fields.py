"""Reading of requests for all Ollama routes."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from banyan.requests.context import RequestContext
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange
from banyan.server.ollama.schema import HARMLESS, REFUSED, Message
from banyan.server.openai.fields import (
    Report,
    account_for,
    account_for_members,
    typed,
)
from banyan.server.openai.models import check_model
from banyan.server.state import ServerState

R = TypeVar("R", bound=msgspec.Struct)

_NO_NAMES: Mapping[str, str] = {}


def reporter(context: RequestContext, names: Mapping[str, str] = _NO_NAMES) -> Report:
    """Reports a field without effect, or refuses the request under --strict-requests.

    Args:
        names: our name of a field -> the client's.
    """

    def report(field: str, why: str) -> None:
        context.warn_or_refuse(names.get(field, field), why)

    return report


def typed_from(raw: Json, kind: type[R], report: Report) -> R:
    """The typed request. Every field of the body is honoured, refused or reported."""
    account_for(raw, kind.__struct_fields__, REFUSED, HARMLESS, report)
    account_for_members(raw, {"messages": Message}, (), report)
    return typed(raw, kind)


async def read(exchange: HttpExchange, kind: type[R], report: Report) -> R:
    """The typed request of a body."""
    return await exchange.request.read(lambda raw: typed_from(raw, kind, report))


def model_and_adapter_of(name: str, context: RequestContext, state: ServerState) -> tuple[str, str]:
    """The model name to answer with, and the adapter that it names: ADAPTER, ADAPTER:TAG or
    BASE:ADAPTER. Any other tag (":latest", ":8b") is ignored."""
    served, names = state.served_name, state.adapters
    stem, _, tag = name.partition(":")
    for adapter in (name, stem, tag):
        if adapter in names and name != served:
            return name, adapter
    if name != served:
        check_model(stem, served, context)
    return name or served, ""
