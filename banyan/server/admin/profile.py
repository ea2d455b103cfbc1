"""Recordings into files: the phases of steps (/start_profile, /stop_profile) and the choices of
experts (/start_expert_distribution_record, /stop_…, /dump_…).
"""

from functools import partial

import msgspec

from banyan.base.errors import RequestError
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.schema import typed
from banyan.server.state import ServerState

_START_S = 60.0
"""Longest wait for the profile to start."""
_WRITE_S = 120.0
"""Longest wait for the file."""


class ProfileRequest(msgspec.Struct, frozen=True, kw_only=True):
    output_dir: str | None = None
    num_steps: int | str | None = None
    """The profile stops after this many steps. A text if it comes in the query."""
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


async def _record(exchange: HttpExchange, state: ServerState, verb: str) -> None:
    """Run a control op on all replicas. The response has a line for each different reply; it is an
    error if no replica succeeded."""
    found = await state.admit().client.ask(verb, _WRITE_S)
    done = [reply.text for _, reply in found if reply.ok and reply.text]
    if not done:
        why = next((reply.text for _, reply in found), "No replica is ready.")
        raise RequestError(why, status=400 if found else 503)
    refused = [f"replica {number}: {reply.text}" for number, reply in found if not reply.ok]
    lines = dict.fromkeys([*done, *refused])
    await exchange.text("".join(f"{line}\n" for line in lines))


start_record = partial(_record, verb="start_expert_record")
stop_record = partial(_record, verb="stop_expert_record")
dump_record = partial(_record, verb="dump_expert_record")
