"""Groups of one and of several processes."""

from multiprocessing import get_context

import pytest
import torch

from banyan.base.errors import ConfigError
from banyan.parallel.groups import Group, open_groups


def _meet(rank, address, results):
    group = open_groups(rank, 2, address, timeout_s=60).world
    x = torch.tensor([[1.0, 2.0]]) * (rank + 1)
    results.put(
        (
            rank,
            group.all_reduce(x.clone()).tolist(),
            group.all_gather(x).tolist(),
            group.broadcast(x.clone(), source=1).tolist(),
        )
    )


def test_two_processes_reduce_gather_and_broadcast(tmp_path):
    context = get_context("spawn")
    results = context.Queue()
    address = f"file://{tmp_path}/meet"
    ranks = [context.Process(target=_meet, args=(r, address, results)) for r in range(2)]
    for rank in ranks:
        rank.start()

    answers = sorted(results.get(timeout=60) for _ in ranks)

    for rank in ranks:
        rank.join(60)
    expected = ([[3.0, 6.0]], [[1.0, 2.0, 2.0, 4.0]], [[2.0, 4.0]])
    assert answers == [(0, *expected), (1, *expected)]


def test_a_group_of_one_returns_what_it_was_given():
    group, x = Group(), torch.ones(2, 3)

    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    assert group.broadcast(x) is x


@pytest.mark.parametrize("address", ["", "meet", "tcp://", "tcp://host", "udp://host:1", "file:"])
def test_a_place_where_ranks_cannot_meet_is_refused(address):
    with pytest.raises(ConfigError, match="tcp://host:port"):
        open_groups(0, 2, address)
