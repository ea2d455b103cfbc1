"""The stores behind which a package of others is, and the file store beside them: one contract."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from banyan.base.errors import ConfigError
from banyan.kv_transfer.mooncake_store import MooncakeStore, open_mooncake_store
from banyan.kv_transfer.store import STORES, Damaged, Missing, Store, StoreOptions
from tests.support.mooncake import Master, mooncake, needs
from tests.support.store_kit import check_store, name, page

MODEL, OTHER = bytes(range(32)), bytes(32)
SIZE = 370_001
KINDS = ("file", "nixl", "mooncake")


class Scene:
    """Stores of one kind in one place, and what may happen to it."""

    def __init__(self, kind: str, folder: Path, master: Master | None) -> None:
        self.kind, self._folder, self._master = kind, folder, master
        self._opened: list[Store] = []

    def open(self, identity: bytes = MODEL) -> Store:
        extra: dict[str, object] = {"path": str(self._folder), "max_bytes": 64 << 20}
        if self._master is not None:
            address = self._master.address
            extra = {"master_server_address": address, "global_segment_size": "32mb"}
        self._opened.append(STORES.load(self.kind)(StoreOptions(identity, [SIZE], extra)))
        return self._opened[-1]

    def spoil(self, store: Store, key: bytes, change: Callable[[bytes], bytes]) -> None:
        """Change what lies under a name, behind the store's back."""
        if isinstance(store, MooncakeStore):
            content = store._client.get(store._key(key))
            assert store._client.remove(store._key(key), True) == 0
            assert store._client.put(store._key(key), change(content)) == 0
        else:
            (file,) = self._folder.rglob(f"{key.hex()}.page")
            file.write_bytes(change(file.read_bytes()))

    def die(self) -> None:
        if self._master is not None:
            self._master.close()
        else:
            for model in list(self._folder.iterdir()):
                model.rename(model.with_name("gone"))
                model.write_text("")

    def close(self) -> None:
        for store in self._opened:
            store.close()


@pytest.fixture(scope="module")
def masters() -> Iterator[Callable[[], Master]]:
    """A master that tests share as long as nobody ends it."""
    opened: list[Master] = []

    def one() -> Master:
        if not opened or opened[-1].master.poll() is not None:
            opened.append(Master(128 << 20))
        return opened[-1]

    yield one
    for master in opened:
        master.close()


@pytest.fixture(params=KINDS)
def scene(request, tmp_path: Path, masters) -> Iterator[Scene]:
    kind = request.param
    if kind != "file":
        needs({"nixl": "nixl_cu12"}.get(kind, kind))
    made = Scene(kind, tmp_path / "pages", masters() if kind == "mooncake" else None)
    yield made
    made.close()


def identity(number: int) -> bytes:
    """Of a model that no other test has in a store that they share."""
    return number.to_bytes(32, "little")


def test_a_store_keeps_pages_by_name(scene: Scene) -> None:
    check_store(scene.open(identity(1)))


def test_another_one_finds_large_pages_and_another_model_none(scene: Scene) -> None:
    store = scene.open(identity(2))
    for number in range(5):
        store.write(name(number), page(number, SIZE))
    again, other = scene.open(identity(2)), scene.open(identity(3))
    assert [bytes(again.read(name(n))) == page(n, SIZE) for n in range(5)] == [True] * 5
    assert not other.has(name(1))
    with pytest.raises(Missing):
        other.read(name(1))


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c[:-1],
        lambda c: c[:50_000] + bytes((c[50_000] ^ 8,)) + c[50_001:],
        lambda c: bytes((c[0] ^ 1,)) + c[1:],
        lambda c: c[:55] + bytes((c[55] ^ 128,)) + c[56:],
        lambda c: c[:-4] + c[-8:-4],
    ],
    ids=["short", "a bit", "its kind", "its name", "a word"],
)
def test_what_is_not_the_page_is_reported_and_removed(scene: Scene, change) -> None:
    store = scene.open(identity(4))
    store.write(name(1), page(1, SIZE))
    scene.spoil(store, name(1), change)
    with pytest.raises(Damaged):
        store.read(name(1))
    assert not store.has(name(1))
    store.write(name(1), page(1, SIZE))
    assert bytes(store.read(name(1))) == page(1, SIZE)
    store.delete(name(1))


