"""FakeTransfer: the other server does not exist. For load tests of one side alone.

A server that gives throws away what it is given. One that takes gets pages of whatever lies in its
memory and a first token that no model chose: its answers mean nothing, and its cache is of no use
to anybody else.
"""

from collections.abc import Callable

from banyan.base.log import logger
from banyan.disaggregation.transfer import End, EndedTransfers, TransferOptions
from banyan.kv_transfer.page_mover import Pages
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
from banyan.messages.plan import CopyResult, Lookup, PageCopy

log = logger(__name__)

_FIRST = bytes(4)


class FakeTransfer:
    """Satisfies PageMover."""

    is_attached = True

    def __init__(self, wake: Callable[[], None]) -> None:
        self._out = EndedTransfers(wake)

    def start(self, copies: list[PageCopy]) -> None:
        away = [copy.id for copy in copies if not copy.is_on_device]
        if away:
            self._out.tell(CopyResult(away))

    def look(self, lookups: list[Lookup]) -> None:
        """Rooms hold nothing that is looked up."""
        assert not lookups

    def obey(self, orders: list[KVTransferOp]) -> None:
        for order in orders:
            match order:
                case FindTransfer():
                    self._out.tell(TransferFound(order.transfer_id, order.prompt_len))
                case ReceiveTransfer():
                    self._out.tell(PrefillResult(order.transfer_id, _FIRST))
                case PrefillResult() | CloseTransfer():
                    self._out.tell(TransferClosed(order.transfer_id))
                case OpenTransfer():
                    pass

    def ended(self) -> list[End]:
        return self._out.take()

    def close(self) -> None:
        """Nothing to release."""


def open_fake(pages: Pages, options: TransferOptions, wake: Callable[[], None]) -> FakeTransfer:
    """The mover of --disaggregation-transfer-backend fake."""
    log.warning("no pages travel with the transfer backend fake: answers mean nothing")
    return FakeTransfer(wake)
