"""The flight recorder keeps the latest records of a core; replay goes on from where they begin."""

import logging
import mmap
import os
from contextlib import ExitStack
from inspect import isfunction
from random import Random

import msgspec
import pytest

from banyan.base.errors import CapacityError, ModelError
from banyan.engine import snapshot
from banyan.engine.flight_recorder import FlightRecorder, Recorders
from banyan.engine.flight_recorder_memory import RecordingMemory, mapped
from banyan.engine.journal import Began, Received, read_journal
from banyan.kv_cache.radix_tree import Node
from banyan.messages.requests import Abort, Generate, StopAt
from banyan.messages.sampling_params import SamplingParams
from banyan.sim.replay import check
from tests.scheduler.driver import Driver
from tests.support.flags import config_of

SMALL = 128 << 10


def memory(size=SMALL):
    made = RecordingMemory()
    made.give_size(size)
    return made


def live(driver, seed, requests=60, rests=False):
    """A busy life with short pages; `rests`: nothing is left to do from time to time."""
    random = Random(seed)
    shared = [random.randrange(90) for _ in range(20)]
    for i in range(requests):
        driver.now += random.random()
        driver.submit(
            f"r{seed}.{i}", [*shared[: random.randrange(20)], i % 90], new=random.randrange(20)
        )
        if random.random() < 0.2:
            driver.receive(Abort(f"r{seed}.{random.randrange(i + 1)}"))
        if random.random() < 0.2:
            driver.receive(StopAt(f"r{seed}.{random.randrange(i + 1)}", 2))
        driver.launch()
        if driver.flying and random.random() < 0.7:
            driver.complete()
        if rests and i % 10 == 9:
            driver.run()
            driver.core.recorder.rested(driver.now)
    return driver


class Recorded:
    """A driver whose core is recorded, and what the recording says at any time."""

    def __init__(self, path, size=SMALL, **limits):
        self.path = path
        self.memory = memory(size)
        recorders = []

        def recorder(spec):
            recorders.append(FlightRecorder(mmap.mmap(self.memory.descriptor, 0), spec))
            return recorders[0]

        whole = {"pages": 30, "depth": 2, "conservativeness": 0.3} | limits
        self.driver = Driver(recorder=recorder, **whole)
        recorders[0].follow(self.driver.core, 0.0)

    def read(self):
        self.path.write_bytes(self.memory.read())
        return str(self.path)


@pytest.fixture
def recorded(tmp_path):
    made = []

    def make(*size, **limits):
        made.append(Recorded(tmp_path / "recording", *size, **limits))
        return made[-1]

    yield make
    for each in made:
        each.memory.close()


@pytest.mark.parametrize("seed", range(5))
def test_a_core_brought_back_from_a_snapshot_decides_alike(seed):
    driver = live(Driver(pages=30, depth=2, conservativeness=0.3), seed, 30)
    taken = snapshot.take(driver.core)
    twin = driver.spec.build()
    snapshot.restore(twin, taken)
    twin.check()
    assert snapshot.take(twin) == taken
    original, driver.plans = driver.core, []
    flying, slots = list(driver.flying), {n: list(s) for n, s in driver.slots.items()}
    expected = list(driver.run().plans)
    assert original.is_idle and expected
    driver.core, driver.plans, driver.slots = twin, [], slots
    driver.flying.extend(flying)
    driver.ends, driver.outputs = {}, {r.id: [0] * r.output_len for r in _alive(twin)}
    assert driver.run().plans == expected


def _alive(core):
    return core.scheduler.request_table.alive


@pytest.mark.parametrize("rests", [False, True])
def test_what_is_kept_of_a_long_life_replays_plan_for_plan(recorded, rests):
    it = recorded()
    for seed in range(8):
        live(it.driver, seed, rests=rests)
        it.driver.run()
        report = check(it.read())
        assert report.ok and report.plans > 20, report
    assert len(it.path.read_bytes()) <= SMALL
    assert report.plans < len(it.driver.plans)
    _, records = read_journal(str(it.path))
    states = [n for n, record in enumerate(records) if isinstance(record, Began)]
    assert len(states) == 2 and states[0] == 0


def test_a_record_without_room_breaks_the_chain_and_the_rest_replays(recorded):
    it = recorded(max_request_tokens=40_000)
    live(it.driver, 1, 10)
    it.driver.submit("long", [1] * 20_000, new=1)
    live(it.driver, 2, 10)
    assert check(it.read()).ok
    _, records = read_journal(str(it.path))
    received = [record.message for record in records if isinstance(record, Received)]
    asked = [message.request for message in received if isinstance(message, Generate)]
    assert "long" not in asked and any(name.startswith("r2.") for name in asked)


def test_a_snapshot_without_room_is_reported_and_the_replay_says_so(recorded, caplog, monkeypatch):
    log = logging.getLogger("banyan.engine.flight_recorder")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    monkeypatch.setattr(log, "propagate", False)
    caplog.set_level(logging.WARNING, log.name)
    it = recorded(8 << 10)
    live(it.driver, 1)
    assert caplog.text.count("raise --flight-recorder-bytes") == 1
    with pytest.raises(ModelError, match="no room for a snapshot"):
        check(it.read())


