"""The flight recorder in random worlds: whatever a core is in the middle of, a snapshot brings it
back, and what is left of a ring replays."""

import mmap
from random import Random

import pytest

from banyan.engine import snapshot
from banyan.engine.core import EngineCore
from banyan.engine.core_spec import CoreSpec
from banyan.engine.flight_recorder import FlightRecorder
from banyan.engine.flight_recorder_memory import RecordingMemory
from banyan.sim.replay import check
from tests.border.build import compile_grammar
from tests.border.driver import Play, random_actions
from tests.border.kit import FAKE, FakeKit, PeerKit

ACTIONS = 250
RING = 160 << 10
KITS = {"plain": FAKE, "store": FakeKit({}), "peer": PeerKit()}


class Suspicious(FlightRecorder):
    """Brings a twin of its core back now and then, and looks whether it is one."""

    def __init__(self, memory: mmap.mmap, spec: CoreSpec) -> None:
        super().__init__(memory, spec)
        self.spec, self.random = spec, Random(1)
        self.core: EngineCore | None = None
        self.twins = 0

    def before(self, size: int, now: float) -> None:
        super().before(size, now)
        assert self.core is not None
        if self.random.random() < 0.1:
            taken = snapshot.take(self.core)
            twin = self.spec.build(
                compile_grammar, _Alone() if self.core.uses_dp_attention else None
            )
            snapshot.restore(twin, taken, compile_grammar)
            twin.check()
            assert snapshot.take(twin) == taken
            self.twins += 1


class _Alone:
    def agree(self, load):
        raise AssertionError("a snapshot launches nothing")


@pytest.mark.parametrize("kind", KITS)
@pytest.mark.parametrize("seed", range(1, 9))
def test_a_world_in_a_small_ring_replays_from_its_middle(tmp_path, kind: str, seed: int) -> None:
    memory = RecordingMemory()
    memory.give_size(RING)
    made: list[Suspicious] = []

    def record(core: CoreSpec) -> Suspicious:
        made.append(Suspicious(mmap.mmap(memory.descriptor, 0), core))
        return made[0]

    game = Play(seed, record, KITS[kind])
    made[0].core = game.core
    made[0].follow(game.core, 0.0)
    for action in random_actions(Random(seed), ACTIONS):
        game.act(action)
    game.finish()
    (tmp_path / "recording").write_bytes(memory.read())
    memory.close()
    report = check(str(tmp_path / "recording"), compile_grammar)
    assert report.ok, str(report)
    assert made[0].twins and 0 < report.plans <= game.runner.seen["steps"]
