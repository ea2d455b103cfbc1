"""Each collective of each library against its plain definition, in processes of their own."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from banyan.base.errors import ConfigError
from banyan.config.cli import parse
from banyan.config.env import read_environment
from banyan.dp_attention.batch import DPAttentionRows
from banyan.parallel import process_group
from banyan.parallel.collectives import Rendezvous
from banyan.parallel.groups import Group
from tests.parallel.ranks import ALL_LIBRARIES, meet, needs_compiler, together

SLOT = 1024
"""Bytes: smaller than most of what is exchanged here."""
SHAPES = ((1, 1), (3, 7), (5, 64), (2, 300), (33, 129), (1, 2000), (9, 2113))
COUNTS = (1, 2, 3, 17, 64)


def matrix(rank: int, rows: int, columns: int) -> torch.Tensor:
    """Numbers of a rank that are its own, of sizes whose sum depends on the order."""
    draw = torch.Generator().manual_seed(1000 * rows + columns + 7 * rank)
    sizes = 10.0 ** torch.randint(-3, 4, (rows, columns), generator=draw)
    return torch.randn(rows, columns, generator=draw) * sizes


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def exercise(rank: int, size: int, address: str, threads: int) -> tuple[list[str], dict]:
    """Call everything in all shapes: what is wrong, and the sums of one row in many batches."""
    wrong: list[str] = []
    sums: dict[str, list[list[float]]] = {}
    for name in ALL_LIBRARIES:
        group = meet(name, rank, size, f"{address}-{name}", slot_bytes=SLOT, threads=threads)
        for rows, columns in SHAPES:
            for what in (reduce, reduce_halves, gather, scatter, exchange, tell, pass_on):
                found, wanted = what(group, rows, columns)
                if found.shape != wanted.shape or not torch.equal(found, wanted):
                    wrong.append(f"{name}: {what.__name__} of {rows}x{columns} on rank {rank}")
        wrong += [f"{name}: joint rows, {text}" for text in join_rows(group)]
        wrong += [f"{name}: rows of experts, {text}" for text in send_to_experts(group)]
        sums[name] = add_in_batches(group)
    return wrong, sums


def reduce(group: Group, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [matrix(r, rows, columns) for r in range(group.size)]
    return group.all_reduce(parts[group.rank].clone()), in_order(parts)


def reduce_halves(group: Group, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of fewer bits: added in fp32 and rounded once."""
    parts = [matrix(r, rows, columns).bfloat16() for r in range(group.size)]
    wanted = in_order([part.float() for part in parts]).bfloat16()
    assert torch.equal(
        group.reduce_scatter(torch.cat(parts[:1] * group.size, 1)),
        in_order([parts[0].float()] * group.size).bfloat16(),
    )
    return group.all_reduce(parts[group.rank].clone()), wanted


