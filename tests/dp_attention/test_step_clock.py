"""The step clock between replicas, each with its end of real sockets; and a core that it holds."""

import os
import select
import socket
import threading

import pytest

from banyan.base.errors import DeviceError
from banyan.dp_attention.step_clock import LocalPeer, StepClock, open_step_clock
from banyan.engine.core import EngineCore
from banyan.engine.journal import Journal
from banyan.messages.plan import SAMPLE, StepLoad, StepResult
from banyan.messages.requests import Abort
from banyan.messages.transport import PrivateFolder
from banyan.sim.replay import check
from tests.engine.test_loop import generate
from tests.scheduler.driver import asked

WAIT_S = 60.0


class HandClock:
    """Shows what it is set to."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now(self) -> float:
        return self.at_s


def three(timeout_s: float = 5.0) -> tuple[list[StepClock], HandClock]:
    """Three replicas that have met."""
    peers: list[dict[int, LocalPeer]] = [{}, {}, {}]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peers[a][b], peers[b][a] = map(LocalPeer, pair)
    hand = HandClock()
    return [StepClock(i, mine, timeout_s, hand) for i, mine in enumerate(peers)], hand


def hear(clocks: list[StepClock]) -> None:
    for clock in clocks:
        clock.receive()


def test_nobody_steps_while_nobody_has_work():
    clocks, _ = three()
    assert [clock.agree(StepLoad(0)) for clock in clocks] == [[], [], []]
    assert not select.select([clock.poll_fd for clock in clocks], [], [], 0)[0]


def test_all_launch_the_same_step_once_everybody_has_spoken():
    clocks, _ = three()
    mine = [StepLoad(0), StepLoad(5, 1), StepLoad(2, 2, 7)]
    assert clocks[1].agree(mine[1]) is None
    assert select.select([clocks[0].poll_fd], [], [], WAIT_S)[0], "it wakes the others"
    hear(clocks)
    assert clocks[0].agree(mine[0]) is None, "one that has nothing answers when it is asked"
    hear(clocks)
    assert clocks[1].agree(mine[1]) is None
    assert clocks[2].agree(mine[2]) == mine
    hear(clocks)
    assert [clock.agree(load) for clock, load in zip(clocks[:2], mine, strict=False)] == [mine] * 2
    assert clocks[0].agree(StepLoad(0)) == [], "that step is over"


def test_one_that_is_a_step_ahead_is_heard_in_order():
    clocks, _ = three()
    for clock in clocks:
        clock.agree(StepLoad(1))
    clocks[0].receive()
    assert clocks[0].agree(StepLoad(1)) == [StepLoad(1)] * 3
    assert clocks[0].agree(StepLoad(9)) is None
    hear(clocks[1:])
    for number in (1, 2):
        assert clocks[number].agree(StepLoad(1)) == [StepLoad(1)] * 3
        assert clocks[number].agree(StepLoad(0)) is None
    hear(clocks)
    assert clocks[1].agree(StepLoad(0)) == [StepLoad(9), StepLoad(0), StepLoad(0)]


def test_who_does_not_answer_in_time_is_named():
    clocks, hand = three(timeout_s=5.0)
    clocks[0].agree(StepLoad(1))
    clocks[1].receive()
    clocks[1].agree(StepLoad(0))
    hear(clocks)
    hand.at_s = 4.9
    clocks[0].check()
    hand.at_s = 5.0
    with pytest.raises(DeviceError, match=r"replica 2 did not answer .* of replica 0 within 5 s"):
        clocks[0].check()
    clocks[2].check()  # it has asked nothing


def test_a_replica_that_dies_is_named_and_one_that_fails_says_why():
    clocks, _ = three()
    for peer in list(clocks[2]._peers.values()):
        peer.close()
    with pytest.raises(DeviceError, match="replica 2 has ended: its process is gone"):
        clocks[0].receive()
    clocks[0].close("DeviceError: replica 2 has ended")
    with pytest.raises(DeviceError, match=r"replica [02] has ended"):
        clocks[1].receive()


def test_a_replica_that_is_asked_to_end_ends_nobody_who_has_nothing_to_do():
    clocks, _ = three()
    clocks[2].close()
    hear(clocks[:2])
    assert clocks[0].agree(StepLoad(0)) == []
    with pytest.raises(DeviceError, match="replica 2 was stopped, and there is work for all"):
        clocks[0].agree(StepLoad(1))


def test_replicas_meet_in_any_order_and_leave_no_socket_behind():
    folder = PrivateFolder()
    try:
        met: dict[int, StepClock] = {}

        def come(number: int) -> None:
            met[number] = open_step_clock(f"file://{folder.path}/joined", number, 3, WAIT_S)

        threads = [threading.Thread(target=come, args=(number,)) for number in (2, 0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert met[2].agree(StepLoad(3)) is None
        for number in (0, 1):
            assert select.select([met[number].poll_fd], [], [], WAIT_S)[0]
        assert os.listdir(folder.path) == []
    finally:
        folder.close()


def test_a_replica_that_does_not_come_is_named():
    folder = PrivateFolder()
    try:
        with pytest.raises(DeviceError, match=r"replica 1 did not come within 0\.1 s"):
            open_step_clock(f"file://{folder.path}/joined", 0, 2, 0.1)
        with pytest.raises(DeviceError, match=r"replica 0 did not come within 0\.1 s"):
            open_step_clock(f"file://{folder.path}/other", 1, 2, 0.1)
    finally:
        folder.close()


class Others:
    """Another replica whose answers are given beforehand; then it has nothing to say."""

    def __init__(self, *answers: list[StepLoad] | None) -> None:
        self.answers = list(answers)
        self.reported: list[StepLoad] = []

    def agree(self, load: StepLoad) -> list[StepLoad] | None:
        self.reported.append(load)
        if self.answers:
            return self.answers.pop(0)
        return [load, StepLoad(0)] if load.tokens else []


def held_core(others: Others, path: str) -> tuple[EngineCore, Journal]:
    spec = asked()
    journal = Journal(path, spec, 1 << 20)
    return spec.build(step_agreement=others, recorder=journal), journal


def finish(core: EngineCore) -> None:
    """Let everything run to its end."""
    five = (5).to_bytes(4, "little")
    for now in range(100):
        plan = core.launch(float(now))
        if plan is None and not core.in_flight:
            return
        if plan is not None:
            tokens = [five if row.want & SAMPLE else b"" for row in plan.rows]
            core.complete(StepResult(step=plan.step, tokens=tokens), now + 0.5)


def test_what_is_drafted_is_held_until_all_agree_and_a_replay_makes_the_same_plans(tmp_path):
    others = Others([], None, None, [StepLoad(3, 1), StepLoad(9)])
    core, journal = held_core(others, str(tmp_path / "journal"))
    assert core.launch(0.0) is None and others.reported == [StepLoad(0)]
    core.receive(generate("a"), 0.1)
    core.receive(generate("b"), 0.1)
    assert core.launch(0.2) is None
    core.receive(generate("c"), 0.3)  # too late for what is held
    assert core.launch(0.3) is None
    assert not core.is_idle and core.stats(1.2).step_age_s == pytest.approx(1.0)
    plan = core.launch(0.4)
    assert (
        plan is not None
        and len(plan.rows) == 2
        and plan.replica_loads == [StepLoad(3, 1), StepLoad(9)]
    )
    assert others.reported[1:] == [StepLoad(6, 2)] * 3
    core.complete(StepResult(step=plan.step, tokens=[(5).to_bytes(4, "little")] * 2), 0.5)
    finish(core)
    assert core.is_idle
    journal.close()
    report = check(str(tmp_path / "journal"))
    assert report.ok and report.plans > 3


def test_a_request_that_ends_while_its_row_is_held_keeps_its_pages_until_the_step_is_over(tmp_path):
    core, journal = held_core(
        Others(None, [StepLoad(3, 1), StepLoad(0)]), str(tmp_path / "journal")
    )
    core.receive(generate("a"), 0.0)
    assert core.launch(0.0) is None
    core.receive(Abort("a"), 0.1)
    held = core.stats(0.1)
    assert held.free_pages < held.total_pages
    plan = core.launch(0.2)
    assert plan is not None and len(plan.rows) == 1
    core.complete(StepResult(step=plan.step, tokens=[(5).to_bytes(4, "little")]), 0.3)
    finish(core)
    after = core.stats(0.4)
    assert core.is_idle and after.free_pages + after.cached_pages == after.total_pages
    journal.close()
    assert check(str(tmp_path / "journal")).ok


def test_a_paused_replica_goes_along_with_the_others_and_a_replay_knows(tmp_path):
    others = Others([], [StepLoad(0), StepLoad(4, 1)])
    core, journal = held_core(others, str(tmp_path / "journal"))
    core.is_paused = True
    core.receive(generate("a"), 0.0)
    assert core.launch(0.0) is None
    plan = core.launch(0.1)
    assert plan is not None and not plan.rows and others.reported == [StepLoad(0)] * 2
    core.complete(StepResult(step=plan.step), 0.2)
    core.is_paused = False
    finish(core)
    assert core.is_idle
    journal.close()
    report = check(str(tmp_path / "journal"))
    assert report.ok and report.plans >= 4
