"""/start_expert_distribution_record and its kin: which experts tokens choose, as a file."""

from functools import partial

from banyan.base.errors import RequestError
from banyan.server.http.exchange import HttpExchange
from banyan.server.state import ServerState

_WRITE_S = 120.0
"""Longest wait for the file."""


async def _record(exchange: HttpExchange, state: ServerState, verb: str) -> None:
    """Answered with what each replica says, a line for all that say the same; refused where none
    could."""
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
