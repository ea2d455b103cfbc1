"""Both links carry everything in order, wake both sides, and survive frames that are nonsense."""

import asyncio
import os
import random
import select
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
import pytest

from banyan.base.errors import ConfigError
from banyan.base.ids import RequestId
from banyan.messages import transport as links
from banyan.messages.events import Fatal, Stats, Tokens
from banyan.messages.frames import FrameSocket, WireError
from banyan.messages.requests import Abort, Control, Generate, StopAt
from banyan.messages.sampling_params import SamplingParams
from banyan.messages.transport import (
    PrivateFolder,
    Receiver,
    Sender,
    local_pair,
    next_events,
    remove_folders_of,
    socket_pair,
)

FRAMES = int(os.environ.get("FRAMES", "20000"))
"""Damaged ones of each kind."""


@pytest.fixture
def folder():
    folder = PrivateFolder()
    yield folder
    folder.close()


@pytest.fixture(params=["local", "socket"])
def pair(request, folder):
    front, engine = (
        local_pair() if request.param == "local" else socket_pair(folder.address("engine"))
    )
    yield front, engine
    engine.close()
    front.close()


def wait_for_messages(engine, timeout_s=10.0):
    """What an engine loop does: wait on the descriptor, then take everything."""
    poller = select.poll()
    poller.register(engine.poll_fd(), select.POLLIN)
    while not (messages := engine.receive()):
        assert poller.poll(timeout_s * 1000), "the descriptor never became readable"
    return messages


def abort(i):
    return Abort(RequestId(f"r{i}"))


def test_messages_arrive_whole_and_in_order(pair):
    front, engine = pair
    sent = [
        Generate(
            request=RequestId("a"), tokens=b"\1\0\0\0", sampling=SamplingParams(max_new_tokens=3)
        ),
        StopAt(RequestId("a"), 2),
        Control(7, "flush", args={"timeout": 1.5, "hard": True}),
        abort(1),
    ]

    async def scenario():
        front.listen(lambda: None)
        front.send(sent[:2])
        front.send(sent[2:])
        received = []
        while len(received) < len(sent):
            received += await asyncio.to_thread(wait_for_messages, engine)
        return received

    assert asyncio.run(scenario()) == sent


def test_events_wake_a_waiting_front(pair):
    front, engine = pair
    events = [Tokens(RequestId("a"), 0, b"\5\0\0\0"), Stats(steps=4), Fatal("out of memory")]

    async def scenario():
        waiting = asyncio.create_task(next_events(front))
        await asyncio.sleep(0)
        assert not waiting.done()
        engine.send(events[:1])
        received = await waiting
        engine.send(events[1:])
        while len(received) < len(events):
            received += await next_events(front)
        return received

    assert asyncio.run(scenario()) == events


def test_a_message_that_comes_while_the_engine_sends_still_wakes_it(pair):
    front, engine = pair
    rounds = 300
    seen = []

    def engine_loop():
        # Sends without receiving in between, which is when an edge of the socket could be lost.
        while len(seen) < rounds:
            engine.send([Stats(steps=len(seen))])
            seen.extend(wait_for_messages(engine))
            engine.send([Stats(steps=len(seen))])

    async def scenario():
        thread = threading.Thread(target=engine_loop)
        thread.start()
        for i in range(rounds):
            front.send([abort(i)])
            if i % 3 == 0:
                await next_events(front)
        await asyncio.to_thread(thread.join, 30)
        assert not thread.is_alive()

    asyncio.run(scenario())
    assert seen == [abort(i) for i in range(rounds)]


def test_receiving_from_an_empty_link_returns_at_once_and_the_descriptor_is_quiet(pair):
    front, engine = pair

    async def scenario():
        front.listen(lambda: None)
        front.send([abort(0)])
        return await asyncio.to_thread(wait_for_messages, engine)

    assert asyncio.run(scenario()) == [abort(0)]
    assert engine.receive() == []
    poller = select.poll()
    poller.register(engine.poll_fd(), select.POLLIN)
    for _ in range(3):  # one spurious wake-up is allowed, a descriptor stuck high is not
        if not poller.poll(0):
            break
        assert engine.receive() == []
    assert not poller.poll(0)


