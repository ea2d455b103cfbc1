"""Groups of one and of several processes."""

from multiprocessing import get_context

import pytest
import torch

from banyan.base.clock import WallClock
from banyan.base.errors import ConfigError
from banyan.parallel.groups import Group, open_groups
from banyan.replica import Phases, open_model
from tests.config.test_resolve import CARD
from tests.flags import config_of


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


def test_a_rank_whose_others_do_not_come_ends_in_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="(?i)time"):
        open_groups(0, 2, f"file://{tmp_path}/meet", timeout_s=0.2)


def test_a_rank_waits_for_the_others_as_long_as_told(monkeypatch):
    """The model is opened with the seconds of the flag; meeting is all that it is left to do."""

    def meet(rank, size, address, library, timeout_s):
        raise TimeoutError(f"waited {timeout_s:g} s")

    monkeypatch.setattr("banyan.replica.open_groups", meet)
    for flags, text in ((), "waited 300 s"), (("--dist-timeout", "7"), "waited 7 s"):
        with pytest.raises(TimeoutError, match=text):
            open_model(config_of("--tp", "2", *flags), CARD, 0, "", Phases(WallClock()))


def test_a_group_of_one_returns_what_it_was_given():
    group, x = Group(), torch.ones(2, 3)

    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    assert group.broadcast(x) is x


@pytest.mark.parametrize("address", ["", "meet", "tcp://", "tcp://host", "udp://host:1", "file:"])
def test_a_place_where_ranks_cannot_meet_is_refused(address):
    with pytest.raises(ConfigError, match="tcp://host:port"):
        open_groups(0, 2, address)
