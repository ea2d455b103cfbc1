"""What is said between two servers, and what whoever else is connected can reach."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from banyan.base.errors import ConfigError
from banyan.disaggregation import prefill_side, wire
from banyan.disaggregation.decode_side import DecodeSide
from banyan.disaggregation.page_cutting import PageForm
from banyan.disaggregation.prefill_side import PrefillSide
from banyan.engine.kv_transfer_setup import peer_layout_of
from banyan.messages.disaggregation import (
    CloseTransfer,
    OpenTransfer,
    PrefillResult,
    ReceiveTransfer,
    TransferClosed,
    TransferFailed,
    TransferFound,
)
from banyan.messages.plan import (
    CopyResult,
    PageAt,
    PageCopy,
    RowScores,
    device_page,
    peer_page,
    transfer_position,
)
from tests.support.flags import config_of
from tests.support.page_transfer import (
    DIGEST,
    FACTS,
    FORMS,
    ROOM,
    SIZE,
    SMALL,
    TOKENS,
    WAIT_S,
    Side,
    free_port,
    give,
    seek,
    take,
)


@pytest.fixture
def sides() -> Iterator[Callable[..., tuple[Side, Side]]]:
    opened: list[Side] = []
    port = free_port()

    def open_(giver: dict | None = None, taker: dict | None = None) -> tuple[Side, Side]:
        opened.append(Side(PrefillSide, port, **(giver or {})))
        opened.append(Side(DecodeSide, port, **(taker or {})))
        opened[1].peer = f"127.0.0.1:{port}"
        return opened[0], opened[1]

    yield open_
    for side in opened:
        side.mover.close()


def test_pages_and_the_rest_come_as_they_were_given(sides) -> None:
    giver, taker = sides()
    giver.pages.bytes[:] = np.arange(10)[:, None] + 100
    seek(taker, 3)
    give(giver, [4, 5, 6])
    assert taker.hear(TransferFound).transfer_id == ROOM
    take(taker, [1, 2])
    assert taker.hear(CopyResult).ids == [2, 3]
    assert taker.hear(PrefillResult).tokens == (7).to_bytes(4, "little")
    assert [int(taker.pages.bytes[i, 0]) for i in range(4)] == [0, 0, 105, 106]
    assert giver.hear(TransferClosed).transfer_id == ROOM


def test_a_page_that_was_not_given_is_a_failed_copy(sides) -> None:
    giver, taker = sides()
    give(giver, [4])
    seek(taker, 1)
    taker.hear(TransferFound)
    take(taker, [0, 5])
    ended = taker.hear(CopyResult)
    assert (ended.ids, ended.failed) == ([1], [6])
    assert taker.hear(PrefillResult)


@pytest.mark.parametrize(
    ("giver", "taker", "status", "why"),
    [
        ({}, {"secret": "another"}, 503, "the same secret"),
        ({"secret": ""}, {}, 503, "the same secret"),
        ({"facts": {"number type": "32"}}, {}, 503, "number type differs: 32 there, 16 here"),
        ({"facts": {**FACTS, "draft": "x"}}, {}, 503, "draft differs: x there, nothing here"),
    ],
)
def test_servers_that_do_not_belong_together_share_nothing(
    sides, giver: dict, taker: dict, status: int, why: str
) -> None:
    gives, takes = sides(giver, taker)
    give(gives, [4])
    seek(takes, 1)
    lost = takes.hear(TransferFailed)
    assert lost.status == status and why in lost.text
    assert not takes.pages.bytes.any()


@pytest.mark.parametrize(
    ("mode", "words", "found"),
    [
        ("prefill", "--disaggregation-decode-tp 4", {"--tensor-parallel-size": 2}),
        ("prefill", "--disaggregation-decode-dp 4", {"--data-parallel-size": 1}),
        ("decode", "--disaggregation-prefill-pp 4", {"--pipeline-parallel-size": 2}),
    ],
)
def test_a_server_of_another_layout_than_announced_gets_nothing(sides, mode, words, found) -> None:
    config = config_of("--disaggregation-mode", mode, *words.split())
    announced, other = {"peer_layout": peer_layout_of(config.handoff)}, {"layout": found}
    gives, takes = sides(*((announced, other) if mode == "prefill" else (other, announced)))
    give(gives, [4])
    seek(takes, 1)
    lost = takes.hear(TransferFailed)
    ((flag, count),) = found.items()
    assert lost.status == 503 and f"{flag} {count}, and 4 was announced" in lost.text
    assert not takes.pages.bytes.any()


LARGE = (PageForm(32, FORMS[0].blocks),)


@pytest.mark.parametrize("forms", [SMALL, LARGE])
def test_pages_come_in_the_size_that_is_wanted(sides, forms) -> None:
    giver, taker = sides(taker={"forms": forms})
    giver.pages.bytes[4:6] = np.arange(2 * SIZE).reshape(2, SIZE)
    (form,) = forms
    taker.pages.bytes = np.zeros((10, form.size_bytes), np.uint8)
    taker.pages.page_bytes = lambda group: form.size_bytes
    seek(taker, 2)
    giver.mover.execute([OpenTransfer(ROOM, DIGEST, 2 * TOKENS)])
    assert taker.hear(TransferFound).tokens == 2 * TOKENS
    places = range(0, 2 * TOKENS, form.tokens)
    copies = [
        PageCopy(at + 1, 0, peer_page(ROOM, first), device_page(at), "before")
        for at, first in enumerate((*places, 2 * TOKENS))  # and one that is not there
    ]
    taker.mover.execute([ReceiveTransfer(ROOM, len(copies))])
    taker.mover.start(copies)
    for at in range(2):  # as if computed one after another
        place = peer_page(ROOM, TOKENS * at)
        giver.mover.start([PageCopy(at + 1, 0, device_page(4 + at), place, "before")])
    giver.mover.execute([PrefillResult(ROOM)])
    assert taker.hear(PrefillResult).transfer_id == ROOM
    reported = [end for end in taker.reported if isinstance(end, CopyResult)]
    assert [i for end in reported for i in end.ids] == [copy.id for copy in copies[:-1]]
    assert [i for end in reported for i in end.failed] == [copies[-1].id]
    assert (taker.pages.bytes.ravel()[: 2 * SIZE] == np.arange(2 * SIZE)).all()
    assert not taker.pages.bytes[len(places) :].any()
    assert giver.hear(TransferClosed).transfer_id == ROOM


@pytest.mark.parametrize(
    ("sizes", "wants"),
    [
        ([TOKENS], [(0, 0), (0, 0)]),
        ([TOKENS], [(8, 0)]),
        ([8], [(0, 0), (4, 0)]),
        ([TOKENS], [(0, 1)]),
        ([0], [(0, 0)]),
        ([-1], [(0, 0)]),
        ([], []),
        ([TOKENS, TOKENS], [(0, 1)]),
    ],
)
def test_who_wants_a_token_twice_or_pages_of_no_size_gets_nothing(
    sides, sizes: list[int], wants: list[tuple[int, int]]
) -> None:
    """A hostile server that knows the secret."""
    giver, _ = sides()
    give(giver, [4])
    assert _asked(giver.port, sizes, wants) == []
    assert giver.hear(TransferClosed).transfer_id == ROOM


@pytest.mark.parametrize("size", [2**31, 2**53, 2**63 - 1, 2**64 - 1])
def test_a_page_beyond_the_room_takes_no_memory(sides, size: int) -> None:
    giver, _ = sides()
    give(giver, [4])
    assert _asked(giver.port, [size], [(0, 0)]) == [wire.ABSENT, wire.HANDOFF]
    give(giver, [4], b"another room")
    places = [(2**64 - TOKENS, 0), (0, 0)]
    assert _asked(giver.port, [TOKENS], places, b"another room")[:2] == [wire.ABSENT, wire.PAGE]


def _asked(
    port: int, sizes: list[int], wants: list[tuple[int, int]], room: bytes = ROOM
) -> list[int]:
    """Kinds of what comes when these pages are wanted."""

    async def ask() -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        channel = await wire.greet(reader, writer, wire.master_of("a secret"), is_prefill=False)
        await channel.send(wire.SEEK, wire.pack(wire.Seek(room, DIGEST, sizes)))
        most = dict.fromkeys((wire.FOUND, wire.PAGE, wire.ABSENT, wire.HANDOFF, wire.GONE), 1 << 16)
        assert (await channel.receive(most, WAIT_S))[0] == wire.FOUND
        await channel.send(wire.WANT, wire.pack_wants(wants))
        come: list[int] = []
        with contextlib.suppress(OSError, EOFError):
            while not come or come[-1] != wire.HANDOFF:
                come.append((await channel.receive(most, WAIT_S))[0])
        writer.close()
        return come

    return asyncio.run(ask())


def test_another_sequence_finds_nothing_and_leaves_the_room_as_it_is(sides) -> None:
    giver, taker = sides()
    give(giver, [4])
    seek(taker, 1, digest=b"e" * 32)
    assert taker.hear(TransferFailed).status == 400
    seek(taker, 1)
    taker.hear(TransferFound)
    take(taker, [0])
    assert taker.hear(CopyResult).ids == [1]


def test_a_request_that_ends_lets_go_of_what_it_has_begun(sides) -> None:
    giver, taker = sides()
    giver.mover.execute([OpenTransfer(ROOM, DIGEST, 2 * TOKENS)])
    seek(taker, 2)
    taker.hear(TransferFound)
    take(taker, [0, 1])
    taker.mover.execute([CloseTransfer(ROOM)])
    assert taker.hear(CopyResult).failed == [1, 2]
    assert giver.hear(TransferClosed).transfer_id == ROOM, "nobody takes it any more"
    take(taker, [0])
    assert taker.hear(CopyResult).failed == [1], "of a room that is not sought"


def test_a_sequence_that_ends_before_its_prompt_is_computed_is_reported(sides) -> None:
    giver, taker = sides()
    seek(taker, 1)
    giver.mover.execute([CloseTransfer(ROOM)])
    lost = taker.hear(TransferFailed)
    assert lost.status == 503 and "ended there" in lost.text


def test_a_port_that_is_taken_is_reported_at_the_start() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as held,
        pytest.raises(ConfigError, match="cannot listen"),
    ):
        Side(PrefillSide, int(held.getsockname()[1]))


def test_who_speaks_otherwise_is_let_go_and_others_are_served(sides) -> None:
    giver, taker = sides()
    port = int(taker.peer.rpartition(":")[2])
    give(giver, [4])
    greeting = wire.GREETING + bytes(16)
    huge = (1 << 31).to_bytes(4, "little") + bytes((wire.SEEK,))
    for said in (b"GET / HTTP/1.1\r\n\r\n" * 4, greeting + huge, greeting + bytes(64)):
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as stranger:
            stranger.sendall(said)
            heard = bytearray()
            while data := _received(stranger):
                heard += data
            assert len(heard) <= len(greeting), "nothing but a greeting"
    seek(taker, 1)
    assert taker.hear(TransferFound)


ANSWERS: dict[str, list[bytes]] = {
    "closes": [],
    "a web server": [b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n"],
    "another version": [b"banyan rooms 3\n", bytes(16)],
    "cut": [wire.GREETING[:5]],
    "forged": [wire.GREETING, bytes(16), bytes(4), bytes((wire.LATER,)), bytes(16)],
    "garbage": [wire.GREETING, bytes(16), b"\xff" * 64],
    "its own words": [wire.GREETING, b"MIRROR"],
}


def test_a_decode_server_tells_no_client_which_ports_are_open(monkeypatch) -> None:
    """Whatever is at the address that a client names, the error is one and the same."""
    monkeypatch.setattr(wire, "GREETING_S", 0.3)
    monkeypatch.setattr(wire, "SILENCE_S", 0.3)
    taker = Side(DecodeSide, 0)
    errors: dict[str, tuple[int, str]] = {}

    def try_port(what: str, port: int) -> None:
        taker.peer = f"127.0.0.1:{port}"
        seek(taker, 1, room=len(errors).to_bytes(len(ROOM), "little"))
        failed = taker.hear(TransferFailed)
        errors[what] = failed.status, failed.text.replace(taker.peer, "THERE")

    try:
        for what, parts in ANSWERS.items():
            with answering(parts) as port:
                try_port(what, port)
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            try_port("closed", closed.getsockname()[1])
        assert len(set(errors.values())) == 1, errors
        assert errors["closed"][0] == 503
        with socket.create_server(("127.0.0.1", 0)) as silent:
            try_port("silent", silent.getsockname()[1])
        assert errors["silent"] == (504, errors["closed"][1])
    finally:
        taker.mover.close()


@contextlib.contextmanager
def answering(parts: list[bytes]) -> Iterator[int]:
    """A port whose server sends this and closes; MIRROR = what it has received."""

    def serve() -> None:
        with listener.accept()[0] as came:
            heard = came.recv(1 << 10)
            for part in parts:
                came.sendall(heard[len(wire.GREETING) :] if part == b"MIRROR" else part)
            if b"MIRROR" in parts:
                came.sendall(came.recv(1 << 10))
            came.shutdown(socket.SHUT_WR)
            while came.recv(1 << 10):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def _received(stranger: socket.socket) -> bytes:
    try:
        return stranger.recv(1 << 16)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1])
def test_a_server_that_sends_pages_of_another_size_writes_nothing(size: int) -> None:
    """A hostile server that knows the secret."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = await wire.greet(reader, writer, wire.master_of("a secret"), is_prefill=True)
        await channel.receive(wire.MAX_SEEK, WAIT_S)
        await channel.send(wire.FOUND, wire.pack(wire.Found(TOKENS, FACTS)))
        await channel.receive({wire.WANT: 1 << 10}, WAIT_S)
        await channel.send(wire.PAGE, b"\xff" * size)
        await reader.read()
        writer.close()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    opened = asyncio.run_coroutine_threadsafe(asyncio.start_server(serve, "127.0.0.1", 0), loop)
    port = opened.result(WAIT_S).sockets[0].getsockname()[1]
    taker = Side(DecodeSide, 0)
    taker.peer = f"127.0.0.1:{port}"
    try:
        seek(taker, 1)
        taker.hear(TransferFound)
        take(taker, [0])
        assert taker.hear(TransferFailed).status == 503
        assert taker.hear(CopyResult).failed == [1]
        assert not taker.pages.bytes.any()
    finally:
        taker.mover.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)


