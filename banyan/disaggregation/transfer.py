"""Transfer backends: movers that bring KV pages from prefill to decode servers, in one table.

Also what the backends share: options, a queue of finished transfers, and an event loop thread.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue

from banyan.base.table import Table
from banyan.disaggregation.page_cutting import PageForm
from banyan.disaggregation.transfer_engine import Fabric, TransferEngine
from banyan.kv_transfer.page_mover import PageMover, Pages
from banyan.messages.disaggregation import KVTransferEvent
from banyan.messages.plan import CopyResult, Held

_GRACE_S = 2.0
End = CopyResult | Held | KVTransferEvent


@dataclass(frozen=True)
class TransferOptions:
    """Options of a mover.

    Attributes:
        is_prefill: this is a prefill server; else a decode server.
        host, port: where a prefill server listens.
        replica, replicas: number of this replica, and how many the server has; their ports are
            consecutive.
        secret: shared by both servers; "" = only the loopback address may connect.
        facts: properties by name that must be equal on both servers for pages to be compatible.
        vocab_size: of the model.
        lease_s: how long a complete room is kept for the decode server.
        patience_s: how long to wait for a room that is not open yet.
        forms: layout of the pages of each group.
        rdma_devices: names of RDMA devices, separated by commas; "" = the engine's own choice.
        layout: ranks and replicas of this server, by their flags.
        peer_layout: those that the other server must have.
        fabric: opens direct device-to-device copies; returns None if there are none.
    """

    is_prefill: bool
    host: str
    port: int
    secret: str = field(repr=False)
    facts: dict[str, str]
    vocab_size: int
    lease_s: float
    patience_s: float
    replica: int = 0
    replicas: int = 1
    forms: tuple[PageForm, ...] = ()
    rdma_devices: str = ""
    layout: Mapping[str, int] = field(default_factory=dict[str, int])
    peer_layout: Mapping[str, int] = field(default_factory=dict[str, int])
    fabric: Callable[[], Fabric | None] = lambda: None


OpenEngine = Callable[[str, TransferOptions], TransferEngine]
"""Opens a transfer engine at this address; ConfigError if it cannot."""
OpenTransfer = Callable[[Pages, TransferOptions, Callable[[], None]], PageMover]
"""Opens a mover that calls `wake` when something has ended; ConfigError if it cannot."""

TRANSFERS: Table[OpenTransfer] = Table(
    "transfer backend",
    {
        "tcp": "banyan.disaggregation.backends:open_tcp",
        "mooncake": "banyan.disaggregation.backends:open_mooncake",
        "nixl": "banyan.disaggregation.backends:open_nixl",
        "ascend": "banyan.ascend.kv_transfer:open_ascend",
        "fake": "banyan.disaggregation.backends:open_fake",
    },
    plugins="banyan.transfers",
)


class EndedTransfers:
    """Finished transfers, for the engine loop.

    Args:
        wake: called after each `put`.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._ended: SimpleQueue[End] = SimpleQueue()

    def put(self, *ends: End) -> None:
        for end in ends:
            self._ended.put(end)
        self._wake()

    def take(self) -> list[End]:
        return [self._ended.get() for _ in range(self._ended.qsize())]


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, what: Callable[..., None], *given: object) -> None:
        """Call a function in the thread, after earlier calls. Does nothing once closed."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(what, *given)

    def run(self, what: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start a task. Call it only in the thread."""
        task = self.loop.create_task(what)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    def wait(self, what: Coroutine[None, None, None], timeout_s: float) -> None:
        """Run a coroutine and wait for it, from another thread; re-raises its exception."""
        asyncio.run_coroutine_threadsafe(what, self.loop).result(timeout_s)

    def close(self) -> None:
        """Cancel every task and end the thread; a thread that hangs is abandoned."""

        async def end() -> None:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.loop.stop()

        if not self.loop.is_closed():
            asyncio.run_coroutine_threadsafe(end(), self.loop)
            self._thread.join(_GRACE_S)
