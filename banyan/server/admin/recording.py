"""/flight_recorder: the latest messages, plans and results of an engine, prompts as token ids."""

import asyncio

from banyan.base.errors import RequestError
from banyan.server.http.exchange import Exchange
from banyan.server.http.state import ServerState


async def flight_recorder(exchange: Exchange, state: ServerState) -> None:
    """A journal for `banyan replay` and `banyan explain`; of replica `dp_rank`, 0 unless told."""
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
