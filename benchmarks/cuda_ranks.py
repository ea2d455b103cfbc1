"""What one GPU can show of several ranks: python -m benchmarks.cuda_ranks

NCCL with one rank, its collectives captured in a graph; the all-reduce over shared memory between
two processes on the same GPU, and between ranks that are streams of one process, which times its
work without the links between GPUs. With TRITON_INTERPRET=1 and --device cpu --small, two
processes share files.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from banyan.dp_attention.batch import DPAttentionRows
from banyan.ops.cuda.all_reduce import PeerAllReduce, Sizes, add_in_order, open_peers
from banyan.parallel.collectives import Rendezvous
from banyan.parallel.process_group import dist, in_order

COUNTS = (4096, 333, 65536, 131072 + 16, 1 << 20, 4096, 2000001)
SMALL_COUNTS = (1, 40, 333, 512)
BOTH = Sizes(at_once=((8, 1 << 18),))
"""Both kernels, also for two ranks."""
SMALL = Sizes(programs=2, block=16, warps=1, slot_bytes=2048, at_once=((8, 600),))
TIMED = {"8 KiB": 4096, "64 KiB": 32768, "512 KiB": 1 << 18, "4 MiB": 1 << 21}
"""Elements of bfloat16; the first is a row of 4,096."""
CANDIDATES = ((8, 1024, 4), (16, 1024, 4), (32, 512, 4), (32, 1024, 4), (64, 512, 4))
"""Programs, block and warps."""
CALLS, LIMIT_S, MEET_S = 50, 100, 15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--parts", nargs="+", default=["nccl", "processes", "streams"])
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # no stream waits in the queue of another
    if options.rank >= 0:
        be_a_rank(options.rank, options.folder, options.small)
        return 0
    if "processes" in options.parts:
        two_processes(options)
    if options.device == "cuda":
        if "nccl" in options.parts:
            one_rank_of_nccl()
        if "streams" in options.parts:
            ranks_as_streams()
    return 0


def say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def check(name: str, found: Tensor, wanted: Tensor) -> None:
    if not torch.equal(found.cpu(), wanted.cpu()):
        raise SystemExit(f"{name}: wrong numbers")


def addends(count: int, size: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    """One tensor of each rank, of sizes whose sum depends on the order."""
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(count, generator=draw) * 10.0**r).to(dtype) for r in range(size)]


def one_rank_of_nccl() -> None:
    """Every collective, called and captured: what one rank gets is what it gave."""
    from banyan.parallel.nccl import NCCL

    with tempfile.TemporaryDirectory() as folder:
        group = NCCL.open(Rendezvous(0, 1, f"file://{folder}/meet", 60.0))
        rows = DPAttentionRows(0, 1, 1)
        for count in (6, 4096):
            rows.enter([count])
            x = torch.randn(count, 64, device="cuda").bfloat16()
            places = torch.zeros(count, 2, dtype=torch.int64, device="cuda")

            def work(x: Tensor = x, count: int = count) -> list[Tensor]:
                summed, sent = x.clone(), x.clone()
                group.all_reduce(summed)
                group.broadcast(sent, 0)
                return [
                    *(summed, sent, group.all_gather(x, 64), group.reduce_scatter(x)),
                    *(group.all_to_all(x), group.gather_rows(x, rows.table, count)),
                    group.reduce_rows(x.clone(), rows.table, count),
                    group.gather_columns(x, 64, rows.table, count),
                ]

            for at, found in enumerate(work()):
                check(f"collective {at} of NCCL", found, x)
            sent = group.dispatch_rows(x, places, 8, rows.table)
            check("rows of experts", sent, x)
            back = group.combine_rows(x, places, 8, rows.table, count, is_apart=False)
            check("rows back", back, x)
            replay, found = captured(work)
            x.copy_(torch.randn(count, 64))
            replay()
            for at, each in enumerate(found):
                check(f"collective {at} of NCCL in a graph", each, x)
    say("NCCL with one rank: all collectives, called and captured")


def captured(work: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
    """A graph of work, made as the platform makes its own; and what the work returned."""
    from banyan.platform.cuda import CudaPlatform

    platform, found = CudaPlatform(), list[Tensor]()
    platform.open(0, 1)

    def once() -> None:
        found[:] = work()

    with platform.stream():
        graph = platform.capture(once)
    graph.replay()

    def replay() -> None:
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()

    return replay, found


def two_processes(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(2):
            (Path(folder) / f"memory{rank}").write_bytes(bytes(SMALL.all_bytes))
        command = [sys.executable, "-m", "benchmarks.cuda_ranks", "--folder", folder]
        command += ["--small"] * options.small
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(2)]
        try:
            codes = [process.wait(LIMIT_S) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    if any(codes):
        raise SystemExit(f"two processes on one device: they ended with {codes}")
    say("two processes on one device add over shared memory, called and captured")


def be_a_rank(rank: int, folder: Path, small: bool) -> None:
    """One of two processes that add over the memory of one device."""
    store = dist.FileStore(str(folder / "store"), 2)
    store.set_timeout(timedelta(seconds=LIMIT_S))
    where = "cpu" if small else "cuda"
    if small:
        memory = [
            torch.from_file(
                str(folder / f"memory{r}"), shared=True, size=SMALL.all_bytes, dtype=torch.uint8
            )
            for r in range(2)
        ]
        addresses = [part.data_ptr() for part in memory]
        peers: PeerAllReduce | str = PeerAllReduce(rank, addresses, torch.device("cpu"), SMALL)
    else:
        torch.cuda.set_device(0)

        def publish(name: str, mine: bytes) -> list[bytes]:
            store.set(f"{name}.{rank}", mine)
            return [store.get(f"{name}.{each}") for each in range(2)]

        peers = open_peers(publish, rank, is_checked=True, sizes=BOTH)
    if isinstance(peers, str):
        raise SystemExit(f"the processes cannot share memory: {peers}")
    types = (torch.float32, torch.float16) if small else (torch.bfloat16, torch.float32)
    for at, count in enumerate((SMALL_COUNTS if small else COUNTS) * 2):
        parts = addends(count, 2, at, types[at % 2])
        mine = parts[rank].clone().to(where)
        peers.add(mine)
        check(f"rank {rank}, call {at} of {count}", mine, in_order(parts))
    if not small:
        replay_in_step(peers, rank)


def replay_in_step(peers: PeerAllReduce, rank: int) -> None:
    """Graphs of several sums on both ranks, with other numbers at each replay."""
    counts = (4096, 1 << 20, 333)
    inputs = [torch.zeros(count, device="cuda", dtype=torch.bfloat16) for count in counts]

    def work() -> list[Tensor]:
        sums = [x.clone() for x in inputs]
        for x in sums:
            peers.add(x)
        return sums

    replay, sums = captured(work)
    began, turns = time.perf_counter(), 10
    for turn in range(turns):
        wanted = []
        for at, x in enumerate(inputs):
            parts = addends(counts[at], 2, 100 + 10 * turn + at, torch.bfloat16)
            wanted.append(in_order(parts))
            x.copy_(parts[rank])
        replay()
        for found, right in zip(sums, wanted, strict=True):
            check(f"rank {rank}, replay {turn}", found, right)
    if rank == 0:
        each = (time.perf_counter() - began) / turns / len(counts)
        say(f"figure: all-reduce of two processes that take turns on a GPU = {each * 1e3:.2f} ms")


def ranks_as_streams() -> None:
    for size in (2, 4, 8):
        ranks = StreamRanks(size, BOTH)
        for count in COUNTS:
            for dtype in (torch.bfloat16, torch.float32)[: 1 + (size != 4)]:
                ranks.check(count, dtype)
        say(f"{size} ranks as streams of one GPU: all sums are right")
    for size in (2, 8):
        for name, count in TIMED.items():
            figures = dict(timed_candidates(size, count))
            (programs, block, warps), best = min(figures.items(), key=lambda pair: pair[1])
            chosen = figures[Sizes().programs, Sizes().block, Sizes().warps]
            text = f"all-reduce of {name}, {size} streams of one GPU"
            say(f"figure: {text} = {chosen:.1f} us")
            say(f"{text}: {programs} programs, block {block}, {warps} warps take {best:.1f} us")
            for is_whole in (True, False):
                took = time_of(size, count, with_kind(Sizes(), is_whole))
                say(f"figure: {text}, {'whole' if is_whole else 'in parts'} = {took:.1f} us")
    parts = torch.randn(8, 1 << 22, device="cuda").bfloat16()
    some = parts[:, :999].contiguous()
    check("parts in order", add_in_order(some), in_order(list(some)))
    for name, add in (("one kernel", add_in_order), ("torch", lambda x: in_order(list(x)))):
        took = time_once(lambda add=add: add(parts))
        say(f"figure: adding 8 parts of 8 MiB by {name} = {took:.1f} us")


def with_kind(sizes: Sizes, is_whole: bool) -> Sizes:
    return replace(sizes, at_once=((8, sizes.slot_bytes if is_whole else 0),))


def timed_candidates(size: int, count: int) -> Iterator[tuple[tuple[int, int, int], float]]:
    for programs, block, warps in CANDIDATES:
        sizes = replace(Sizes(), programs=programs, block=block, warps=warps)
        yield (programs, block, warps), time_of(size, count, sizes)


def time_of(size: int, count: int, sizes: Sizes) -> float:
    return StreamRanks(size, sizes).time(torch.zeros(count, dtype=torch.bfloat16))


class StreamRanks:
    """Ranks that are streams of one device: each has memory, and all see all of it."""

    def __init__(self, size: int, sizes: Sizes) -> None:
        self.memory = [
            torch.zeros(sizes.all_bytes, dtype=torch.uint8, device="cuda") for _ in range(size)
        ]
        addresses = [part.data_ptr() for part in self.memory]
        device = torch.device("cuda", 0)
        self.ranks = [PeerAllReduce(rank, addresses, device, sizes) for rank in range(size)]
        self.streams = [torch.cuda.Stream() for _ in range(size)]
        torch.cuda.synchronize()

    def check(self, count: int, dtype: torch.dtype) -> None:
        parts = addends(count, len(self.ranks), count, dtype)
        xs = [part.cuda() for part in parts]
        torch.cuda.synchronize()
        self._on_all(lambda rank: self.ranks[rank].add(xs[rank]))
        for x in xs:
            check(f"{count} of {dtype}, {len(xs)} streams", x, in_order(parts))

    def time(self, like: Tensor) -> float:
        """Microseconds of one sum, in a graph of many on each stream."""
        xs = [like.cuda() for _ in self.ranks]
        torch.cuda.synchronize()
        self._on_all(lambda rank: self.ranks[rank].add(xs[rank]))
        graphs = [torch.cuda.CUDAGraph() for _ in self.ranks]
        for rank, graph in enumerate(graphs):
            with torch.cuda.graph(graph, stream=self.streams[rank]):
                for _ in range(CALLS):
                    self.ranks[rank].add(xs[rank])
        self._on_all(lambda rank: graphs[rank].replay())
        took = []
        for _ in range(3):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

            def replay(rank: int, began: torch.cuda.Event = began) -> None:
                if rank == len(graphs) - 1:
                    began.record()
                graphs[rank].replay()

            self._on_all(replay, ended)
            took.append(began.elapsed_time(ended) * 1e3 / CALLS)
        return sorted(took)[1]

    def _on_all(self, work: Callable[[int], None], ended: torch.cuda.Event | None = None) -> None:
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                work(rank)
                if ended is not None and rank == len(self.streams) - 1:
                    ended.record()
        last = time.monotonic() + MEET_S
        while not all(stream.query() for stream in self.streams):
            if time.monotonic() > last:
                say(f"{len(self.streams)} ranks as streams do not meet within {MEET_S} s")
                os._exit(1)  # their kernels wait for ever, and so would an ordinary exit


def time_once(work: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return do_bench(work) * 1e3


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without a wait for NCCL's threads