def gather(group: Group, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = matrix(99, rows, group.size * columns - (columns > 1))
    share = -(-whole.shape[1] // group.size)
    mine = whole[:, group.rank * share : (group.rank + 1) * share]  # rows that lie apart
    return group.all_gather(mine, whole.shape[1]), whole


def scatter(group: Group, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [matrix(r, rows, group.size * columns) for r in range(group.size)]
    mine = slice(group.rank * columns, (group.rank + 1) * columns)
    return group.reduce_scatter(parts[group.rank]), in_order([part[:, mine] for part in parts])


def exchange(group: Group, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [matrix(r, rows, group.size * columns) for r in range(group.size)]
    mine = slice(group.rank * columns, (group.rank + 1) * columns)
    return group.all_to_all(parts[group.rank]), torch.cat([part[:, mine] for part in parts], 1)


def tell(group: Group, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(rows * columns).view(rows, columns)
    found = [group.broadcast(x * (group.rank + 1), source) for source in range(group.size)]
    return torch.stack(found), torch.stack([x * (source + 1) for source in range(group.size)])


def pass_on(group: Group, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Around the ring, twice."""
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x, found = matrix(group.rank, rows, columns), torch.zeros(2, rows, columns)
    for i in range(2):
        if group.rank % 2:
            group.recv(found[i], before)
            group.send(x, after)
        else:
            group.send(x, after)
            group.recv(found[i], before)
    return found, matrix(before, rows, columns).expand(2, -1, -1)


def send_to_experts(group: Group) -> list[str]:
    """Rows to the ranks of their experts and back: summed, and each pair by itself."""
    ranks = 2 if group.size == 4 else 1
    replicas, mine = group.size // ranks, group.rank // ranks
    joint, of_rank, wrong = DPAttentionRows(mine, replicas, ranks), 3, []
    same, group = group, group.of_rows(joint)
    for counts in ([5, 0, 2], [0, 33, 0], [1, 1, 1], [40, 3, 17]):
        joint.enter(counts[:replicas])
        total, first = sum(counts[:replicas]), sum(counts[:mine])
        own = slice(first, first + counts[mine])
        draw = torch.Generator().manual_seed(total)
        places = torch.rand(total, of_rank * group.size, generator=draw).argsort(1)[:, :2]
        places = places.contiguous()
        is_on = [(places // of_rank == r) for r in range(group.size)]
        whole = matrix(99, total, 29)
        found = group.dispatch_rows(whole[own], places, of_rank)
        needed = is_on[group.rank].any(1)
        if not torch.equal(found[needed], whole[needed]):
            wrong.append(f"to them, {counts}")
        sums = [matrix(r, total, 29) for r in range(group.size)]
        added = in_order([x * on.any(1, keepdim=True) for x, on in zip(sums, is_on, strict=True)])
        pairs = [matrix(r, total, 58) for r in range(group.size)]
        chosen = in_order(
            [x * on.repeat_interleave(29, 1) for x, on in zip(pairs, is_on, strict=True)]
        )
        for who, rows, text in ((group, own, "joint"), (same, slice(None), "same")):
            if not torch.equal(who.combine_rows(sums[who.rank], places, of_rank), added[rows]):
                wrong.append(f"sums, {text} {counts}")
            back = who.combine_rows(pairs[who.rank], places, of_rank, is_apart=True)
            if not torch.equal(back, chosen[rows]):
                wrong.append(f"pairs, {text} {counts}")
    return wrong


def join_rows(group: Group) -> list[str]:
    """Rows of several replicas: gathered, added up and shared out again, column by column too."""
    ranks = 2 if group.size == 4 else 1
    replicas, mine = group.size // ranks, group.rank // ranks
    joint = DPAttentionRows(mine, replicas, ranks)
    group, wrong = group.of_rows(joint), []
    for counts in ([5, 0, 2], [0, 33, 0], [1, 1, 1], [40, 3, 17]):
        joint.enter(counts[:replicas])
        total, first = sum(counts[:replicas]), sum(counts[:mine])
        own = slice(first, first + counts[mine])
        parts = [matrix(r, total, 37) for r in range(group.size)]
        whole = matrix(99, total, 29)
        share = -(-29 // group.size)
        columns = whole[:, group.rank * share : (group.rank + 1) * share]
        found = {
            "gathered": (group.gather_rows(whole[own].contiguous()), whole),
            "added": (group.reduce_rows(parts[group.rank].clone()), in_order(parts)[own]),
            "columns": (group.gather_columns(columns, 29), whole[own]),
        }
        wrong += [f"{k} of {counts}" for k, (a, b) in found.items() if not torch.equal(a, b)]
    return wrong


def add_in_batches(group: Group) -> list[list[float]]:
    """Sums of the first row of one matrix, in batches of every size."""
    whole = matrix(group.rank, max(COUNTS), 576)
    return [group.all_reduce(whole[:rows].clone())[0].tolist() for rows in COUNTS]


@pytest.mark.parametrize(("size", "threads"), [(2, 2), (3, 1), (4, 1)])
def test_every_collective_does_what_its_definition_says(size, threads, tmp_path):
    answers = together(size, tmp_path, exercise, threads)
    assert [wrong for wrong, _ in answers] == [[]] * size
    # One row's sum has the same bits on every rank, in every batch, by either library.
    rows = [row for _, sums in answers for by in sums.values() for row in by]
    assert len(rows) == size * len(ALL_LIBRARIES) * len(COUNTS)
    assert all(row == rows[0] for row in rows)


def fail_in_the_middle(rank: int, size: int, address: str, victim: int, how: str) -> None:
    group = meet("shared", rank, size, address, timeout_s=1.0 if how == "hangs" else 60.0)
    folder = Path(address.removeprefix("file://")).parent
    others = [folder / f"over{r}" for r in range(size) if r != victim]
    x = torch.ones(4, 4)
    group.all_reduce(x)
    if rank == victim:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        while how == "hangs" and not all(other.exists() for other in others):
            time.sleep(0.01)
    try:
        if rank == victim:  # something else than the others do
            group.broadcast(x, 0)
        group.all_reduce(x)
    finally:
        (folder / f"over{rank}").touch()


@needs_compiler
@pytest.mark.parametrize(
    ("how", "victim", "all_say", "one_says"),
    [
        ("dies", 0, "rank 0", "rank 0 has ended"),
        ("hangs", 1, "rank 1", "rank 1 did not come within 1 s"),
        ("strays", 1, "not in step", "in broadcast of 64 bytes"),
    ],
)
def test_a_rank_that_does_not_come_is_named_by_all_others(how, victim, all_say, one_says, tmp_path):
    shared = set(os.listdir("/dev/shm"))
    answers = together(3, tmp_path, fail_in_the_middle, victim, how)
    reported = [answer for answer in answers if answer is not None]
    assert len(reported) == (2 if how == "dies" else 3)
    assert all("DeviceError" in answer and all_say in answer for answer in reported), reported
    assert any(one_says in answer for answer in reported), reported
    assert sorted(os.listdir(tmp_path)) == [f"over{r}" for r in range(3) if answers[r] is not None]
    assert set(os.listdir("/dev/shm")) <= shared


def files_and_ports(rank: int, size: int, address: str, name: str) -> tuple[list[str], list[str]]:
    group = meet(name, rank, size, address)
    group.all_reduce(torch.ones(2, 2))
    mine = psutil.Process()
    ports = [c.laddr.ip for c in mine.net_connections() if c.status == psutil.CONN_LISTEN]
    folder = Path(address.removeprefix("file://")).parent
    left = [p.name for p in folder.iterdir()]
    group.broadcast(torch.ones(2, 2), 0)  # nobody leaves before all have looked
    return ports, left


@needs_compiler
def test_shared_memory_leaves_no_file_and_no_port(tmp_path):
    before = set(os.listdir("/dev/shm"))
    assert together(2, tmp_path, files_and_ports, "shared") == [([], [])] * 2
    assert set(os.listdir("/dev/shm")) <= before
    assert os.listdir(tmp_path) == []


def test_gloo_listens_on_loopback_alone_where_the_ranks_meet_at_a_file(tmp_path):
    for ports, _ in together(2, tmp_path, files_and_ports, "gloo"):
        assert ports and set(ports) == {"127.0.0.1"}


def test_gloo_listens_on_the_interface_that_is_named(monkeypatch):
    """And not where it reaches the other ranks."""
    config = parse(["M"], read_environment({"GLOO_SOCKET_IFNAME": "lo"}))
    opened = list[str]()

    def stop(hostname):
        opened.append(hostname)
        raise RuntimeError

    monkeypatch.setattr(process_group.dist.ProcessGroupGloo, "create_device", stop)
    away = Rendezvous(0, 2, "tcp://192.0.2.1:5", 1.0, interface=config.parallel.interface)
    with pytest.raises(RuntimeError):
        process_group.GLOO.open(away)
    assert opened == ["127.0.0.1"]
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME=no-such: .* no such interface"):
        process_group.own_address("192.0.2.1", "no-such")