@pytest.mark.parametrize(
    "handoff",
    [
        PrefillResult(b"another room"),
        PrefillResult(ROOM, bytes(8)),
        PrefillResult(ROOM, (100).to_bytes(4, "little")),
        PrefillResult(ROOM, (-1).to_bytes(4, "little", signed=True)),
        PrefillResult(ROOM, bytes(4), [RowScores(-1, 0, b"")]),
        PrefillResult(ROOM, bytes(4), [RowScores(-1, -1, bytes(4))]),
        PrefillResult(ROOM, bytes(4), [RowScores(-1, 17, bytes(4))]),
        PrefillResult(ROOM, bytes(4), [RowScores(-1, 3, bytes(8), bytes(4))]),
    ],
)
def test_a_handoff_that_no_engine_says_is_refused(handoff: PrefillResult) -> None:
    with pytest.raises(wire.Broken):
        wire.read_handoff(wire.pack(handoff), ROOM, 16, 100)


def test_what_an_engine_says_is_read() -> None:
    handoff = PrefillResult(ROOM, bytes(4), [RowScores(-1, 16, bytes(4))], 5)
    assert wire.read_handoff(wire.pack(handoff), ROOM, 16, 100) == handoff


def test_a_page_has_its_own_place() -> None:
    place = peer_page(ROOM, 1 << 40)
    assert isinstance(place, PageAt) and place.tier == "peer"
    assert peer_page(ROOM, 0) != place != peer_page(b"another room", 1 << 40)
    assert transfer_position(place.key) == (ROOM, 1 << 40)


