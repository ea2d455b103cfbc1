"""The normal server with an engine that needs no model; it records the delays of its event loop.

`python -m benchmarks.watched_server RATE NOTES [flags of banyan serve]`; the file NOTES is
written at the end, and "" records nothing.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvloop

from banyan.base.child_process import spawn
from banyan.base.log import start_logging
from banyan.config.cli import parse
from banyan.config.env import read_environment
from banyan.config.prepare import prepare
from banyan.config.schema import Config
from banyan.model_config.model_config import ModelConfig
from banyan.server.http.listen import bind
from banyan.server.lifecycle.serve import Server
from banyan.server.processes import EngineHandle

TICK_S = 0.002


async def note_lag(notes: list[tuple[float, float]]) -> None:
    """(monotonic seconds, seconds that the loop was late) of every tick."""
    while True:
        due_s = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        now_s = time.monotonic()
        notes.append((now_s, max(0.0, now_s - due_s)))


def start_engine(
    rate: str,
    config: Config,
    model_config: ModelConfig,
    address: str,
    on_death: Callable[[str], None],
) -> EngineHandle:
    child = spawn("benchmarks.instant_engine", "engine", f"{address} {rate}".encode())
    child.watch(on_death)
    return EngineHandle(child.stop, child.put_down, lambda: [child.pid])


def main() -> None:
    rate, path, *flags = sys.argv[1:]
    environment = read_environment()
    config = parse(flags, environment)
    start_logging("server", "warning")
    notes: list[tuple[float, float]] = []

    async def serve() -> int:
        ready = partial(prepare, config, environment)
        server = Server(config, ready, [("http", listener)], partial(start_engine, rate))
        watch = asyncio.create_task(note_lag(notes)) if path else None
        try:
            return await server.run()
        finally:
            if watch is not None:
                watch.cancel()

    with contextlib.closing(bind(config.server)) as listener:
        code = uvloop.run(serve())
    if path:
        Path(path).write_text(json.dumps(notes))
    raise SystemExit(code)


if __name__ == "__main__":
    main()
