"""LocalEngines: engines on this machine whose fronts are on another one; what both say to each
other goes through whoever keeps them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import zmq

from banyan.engine.duty import Duty
from banyan.engine.processes import Child, spawn
from banyan.messages.link import PrivateFolder, pair_socket


class LocalEngines:
    """Satisfies `engine.nodes.Kept`.

    Args:
        duties: of the engines, by which replica each of them is; their addresses are found here.
    """

    def __init__(self, duties: Sequence[Duty]) -> None:
        self.kind = "replicas"
        self._folder = PrivateFolder()
        self._context = zmq.Context()
        self._children: dict[int, Child] = {}
        self.speaking: dict[int, zmq.Socket[bytes]] = {}
        for duty in duties:
            number = duty.config.parallel.replica
            told = replace(duty, address=self._folder.address(f"front{number}"))
            self.speaking[number] = pair_socket(self._context)
            self.speaking[number].bind(told.address)
            self._children[number] = spawn("banyan.compose", f"engine{number}", told.encode())

    @property
    def numbers(self) -> list[int]:
        return list(self._children)

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death` from a thread when one of them ends unasked."""
        for child in self._children.values():
            child.watch(on_death)

    def silence(self) -> tuple[int, float]:
        """None is looked for here: their fronts hear of them."""
        return 0, 0.0

    def stacks(self) -> list[tuple[int, str]]:
        """None are told to another machine: an engine writes them to the log of its own."""
        return []

    def send(self, rank: int, frame: bytes) -> None:
        """What a front says to its engine; dropped when that one has died, which `watch` tells."""
        with suppress(zmq.Again):
            self.speaking[rank].send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        for child in self._children.values():
            child.stop()
        self._context.destroy(linger=0)
        self._folder.close()


def frames_of(sockets: Mapping[int, "zmq.Socket[bytes]"]) -> Iterator[tuple[int, bytes]]:
    """What has arrived at each, in order."""
    for number, one in sockets.items():
        with suppress(zmq.Again):
            while True:
                yield number, one.recv(zmq.NOBLOCK)
