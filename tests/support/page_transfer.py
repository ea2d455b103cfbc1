"""Both sides of a transfer of pages."""

import socket
import threading
import time

import numpy as np

from banyan.disaggregation.page_cutting import Block, PageForm
from banyan.disaggregation.prefill_side import PrefillSide
from banyan.disaggregation.transfer import TransferOptions
from banyan.messages.disaggregation import (
    FindTransfer,
    OpenTransfer,
    PrefillResult,
    ReceiveTransfer,
)
from banyan.messages.plan import CopyResult, PageCopy, device_page, peer_page

WAIT_S = 60.0

SIZE, TOKENS = 32, 16

ROOM, DIGEST = b"room of this", b"d" * 32

FACTS = {"number type": "16"}

FORMS = (PageForm(TOKENS, (Block(1, ((1, SIZE // TOKENS),)),)),)


class Pages:
    """One group of ten pages."""

    groups = (0,)

    def __init__(self) -> None:
        self.bytes = np.zeros((10, SIZE), np.uint8)

    def page_bytes(self, group: int) -> int:
        return SIZE

    def take(self, group: int, page: int) -> np.ndarray:
        return self.bytes[page].copy()

    def put(self, group: int, page: int, payload: np.ndarray) -> None:
        self.bytes[page] = payload


class Side:
    """A mover and what it has reported."""

    def __init__(self, kind: type, port: int, **changed: object) -> None:
        self.pages, self.reported, self.port = Pages(), [], port
        self._bell = threading.Semaphore(0)
        given = {
            "is_prefill": kind is PrefillSide,
            "host": "127.0.0.1",
            "port": port,
            "secret": "a secret",
            "facts": FACTS,
            "vocab_size": 100,
            "lease_s": 30.0,
            "patience_s": 30.0,
            "forms": FORMS,
        }
        options = TransferOptions(**{**given, **changed})
        self.mover = kind(self.pages, options, self._bell.release)

    def hear(self, kind: type, wait_s: float = WAIT_S) -> object:
        """The next of this kind that it tells."""
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            for end in self.reported:
                if isinstance(end, kind):
                    self.reported.remove(end)
                    return end
            self._bell.acquire(timeout=0.1)
            self.reported += self.mover.ended()
        raise AssertionError(f"no {kind.__name__}, but {self.reported}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def give(giver: Side, pages: list[int], room: bytes = ROOM) -> None:
    """Open a room with these pages and complete it."""
    giver.mover.execute([OpenTransfer(room, DIGEST, TOKENS * len(pages))])
    copies = [
        PageCopy(i + 1, 0, device_page(page), peer_page(room, TOKENS * i), "before")
        for i, page in enumerate(pages)
    ]
    giver.mover.start(copies)
    assert giver.hear(CopyResult).ids == [copy.id for copy in copies]
    giver.mover.execute([PrefillResult(room, (7).to_bytes(4, "little"))])


def seek(taker: Side, units: int, room: bytes = ROOM, digest: bytes = DIGEST) -> None:
    taker.mover.execute([FindTransfer(room, taker.peer, digest, TOKENS * units)])


def take(taker: Side, units: list[int], room: bytes = ROOM) -> None:
    copies = [
        PageCopy(unit + 1, 0, peer_page(room, TOKENS * unit), device_page(unit + 1), "before")
        for unit in units
    ]
    taker.mover.execute([ReceiveTransfer(room, len(copies))])
    taker.mover.start(copies)


SMALL = (PageForm(8, FORMS[0].blocks),)
