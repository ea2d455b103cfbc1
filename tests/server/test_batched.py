"""What connections write in one turn of the event loop goes out together, whole and in order."""

import asyncio
from collections.abc import Callable

import pytest

from banyan.server.http.listen import MAX_HELD_BYTES, BatchedTransport, WriteBatch


class _Wire(asyncio.Transport):
    """Notes what is done to it, by the name of its connection."""

    def __init__(self, name: str, notes: list[tuple[str, bytes]]) -> None:
        super().__init__()
        self._name = name
        self._notes = notes
        self._is_closed = False

    def is_closing(self) -> bool:
        return self._is_closed

    def lose(self) -> None:
        """The client has gone."""
        self._is_closed = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closed:
            raise RuntimeError("the handler is closed")  # as uvloop does
        self._notes.append((self._name, bytes(data)))

    def close(self) -> None:
        self._notes.append((self._name, b"(closed)"))

    def abort(self) -> None:
        self._notes.append((self._name, b"(aborted)"))

    def get_write_buffer_size(self) -> int:
        return 0


def _play(work: Callable[[list[BatchedTransport]], None]) -> list[tuple[str, bytes]]:
    """What reaches the wires of two connections when `work` is one turn, and "(end)" behind it."""
    notes: list[tuple[str, bytes]] = []

    async def main() -> None:
        loop, turn = asyncio.get_running_loop(), WriteBatch()
        work([BatchedTransport(_Wire(name, notes), turn, loop) for name in "ab"])
        notes.append(("", b"(end)"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(main())
    return notes


def test_each_connection_writes_once_behind_the_turn_and_in_order() -> None:
    def work(ends: list[BatchedTransport]) -> None:
        for number in range(3):
            for end in ends:
                end.write(b"%d" % number)

    assert _play(work) == [("", b"(end)"), ("a", b"012"), ("b", b"012")]


def test_closing_sends_what_is_held_and_aborting_drops_it() -> None:
    def work(ends: list[BatchedTransport]) -> None:
        for end in ends:
            end.write(b"last words")
            assert end.get_write_buffer_size() == len(b"last words")
        ends[0].close()
        ends[1].abort()

    assert _play(work) == [
        ("a", b"last words"),
        ("a", b"(closed)"),
        ("b", b"(aborted)"),
        ("", b"(end)"),
    ]


def test_what_is_held_is_bounded() -> None:
    piece = b"x" * (MAX_HELD_BYTES // 2 + 1)

    def work(ends: list[BatchedTransport]) -> None:
        for _ in range(5):
            ends[0].write(piece)

    assert _play(work) == [("a", 2 * piece), ("a", 2 * piece), ("", b"(end)"), ("a", piece)]


def test_a_turn_follows_a_turn() -> None:
    notes: list[tuple[str, bytes]] = []

    async def main() -> None:
        end = BatchedTransport(_Wire("a", notes), WriteBatch(), asyncio.get_running_loop())
        for number in range(3):
            end.write(b"%d" % number)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(main())
    assert notes == [("a", b"0"), ("a", b"1"), ("a", b"2")]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_client_that_leaves_before_its_answer_keeps_no_other_from_theirs(lost: int) -> None:
    notes: list[tuple[str, bytes]] = []

    async def main() -> None:
        loop, batch = asyncio.get_running_loop(), WriteBatch()
        wires = [_Wire(name, notes) for name in "abc"]
        ends = [BatchedTransport(wire, batch, loop) for wire in wires]
        for end in ends:
            end.write(b"alive")
        wires[lost].lose()
        await asyncio.sleep(0)
        ends[lost - 1].write(b"again")
        await asyncio.sleep(0)

    asyncio.run(main())
    others = [name for number, name in enumerate("abc") if number != lost]
    assert notes == [*((name, b"alive") for name in others), ("abc"[lost - 1], b"again")]
