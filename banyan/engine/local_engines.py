"""LocalEngines: engines on this machine whose fronts are on another one; what both say to each
other goes through whoever keeps them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import zmq

from banyan.base.child_process import Child, spawn
from banyan.engine.process_spec import ProcessSpec
from banyan.messages.frames import FrameSocket
from banyan.messages.transport import PrivateFolder


class LocalEngines:
    """Satisfies `engine.multi_node.LocalProcesses`.

    Args:
        duties: of the engines, by which replica each of them is; their addresses are found here.
    """

    def __init__(self, duties: Sequence[ProcessSpec]) -> None:
        self.kind = "replicas"
        self._folder = PrivateFolder()
        self._children: dict[int, Child] = {}
        self.speaking: dict[int, FrameSocket] = {}
        for process_spec in duties:
            number = process_spec.config.parallel.replica
            told = replace(process_spec, address=self._folder.address(f"front{number}"))
            self.speaking[number] = FrameSocket.bound(told.address)
            self._children[number] = spawn(
                "banyan.server.processes", f"engine{number}", told.encode()
            )

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
        self.speaking[rank].send(frame)

    def close(self) -> None:
        for child in self._children.values():
            child.stop()
        for one in self.speaking.values():
            one.close()
        self._folder.close()


def frames_of(sockets: Mapping[int, FrameSocket]) -> Iterator[tuple[int, bytes]]:
    """What has arrived at each, in order; what waits to leave them goes on."""
    for number, one in sockets.items():
        one.flush()
        for frame in one.take():
            yield number, frame


def poll_along(poller: zmq.Poller, sockets: Collection[FrameSocket]) -> None:
    """Poll for what `frames_of` gives and for what it lets go on."""
    for one in sockets:
        comes, goes = 0 if one.is_over else zmq.POLLIN, zmq.POLLOUT if one.has_unsent else 0
        poller.register(one, comes | goes)
