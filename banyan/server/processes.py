"""The composition root for processes: starts an engine in a process or thread of its own.

Importable without torch, so that the API process stays small; `engine/core_process.py` builds
the engine inside. `python -m banyan.server.processes` is the entry of child processes. They load
their libraries first and then read their ProcessSpec from standard input, so that a child can be
started before its spec is known.
"""

import faulthandler
import gc
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from banyan.base.child_process import (
    STACKS,
    Child,
    Process,
    Pulse,
    follow_parent,
    fork_spares,
    read_process_spec,
    spawn,
    watch_parent,
)
from banyan.base.errors import BanyanError, ConfigError
from banyan.base.log import logger, start_logging
from banyan.base.memory import report_slow_gc, set_gc_threshold
from banyan.base.torch_parts import without_parts
from banyan.config.schema import Config
from banyan.dp_attention.remote_engines import RemoteEngines
from banyan.engine.flight_recorder_memory import RecordingMemory
from banyan.engine.process_spec import ENGINE, NO_RECORDING, RANK, ProcessSpec
from banyan.formats.shards import read_ahead
from banyan.messages.events import Fatal
from banyan.messages.transport import remove_folders_of
from banyan.model_config.model_config import ModelConfig

if TYPE_CHECKING:
    from banyan.engine.loop import EngineLoop, Link

log = logger(__name__)

OnDeath = Callable[[str], None]
"""Called from a thread with a description when an engine ends unexpectedly."""


@dataclass(frozen=True)
class EngineHandle:
    """A running engine, in a process, a thread or on another node."""

    stop: Callable[[], None]
    put_down: Callable[[], None]
    """Kill an engine that does not answer, after its stack traces are in the log."""
    pids: Callable[[], list[int]]
    recording: Callable[[], bytes] = bytes
    """Content of its flight recorder as a journal, even after its death."""


def start_engine_process(
    config: Config, model_config: ModelConfig, address: str, on_death: OnDeath, secret: str = ""
) -> EngineHandle:
    """Start the engine in its own process, connected to `address`; without a flight recorder and
    without other nodes.

    Raises:
        ConfigError: the engine would be on another node.
    """
    parallel = config.parallel
    if parallel.node_of(parallel.replica):
        raise ConfigError(
            f"--enable-dp-attention with {parallel.nodes_flag} works only in a server",
            hint="run: banyan serve with the same flags, on each node",
        )
    config = replace(config, observe=replace(config.observe, recorder_bytes=0))
    return _start(_engine_child(), config, model_config, address, on_death, secret)


@contextmanager
def waiting_engines(
    count: int,
    secret: str = "",
) -> Iterator[Callable[[Config, ModelConfig, str, OnDeath], EngineHandle]]:
    """Start `count` processes; yield a function that starts engines in them.

    The processes load their libraries while the caller prepares the config. Unused processes and
    other nodes end with the block.
    """
    waiting = [_engine_child() for _ in range(count)]
    far = RemoteEngines(secret)

    def start(
        config: Config, model_config: ModelConfig, address: str, on_death: OnDeath
    ) -> EngineHandle:
        if config.parallel.node_of(config.parallel.replica):
            far.start(_without_secrets(config), model_config, address, on_death)
            return EngineHandle(stop=_nothing, put_down=_nothing, pids=list)
        engine = waiting.pop() if waiting else _engine_child()
        return _start(engine, config, model_config, address, on_death, secret)

    try:
        yield start
    finally:
        far.close()
        for engine in waiting:
            engine.child.stop()
            engine.memory.close()


def _nothing() -> None:
    """An engine on another node ends when it is replaced, or with the server."""


def _without_secrets(config: Config) -> Config:
    """Remove keys and passwords, which an engine does not need."""
    server = replace(config.server, api_key="", admin_api_key="", ssl_password="")
    return replace(config, server=server)


@dataclass(frozen=True)
class _Engine:
    """A process without a spec yet, and the memory of its flight recorder."""

    child: Child
    memory: RecordingMemory


def _engine_child() -> _Engine:
    memory = RecordingMemory()
    return _Engine(spawn("banyan.server.processes", ENGINE, shared=[memory.descriptor]), memory)


