"""A group of one, and places where several cannot meet."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from banyan.base.clock import WallClock
from banyan.base.errors import ConfigError, DeviceError
from banyan.engine.core_process import OtherRanks
from banyan.engine.model_loader import Phases, open_model
from banyan.parallel import nccl
from banyan.parallel.collectives import COLLECTIVES, Rendezvous, open_collectives
from banyan.parallel.groups import Group, GroupsConfig, open_groups
from tests.parallel.ranks import LIBRARIES, meet, needs_compiler
from tests.support.configs import MODEL_CONFIG
from tests.support.flags import config_of


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_rank_whose_others_do_not_come_ends_in_an_error(library, tmp_path):
    with pytest.raises((RuntimeError, DeviceError), match="(?i)time|rank 1 did not come within"):
        meet(library, 0, 2, f"file://{tmp_path}/meet", timeout_s=0.2)
    assert not (tmp_path / "meet.segment").exists()


@needs_compiler
def test_a_rank_that_rank_0_does_not_meet_ends_in_an_error(tmp_path):
    with pytest.raises(DeviceError, match=r"rank 0 did not come to .* within 0\.2 s"):
        meet("shared", 1, 2, f"file://{tmp_path}/meet", timeout_s=0.2)


@needs_compiler
def test_a_segment_for_others_is_refused(tmp_path):
    (tmp_path / "meet.segment").write_bytes(b"bytes of somebody else")
    with pytest.raises(DeviceError, match="has 22 bytes, .* were expected"):
        meet("shared", 1, 2, f"file://{tmp_path}/meet")


def test_the_choice_of_a_library_says_why_the_others_declined(tmp_path):
    """Between machines, and beside plain torch, ranks do not share memory."""
    for address, reason in (
        (f"file://{tmp_path}/meet", "it needs the compiled kernels"),
        ("tcp://127.0.0.1:9", "ranks may be on several machines"),
    ):
        rendezvous = Rendezvous(0, 2, address, 1.0)
        assert COLLECTIVES.load("shared").declines(rendezvous) == reason
        with pytest.raises(ConfigError, match=f"no collectives for 2 ranks: shared: {reason}"):
            open_collectives(rendezvous, ("shared",))


def test_ranks_meet_at_the_port_that_is_named(monkeypatch):
    def started(ranks, process_spec, meeting, spares):
        raise TimeoutError(meeting)

    monkeypatch.setattr("banyan.engine.core_process.LocalRanks", started)
    with pytest.raises(TimeoutError, match=r"^$"):
        OtherRanks(config_of("--tp", "2"), MODEL_CONFIG, "")
    config = config_of("--tp", "2", "--nccl-port", "5000")
    second = replace(config, parallel=replace(config.parallel, replica=1))
    for each, meeting in ((config, "tcp://127.0.0.1:5000"), (second, "tcp://127.0.0.1:5001")):
        with pytest.raises(TimeoutError, match=f"^{meeting}$"):
            OtherRanks(each, MODEL_CONFIG, "")


def test_our_own_collectives_can_be_left_out(monkeypatch):
    def opened(config):
        raise TimeoutError(" ".join(config.libraries))

    monkeypatch.setattr("banyan.engine.model_loader.open_groups", opened)
    for flags, text in ((), "shared gloo"), (("--disable-custom-all-reduce",), "gloo"):
        with pytest.raises(TimeoutError, match=f"^{text}$"):
            open_model(config_of("--tp", "2", *flags), MODEL_CONFIG, 0, "", Phases(WallClock()))


def test_the_memory_of_peers_is_checked_where_it_is_asked(monkeypatch):
    def opened(config):
        raise TimeoutError(str(config.checks_peers))

    monkeypatch.setattr("banyan.engine.model_loader.open_groups", opened)
    for flags, text in ((), "False"), (("--enable-p2p-check",), "True"):
        with pytest.raises(TimeoutError, match=text):
            open_model(config_of("--tp", "2", *flags), MODEL_CONFIG, 0, "", Phases(WallClock()))
    asked = list[bool]()
    store = SimpleNamespace(set=lambda key, value: None, get=lambda key: b"")

    def no_peers(publish, rank, is_checked):
        asked.append(is_checked)
        assert publish("name", b"") == [b"", b""]
        return "there are none"

    monkeypatch.setattr(nccl, "open_store", lambda rendezvous: store)
    monkeypatch.setattr(nccl, "open_process_group", lambda rendezvous, store: None)
    monkeypatch.setattr(nccl, "open_peers", no_peers)
    for checks in (False, True):
        nccl.PEER_MEMORY.open(Rendezvous(0, 2, "file:///meet", 1.0, checks_peers=checks))
    assert asked == [False, True]


def test_gpus_of_several_kinds_are_refused(monkeypatch):
    monkeypatch.setattr(nccl, "own_kind", lambda: "B")
    nccl.check_kinds(lambda name, mine: [mine, b"B"])
    with pytest.raises(ConfigError, match=r"GPUs of several kinds: A, B\. Choose"):
        nccl.check_kinds(lambda name, mine: [mine, b"A", b"B"])


@pytest.mark.parametrize(
    ("address", "interface"),
    [("file:///meet", "lo"), ("tcp://127.0.0.1:5", "lo"), ("tcp://192.0.2.1:5", None)],
)
def test_nccl_listens_on_loopback_alone_where_all_ranks_are_on_one_machine(
    address, interface, monkeypatch
):
    def opened(config):
        raise TimeoutError

    monkeypatch.setattr("banyan.engine.model_loader.open_groups", opened)
    for given in (None, "eth7"):
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", given or "")
        if given is None:
            del os.environ["NCCL_SOCKET_IFNAME"]
        with pytest.raises(TimeoutError):
            open_model(config_of("--tp", "2"), MODEL_CONFIG, 0, address, Phases(WallClock()))
        assert os.environ.get("NCCL_SOCKET_IFNAME") == (given or interface)


def test_a_rank_waits_for_the_others_as_long_as_the_limit(monkeypatch):
    """The groups are opened with the timeout of the flag."""

    def wait(config):
        raise TimeoutError(f"waited {config.timeout_s:g} s")

    monkeypatch.setattr("banyan.engine.model_loader.open_groups", wait)
    for flags, text in ((), "waited 300 s"), (("--dist-timeout", "7"), "waited 7 s"):
        with pytest.raises(TimeoutError, match=text):
            open_model(config_of("--tp", "2", *flags), MODEL_CONFIG, 0, "", Phases(WallClock()))


def test_a_group_of_one_returns_what_it_was_given():
    group, x = Group(), torch.ones(2, 3)

    assert group.all_reduce(x) is x
    assert group.all_gather(x, 3) is x
    assert group.reduce_scatter(x) is x
    assert group.all_to_all(x) is x
    assert group.broadcast(x) is x


@pytest.mark.parametrize("address", ["", "meet", "tcp://", "tcp://host", "udp://host:1", "file:"])
def test_a_place_where_ranks_cannot_meet_is_refused(address):
    with pytest.raises(ConfigError, match="tcp://host:port"):
        open_groups(GroupsConfig(0, 2, address))
