"""The store of the real runner's mover: real files, which are spoiled and removed now and then, and
lanes whose work is done when the driver says so.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random

from banyan.engine.kv_transfer_setup import StoreSwitch
from banyan.kv_transfer.file_store import FileStore
from banyan.kv_transfer.page_mover import Mover
from banyan.messages.plan import CopyResult, Held, Lookup
from banyan.runner.kvstore import KVStore
from tests.border.faults import Faults

IDENTITY = bytes(32)
CAPACITY_BYTES = 1 << 20


class ManualLane:
    """Work that waits for the driver."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()

    def do(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def close(self) -> None:
        self.waiting.clear()

    def join(self, timeout_s: float) -> bool:
        return True


class Shelf:
    """
    Args:
        folder: of the pages.
        faults: `copy` says how often a file is spoiled or removed.
        is_attached: there is a store from the start.
    """

    def __init__(
        self, folder: Path, faults: Faults, random: Random, is_attached: bool = True
    ) -> None:
        self._is_attached = is_attached
        self._folder = folder
        self._faults = faults
        self._random = random
        self._lanes: list[ManualLane] = []
        self._mover: Mover | None = None
        self._held: deque[Held] = deque()
        self._ended: list[CopyResult] = []
        self.spoiled = 0

    def open_mover(self, pages: KVStore) -> Mover:
        store = FileStore(self._folder, IDENTITY, CAPACITY_BYTES) if self._is_attached else None
        self._mover = Mover(pages, store, lambda: None, self._open_lane)
        return self._mover

    @property
    def switch(self) -> StoreSwitch:
        """What attaches other stores to the mover, and detaches them."""
        assert self._mover is not None

        def open_store(name: str, options: dict[str, object]) -> FileStore:
            folder = self._folder / str(options.get("path", ""))
            return FileStore(folder, IDENTITY, CAPACITY_BYTES)

        return StoreSwitch(self._mover, open_store)

    def _open_lane(self, name: str) -> ManualLane:
        self._lanes = [*self._lanes[-2:], ManualLane()]  # those of the present store
        return self._lanes[-1]

    @property
    def copies(self) -> int:
        return sum(len(lane.waiting) for lane in self._lanes[1:]) + len(self._ended)

    @property
    def is_busy(self) -> bool:
        return bool(self.copies or self._held or any(lane.waiting for lane in self._lanes[:1]))

    def look(self, lookups: list[Lookup]) -> None:
        assert self._mover is not None
        self._mover.look(lookups)
        self._sort()  # where there is no store it is answered at once

    def held(self) -> Held | None:
        """The answer to the oldest lookup."""
        if self._lanes and self._lanes[0].waiting:
            self._lanes[0].waiting.popleft()()
            self._sort()
        return self._held.popleft() if self._held else None

    def copy(self, count: int) -> CopyResult:
        """Do so much of the work that waits, and tell the ends."""
        for _ in range(count):
            busy = [lane for lane in self._lanes[1:] if lane.waiting]
            if busy:
                if self._random.random() < self._faults.copy:
                    self._spoil()
                self._random.choice(busy).waiting.popleft()()
        self._sort()
        ended, self._ended = self._ended, []
        return CopyResult(
            [i for end in ended for i in end.ids],
            [i for end in ended for i in end.failed],
            0.001 * sum(end.seconds > 0 for end in ended),
        )

    def _sort(self) -> None:
        assert self._mover is not None
        for end in self._mover.ended():
            (self._held if isinstance(end, Held) else self._ended).append(end)

    def _spoil(self) -> None:
        files = sorted(self._folder.rglob("*.page"))
        if not files:
            return
        file = self._random.choice(files)
        self.spoiled += 1
        if self._random.random() < 0.5:
            file.unlink()
            return
        content = bytearray(file.read_bytes())
        content[self._random.randrange(len(content))] ^= 1 << self._random.randrange(8)
        file.write_bytes(content)