def test_a_server_that_takes_and_says_nothing_more_loses_its_room(sides, monkeypatch) -> None:
    """It is stopped, or what it sends goes nowhere: the pages do not wait for it."""
    monkeypatch.setattr(wire, "SILENCE_S", 0.5)
    giver, _ = sides()
    give(giver, [4])

    async def seek_and_wait() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", giver.port)
        channel = await wire.greet(reader, writer, wire.master_of("a secret"), is_prefill=False)
        await channel.send(wire.SEEK, wire.pack(wire.Seek(ROOM, DIGEST, [TOKENS])))
        with pytest.raises((OSError, EOFError)):
            await channel.receive(dict.fromkeys((wire.FOUND, wire.GONE), 1 << 16), WAIT_S)
            await channel.receive({}, WAIT_S)

    asyncio.run(seek_and_wait())
    assert giver.hear(TransferClosed).transfer_id == ROOM


def test_a_server_that_takes_says_that_it_lives_while_it_waits_for_room(sides, monkeypatch) -> None:
    monkeypatch.setattr(wire, "PING_S", 0.05)
    monkeypatch.setattr(wire, "SILENCE_S", 0.5)
    giver, taker = sides()
    give(giver, [4])
    seek(taker, 1)
    assert taker.hear(TransferFound).transfer_id == ROOM
    with pytest.raises(AssertionError, match="no TransferClosed"):
        giver.hear(TransferClosed, 1.5)  # thrice the silence
    take(taker, [0])
    assert taker.hear(PrefillResult).transfer_id == ROOM
    assert giver.hear(TransferClosed).transfer_id == ROOM


