"""The mover of --disaggregation-transfer-backend tcp: plain connections, nothing to install."""

from collections.abc import Callable

from banyan.transfer.mover import PageMover, Pages
from banyan.transfer.rooms.base import RoomOptions
from banyan.transfer.rooms.giving import GivingRooms
from banyan.transfer.rooms.taking import TakingRooms


def open_tcp(pages: Pages, options: RoomOptions, wake: Callable[[], None]) -> PageMover:
    """ConfigError when this server gives and cannot listen."""
    kind = GivingRooms if options.is_giver else TakingRooms
    return kind(pages, options, wake)