def test_a_torn_record_ends_what_is_read(recorded):
    it = recorded()
    live(it.driver, 1, 20)
    whole = check(it.read()).records
    end = len(it.path.read_bytes())
    os.pwrite(it.memory.descriptor, b"\xff", end - 3 + 16)
    assert check(it.read()).records == whole - 1


def test_memory_that_holds_nothing_reads_as_nothing():
    empty = memory()
    assert empty.read() == b""
    empty.close()
    assert empty.read() == b""


def test_a_constrained_request_is_named_where_nothing_compiles_its_constraint(recorded):
    it = recorded()
    live(it.driver, 1, 3).run()
    it.driver.receive(
        Generate(
            request="json", tokens=bytes(8), sampling=SamplingParams(max_new_tokens=1), grammar="{}"
        )
    )
    report = check(it.read())
    assert not report.ok and "request json is constrained" in report.difference


def test_another_version_is_named(recorded, monkeypatch):
    it = recorded()
    live(it.driver, 1, 5)
    monkeypatch.setattr("banyan.sim.replay.VERSION", "9.9")
    with pytest.raises(ModelError, match=r"recorded by version .*this is 9\.9"):
        check(it.read())


def test_a_damaged_snapshot_is_named(recorded):
    driver = recorded().driver
    taken = snapshot.take(driver.core)
    for spoilt in (
        b"",
        b"\x93",
        taken[: len(taken) // 2],
        taken.replace(b"RequestTable", b"Rooter"),
    ):
        with pytest.raises(ModelError, match="snapshot"):
            snapshot.restore(driver.spec.build(), spoilt)


def test_journal_and_flight_recorder_hold_the_same_life(tmp_path):
    observe = config_of("--journal", str(tmp_path / "journal")).observe
    shared = memory(1 << 20)
    with ExitStack() as cleanup:
        made = []

        def recorder(spec):
            made.append(Recorders(observe, spec, shared.descriptor, cleanup))
            return made[0].recorder

        driver = Driver(pages=30, depth=2, recorder=recorder)
        made[0].follow(driver.core, 0.0)
        live(driver, 3, 20)
    (tmp_path / "recording").write_bytes(shared.read())
    shared.close()
    reports = [check(str(tmp_path / name)) for name in ("journal", "recording")]
    assert reports[0].plans == reports[1].plans == len(driver.plans)
    assert reports[0].records + 1 == reports[1].records


def test_more_memory_than_the_machine_has_is_refused_before_any_is_taken():
    made = RecordingMemory()
    with pytest.raises(CapacityError, match="this machine has"):
        made.give_size(1 << 60)
    made.close()


def test_memory_that_nothing_was_written_to_is_not_taken() -> None:
    made = RecordingMemory()
    made.give_size(1 << 24)
    with mapped(made.descriptor) as memory:
        assert os.fstat(made.descriptor).st_blocks == 0
        memory[1 << 20] = 1
        assert 0 < os.fstat(made.descriptor).st_blocks * 512 <= 1 << 21
    made.close()


def _with_shape(taken: bytes, name: str, change) -> bytes:
    """A snapshot whose objects of one class have other attributes."""
    shapes, entries = msgspec.msgpack.decode(taken)
    shapes = [[of, change(names) if of.endswith(f":{name}") else names] for of, names in shapes]
    return msgspec.msgpack.encode([shapes, entries])


@pytest.mark.parametrize("name", ["Scheduler", "RequestTable", "Node", "Generate"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda names: [*names[:-1], "renamed"], "only there: renamed; only here: "),
        (lambda names: names[:-1], r"\(only here: "),
        (lambda names: [*names, "more"], r"\(only there: more\)"),
    ],
)
def test_a_snapshot_with_other_attributes_is_refused_and_names_them(name, change, expected):
    driver = Driver(pages=30)
    driver.submit("a", [1, 2, 3], new=5)
    driver.launch()
    changed = _with_shape(snapshot.take(driver.core), name, change)
    with pytest.raises(ModelError, match=f"another build: .*{name} has other .*{expected}"):
        snapshot.restore(driver.spec.build(), changed)


def test_a_snapshot_of_a_class_that_is_gone_is_refused():
    driver = Driver(pages=30)
    changed = snapshot.take(driver.core).replace(b"RequestTable", b"RequestGone!")
    with pytest.raises(ModelError, match=r"another build: this one has no class .*RequestGone!"):
        snapshot.restore(driver.spec.build(), changed)


def test_classes_of_a_snapshot_set_every_attribute_in_their_constructor():
    """Otherwise a snapshot could not be compared with this build before it is restored."""
    for name, kind in snapshot._classes().items():
        if kind is Node:  # encoded by hand
            continue
        methods = [m for base in kind.__mro__ for m in vars(base).values() if isfunction(m)]
        later = {attribute for method in methods for attribute in snapshot._assigned(method)}
        assert later <= snapshot._attributes(kind), name