def idle_connections(giver: Side, count: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", giver.port)) for _ in range(count)]


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has ended the connection; skips its greeting."""
    connection.settimeout(WAIT_S)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 10):
            pass
    return True


@pytest.mark.parametrize("limit", ["_MOST_STRANGERS", "_MOST_OF_PEER"])
def test_idle_connections_without_the_secret_keep_no_pair_out(sides, monkeypatch, limit) -> None:
    monkeypatch.setattr(prefill_side, limit, 8)
    giver, taker = sides()
    idle = idle_connections(giver, 20)
    try:
        assert all(map(is_closed, idle[:12]))
        give(giver, [1, 2])
        seek(taker, 2)
        assert taker.hear(TransferFound).tokens == 2 * TOKENS
    finally:
        for connection in idle:
            connection.close()


def test_rooms_that_never_come_are_forgotten(sides) -> None:
    giver, taker = sides(taker={"patience_s": 0.2})
    for number in range(20):
        seek(taker, 1, room=bytes([number]) * len(ROOM))
    for _ in range(20):
        assert taker.hear(TransferFailed).status == 504
    mover = giver.mover
    deadline = time.monotonic() + WAIT_S
    while mover._awaited or mover._connections:
        assert time.monotonic() < deadline, (mover._awaited, mover._connections)


@pytest.mark.parametrize("held", [0, 1])
def test_a_room_that_opens_late_is_found_without_a_connection_that_waits(
    sides, monkeypatch, held: int
) -> None:
    """Three rooms wait, and at most one of them by a connection."""
    monkeypatch.setattr(prefill_side, "_MOST_HELD", held)
    giver, taker = sides()
    rooms = [bytes([number]) * len(ROOM) for number in range(3)]
    for room in rooms:
        seek(taker, 1, room=room)
    for room in rooms:
        give(giver, [1], room=room)
    found = {taker.hear(TransferFound).transfer_id for _ in rooms}
    assert found == set(rooms)
