"""Writes of many connections, sent together behind the turn of the event loop that made them.

A step of the engine makes events of many streams. The kernel's part of a write wakes the client and
leaves little of this process in the processor's caches and branch predictors, so all events of a
turn are made first and then sent one behind the other. Knows no HTTP.
"""

import asyncio

MAX_HELD_BYTES = 64 << 10
"""What a connection holds back at most: beyond it, its client's buffer says at once whether more
may be written."""


class Turn:
    """The connections that hold something back until the end of the event loop's turn."""

    def __init__(self) -> None:
        self._waiting: list[BatchedTransport] = []

    def join(self, transport: "BatchedTransport", loop: asyncio.AbstractEventLoop) -> None:
        if not self._waiting:
            loop.call_soon(self._end)
        self._waiting.append(transport)

    def _end(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            transport.flush()


class BatchedTransport(asyncio.Transport):
    """A transport over another one, to which everything is passed on in the order in which it came.

    Args:
        inner: of the connection.
        turn: shared by the connections of `loop`, on which all calls are made.
    """

    def __init__(
        self, inner: asyncio.Transport, turn: Turn, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__()
        self._inner = inner
        self._turn = turn
        self._loop = loop
        self._held: list[bytes] = []
        self._held_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._held:
            self._turn.join(self, self._loop)
        self._held.append(data if isinstance(data, bytes) else bytes(data))
        self._held_bytes += len(data)
        if self._held_bytes > MAX_HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is held back."""
        held = self._held
        if held:
            self._held, self._held_bytes = [], 0
            self._inner.write(held[0] if len(held) == 1 else b"".join(held))

    def close(self) -> None:
        self.flush()
        self._inner.close()

    def abort(self) -> None:
        self._held, self._held_bytes = [], 0
        self._inner.abort()

    def is_closing(self) -> bool:
        return self._inner.is_closing()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._inner.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._held_bytes + self._inner.get_write_buffer_size()