def test_what_stands_behind_a_page_is_never_a_part_of_it(scene: Scene) -> None:
    store = scene.open(identity(6))
    store.write(name(1), page(1, SIZE))
    scene.spoil(store, name(1), lambda content: content + b"\0")
    try:
        assert bytes(store.read(name(1))) == page(1, SIZE)
    except Damaged:
        assert not store.has(name(1))
    store.delete(name(1))


def test_a_store_that_dies_fails_as_a_disk_does(scene: Scene) -> None:
    store = scene.open(identity(5))
    store.write(name(1), page(1, SIZE))
    scene.die()
    for call in (lambda: store.read(name(1)), lambda: store.write(name(2), page(2, SIZE))):
        with pytest.raises(OSError, match=r"\S"):
            call()
    try:
        assert not store.has(name(1))
    except OSError as error:
        assert "does not answer" in str(error)


def test_what_does_not_fit_in_the_memory_that_is_lent_is_refused_or_evicted() -> None:
    with mooncake(16 << 20) as master:
        extra = {"master_server_address": master.address, "global_segment_size": "0"}
        store = open_mooncake_store(StoreOptions(MODEL, [SIZE], extra))
        for number in range(100):
            try:
                store.write(name(number), page(number, SIZE))
            except OSError as error:
                assert "is full" in str(error)
        held = [number for number in range(100) if store.has(name(number))]
        assert 0 < len(held) < 16 * 1024 * 1024 // SIZE
        assert all(bytes(store.read(name(n))) == page(n, SIZE) for n in held)
        store.close()


@pytest.mark.parametrize(
    "extra, message",
    [
        ({}, "needs master_server_address and global_segment_size"),
        ({"master_server_address": "127.0.0.1:1", "global_segment_size": 0}, "no master answers"),
        ({"master_server_address": "x", "global_segment_size": 0}, "no master answers"),
        ({"master_server_address": 7}, "must be a text"),
        ({"master_server_address": "x", "global_segment_size": "4zb"}, "number of bytes"),
        ({"master_server_address": "x", "global_segment_size": 2**53}, "number of bytes"),
        ({"master_server_address": "x", "global_segment_size": -1}, "number of bytes"),
        ({"master_server_address": "x", "global_segment_size": True}, "number of bytes"),
        ({"master_server_address": "x", "global_segment_size": 1 << 20}, "16 pages"),
        ({"master_server_address": "x", "global_segment_size": 0, "fsync": True}, "no 'fsync'"),
    ],
)
def test_each_option_of_mooncake_is_read_or_refused_by_name(extra, message, monkeypatch) -> None:
    monkeypatch.setattr("banyan.kv_transfer.mooncake_store._client_kind", lambda: object)
    with pytest.raises(ConfigError, match=message):
        open_mooncake_store(StoreOptions(MODEL, [SIZE], extra))


@pytest.mark.parametrize("kind", ["mooncake", "nixl"])
def test_a_package_that_is_not_there_is_named(kind: str, monkeypatch, tmp_path) -> None:
    for module in ("mooncake.store", "nixl._api", "nixl_cu12._api", "nixl_cu13._api"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    monkeypatch.setattr("banyan.kv_transfer.mooncake_store._check_master", lambda address: None)
    extra = {"path": str(tmp_path)}
    if kind == "mooncake":
        extra = {"master_server_address": "x:1", "global_segment_size": 0}
    with pytest.raises(ConfigError, match="pip install"):
        STORES.load(kind)(StoreOptions(MODEL, [SIZE], extra))


def test_a_class_that_is_named_is_the_store(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "my_store.py").write_text(
        "from banyan.kv_transfer.file_store import open_files\n"
        "class MyStore:\n"
        "    def __new__(cls, options):\n"
        "        return open_files(options)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    named = {"backend_name": "mine", "module_path": "my_store", "class_name": "MyStore"}
    extra: dict[str, object] = {**named, "path": str(tmp_path / "pages")}
    store = STORES.load("dynamic")(StoreOptions(MODEL, [SIZE], extra))
    store.write(name(1), page(1, SIZE))
    assert bytes(store.read(name(1))) == page(1, SIZE)
    store.close()
    for missing, message in (
        ({**named, "class_name": "Other"}, "has no function 'Other'"),
        ({**named, "module_path": "no_such_module"}, "cannot be imported"),
        ({"class_name": "MyStore"}, "needs module_path and class_name"),
        ({**named, "class_name": 5}, "needs module_path and class_name"),
    ):
        with pytest.raises(ConfigError, match=message):
            STORES.load("dynamic")(StoreOptions(MODEL, [SIZE], missing))
