"""`banyan batch IN.jsonl OUT.jsonl`: run the requests of a batch file on an engine of this process.

The file formats are the same as for /v1/batches. An interrupted run continues where it stopped.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from banyan.base.errors import ConfigError, DeviceError
from banyan.base.log import log_always, logger, start_logging
from banyan.config.cli import parse
from banyan.config.env import forget_secrets, read_environment
from banyan.config.prepare import prepare
from banyan.config.rules.ignored import flags_that_need_a_server
from banyan.config.schema import Config
from banyan.dp_attention.rules import of_replica
from banyan.engine_client.client import ClientLimits, EngineClient
from banyan.engine_client.data_parallel import DataParallelClient
from banyan.messages.transport import PrivateFolder, SocketFrontLink
from banyan.scheduler.routing import ROUTES
from banyan.server.batch_lines import BatchLine, ServerEnding, read_lines, run_lines
from banyan.server.lifecycle.startup import open_service
from banyan.server.processes import start_engine_process
from banyan.server.state import ServerState
from banyan.server.store.batches import AnswerLog
from banyan.server.tool_servers.start import start_tool_servers

log = logger(__name__)

USAGE = """banyan batch IN.jsonl OUT.jsonl [MODEL] [flags]

Answers every line of IN.jsonl, {"custom_id", "method": "POST", "url", "body"}, with one line of
OUT.jsonl, in the order in which answers come. Lines that OUT.jsonl answers already are left out:
the same command goes on after a crash. Exit code 1 says that some lines were refused.
Every other flag is the server's; see banyan serve --help."""

_BAR_CHARS = 30
_SOME_REFUSED = 1


def batch(argv: Sequence[str]) -> int:
    """Answer a file of requests; returns the exit code."""
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        return 0
    if len(argv) < 2 or argv[0].startswith("-") or argv[1].startswith("-"):
        raise ConfigError(
            "banyan batch needs two files", hint="write: banyan batch IN.jsonl OUT.jsonl"
        )
    source, out = Path(argv[0]), Path(argv[1])
    lines = _lines(source)
    if out.exists() and out.samefile(source):
        raise ConfigError(f"{source} and {out} are the same file", hint="name another for answers")
    environment = read_environment()
    forget_secrets()
    config = parse(argv[2:], environment)
    quiet = not any(word.startswith("--log-level") for word in argv)
    start_logging("batch", "warning" if quiet else config.observe.log_level)
    log_always(log, (*config.observe.notes, *flags_that_need_a_server(config)))
    answers = AnswerLog(out, out)
    try:
        try:
            answers.recover()
        except OSError as error:
            raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
        if any(line.custom_id not in answers.answered for line in lines):
            asyncio.run(_run(config, partial(prepare, config, environment), lines, answers))
    finally:
        answers.close()
    print(f"{answers.num_succeeded} answered, {answers.num_failed} refused: {argv[1]}")
    return _SOME_REFUSED if answers.num_failed else 0


def _lines(path: Path) -> list[BatchLine]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    lines, faults = read_lines(content)
    if faults:
        reasons = "; ".join(f"line {f.line}: {f.message}" for f in faults)
        raise ConfigError(f"{path} cannot be run: {reasons}")
    return lines


async def _run(
    config: Config, prepared: partial, lines: Sequence[BatchLine], answers: AnswerLog
) -> None:
    progress = Progress(len(lines))
    async with _engine(config, prepared) as state:
        progress.show(len(answers.answered))
        try:
            await run_lines(
                state, lines, answers, lambda: progress.show(len(answers.answered)), share=1.0
            )
        except ServerEnding:
            raise DeviceError(f"the engine has died: {state.dead}") from None
        finally:
            progress.end()


@asynccontextmanager
async def _engine(config: Config, prepared: partial) -> AsyncIterator[ServerState]:
    """One engine per replica and a service over them, as the server has it."""
    tool_servers = await start_tool_servers(config.server.tool_servers)
    config, model_config = await asyncio.to_thread(prepared)
    state = ServerState(config, tool_servers=tool_servers)
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        folder = PrivateFolder()
        stack.callback(folder.close)
        addresses = [folder.address(f"front{i}") for i in range(config.parallel.dp)]
        watchdog_s = config.schedule.watchdog_s
        engines = [
            EngineClient(SocketFrontLink(a), ClientLimits(watchdog_s=watchdog_s)) for a in addresses
        ]
        parallel = config.parallel
        fleet = DataParallelClient(
            engines, ROUTES.load(parallel.load_balance), parallel.uses_dp_attention
        )
        await fleet.start()
        stack.push_async_callback(fleet.close)
        for number, (address, engine) in enumerate(zip(addresses, engines, strict=True)):

            def on_death(text: str, engine: EngineClient = engine) -> None:
                loop.call_soon_threadsafe(engine.engine_lost, text)

            mine = of_replica(config, number, f"{folder.path}/joined")
            handle = start_engine_process(mine, model_config, address, on_death)
            stack.push_async_callback(asyncio.to_thread, handle.stop)
        watch = asyncio.create_task(_watch(state, fleet))
        stack.callback(watch.cancel)
        state.service = await open_service(state, model_config, fleet)
        yield state


async def _watch(state: ServerState, fleet: DataParallelClient) -> None:
    state.dead = await fleet.lost()


class Progress:
    """A bar on a terminal; nothing where standard error is a file or a pipe."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._is_shown = sys.stderr.isatty()

    def show(self, num_done: int) -> None:
        if not self._is_shown:
            return
        full = _BAR_CHARS * num_done // self._total
        bar = "█" * full + "░" * (_BAR_CHARS - full)
        print(f"\r{bar} {num_done}/{self._total}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._is_shown:
            print(file=sys.stderr)
