"""Replays of cache events: who gets them, and that long ones come whole."""

import socket
from collections.abc import Iterator

import pytest
import zmq

from banyan.config.observability import KVEvents, replay_code
from banyan.engine.kv_events import KVEventPublisher, replay_endpoint
from banyan.kv_cache.cache_events import Removed

WAIT_MS = 20_000
FIRST = bytes(8)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(0)


def publisher(port: int, secret: str = "") -> KVEventPublisher:
    events = KVEvents(
        publisher="zmq",
        endpoint=f"tcp://127.0.0.1:{free_port()}",
        replay_endpoint=f"tcp://127.0.0.1:{port}",
        bind=True,
    )
    return KVEventPublisher(events, 0, 16, 8, lambda salt: "", secret)


def asking(context: zmq.Context, port: int, *frames: bytes) -> zmq.Socket:
    reader = context.socket(zmq.DEALER)
    reader.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    reader.connect(f"tcp://127.0.0.1:{port}")
    reader.send_multipart([b"", *frames])
    return reader


def numbers(reader: zmq.Socket) -> list[int]:
    found: list[int] = []
    while not found or found[-1] >= 0:
        *_, number, _ = reader.recv_multipart()
        found.append(int.from_bytes(number, "big", signed=True))
    return found[:-1]


def test_with_a_secret_only_readers_that_have_it_get_a_replay(context: zmq.Context) -> None:
    port = free_port()
    events = publisher(port, "a secret")
    try:
        strangers = [
            asking(context, port, FIRST),
            asking(context, port, replay_code("another", FIRST), FIRST),
            asking(context, port, replay_code("a secret", b"\1" * 8), FIRST),
        ]
        known = asking(context, port, replay_code("a secret", FIRST), FIRST)
        assert numbers(known) == [0]
        again = asking(context, port, replay_code("a secret", FIRST), FIRST)
        assert numbers(again) == [0]
        assert not any(stranger.poll(0) for stranger in strangers)
    finally:
        events.close()


def test_a_long_replay_comes_whole_and_to_several_readers(context: zmq.Context) -> None:
    port = free_port()
    events = publisher(port)
    try:
        for _ in range(700):
            events.publish([Removed([1])])
        readers = [asking(context, port, FIRST) for _ in range(3)]
        for reader in readers:
            found = numbers(reader)
            assert found == list(range(len(found)))
        assert numbers(asking(context, port, (690).to_bytes(8, "big")))[0] == 690
    finally:
        events.close()


@pytest.mark.parametrize(
    ("given", "secret", "opened"),
    [
        ("tcp://*:5657", "", "tcp://127.0.0.1:5657"),
        ("tcp://0.0.0.0:5657", "", "tcp://127.0.0.1:5657"),
        ("tcp://[::]:5657", "", "tcp://127.0.0.1:5657"),
        ("tcp://*:5657", "a secret", "tcp://*:5657"),
        ("tcp://192.0.2.1:5657", "", "tcp://192.0.2.1:5657"),
        ("ipc:///tmp/replays", "", "ipc:///tmp/replays"),
    ],
)
def test_without_a_secret_replays_stay_on_this_machine(
    given: str, secret: str, opened: str
) -> None:
    assert replay_endpoint(given, secret) == opened