def test_frames_of_nonsense_are_dropped_and_counted_and_the_next_good_one_arrives(folder):
    address = folder.address("fuzz")
    raw = FrameSocket.bound(address)
    engine = links.SocketEngineLink(address)
    rng = random.Random(1)
    good = links.message_codec().encode([abort(0)])
    bad = [b"", good[:-1], b"\xff" + good[1:], good + b"\0", b"\2\xdd\xff\xff\xff\xff"]
    bad += [rng.randbytes(rng.randrange(1, 60)) for _ in range(200)]
    bad += [good.replace(b"r0", b"\xffr")]
    for frame in bad:
        raw.send(frame)
    raw.send(good)
    raw.accept()
    received = []
    while not received:
        received = wait_for_messages(engine)
    assert received == [abort(0)]
    assert engine.dropped == len(bad)
    engine.close()
    raw.close()


def test_a_damaged_frame_decodes_or_is_a_wire_error():
    rng = random.Random(2)
    sampling = SamplingParams(max_new_tokens=3)
    generate = Generate(
        request=RequestId("é"), tokens=b"\1\0\0\0", sampling=sampling, namespace="space"
    )
    control = Control(7, "flush", args={"timeout": 1.5, "text": "é"})
    codec = links.message_codec()
    num_refused = 0
    for frame in (codec.encode([generate]), codec.encode([control, abort(1)])):
        for _ in range(FRAMES):
            damaged = bytearray(frame)
            for _ in range(rng.randint(1, 3)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            try:
                codec.decode(bytes(damaged))
            except WireError:
                num_refused += 1
    print(f"\nfigure: {2 * FRAMES:,} damaged frames: {num_refused:,} refused, the others read")
    assert num_refused > FRAMES


def test_frames_of_nonsense_do_not_end_the_front(folder):
    address = folder.address("fuzz")
    front = links.SocketFrontLink(address)
    raw = FrameSocket.connected(address)
    raw.send(b"\2garbage")
    raw.send(links.event_codec().encode([]))
    raw.send(links.event_codec().encode([Stats(steps=1)]))
    assert asyncio.run(next_events(front)) == [Stats(steps=1)]
    assert front.dropped == 1
    raw.close()
    front.close()


def test_a_long_constraint_travels_once_and_every_request_has_it(folder):
    front, engine = socket_pair(folder.address("engine"))
    sent_bytes = 0
    send = front._socket.send

    def counted(frame):
        nonlocal sent_bytes
        is_taken = send(frame)
        sent_bytes += len(frame) * is_taken
        return is_taken

    front._socket.send = counted
    text = "ebnf:" + "x" * 500_000
    sampling = SamplingParams(max_new_tokens=3)
    requests = [
        Generate(request=RequestId(f"r{i}"), tokens=b"\1\0\0\0", sampling=sampling, grammar=text)
        for i in range(100)
    ]

    async def scenario():
        front.listen(lambda: None)
        front.send(requests[:50])
        front.send(requests[50:])
        received = []
        while len(received) < len(requests):
            received += await asyncio.to_thread(wait_for_messages, engine)
        return received

    received = asyncio.run(scenario())
    front.close()
    engine.close()
    assert received == requests
    assert sent_bytes < 2 * len(text)
    assert len({id(generate.grammar) for generate in received}) == 1


def test_texts_that_are_forgotten_travel_again():
    rng = random.Random(3)
    sender, receiver = Sender(), Receiver()
    sampling = SamplingParams(max_new_tokens=3)
    num_short = 0
    for i in range(2_000):
        grammar = f"ebnf:{rng.choice('ab') * 1024}{int(rng.expovariate(0.1))}"
        request = Generate(
            request=RequestId(f"r{i}"),
            tokens=b"\1\0\0\0",
            sampling=sampling,
            grammar=rng.choice([grammar, "", "regex:a"]),
        )
        packed = sender.packed(request)
        num_short += packed is not request
        assert receiver.unpacked(packed) == request
    assert 100 < num_short < 1_000
    for unknown in ("=99999", "=", "=x"):
        assert receiver.unpacked(msgspec.structs.replace(request, grammar=unknown)) is None


def test_what_the_engine_says_before_the_front_listens_is_kept(folder):
    front, engine = socket_pair(folder.address("early"))
    engine.send([Stats(steps=1)])
    assert asyncio.run(next_events(front)) == [Stats(steps=1)]
    engine.close()
    front.close()


def test_an_engine_without_a_front_learns_it_at_once(folder):
    with pytest.raises(FileNotFoundError):
        links.SocketEngineLink(folder.address("nobody"))


def test_an_address_is_free_again_when_its_front_has_closed_or_its_engine_has_come(folder):
    links.SocketFrontLink(folder.address("front")).close()
    front, engine = socket_pair(folder.address("front"))
    asyncio.run(_meet(front))
    assert os.listdir(folder.path) == []
    engine.close()
    front.close()


def test_what_the_front_says_before_the_engine_exists_is_kept(folder):
    front = links.SocketFrontLink(folder.address("early"))

    async def scenario():
        front.listen(lambda: None)
        front.send([abort(0)])
        front.send([abort(1)])
        engine = links.SocketEngineLink(folder.address("early"))
        received = []
        while len(received) < 2:
            received += await asyncio.to_thread(wait_for_messages, engine)
        engine.close()
        return received

    assert asyncio.run(scenario()) == [abort(0), abort(1)]
    front.close()


def test_the_last_words_of_an_engine_arrive_after_it_and_nothing_spins_then(folder):
    front, engine = socket_pair(folder.address("last"))
    num_rung = 0

    def bell():
        nonlocal num_rung
        num_rung += 1
        heard.extend(front.receive())

    heard: list = []

    async def scenario():
        front.listen(bell)
        await asyncio.to_thread(engine.send, [Stats(steps=1)])
        await asyncio.to_thread(engine.send, [Fatal("out of memory")])
        await asyncio.to_thread(engine.close)
        while len(heard) < 2:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert heard == [Stats(steps=1), Fatal("out of memory")]
    assert num_rung <= 3, "two frames, and the end"
    front.send([abort(0)])
    assert front.dropped == 1
    front.close()


def test_an_engine_whose_front_has_gone_counts_what_nobody_hears_and_its_descriptor_is_quiet(
    folder,
):
    front, engine = socket_pair(folder.address("gone"))
    asyncio.run(_meet(front))
    front.close()
    assert engine.receive() == []
    engine.send([Stats(steps=1)])
    assert engine.dropped == 1
    poller = select.poll()
    poller.register(engine.poll_fd(), select.POLLIN)
    assert not poller.poll(0)
    engine.close()


async def _meet(front):
    front.listen(lambda: None)
    while front._socket.is_door:
        await asyncio.sleep(0)


def test_more_than_the_kernel_takes_at_once_arrives_whole_in_both_directions(folder):
    front, engine = socket_pair(folder.address("large"))
    sizes = [1, 70_000, 65_532, 65_536, 3_000_000, 5]
    events = [Tokens(RequestId(f"r{i}"), 0, os.urandom(size)) for i, size in enumerate(sizes)]
    sampling = SamplingParams(max_new_tokens=3)
    messages = [
        Generate(request=RequestId(f"r{i}"), tokens=os.urandom(4 * size), sampling=sampling)
        for i, size in enumerate(sizes)
    ]

    def engine_loop():
        for event in events:
            engine.send([event])
        poller = select.poll()
        poller.register(engine.poll_fd(), select.POLLIN)
        received = []
        while len(received) < len(messages):
            assert poller.poll(10_000)
            received += engine.receive()
        return received

    async def scenario():
        front.listen(lambda: None)
        for message in messages:
            front.send([message])
        there = asyncio.create_task(asyncio.to_thread(engine_loop))
        received = []
        while len(received) < len(events):
            received += await next_events(front)
            front.listen(lambda: None)
        front.listen(None)
        front.listen(lambda: None)
        return received, await there

    heard, said = asyncio.run(scenario())
    assert heard == events
    assert said == messages
    engine.close()
    front.close()


def test_frames_come_out_whole_however_their_bytes_were_cut(folder):
    near = FrameSocket.bound(folder.address("cut"))
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(f"{folder.path}/cut")
    rng = random.Random(4)
    sent = [rng.randbytes(rng.choice((0, 1, 2, 3, 4, 5, 300))) for _ in range(300)]
    stream = b"".join(len(frame).to_bytes(4, "little") + frame for frame in sent)
    received = []
    while stream:
        cut = rng.choice((1, 2, 3, 4, 5, 6, 7, 100, 1000))
        raw.sendall(stream[:cut])
        stream = stream[cut:]
        received += near.take()
    assert received == sent
    raw.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(WireError, match="4294967295 bytes"):
        near.take()
    raw.close()
    near.close()


def test_a_list_too_large_for_one_frame_travels_in_several(monkeypatch):
    monkeypatch.setattr(links, "MAX_FRAME_BYTES", 64)
    items = [abort(i) for i in range(20)]
    codec = links.message_codec()
    frames = list(links._frames(codec, items))
    assert len(frames) > 1 and all(len(f) <= 64 for f in frames)
    assert [m for f in frames for m in codec.decode(f)] == items


def test_sockets_lie_in_a_folder_that_only_their_user_may_enter(folder):
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700


def test_closing_the_folder_removes_it():
    folder = PrivateFolder()
    folder.close()
    assert not os.path.exists(folder.path)


@pytest.mark.parametrize("length", [40, 66, 67, 200])
def test_sockets_have_a_path_that_is_short_enough_wherever_temporary_files_lie(
    request, monkeypatch, length
):
    """A path of a socket has at most 107 bytes."""
    base = tempfile.mkdtemp(prefix="d", dir="/tmp")
    request.addfinalizer(lambda: shutil.rmtree(base))
    deep = f"{base}/{'d' * (length - len(base) - 1)}"
    os.makedirs(deep)
    monkeypatch.setattr(tempfile, "tempdir", deep)
    folder = PrivateFolder()
    try:
        assert folder.path.startswith(f"{deep}/") == (len(deep) <= 66)
        assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
        for name in ("front9", "joined.c99~"):
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(f"{folder.path}/{name}")
    finally:
        folder.close()


def test_where_no_place_is_short_enough_the_numbers_are_reported(tmp_path, monkeypatch):
    deep = f"{tmp_path}/{'d' * 100}"
    os.makedirs(deep)
    monkeypatch.setattr(tempfile, "tempdir", deep)
    monkeypatch.setattr(links, "_SHORT", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=rf"has a path of {len(deep)} bytes: .* at most 107"):
        PrivateFolder()


def test_a_mailbox_descriptor_outlives_a_front_that_closed_first():
    front, engine = local_pair()
    front.close()
    del front
    engine.send([Stats(steps=1)])
    fd = engine._outgoing.fd
    os.fstat(fd)
    del engine
    with pytest.raises(OSError):
        os.fstat(fd)


@pytest.fixture
def place(monkeypatch):
    """The folder of temporary files, no deeper than sockets in it may lie."""
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


def test_the_folder_of_a_killed_process_goes_with_the_next_and_no_other_does(place):
    alive = PrivateFolder()
    code = (
        "from banyan.messages.transport import PrivateFolder as F; import os; f = F(); os._exit(9)"
    )
    environment = os.environ | {"TMPDIR": str(place)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 9
    for name in ("banyan-link-notes", "banyan-linkabcdefgh", "banyan-checkpoints"):
        (place / name).mkdir()
    (left,) = set(place.glob("banyan-link-[0-9]*-????????")) - {Path(alive.path)}
    fresh = PrivateFolder()
    assert left.exists(), "it is too young to be sure"
    fresh.close()
    for path in place.iterdir():
        os.utime(path, (1, 1))
    last = PrivateFolder()
    assert not left.exists()
    assert {p.name for p in place.iterdir()} == {
        Path(alive.path).name,
        Path(last.path).name,
        "banyan-link-notes",
        "banyan-linkabcdefgh",
        "banyan-checkpoints",
    }
    alive.close()
    last.close()


def test_the_folders_of_a_process_that_has_ended_can_be_removed_at_once(place):
    alive = PrivateFolder()
    code = """
from banyan.messages.transport import PrivateFolder as F
import os; print(os.getpid(), flush=True); f, g = F(), F(); os._exit(9)"""
    environment = os.environ | {"TMPDIR": str(place)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    assert len(list(place.iterdir())) == 3
    remove_folders_of(int(ended.stdout))
    remove_folders_of(os.getpid())
    assert list(place.iterdir()) == [Path(alive.path)], "its process lives"
    alive.close()
