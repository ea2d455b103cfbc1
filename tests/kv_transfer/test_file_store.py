import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from banyan.base.errors import ConfigError
from banyan.kv_transfer.file_store import FileStore, Segment, SystemIO
from banyan.kv_transfer.store import STORES, Damaged, Missing, StoreOptions
from tests.support.store_kit import MemoryStore, check_store, name, page
from tests.system.serving import wait_until

MODEL = bytes(range(32))
OTHER = bytes(32)


@pytest.fixture
def store(tmp_path):
    return FileStore(tmp_path / "pages", MODEL, 1 << 20)


def files(folder):
    return sorted(folder.rglob("*.page"))


def pages_in(store, last):
    return [n for n in range(last) if store.has(name(n))]


@pytest.mark.parametrize("make", [lambda f: FileStore(f, MODEL, 1 << 20), lambda f: MemoryStore()])
def test_a_store_keeps_pages_by_name(make, tmp_path):
    check_store(make(tmp_path / "pages"))


def test_another_process_and_a_later_one_find_the_pages(store, tmp_path):
    store.write(name(1), page(1))
    again = FileStore(tmp_path / "pages", MODEL, 1 << 20, fsync=True)
    again.write(name(2), page(2))
    assert again.read(name(1)) == page(1) and store.read(name(2)) == page(2)


def test_another_model_finds_nothing(store, tmp_path):
    store.write(name(1), page(1))
    other = FileStore(tmp_path / "pages", OTHER, 1 << 20)
    assert not other.has(name(1))


def test_files_are_readable_by_their_owner_alone(store, tmp_path):
    store.write(name(1), page(1))
    (file,) = files(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "pages").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("at", [0, 8, 39, 40, 72, 73, 80, 89, 500, -1])
def test_a_flipped_bit_anywhere_is_found_and_the_page_removed(store, tmp_path, at):
    store.write(name(1), page(1))
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(content)
    with pytest.raises(Damaged):
        store.read(name(1))
    assert not store.has(name(1))
    store.write(name(1), page(1))
    assert store.read(name(1)) == page(1)


@pytest.mark.parametrize("length", [-1, 0, 20, 60, 97, 98])
def test_a_page_that_is_cut_off_is_damaged(store, tmp_path, length):
    store.write(name(1), page(1))
    (file,) = files(tmp_path)
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(Damaged):
        store.read(name(1))


def test_a_page_under_the_name_of_another_is_damaged(store, tmp_path):
    store.write(name(1), page(1))
    (one,) = files(tmp_path)
    two = Path(str(one).replace(name(1).hex(), name(2).hex()))
    os.link(one, two)
    with pytest.raises(Damaged):
        store.read(name(2))
    assert not two.exists() and store.read(name(1)) == page(1)


# -- pages that share a file ------------------------------------------------------------------


@pytest.fixture
def roomy(tmp_path):
    """A store whose segments take as many pages as any."""
    return FileStore(tmp_path / "pages", MODEL, 1 << 30)


def inodes(folder):
    return {file.stat().st_ino for file in files(folder)}


def test_pages_share_files_and_are_read_one_by_one(roomy, tmp_path):
    for number in range(40):
        roomy.write(name(number), page(number, 900 + number))
    assert len(files(tmp_path)) == 40 and len(inodes(tmp_path)) == 3
    for number in reversed(range(40)):
        assert roomy.read(name(number)) == page(number, 900 + number)
    roomy.close()
    assert not list(tmp_path.rglob("*.tmp")), "what is full keeps no name but those of its pages"
    again = FileStore(tmp_path / "pages", MODEL, 1 << 30)
    assert all(again.read(name(n)) == page(n, 900 + n) for n in range(40))


def test_a_page_that_goes_takes_none_of_its_file_with_it(roomy, tmp_path):
    for number in range(5):
        roomy.write(name(number), page(number))
    roomy.delete(name(2))
    with pytest.raises(Missing):
        roomy.read(name(2))
    assert all(roomy.read(name(n)) == page(n) for n in (0, 1, 3, 4))


