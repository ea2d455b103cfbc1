"""/flight_recorder: the latest messages, plans and results of an engine, prompts as token ids; and
the dumps of them, with the last requests, in the folder of --crash-dump-folder.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from banyan.base.errors import RequestError
from banyan.engine_client.request_records import dump_recordings
from banyan.server.http.exchange import HttpExchange
from banyan.server.state import ServerState


async def flight_recorder(exchange: HttpExchange, state: ServerState) -> None:
    """GET: a replica's journal for `banyan replay` and `banyan explain`; `dp_rank`, default 0.
    POST: write the recordings of all replicas, and the last requests, to files."""
    if exchange.method == "POST":
        await _write(exchange, state)
        return
    recordings, asked = state.recordings(), exchange.query.get("dp_rank", "0")
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
