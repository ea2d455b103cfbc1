"""/start_profile and /stop_profile: a file of what the steps did between them."""

import msgspec

from banyan.base.errors import RequestError
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.fields import typed
from banyan.server.state import ServerState

_START_S = 60.0
"""Longest wait for the recording to begin."""
_WRITE_S = 120.0
"""Longest wait for the file."""


class ProfileRequest(msgspec.Struct, frozen=True, kw_only=True):
    output_dir: str | None = None
    num_steps: int | str | None = None
    """The recording ends by itself after so many; a text where it comes in the query."""
    profile_prefix: str | None = None


async def start_profile(exchange: HttpExchange, state: ServerState) -> None:
    service = state.admit()
    raw = await exchange.optional_object()
    for name, value in raw.items():
        if name not in ProfileRequest.__struct_fields__ and value:
            exchange.context.warn_or_refuse(name, "a profile has phases and ops alone")
    asked = typed(raw, ProfileRequest)
    args: dict[str, str | int | float | bool] = {
        name: value
        for name, value in (
            ("output_dir", asked.output_dir),
            ("num_steps", _steps(asked.num_steps)),
            ("profile_prefix", asked.profile_prefix),
        )
        if value
    }
    reply = await service.client.control("start_profile", _START_S, **args)
    if not reply.ok:
        raise RequestError(reply.text)
    await exchange.text(f"{reply.text}\n")


async def stop_profile(exchange: HttpExchange, state: ServerState) -> None:
    reply = await state.admit().client.control("stop_profile", _WRITE_S)
    if not reply.ok:
        raise RequestError(reply.text)
    await exchange.text(f"Stop profiling. {reply.text}\n")


def _steps(given: int | str | None) -> int | None:
    if isinstance(given, str):
        if not (given.isascii() and given.isdecimal() and len(given) <= 9):
            raise RequestError("num_steps must be a whole number.", param="num_steps")
        given = int(given)
    if given is not None and not 1 <= given < 10**9:
        raise RequestError(f"num_steps must be at least 1, got {given}.", param="num_steps")
    return given