def test_a_flipped_bit_anywhere_in_a_shared_file_gives_no_wrong_page(tmp_path):
    numbers, at, size = range(3), 0, 1
    while at < size:
        store = FileStore(tmp_path / str(at), MODEL, 1 << 30)
        for number in numbers:
            store.write(name(number), page(number, 40))
        file = files(tmp_path / str(at))[0]
        content = bytearray(file.read_bytes())
        size = len(content)
        content[at] ^= 1 << at % 8
        file.write_bytes(content)
        found = {number: _read(store, number) for number in numbers}
        assert None in found.values(), "a bit that changes nothing"
        assert all(found[n] in (None, page(n, 40)) for n in numbers)
        for number in numbers:
            store.write(name(number), page(number, 40))
        assert [_read(store, n) for n in numbers] == [page(n, 40) for n in numbers]
        at += 3  # one bit of every third byte: heads, sums and pages are all longer


def _read(store, number):
    try:
        return bytes(store.read(name(number)))
    except Damaged:
        return None


def test_a_folder_without_hard_links_keeps_a_page_in_each_file(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    check_store(FileStore(tmp_path / "pages", MODEL, 1 << 30))
    store = FileStore(tmp_path / "pages", MODEL, 1 << 30)
    for number in range(20):
        store.write(name(number), page(number))
    assert len(inodes(tmp_path)) == 20 == len(files(tmp_path))
    assert all(store.read(name(n)) == page(n) for n in range(20))


def test_what_a_failed_write_leaves_stands_before_no_other_page(roomy, tmp_path, monkeypatch):
    roomy.write(name(1), page(1))
    write = SystemIO.write

    def half(self, descriptor, at, parts):
        write(self, descriptor, at, [parts[0], parts[1][:300]])
        raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(SystemIO, "write", half)
    with pytest.raises(OSError, match="the disk fails"):
        roomy.write(name(2), page(2))
    monkeypatch.setattr(SystemIO, "write", write)
    roomy.write(name(3), page(3))
    assert pages_in(roomy, 5) == [1, 3]
    assert roomy.read(name(1)) == page(1) and roomy.read(name(3)) == page(3)


def test_a_draft_that_another_has_removed_costs_one_page(roomy, tmp_path):
    roomy.write(name(1), page(1))
    for draft in tmp_path.rglob("*.tmp"):
        draft.unlink()
    with pytest.raises(OSError):
        roomy.write(name(2), page(2))
    roomy.write(name(3), page(3))
    assert pages_in(roomy, 5) == [1, 3] and roomy.read(name(1)) == page(1)


def test_stores_of_one_process_fill_files_of_their_own(roomy, tmp_path):
    other = FileStore(tmp_path / "pages", MODEL, 1 << 30)
    for number in range(20):
        (roomy, other)[number % 2].write(name(number), page(number))
    assert all(roomy.read(name(n)) == other.read(name(n)) == page(n) for n in range(20))


def test_segments_used_longest_ago_go_as_wholes(tmp_path):
    store = FileStore(tmp_path / "pages", MODEL, 16 * 1100 * 20)
    store._capacity *= 256  # segments of 16 pages, as in a store of usual size
    for number in range(16 * 4):
        store.write(name(number), page(number))
    for file in files(tmp_path):
        if name(5).hex() in file.name:
            os.utime(file, (time.time() + 1000,) * 2)
    store._shrink(16 * 1100 * 2)
    assert pages_in(store, 64) == [*range(16), *range(48, 64)]
    assert sum(size for _, size, _ in store._files()) <= 16 * 1100 * 2


def test_links_and_pipes_are_not_read(store, tmp_path):
    store.write(name(1), page(1))
    (file,) = files(tmp_path)
    target = tmp_path / "elsewhere"
    file.rename(target)
    file.symlink_to(target)
    with pytest.raises(Damaged):
        store.read(name(1))
    os.mkfifo(file)
    with pytest.raises(Damaged):
        store.read(name(1))


def test_what_was_used_longest_ago_goes_when_the_bound_is_reached(tmp_path):
    store = FileStore(tmp_path / "pages", MODEL, 64_000)
    for number in range(200):
        store.write(name(number), page(number))
        for file in files(tmp_path):
            if number == 20 and name(3).hex() in str(file):
                os.utime(file, (time.time() + 1000,) * 2)
    held = pages_in(store, 200)
    assert sum(f.stat().st_size for f in files(tmp_path)) <= 64_000
    assert 3 in held and 199 in held and 4 not in held
    assert len(held) > 40, "more is removed than the bound asks for"


def test_reading_a_page_counts_as_using_it(store, tmp_path):
    store.write(name(1), page(1))
    (file,) = files(tmp_path)
    os.utime(file, (1000, 1000))
    store.read(name(1))
    assert file.stat().st_mtime > 1000


def test_servers_on_one_folder_stay_near_one_bound(tmp_path):
    stores = [FileStore(tmp_path / "pages", m, 64_000) for m in (MODEL, MODEL, OTHER)]
    for number in range(150):
        for at, store in enumerate(stores):
            store.write(name(number * 3 + at), page(number))
            assert sum(f.stat().st_size for f in files(tmp_path)) <= 64_000 * (1 + 3 / 16)


def test_a_page_evicted_by_another_server_is_missing(store, tmp_path):
    store.write(name(1), page(1))
    for file in files(tmp_path):
        file.unlink()
    with pytest.raises(Missing):
        store.read(name(1))


def test_a_full_disk_makes_room_among_the_pages_and_then_refuses(store, monkeypatch):
    for number in range(20):
        store.write(name(number), page(number))
    add, is_full = Segment.add, iter([True])

    def out_of_space(self, name, payload, path):
        if next(is_full, False):
            raise OSError(errno.ENOSPC, "no space left")
        add(self, name, payload, path)

    monkeypatch.setattr(Segment, "add", out_of_space)
    store.write(name(50), page(50))
    assert store.has(name(50)) and 10 < len(pages_in(store, 20)) <= 16

    def always(self, name, payload, path):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Segment, "add", always)
    with pytest.raises(OSError, match="no space"):
        store.write(name(51), page(51))
    assert not store.has(name(51))


