"""LocalRanks: processes of ranks on this machine, as the one that started them sees them."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import zmq

from banyan.base.child_process import STACKS, Child, Process, Pulse, doing, spawn
from banyan.engine.process_spec import ProcessSpec
from banyan.messages.frames import FrameSocket
from banyan.messages.transport import PrivateFolder

_LOOK_S = 0.1
_REPORT_LOOKS = 10
"""How often a look is taken at what a rank writes about its threads."""
_STACKS = ".stacks"
_ALIVE_MS = 100
"""How often a sender that has to wait looks whether the receiver still lives."""


class LocalRanks:
    """Satisfies `engine.multi_node.LocalProcesses`.

    Args:
        ranks: their numbers within the replica; there may be none.
        duty: what each of them is told, but for its number and addresses.
        meeting: where all ranks of the replica meet; "" = a file that these ranks alone can reach.
        spares: processes that have their libraries; the rest are started anew.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        process_spec: ProcessSpec,
        meeting: str = "",
        spares: Sequence[Process] = (),
    ) -> None:
        self.kind = "ranks"
        self.speaking: dict[int, FrameSocket] = {}
        """None of them does."""
        self._folder = PrivateFolder()
        self._context = zmq.Context()
        self._children: dict[int, Child] = {}
        self._pulses: dict[int, Pulse] = {}
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self.meeting = meeting or f"file://{self._folder.path}/meeting"
        ready = iter(spares)
        for rank in ranks:
            address = self._folder.address(f"rank{rank}")
            self._sockets[rank] = self._context.socket(zmq.PUSH)
            self._sockets[rank].bind(address)
            beats = f"{self._folder.path}/pulse{rank}"
            self._pulses[rank] = Pulse(beats)
            self._pulses[rank].beat()
            told = replace(
                process_spec, address=address, rank=rank, mesh_address=self.meeting, pulse=beats
            )
            self._children[rank] = spawn(
                "banyan.server.processes", told.process_name, told.encode(), spare=next(ready, None)
            )

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death` from a thread when one of them ends unasked."""
        for child in self._children.values():
            child.watch(on_death)

    def silence(self) -> tuple[int, float]:
        """The rank that has given no sign of life for longest, and for how many seconds; (0, 0)
        when there is none."""
        silent_s = [(pulse.silence_s(), rank) for rank, pulse in self._pulses.items()]
        longest, rank = max(silent_s, default=(0.0, 0))
        return rank, longest

    def stacks(self) -> list[tuple[int, str]]:
        """(rank, what it is doing and where its threads stand), as each that lives writes it
        itself: one that is stopped cannot. Takes a second at most."""
        alive = [rank for rank, child in self._children.items() if child.is_alive()]
        pulses = {rank: f"{self._folder.path}/pulse{rank}" for rank in alive}
        files = {rank: Path(pulse + _STACKS) for rank, pulse in pulses.items()}
        for rank, file in files.items():
            with suppress(OSError):
                os.truncate(file, 0)
            self._children[rank].signal(STACKS)
        told: dict[int, str] = {}
        for _ in range(_REPORT_LOOKS):
            time.sleep(_LOOK_S)
            before, told = told, {rank: _text_of(file) for rank, file in files.items()}
            if told == before and all(told.values()):
                break
        pids = {rank: self._children[rank].pid for rank in alive}
        return [(n, f"pid {pids[n]} {doing(pids[n])}\n{text}") for n, text in told.items()]

    def send(self, rank: int, frame: bytes) -> None:
        """Give a frame to one of them; dropped when that one has died, which `watch` tells."""
        child, socket = self._children[rank], self._sockets[rank]
        while not socket.poll(_ALIVE_MS, zmq.POLLOUT) and child.is_alive():
            pass
        with suppress(zmq.Again):
            socket.send(frame, zmq.NOBLOCK)

    @property
    def numbers(self) -> list[int]:
        return list(self._children)

    @property
    def addresses(self) -> list[str]:
        """Where each of them gets its frames."""
        return [self._folder.address(f"rank{rank}") for rank in self._children]

    def close(self) -> None:
        for child in self._children.values():
            child.stop()
        self._context.destroy(linger=0)
        self._folder.close()


def open_stacks(pulse: str) -> int:
    """In a rank: the file into which it writes where its threads stand, beside the one of its signs
    of life; a descriptor."""
    return os.open(pulse + _STACKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _text_of(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
