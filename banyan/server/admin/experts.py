"""/start_expert_distribution_record and its kin: which experts tokens choose, as a file."""

from functools import partial

from banyan.base.errors import RequestError
from banyan.server.http.exchange import Exchange
from banyan.server.http.state import ServerState

_WRITE_S = 120.0
"""Longest wait for the file."""


async def _record(exchange: Exchange, state: ServerState, verb: str) -> None:
    reply = await state.admit().client.control(verb, _WRITE_S)
    if not reply.ok:
        raise RequestError(reply.text)
    await exchange.text(f"{reply.text}\n")


start_record = partial(_record, verb="start_expert_record")
stop_record = partial(_record, verb="stop_expert_record")
dump_record = partial(_record, verb="dump_expert_record")