def _start(
    engine: _Engine,
    config: Config,
    model_config: ModelConfig,
    address: str,
    on_death: OnDeath,
    secret: str,
) -> EngineHandle:
    child, memory, size = engine.child, engine.memory, config.observe.recorder_bytes
    if size:
        memory.give_size(size)
    recording = memory.descriptor if size else NO_RECORDING
    process_spec = ProcessSpec(
        ENGINE,
        _without_secrets(config),
        model_config,
        address,
        secret=secret,
        recording=recording,
    )
    child.assign(process_spec.encode())
    child.watch(on_death)
    if config.model.load_format != "dummy":
        threading.Thread(target=read_ahead, args=(model_config.path,), daemon=True).start()

    def ended(how: Callable[[], None]) -> None:
        how()
        remove_folders_of(child.pid)  # a killed process cannot remove them
        memory.close()

    return EngineHandle(
        stop=partial(ended, child.stop),
        put_down=partial(ended, child.put_down),
        pids=lambda: [child.pid],
        recording=memory.read,
    )


def start_engine_thread(
    config: Config, model_config: ModelConfig, link: "Link", on_death: OnDeath
) -> EngineHandle:
    """Start the engine in a thread of this process (offline use, tests)."""
    from banyan.engine.core_process import run_engine

    loops: list[EngineLoop] = []
    is_stopping = threading.Event()

    def started(loop: "EngineLoop") -> None:
        loops.append(loop)
        if is_stopping.is_set():
            loop.stop()

    def serve() -> None:
        try:
            run_engine(config, model_config, link, started)
        except BanyanError as error:
            on_death(str(error))
        except Exception as error:
            log.exception("the engine thread failed")
            on_death(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=serve, name="engine", daemon=True)
    thread.start()

    def stop() -> None:
        is_stopping.set()
        for loop in loops:
            loop.stop()
        thread.join()
        gc.collect()  # frees what the engine kept, files and memory included

    return EngineHandle(stop=stop, put_down=stop, pids=list)


def main() -> None:
    """Entry of a child process: run its ProcessSpec; exit with the code of a BanyanError."""
    follow_parent()
    gc.disable()  # imports create many objects and hardly any garbage
    with without_parts():
        from banyan.engine.core_process import run_rank

    gc.freeze()
    gc.enable()
    faulthandler.register(STACKS)
    process_spec = _read_process_spec()
    spares = fork_spares(_num_local_ranks(process_spec))
    if spares is None:  # this process is one of the forks
        process_spec = _read_process_spec()
    watch_parent()
    set_gc_threshold(process_spec.config.observe.gc_threshold)
    report_slow_gc(process_spec.config.observe.slow_gc_s)
    try:
        if process_spec.role == RANK:
            from banyan.engine.local_processes import open_stacks

            faulthandler.register(STACKS, open_stacks(process_spec.pulse))
            Pulse(process_spec.pulse).keep_beating()
            run_rank(
                process_spec.config,
                process_spec.model_config,
                process_spec.rank,
                process_spec.address,
                process_spec.mesh_address,
            )
        else:
            _serve_engine(process_spec, spares or ())
    except BanyanError as error:
        log.error("%s", error)
        raise SystemExit(error.exit_code) from None


def _read_process_spec() -> ProcessSpec:
    process_spec = ProcessSpec.decode(read_process_spec())
    observe = process_spec.config.observe
    start_logging(process_spec.process_name, observe.log_level, observe.logs_json)
    return process_spec


def _num_local_ranks(process_spec: ProcessSpec) -> int:
    """Number of ranks that an engine starts on its own machine."""
    parallel = process_spec.config.parallel
    return 0 if process_spec.role == RANK or parallel.by_ray else parallel.local_world - 1


def _serve_engine(process_spec: ProcessSpec, spares: Sequence[Process]) -> None:
    from banyan.engine.core_process import run_engine
    from banyan.messages.transport import SocketEngineLink

    link = SocketEngineLink(process_spec.address)

    def started(loop: "EngineLoop") -> None:
        signal.signal(signal.SIGTERM, lambda *_: loop.stop())

    try:
        run_engine(
            process_spec.config,
            process_spec.model_config,
            link,
            started,
            process_spec.secret,
            process_spec.recording,
            spares,
        )
    except BanyanError as error:
        link.send([Fatal(str(error), error.exit_code)])  # the API server reports it
        raise SystemExit(error.exit_code) from None
    finally:
        link.close()


if __name__ == "__main__":
    main()
