"""The journal records what decisions depend on; replay makes every plan again."""

import errno
import logging
import os
from pathlib import Path
from random import Random
from zlib import crc32

import pytest

from banyan.base.errors import ConfigError, ModelError
from banyan.engine.journal import Journal, read_journal
from banyan.messages.requests import Abort, StopAt
from banyan.sim.replay import check
from tests.scheduler.driver import Driver, asked
from tests.support.flags import config_of


def record(path, seed=1, size=1 << 20, close=True):
    """A short, busy life of a core, recorded at `path`."""
    random = Random(seed)
    journals = []

    def recorder(spec):
        journals.append(Journal(str(path), spec, size))
        return journals[0]

    driver = Driver(pages=30, depth=2, conservativeness=0.3, recorder=recorder)
    shared = [random.randrange(90) for _ in range(20)]
    for i in range(30):
        prompt = [*shared[: random.randrange(20)], i]
        driver.submit(f"r{i}", prompt, new=random.randrange(20))
        if random.random() < 0.2:
            driver.receive(Abort(f"r{random.randrange(i + 1)}"))
        if random.random() < 0.2:
            driver.receive(StopAt(f"r{random.randrange(i + 1)}", 2))
        driver.launch()
        if driver.flying and random.random() < 0.7:
            driver.complete()
    driver.run()
    driver.core.flush(0.0)
    if close:
        journals[0].close()
    return driver


def seal(content, at):
    """Make the checksum of the record at `at` right again."""
    length = int.from_bytes(content[at : at + 4], "little")
    checksum = crc32(content[at + 8 : at + 8 + length])
    content[at + 4 : at + 8] = checksum.to_bytes(4, "little")


@pytest.mark.parametrize("seed", range(5))
def test_a_recorded_life_replays_plan_for_plan(tmp_path, seed):
    driver = record(tmp_path / "journal", seed)
    report = check(str(tmp_path / "journal"))
    assert report.ok and report.plans == len(driver.plans) > 20


def test_a_journal_survives_a_process_that_never_closed_it(tmp_path):
    driver = record(tmp_path / "journal", close=False)
    assert check(str(tmp_path / "journal")).plans == len(driver.plans)


def test_other_decisions_are_found_and_the_record_is_named(tmp_path):
    record(tmp_path / "journal")
    content = bytearray((tmp_path / "journal").read_bytes())
    at = content.index(b"max_running") + len(b"max_running")
    assert content[at] == 8
    content[at] = 7
    seal(content, 8)
    (tmp_path / "journal").write_bytes(content)
    report = check(str(tmp_path / "journal"))
    assert not report.ok and f"record {report.records}" in str(report)


def test_a_torn_record_ends_the_replay_with_a_word_and_without_an_error(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("banyan"), "propagate", True)
    record(tmp_path / "journal")
    content = (tmp_path / "journal").read_bytes()
    (tmp_path / "journal").write_bytes(content[:-5])
    assert check(str(tmp_path / "journal")).ok
    assert "cut off inside record" in caplog.text


def test_a_full_journal_stops_and_what_it_holds_replays(tmp_path):
    driver = record(tmp_path / "journal", size=3000)
    report = check(str(tmp_path / "journal"))
    assert report.ok and report.is_full and 0 < report.plans < len(driver.plans)
    assert (tmp_path / "journal").stat().st_size <= 3000


def test_the_journal_is_as_large_as_the_flag_says(tmp_path):
    size = config_of("--journal-bytes", str(2 << 20)).observe.journal_bytes
    journal = Journal(str(tmp_path / "journal"), asked(), size)
    assert (tmp_path / "journal").stat().st_size == 2 << 20
    journal.close()


@pytest.mark.parametrize(
    "content", [b"", b"something else", b"BANYANJ1", b"BANYANJ1\x05\0\0\0abcde", b"BANYANJ1\xff"]
)
def test_what_is_not_a_journal_is_refused(tmp_path, content):
    (tmp_path / "journal").write_bytes(content)
    with pytest.raises(ModelError, match="journal"):
        check(str(tmp_path / "journal"))


def test_garbage_in_a_record_is_named_by_its_number(tmp_path):
    record(tmp_path / "journal")
    content = bytearray((tmp_path / "journal").read_bytes())
    first = 8 + 8 + int.from_bytes(content[8:12], "little")
    content[first + 8 : first + 12] = b"\xc1\xc1\xc1\xc1"
    seal(content, first)
    (tmp_path / "journal").write_bytes(content)
    _, records = read_journal(str(tmp_path / "journal"))
    with pytest.raises(ModelError, match="record 1 does not decode"):
        list(records)


def test_a_flipped_bit_of_content_is_found(tmp_path):
    record(tmp_path / "journal")
    sound = (tmp_path / "journal").read_bytes()
    header = 16 + int.from_bytes(sound[8:12], "little")
    for at in range(header + 8, header + 60):
        content = bytearray(sound)
        content[at] ^= 16
        (tmp_path / "journal").write_bytes(content)
        with pytest.raises(ModelError, match="damaged"):
            check(str(tmp_path / "journal"))


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        record(tmp_path / "missing" / "journal")


def test_the_disk_gives_the_whole_journal_at_the_start(tmp_path):
    """A hole in a mapped file, written to when the disk is full, would kill the engine."""
    path = tmp_path / "journal"
    journal = Journal(str(path), asked(), 1 << 20)
    assert path.stat().st_blocks * 512 >= 1 << 20
    journal.close()


def test_a_disk_without_room_for_the_journal_is_reported_and_nothing_remains(tmp_path, monkeypatch):
    def full(descriptor, start, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"1048576 bytes: No space left.*--journal-bytes"):
        Journal(str(tmp_path / "journal"), asked(), 1 << 20)
    assert (tmp_path / "journal").stat().st_size == 0


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "journal").symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="it is a link"):
        Journal(str(tmp_path / "journal"), asked(), 1 << 20)
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_a_journal_from_before_fields_were_renamed_still_replays() -> None:
    """Recorded by an older build: encoded names of fields must not change."""
    path = str(Path(__file__).parent / "data" / "before_renames.journal")
    spec, _ = read_journal(path)
    assert spec.limits.multi_step > 1
    report = check(path)
    assert report.ok and report.plans == 17
