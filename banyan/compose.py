"""The composition root for processes: starts an engine in a process or thread of its own.

Importable without torch, so that the API process stays small; `replica.py` builds what runs inside.
`python -m banyan.compose` is the entry of child processes, whose orders come on standard input.
"""

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from banyan.base.errors import BanyanError
from banyan.base.log import logger, start_logging
from banyan.config.card import ModelCard
from banyan.config.schema import Config
from banyan.engine.loop import EngineLoop, Link
from banyan.engine.orders import ENGINE, RANK, Orders
from banyan.engine.processes import spawn, take_orders
from banyan.messages.events import Fatal

log = logger(__name__)


@dataclass(frozen=True)
class EngineHandle:
    """A running engine, wherever it runs."""

    stop: Callable[[], None]
    pids: Callable[[], list[int]]


def start_engine_process(
    config: Config, card: ModelCard, address: str, on_death: Callable[[str], None]
) -> EngineHandle:
    """Start the engine in a process of its own, connected to `address`.

    Args:
        on_death: called from a thread with what happened when the process ends unasked.
    """
    orders = Orders(ENGINE, config, card, address)
    child = spawn("banyan.compose", orders.process_name, orders.encode())
    child.watch(on_death)
    return EngineHandle(stop=child.stop, pids=lambda: [child.pid])


def start_engine_thread(
    config: Config, card: ModelCard, link: Link, on_death: Callable[[str], None]
) -> EngineHandle:
    """Start the engine in a thread of this process (offline use, tests)."""
    from banyan.replica import run_engine

    loops: list[EngineLoop] = []
    is_stopping = threading.Event()

    def started(loop: EngineLoop) -> None:
        loops.append(loop)
        if is_stopping.is_set():
            loop.stop()

    def serve() -> None:
        try:
            run_engine(config, card, link, started)
        except Exception as error:
            log.error("the engine thread failed: %s", error)
            on_death(str(error))

    thread = threading.Thread(target=serve, name="engine", daemon=True)
    thread.start()

    def stop() -> None:
        is_stopping.set()
        for loop in loops:
            loop.stop()
        thread.join()

    return EngineHandle(stop=stop, pids=list)


def main() -> None:
    """Entry of a child process: carry out the orders, exit with the error's own code."""
    orders = Orders.decode(take_orders())
    start_logging(orders.process_name, orders.config.observe.log_level)
    try:
        if orders.role == RANK:
            from banyan.replica import run_rank

            run_rank(orders.config, orders.card, orders.rank, orders.address, orders.mesh_address)
        else:
            _serve_engine(orders)
    except BanyanError as error:
        log.error("%s", error)
        raise SystemExit(error.exit_code) from None


def _serve_engine(orders: Orders) -> None:
    from banyan.messages.link import ZmqEngineLink
    from banyan.replica import run_engine

    link = ZmqEngineLink(orders.address)

    def started(loop: EngineLoop) -> None:
        signal.signal(signal.SIGTERM, lambda *_: loop.stop())

    try:
        run_engine(orders.config, orders.card, link, started)
    except BanyanError as error:
        link.send([Fatal(str(error), error.exit_code)])
        raise
    finally:
        link.close()


if __name__ == "__main__":
    main()
