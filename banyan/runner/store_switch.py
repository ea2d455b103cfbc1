"""StoreSwitch: attaches the store of the cache and detaches it while the server runs, by order.

Rank 0 carries the pages of all ranks, so it alone opens the store; the others agree where their
pages are in memory that rank 0 maps.
"""

from collections.abc import Callable

import msgspec

from banyan.base.errors import ConfigError
from banyan.kv_transfer.page_mover import Mover
from banyan.kv_transfer.store import Store
from banyan.messages.control_ops import AttachStore, ControlOp, DetachStore
from banyan.runner.control_ops import Finish, Said

OpenStore = Callable[[str, dict[str, object]], Store]
"""Opens a store by its name and its own options; ConfigError when that cannot be."""


class StoreSwitch:
    """
    Args:
        mover: of rank 0; None on the others.
        open_store: opens the store of this replica's pages.
    """

    def __init__(self, mover: Mover, open_store: OpenStore) -> None:
        self._mover = mover
        self._open_store = open_store
        self._unused: Store | None = None
        """Opened for an order that another rank could not carry out."""

    def prepare_attach(self, order: ControlOp) -> Finish:
        """Open the store, which changes nothing yet.

        Raises:
            ConfigError: it cannot be opened, or there is one.
        """
        assert isinstance(order, AttachStore)
        self._close_unused()
        if self._mover.is_attached:
            raise ConfigError("a store is attached already", hint="detach it first")
        options = msgspec.json.decode(order.options, type=dict[str, object])
        store = self._unused = self._open_store(order.store, options)

        def attach() -> Said:
            if order.is_trial:
                self._close_unused()
                return Said("The store can be attached.")
            self._unused = None
            self._mover.attach(store)
            return Said(f"store={order.store} capacity_gb={store.capacity_bytes / 1e9:.1f}")

        return attach

    def prepare_detach(self, order: ControlOp) -> Finish:
        assert isinstance(order, DetachStore)
        self._close_unused()

        def detach() -> Said:
            if order.is_trial:
                return Said("The store can be detached.")
            self._mover.detach()
            return Said("The cache is kept in memory alone.")

        return detach

    def _close_unused(self) -> None:
        store, self._unused = self._unused, None
        if store is not None:
            store.close()


def prepare_beside(order: ControlOp) -> Finish:
    """On a rank other than 0, whose pages rank 0 maps since the start."""
    return lambda: Said("")
