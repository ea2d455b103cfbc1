"""The all-reduce over shared memory of GPUs: in Triton's interpreter between processes that map the
same files, and its order of writing and waiting in every interleaving of a model."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from banyan.base.errors import DeviceError
from banyan.ops.cuda import all_reduce
from banyan.ops.cuda.all_reduce import PeerAllReduce, Sizes, add_in_order
from banyan.parallel.process_group import in_order
from tests.ops.triton_device import ABSENCE, IS_INTERPRETED, TYPES, random
from tests.parallel.ranks import together

needs_kernels = pytest.mark.skipif(bool(ABSENCE), reason=ABSENCE)
SMALL = Sizes(programs=2, block=16, warps=1, slot_bytes=2048, at_once=((8, 600),))
COUNTS = (1, 16, 150, 37, 512, 2, 300, 511, 64, 500)
"""Elements: added whole by each rank and in parts, in turns that fill both buffers."""
ROUNDS = 3


def shared_memory(folder: Path, rank: int, size: int, sizes: Sizes) -> list[torch.Tensor]:
    """What `open_peers` gives on GPUs: the memory of every rank in this process."""
    return [
        torch.from_file(
            str(folder / f"memory{peer}"), shared=True, size=sizes.all_bytes, dtype=torch.uint8
        )
        for peer in range(size)
    ]


def add(rank: int, size: int, address: str) -> list[str]:
    """Call it with many sizes and types; returns what is wrong."""
    memory = shared_memory(Path(address.removeprefix("file://")).parent, rank, size, SMALL)
    peers = PeerAllReduce(rank, [part.data_ptr() for part in memory], torch.device("cpu"), SMALL)
    wrong = []
    for at, count in enumerate(COUNTS * ROUNDS):
        dtype = TYPES[at % len(TYPES)]
        parts = [random(count, seed=100 * at + r) * 10.0 ** (r - 1) for r in range(size)]
        parts = [part.to(dtype) for part in parts]
        found = parts[rank].clone()
        assert peers.takes(found)
        peers.add(found)
        if not torch.equal(found, in_order(parts)):
            wrong.append(f"call {at}: {count} of {dtype}")
    too_large = torch.zeros(SMALL.slot_bytes // 4 + 1)
    if peers.takes(too_large) or peers.takes(torch.zeros(4, 4).t()[1:]) or peers.takes(COUNTED):
        wrong.append("it takes what it cannot add")
    return wrong


COUNTED = torch.zeros(4, dtype=torch.int64)


@needs_kernels
@pytest.mark.skipif(not IS_INTERPRETED, reason="ranks of one device: benchmarks/cuda_ranks.py")
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_add_in_their_order_and_get_the_same_bits(size: int, tmp_path: Path) -> None:
    for rank in range(size):
        (tmp_path / f"memory{rank}").write_bytes(bytes(SMALL.all_bytes))
    assert together(size, tmp_path, add) == [[]] * size


@needs_kernels
@pytest.mark.parametrize("count", [1, 1000, 2050])
def test_parts_that_came_are_added_in_order(count: int) -> None:
    parts = torch.stack([random(count, seed=r) * 10.0**r for r in range(5)]).to(torch.float16)
    assert torch.equal(add_in_order(parts), in_order(list(parts)))


@dataclass
class Machine:
    """What a rank sees of the GPUs."""

    machine: str = "here"
    reaches: bool = True
    opens: bool = True
    sum_error: str = ""


def opened(machines: list[Machine], monkeypatch: pytest.MonkeyPatch) -> list[PeerAllReduce | str]:
    """What `open_peers` returns on each rank, in threads that exchange their facts."""
    posts: dict[tuple[str, int], bytes] = {}
    meeting = threading.Barrier(len(machines), timeout=30)
    local = threading.local()

    class Driver:
        def allocate(self, size_bytes: int) -> int:
            return 1000 + local.rank

        def handle(self, address: int) -> bytes:
            return bytes([address - 1000])

        def open(self, handle: bytes) -> int:
            if not local.machine.opens:
                raise DeviceError("cuIpcOpenMemHandle_v2 failed")
            return 1000 + handle[0]

    def be(rank: int) -> PeerAllReduce | str:
        local.rank, local.machine = rank, machines[rank]

        def publish(name: str, mine: bytes) -> list[bytes]:
            posts[name, rank] = mine
            meeting.wait()
            return [posts[name, each] for each in range(len(machines))]

        return all_reduce.open_peers(publish, rank, is_checked=True, sizes=SMALL)

    monkeypatch.setattr(all_reduce, "_Driver", Driver)
    monkeypatch.setattr(all_reduce, "_machine", lambda: local.machine.machine)
    monkeypatch.setattr(all_reduce, "_wrong_sums", lambda *peers: local.machine.sum_error)
    monkeypatch.setattr(
        all_reduce,
        "own_device",
        lambda: SimpleNamespace(index=local.rank),
    )
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda mine, theirs: local.machine.reaches
    )
    monkeypatch.setattr(
        all_reduce, "PeerAllReduce", lambda rank, addresses, device, sizes: (rank, addresses)
    )
    with ThreadPoolExecutor(len(machines)) as pool:
        return list(pool.map(be, range(len(machines))))


def test_ranks_that_reach_each_other_see_the_memory_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [(rank, [1000, 1001, 1002]) for rank in range(3)]
    assert opened([Machine(), Machine(), Machine()], monkeypatch) == expected


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (Machine(machine="there"), "several machines"),
        (Machine(reaches=False), "GPU 2 cannot read memory of GPU 0"),
        (Machine(opens=False), "cuIpcOpenMemHandle_v2 failed"),
        (Machine(sum_error="wrong numbers"), "wrong numbers"),
    ],
)
def test_a_rank_that_cannot_share_memory_is_known_to_all(
    last: Machine, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = opened([Machine(), Machine(), last], monkeypatch)
    assert len(set(found)) == 1 and why in str(found[0])


Step = tuple[str, int]
"""What a rank does next, and in which call."""


def steps_of(kinds: str, meetings: bool) -> list[Step]:
    """The order of one rank's work in calls that add whole tensors (w) or parts (p).

    meetings: False leaves out the second meeting of a call by parts.
    """
    found: list[Step] = []
    for call, kind in enumerate(kinds):
        found += [("write", call), ("raise", 2 * call + 1), ("wait", 2 * call + 1), ("read", call)]
        if kind == "p":
            found += [("sum", call)]
            found += [("raise", 2 * call + 2), ("wait", 2 * call + 2)] * meetings
            found += [("read sum", call)]
    return found


def misreads(kinds: str, slots: int = 2, meetings: bool = True) -> Iterator[str]:
    """Every wrong read in every interleaving of two ranks.

    The state: each rank's place, its flag, and for each of its buffers the call that wrote its
    addends (whole; the part of the other rank) and its sums.
    """
    steps = steps_of(kinds, meetings)
    start = ((0, 0), (0, 0), (((-1, -1),) * slots,) * 2)
    seen, left = {start}, [start]
    while left:
        places, flags, buffers = left.pop()
        for rank in range(2):
            if places[rank] == len(steps):
                continue
            what, number = steps[places[rank]]
            slot, other = number % slots, buffers[1 - rank]
            mine, flag = list(buffers[rank]), flags[rank]
            if what == "wait" and flags[1 - rank] < number:
                continue
            if what == "raise":
                flag = number
            elif what == "write":
                mine[slot] = (number, -1)
            elif what == "sum":
                mine[slot] = (mine[slot][0], number)
            elif what == "read" and other[slot][0] != number:
                yield f"rank {rank} reads call {other[slot][0]} in call {number}"
            elif what == "read sum" and other[slot][1] != number:
                yield f"rank {rank} reads the sum of call {other[slot][1]} in call {number}"
            then = (
                tuple(place + (r == rank) for r, place in enumerate(places)),
                tuple(flag if r == rank else f for r, f in enumerate(flags)),
                tuple(tuple(mine) if r == rank else b for r, b in enumerate(buffers)),
            )
            if then not in seen:
                seen.add(then)
                left.append(then)
    if (done := ((len(steps),) * 2)) not in {state[0] for state in seen}:
        yield f"nobody comes to {done}"


@pytest.mark.parametrize("kinds", ["wwwww", "ppppp", "wpwwp", "pwppw"])
def test_no_order_of_two_ranks_reads_what_another_call_wrote(kinds: str) -> None:
    assert not list(misreads(kinds))


@pytest.mark.parametrize("broken", [{"slots": 1}, {"meetings": False}])
def test_the_model_finds_what_one_buffer_or_one_meeting_would_break(broken: dict) -> None:
    assert list(misreads("wpwwp", **broken))
