"""The processes of a node: LocalRanks (ranks of one replica) and LocalEngines (DP attention)."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import zmq

from banyan.base.child_process import STACKS, Child, Process, Pulse, doing, spawn
from banyan.engine.process_spec import ProcessSpec
from banyan.messages.frames import FrameSocket
from banyan.messages.transport import PrivateFolder

_LOOK_S = 0.1
_REPORT_LOOKS = 10
"""Number of times that the stack traces of a rank are read until they are complete."""
_STACKS = ".stacks"
_ALIVE_MS = 100
"""Interval at which a blocked sender checks whether the receiver is alive."""


class LocalProcesses(Protocol):
    """Processes that a node runs for the leader."""

    kind: str
    """Name of the processes in the log."""

    @property
    def numbers(self) -> list[int]: ...

    @property
    def speaking(self) -> Mapping[int, FrameSocket]:
        """Sockets of processes that send frames to the leader, by number."""
        ...

    def watch(self, on_death: Callable[[str], None]) -> None: ...
    def silence(self) -> tuple[int, float]: ...
    def stacks(self) -> list[tuple[int, str]]: ...
    def send(self, rank: int, frame: bytes) -> None: ...
    def close(self) -> None: ...


class LocalRanks:
    """Ranks of one replica on this machine. Implements `LocalProcesses`.

    Args:
        ranks: their numbers within the replica; may be empty.
        process_spec: spec of each rank, without its number and addresses.
        meeting: rendezvous address of all ranks of the replica; "" = a private file.
        spares: processes that have loaded their libraries; further ranks are started anew.
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
        """Always empty: ranks send nothing to the leader."""
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
            own_spec = replace(
                process_spec, address=address, rank=rank, mesh_address=self.meeting, pulse=beats
            )
            self._children[rank] = spawn(
                "banyan.server.processes",
                own_spec.process_name,
                own_spec.encode(),
                spare=next(ready, None),
            )

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death` from a thread when one of them ends unexpectedly."""
        for child in self._children.values():
            child.watch(on_death)

    def silence(self) -> tuple[int, float]:
        """The rank with the oldest heartbeat, and its age in seconds; (0, 0) without ranks."""
        silent_s = [(pulse.silence_s(), rank) for rank, pulse in self._pulses.items()]
        longest, rank = max(silent_s, default=(0.0, 0))
        return rank, longest

    def stacks(self) -> list[tuple[int, str]]:
        """(rank, process state and stack traces) of each live rank; takes a second at most.

        A rank writes its own stack traces, so a stopped process has none.
        """
        alive = [rank for rank, child in self._children.items() if child.is_alive()]
        pulses = {rank: f"{self._folder.path}/pulse{rank}" for rank in alive}
        files = {rank: Path(pulse + _STACKS) for rank, pulse in pulses.items()}
        for rank, file in files.items():
            with suppress(OSError):
                os.truncate(file, 0)
            self._children[rank].signal(STACKS)
        texts: dict[int, str] = {}
        for _ in range(_REPORT_LOOKS):
            time.sleep(_LOOK_S)
            before, texts = texts, {rank: _text_of(file) for rank, file in files.items()}
            if texts == before and all(texts.values()):
                break
        pids = {rank: self._children[rank].pid for rank in alive}
        return [(n, f"pid {pids[n]} {doing(pids[n])}\n{text}") for n, text in texts.items()]

    def send(self, rank: int, frame: bytes) -> None:
        """Send a frame to one rank. It is dropped if the rank has died, which `watch` reports."""
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
        """Address at which each rank receives frames."""
        return [self._folder.address(f"rank{rank}") for rank in self._children]

    def close(self) -> None:
        for child in self._children.values():
            child.stop()
        self._context.destroy(linger=0)
        self._folder.close()


class LocalEngines:
    """Engines on this machine whose clients run on the leader's node. Implements `LocalProcesses`.

    Args:
        process_specs: specs of the engines, without addresses.
    """

    def __init__(self, process_specs: Sequence[ProcessSpec]) -> None:
        self.kind = "replicas"
        self._folder = PrivateFolder()
        self._children: dict[int, Child] = {}
        self.speaking: dict[int, FrameSocket] = {}
        for process_spec in process_specs:
            number = process_spec.config.parallel.replica
            own_spec = replace(process_spec, address=self._folder.address(f"front{number}"))
            self.speaking[number] = FrameSocket.bound(own_spec.address)
            self._children[number] = spawn(
                "banyan.server.processes", f"engine{number}", own_spec.encode()
            )

    @property
    def numbers(self) -> list[int]:
        return list(self._children)

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death` from a thread when one of them ends unexpectedly."""
        for child in self._children.values():
            child.watch(on_death)

    def silence(self) -> tuple[int, float]:
        """Nothing: the clients of the engines check this themselves."""
        return 0, 0.0

    def stacks(self) -> list[tuple[int, str]]:
        """Nothing: engines write stack traces to their own log."""
        return []

    def send(self, rank: int, frame: bytes) -> None:
        """Send a client's frame to an engine. It is dropped if the engine has died."""
        self.speaking[rank].send(frame)

    def close(self) -> None:
        for child in self._children.values():
            child.stop()
        for one in self.speaking.values():
            one.close()
        self._folder.close()


def open_stacks(pulse: str) -> int:
    """In a rank: open the file for its stack traces, next to its heartbeat file.

    Returns:
        A descriptor.
    """
    return os.open(pulse + _STACKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _text_of(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
