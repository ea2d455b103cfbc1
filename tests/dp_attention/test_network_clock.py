"""The step clock of replicas on several machines, over real sockets."""

import select
import threading
from queue import SimpleQueue

import pytest

from banyan.base.errors import DeviceError
from banyan.dp_attention.network_clock import open_network_clock
from banyan.dp_attention.step_clock import StepClock
from banyan.messages.plan import StepLoad

WAIT_S = 60.0


class Board:
    """What ranks of several machines find each other by."""

    def __init__(self) -> None:
        self._texts: dict[str, SimpleQueue[str]] = {}
        self._turn = threading.Lock()

    def publish(self, name: str, text: str) -> None:
        self._of(name).put(text)

    def lookup(self, name: str) -> str:
        return self._of(name).get(timeout=WAIT_S)

    def _of(self, name: str) -> SimpleQueue[str]:
        with self._turn:
            return self._texts.setdefault(name, SimpleQueue())


def met(*secrets: str, limit_s: float = WAIT_S) -> list[StepClock]:
    """One replica for each secret, where it has met the others."""
    board, clocks, why = Board(), dict[int, StepClock](), list[str]()

    def come(number: int) -> None:
        where = ("127.0.0.1", number, len(secrets), secrets[number], limit_s)
        try:
            clocks[number] = open_network_clock(*where, board.publish, board.lookup)
        except DeviceError as error:
            why.append(str(error))

    threads = [threading.Thread(target=come, args=(n,)) for n in range(len(secrets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not why, why
    return [clocks[number] for number in range(len(secrets))]


def agreed(clock: StepClock, load: StepLoad) -> list[StepLoad]:
    """As the loop asks: it sleeps until the descriptor says that there is a word."""
    while (found := clock.agree(load)) is None:
        assert select.select([clock.poll_fd], [], [], WAIT_S)[0], "nobody woke it"
        clock.receive()
    return found


def test_all_agree_on_each_of_many_steps_and_every_word_wakes_its_hearer():
    clocks = met("s", "s", "s")
    found: dict[int, list[list[StepLoad]]] = {}

    def run(number: int) -> None:
        found[number] = [agreed(clocks[number], StepLoad(step + number + 1)) for step in range(300)]

    threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert found[0] == found[1] == found[2]
    assert found[0] == [[StepLoad(step + n + 1) for n in range(3)] for step in range(300)]
    for clock in clocks:
        clock.close()


def test_who_has_not_the_secret_has_not_come():
    with pytest.raises(AssertionError, match="replica 1 did not come within 0.5 s"):
        met("s", "another", limit_s=0.5)