WRITER = """
import sys
from pathlib import Path
from banyan.kv_transfer.file_store import FileStore
from tests.support.store_kit import name, page
store = FileStore(Path(sys.argv[1]), bytes(range(32)), 1 << 30)
print("ready", flush=True)
for number in range(1_000_000):
    store.write(name(number), page(number, 200_000))
"""


def test_a_writer_killed_at_any_moment_leaves_whole_pages_only(tmp_path):
    folder, seen = tmp_path / "pages", 0
    for delay_s in (0.0, 0.005, 0.02, 0.05):
        command = [sys.executable, "-c", WRITER, str(folder)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        assert writer.stdout.readline() == b"ready\n"
        wait_until(lambda: files(folder), 60, "a first page")
        time.sleep(delay_s)  # the moment of the blow is what differs
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        store = FileStore(folder, MODEL, 1 << 30)
        for file in files(folder):
            number = int.from_bytes(bytes.fromhex(file.stem)[1:], "little")
            assert store.read(name(number)) == page(number, 200_000)
            seen += 1
    assert seen


def test_what_dead_writers_left_is_removed_after_a_while(store, tmp_path):
    draft = tmp_path / "pages" / MODEL.hex()[:32] / "new" / "77-1.tmp"
    draft.write_bytes(b"half a page")
    FileStore(tmp_path / "pages", MODEL, 1 << 20)
    assert draft.exists(), "another server may be writing it"
    os.utime(draft, (1000, 1000))
    FileStore(tmp_path / "pages", MODEL, 1 << 20)
    assert not draft.exists()


def options(**extra):
    return StoreOptions(MODEL, [1000], extra)


def test_the_file_store_opens_by_name(tmp_path):
    path = str(tmp_path / "kept")
    store = STORES.load("file")(options(path=path, max_bytes=100_000, fsync=True))
    store.write(name(1), page(1))
    assert files(tmp_path / "kept") and store.capacity_bytes == 100_000


def test_without_a_bound_half_of_the_free_disk_is_the_most(tmp_path):
    store = STORES.load("file")(options(path=str(tmp_path)))
    assert 0 < store.capacity_bytes <= 16 << 30


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"path": "/proc/nowhere"}, "cannot use"),
        ({"path": 3}, "path must be a text"),
        ({"max_bytes": "many"}, "max_bytes a number"),
        ({"max_bytes": 15_999}, "16 pages"),
        ({"fsync": 1}, "true or false"),
        ({"folder": "x"}, "has no 'folder'"),
    ],
)
def test_what_the_file_store_cannot_use_is_refused(extra, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        STORES.load("file")(options(**({"path": str(tmp_path)} | extra)))


def test_a_folder_that_others_can_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="written by others"):
        STORES.load("file")(options(path=str(tmp_path)))
