"""FakeTransfer: the other server does not exist. For load tests of one side alone.

A prefill server discards its pages. A decode server keeps whatever its pages contain and gets a
first token that no model chose: its answers mean nothing, and its cache must not be shared.
"""

from collections.abc import Callable

from banyan.base.log import logger
from banyan.disaggregation.transfer import End, EndedTransfers, TransferOptions
from banyan.kv_transfer.page_mover import PageMover, Pages
from banyan.messages.disaggregation import (
    CloseTransfer,
    FindTransfer,
    KVTransferOp,
    OpenTransfer,
    PrefillResult,
    ReceiveTransfer,
    TransferClosed,
    TransferFound,
)
from banyan.messages.plan import (
    CopyResult,
    Lookup,
    PageCopy,
    is_fake_transfer,
    transfer_position,
)

log = logger(__name__)

_FIRST = bytes(4)


class FakeTransfer:
    """Satisfies PageMover."""

    is_attached = True

    def __init__(self, wake: Callable[[], None]) -> None:
        self._ended = EndedTransfers(wake)

    def start(self, copies: list[PageCopy]) -> None:
        away = [copy.id for copy in copies if not copy.is_on_device]
        if away:
            self._ended.put(CopyResult(away))

    def look(self, lookups: list[Lookup]) -> None:
        """A transfer backend has no lookups."""
        assert not lookups

    def execute(self, ops: list[KVTransferOp]) -> None:
        for op in ops:
            match op:
                case FindTransfer():
                    self._ended.put(TransferFound(op.transfer_id, op.prompt_len))
                case ReceiveTransfer():
                    self._ended.put(PrefillResult(op.transfer_id, _FIRST))
                case PrefillResult() | CloseTransfer():
                    self._ended.put(TransferClosed(op.transfer_id))
                case OpenTransfer():
                    pass

    def ended(self) -> list[End]:
        return self._ended.take()

    def close(self) -> None:
        """Nothing to release."""


class FakeWithoutHost:
    """Satisfies PageMover: transfers that name no prefill server are fake, the others real.

    Args:
        real: the mover of --disaggregation-transfer-backend.
    """

    is_attached = True

    def __init__(self, real: PageMover, wake: Callable[[], None]) -> None:
        self._real = real
        self._fake = FakeTransfer(wake)

    def start(self, copies: list[PageCopy]) -> None:
        here: list[PageCopy] = []
        others: list[PageCopy] = []
        for copy in copies:
            transfer_id = b"" if copy.is_on_device else transfer_position(copy.src.key)[0]
            (here if is_fake_transfer(transfer_id) else others).append(copy)
        self._fake.start(here)
        self._real.start(others)

    def look(self, lookups: list[Lookup]) -> None:
        self._real.look(lookups)

    def execute(self, ops: list[KVTransferOp]) -> None:
        for op in ops:
            (self._fake if is_fake_transfer(op.transfer_id) else self._real).execute([op])

    def ended(self) -> list[End]:
        return [*self._fake.ended(), *self._real.ended()]

    def close(self) -> None:
        self._real.close()


def open_fake(pages: Pages, options: TransferOptions, wake: Callable[[], None]) -> FakeTransfer:
    """The mover of --disaggregation-transfer-backend fake."""
    log.warning("no pages travel with the transfer backend fake: answers mean nothing")
    return FakeTransfer(wake)
