"""What carries pages from one server to another: one protocol, one table.

Knows rooms, pages and bytes; not requests, and not which pages a sequence needs.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
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
    """What a mover is opened with.

    Attributes:
        is_prefill: this server computes prompts; else it continues them.
        host, port: where it listens, if it gives.
        replica, replicas: which of the server's replicas this is; their ports follow one another.
        secret: what both servers have in common; "" = the loopback address only.
        facts: what both must have in common for pages to mean the same, by name.
        vocab_size: of the model.
        lease_s: how long a room is kept for whoever takes it, once it is complete.
        patience_s: how long a room that is not there yet is waited for.
        forms: of the pages of each group.
        fabric: opens what copies from device to device; it gives None where nothing does.
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
    fabric: Callable[[], Fabric | None] = lambda: None


OpenEngine = Callable[[str, TransferOptions], TransferEngine]
"""Opens an engine at this address of the machine; ConfigError when that cannot be."""
OpenTransfer = Callable[[Pages, TransferOptions, Callable[[], None]], PageMover]
"""Opens a mover that rings when something has ended; ConfigError when that cannot be."""

TRANSFERS: Table[OpenTransfer] = Table(
    "transfer backend",
    {
        "tcp": "banyan.disaggregation.tcp:open_tcp",
        "mooncake": "banyan.disaggregation.mooncake:open_mooncake",
        "nixl": "banyan.disaggregation.nixl:open_nixl",
        "ascend": "banyan.ascend.kv_transfer:open_ascend",
        "fake": "banyan.disaggregation.fake:open_fake",
    },
    plugins="banyan.transfers",
)


class EndedTransfers:
    """What has ended, for the engine's loop.

    Args:
        wake: rung whenever something has.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._ended: SimpleQueue[End] = SimpleQueue()

    def tell(self, *ends: End) -> None:
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
        """Do it in the thread, after what was asked before. Nothing happens once it is closed."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(what, *given)

    def run(self, what: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """A task; from the thread alone."""
        task = self.loop.create_task(what)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    def wait(self, what: Coroutine[None, None, None], timeout_s: float) -> None:
        """Wait for it, from another thread; what it raises is raised."""
        asyncio.run_coroutine_threadsafe(what, self.loop).result(timeout_s)

    def close(self) -> None:
        """Cancel every task and end the thread; what hangs is left behind."""

        async def end() -> None:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.loop.stop()

        if not self.loop.is_closed():
            asyncio.run_coroutine_threadsafe(end(), self.loop)
            self._thread.join(_GRACE_S)
