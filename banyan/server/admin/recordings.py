"""Recordings: profiles of steps, chosen experts, and the flight recorder.

/start_profile and /stop_profile write the phases of steps; /start_, /stop_ and
/dump_expert_distribution_record write the choices of experts. /flight_recorder returns the latest
messages, plans and results of an engine, with prompts as token ids, or writes them with the last
requests into the folder of --crash-dump-folder.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from banyan.base.errors import RequestError
from banyan.engine_client.request_log import dump_recordings
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.schema import typed
from banyan.server.state import ServerState

_START_S = 60.0
"""Longest wait for the profile to start."""
_WRITE_S = 120.0
"""Longest wait for the file."""


class ProfileRequest(msgspec.Struct, frozen=True, kw_only=True):
    output_dir: str | None = None
    num_steps: int | None = None
    """The profile stops after this many steps."""
    profile_prefix: str | None = None


async def start_profile(exchange: HttpExchange, state: ServerState) -> None:
    service = state.admit()
    raw = await exchange.request.optional_object()
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


def _steps(given: int | None) -> int | None:
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


async def flight_recorder(exchange: HttpExchange, state: ServerState) -> None:
    """GET: a replica's journal for `banyan replay` and `banyan explain`; `dp_rank`, default 0.
    POST: write the recordings of all replicas, and the last requests, to files."""
    if exchange.request.method == "POST":
        await _write(exchange, state)
        return
    recordings, asked = state.recordings(), exchange.request.query.get("dp_rank", "0")
    read = {str(replica): read for replica, read in recordings.items()}.get(asked)
    if read is None:
        raise RequestError(
            f"dp_rank must be one of {', '.join(map(str, recordings))}, got {asked[:20]!r}.",
            param="dp_rank",
        )
    content = await asyncio.to_thread(read)
    if not content:
        raise RequestError(
            "nothing is recorded",
            status=404,
            code="not_recorded",
            hint="--flight-recorder-bytes 0 was given",
        )
    await exchange.whole(content, 200, "application/octet-stream")


async def _write(exchange: HttpExchange, state: ServerState) -> None:
    if state.recent is None:
        raise RequestError(
            "There is no folder for dumps",
            status=404,
            code="not_enabled",
            hint="Start the server with --crash-dump-folder.",
        )
    written = await asyncio.to_thread(dumper(state, "asked for"))
    if not written:
        raise RequestError(
            f"nothing could be written into {state.config.observe.dumps}",
            status=500,
            code="not_written",
            hint="The log says why.",
        )
    await exchange.json({"files": [str(path) for path in written]})


def dumper(state: ServerState, why: str) -> Callable[[], list[Path]]:
    """A function that writes the engines' recordings and the last requests; it returns the files.

    The recordings are taken at once, because they are lost when an engine ends.
    """
    recordings = {replica: read() for replica, read in state.recordings().items()}

    def dump() -> list[Path]:
        requests = None if state.recent is None else state.recent.dump(why)
        found = dump_recordings(Path(state.config.observe.dumps), recordings)
        return found if requests is None else [requests, *found]

    return dump
