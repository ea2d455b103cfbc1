"""Pages of several ranks as one: cut by heads and by layers, whatever the number of ranks."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq

from banyan.base.errors import ConfigError, DeviceError
from banyan.base.ids import PageId
from banyan.layers.cache_spec import CacheTensor, LayerCache, ShardedAxis
from banyan.messages.plan import PageCopy, device_page
from banyan.model_config.model_config import STATE
from banyan.parallel.groups import Group
from banyan.runner.kvstore import GroupLayout, KVStore
from banyan.runner.rank_page_access import (
    LocalRankAccess,
    RankAddress,
    RemoteRankAccess,
    layout_facts,
    page_layouts_of,
    publish_pages,
    publish_pages_remotely,
    rank_addresses_of,
)
from banyan.runner.rank_pages import RankPages, end_together

CPU = torch.device("cpu")
GROUPS = (GroupLayout("full", 0, 4, 6),)
HEADS, WIDTH = 4, 3


def layer(number: int, here: int, latent: bool = False, first: int = 0) -> LayerCache:
    """Of one rank: a latent, or `here` of the heads from `first` on."""
    if latent:
        return LayerCache(number, {"latent": CacheTensor((5,), torch.float32)})
    kept = CacheTensor((here, WIDTH), torch.float32, (ShardedAxis(HEADS, first, first + here),))
    return LayerCache(number, {"k": kept, "v": kept})


def afar(stores: list[KVStore], is_by_head: bool, timeout_s: float = 5.0) -> RankPages:
    """As `opened`, of ranks of other machines."""
    rank_access = [RemoteRankAccess("127.0.0.1", lambda: False) for _ in stores[1:]]
    for rank, place in rank_addresses_of(rank_access).items():
        publish_pages_remotely(stores[rank], place)
    return RankPages(stores[0], rank_access, is_by_head, timeout_s)


def opened(
    folder: Path, stores: list[KVStore], is_by_head: bool, timeout_s: float = 5.0
) -> RankPages:
    """As rank 0 of these ranks sees them, each of which tells of itself."""
    links = [str(folder / f"rank{rank}") for rank in range(1, len(stores))]
    for store, link in zip(stores[1:], links, strict=True):
        publish_pages(store, link)
    return RankPages(stores[0], [LocalRankAccess(link) for link in links], is_by_head, timeout_s)


def shared(*caches: LayerCache) -> KVStore:
    return KVStore(GROUPS, caches, CPU, is_shared=True)


def of_a_device(*caches: LayerCache) -> KVStore:
    """Rank 0 cannot map its pages: they come and go through a window."""
    store = shared(*caches)
    store.is_host = False
    return store


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("is_by_head", [False, True])
@pytest.mark.parametrize("shared", [shared, of_a_device])
@pytest.mark.parametrize("is_afar", [False, True])
def test_a_page_is_the_same_on_any_number_of_ranks(
    ranks: int, is_by_head: bool, shared: Callable[..., KVStore], is_afar: bool, tmp_path: Path
) -> None:
    """Above four ranks several of them keep the same head."""
    alone = KVStore(GROUPS, [layer(0, HEADS), layer(1, 0, latent=True)], CPU)
    here = max(1, HEADS // ranks)
    firsts = [rank * HEADS // ranks for rank in range(ranks)]
    stores = [shared(layer(0, here, first=at), layer(1, 0, latent=True)) for at in firsts]
    pages = afar(stores, is_by_head) if is_afar else opened(tmp_path, stores, is_by_head)
    assert pages.page_bytes(0) == alone.page_bytes(0)
    payload = np.random.default_rng(3).integers(0, 255, alone.page_bytes(0), np.uint8)
    pages.put(0, 5, payload)
    assert (pages.take(0, 5) == payload).all() and not pages.take(0, 4).any()
    alone.put(0, 5, payload)
    whole = alone.tensors(0)["k"][5].numpy()
    for first, store in zip(firsts, stores, strict=True):
        mine = store.tensors(0)["k"][5].numpy()
        if is_by_head:  # one head after another, whatever the shape says
            of = whole.reshape(HEADS, -1)[first : first + here]
            assert (mine.reshape(here, -1).view(np.uint8) == of.view(np.uint8)).all()
        else:
            assert (mine.view(np.uint8) == whole[:, first : first + here].view(np.uint8)).all()
        latents = [s.tensors(1)["latent"][5].view(torch.uint8) for s in (store, alone)]
        assert torch.equal(*latents)
    facts = layout_facts(page_layouts_of(alone), GROUPS)
    assert layout_facts(pages.page_layouts, GROUPS) == facts


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_all_layers_keep_under_one_name_lies_together(ranks: int, tmp_path: Path) -> None:
    """Where that is asked for: as one rank would lay a page out."""
    whole = [layer(0, HEADS), layer(1, HEADS), layer(2, 0, latent=True)]
    alone, here = KVStore(GROUPS, whole, CPU), HEADS // ranks
    mine = [
        [layer(n, here, first=at) for n in (0, 1)] + [layer(2, 0, latent=True)]
        for at in range(0, HEADS, here)
    ]
    stores = [of_a_device(*each) for each in mine]
    payload = np.random.default_rng(3).integers(0, 255, alone.page_bytes(0), np.uint8)
    alone.put(0, 5, payload)
    alone.arrange(True, False)
    pages = opened(tmp_path, stores, False)
    pages.put(0, 5, payload)
    rank_access = [LocalRankAccess(str(tmp_path / f"again{rank}")) for rank in range(1, ranks)]
    for rank in range(1, ranks):
        publish_pages(stores[rank], str(tmp_path / f"again{rank}"))
    by_name = RankPages(stores[0], rank_access, False, 5.0, is_by_name=True)
    assert (by_name.take(0, 5) == alone.take(0, 5)).all() and (alone.take(0, 5) != payload).any()


STATES = (GroupLayout(STATE, 0, 64, 6),)
VALUES, KEYS, TAPS, NUMBERS = 8, 2, 3, 5


def kept(rank: int, ranks: int) -> LayerCache:
    """What a convolution over values and keys has read last, and a matrix of numbers by channels.
    Above two ranks several of them keep the same key."""

    def span(size: int) -> ShardedAxis:
        first = rank * size // ranks
        return ShardedAxis(size, first, first + max(1, size // ranks))

    parts = span(VALUES), span(KEYS)
    channels = sum(part.last - part.first for part in parts)
    inputs = CacheTensor((TAPS, channels), torch.float32, parts, axis=1)
    matrix = CacheTensor((VALUES // ranks, 2, 3), torch.float32, parts[:1])
    turned = CacheTensor((NUMBERS, VALUES // ranks), torch.float32, parts[:1], axis=1)
    return LayerCache(0, {"inputs": inputs, "matrix": matrix, "turned": turned}, STATE)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("is_by_head", [False, True])
def test_states_are_cut_by_their_heads_and_channels(
    ranks: int, is_by_head: bool, tmp_path: Path
) -> None:
    alone = KVStore(STATES, [kept(0, 1)], CPU)
    stores = [KVStore(STATES, [kept(n, ranks)], CPU, is_shared=True) for n in range(ranks)]
    pages = opened(tmp_path, stores, is_by_head)
    payload = np.random.default_rng(3).integers(0, 255, alone.page_bytes(0), np.uint8)
    pages.put(0, 5, payload)
    alone.put(0, 5, payload)
    assert (pages.take(0, 5) == payload).all() and not pages.take(0, 4).any()
    whole = {name: pages[5].view(torch.int32) for name, pages in alone.tensors(0).items()}
    for rank, store in enumerate(stores):
        values = slice(rank * VALUES // ranks, (rank + 1) * VALUES // ranks)
        key = VALUES + rank * KEYS // ranks
        inputs = whole["inputs"]
        keys = inputs[:, key : key + max(1, KEYS // ranks)]
        right = {
            "inputs": torch.cat([inputs[:, values], keys], 1),
            "matrix": whole["matrix"][values],
            "turned": whole["turned"][:, values],
        }
        for name, mine in store.tensors(0).items():
            assert torch.equal(mine[5].view(torch.int32), right[name]), name
    assert layout_facts(pages.page_layouts, STATES) == layout_facts(page_layouts_of(alone), STATES)


def test_stages_hold_layers_one_after_another(tmp_path: Path) -> None:
    alone = KVStore(GROUPS, [layer(n, HEADS) for n in range(3)], CPU)
    stores = [shared(layer(0, HEADS), layer(1, HEADS)), shared(layer(2, HEADS)), shared()]
    pages = opened(tmp_path, stores, is_by_head=True)
    payload = np.arange(alone.page_bytes(0)).astype(np.uint8)
    pages.put(0, 2, payload)
    alone.put(0, 2, payload)
    for number, store in ((0, stores[0]), (1, stores[0]), (2, stores[1])):
        for name in ("k", "v"):
            mine, right = store.tensors(number)[name], alone.tensors(number)[name]
            assert torch.equal(mine.view(torch.uint8), right.view(torch.uint8))
    assert layout_facts(pages.page_layouts, GROUPS) == layout_facts(page_layouts_of(alone), GROUPS)


def slowed(store: KVStore, stop_s: dict[int, float], failing: int = -1) -> KVStore:
    """`store`, which moves some pages late, and one not at all."""
    take = store.take

    def taken(group: int, page: PageId) -> np.ndarray:
        time.sleep(stop_s.get(page, 0.0))
        assert page != failing, "this page is lost"
        return take(group, page)

    store.take = taken
    return store


@pytest.mark.parametrize("lame", [0, 1])
@pytest.mark.parametrize("is_afar", [False, True])
def test_a_page_that_fails_on_one_rank_spoils_no_other_page(
    lame: int, is_afar: bool, tmp_path: Path
) -> None:
    """What a rank answers late is not taken for its answer about the next page."""
    stores = [of_a_device(layer(0, 1, first=rank)) for rank in range(HEADS)]
    for rank, store in enumerate(stores):
        slowed(store, {2: 0.1, 3: 0.1} if rank > lame else {}, 2 if rank == lame else -1)
    pages = afar(stores, True) if is_afar else opened(tmp_path, stores, True)
    draw = np.random.default_rng(5)
    payloads = [draw.integers(0, 255, pages.page_bytes(0), np.uint8) for _ in range(4)]
    for page, payload in enumerate(payloads):
        pages.put(0, page, payload)
    with pytest.raises((AssertionError, OSError)):
        pages.take(0, 2)
    assert (pages.take(0, 3) == payloads[3]).all()


@pytest.mark.parametrize("is_afar", [False, True])
def test_a_rank_that_answered_too_late_is_not_asked_again(is_afar: bool, tmp_path: Path) -> None:
    stores = [of_a_device(layer(0, 2)), slowed(of_a_device(layer(0, 2, first=2)), {2: 0.6})]
    pages = afar(stores, True, 0.2) if is_afar else opened(tmp_path, stores, True, 0.2)
    with pytest.raises(TimeoutError):
        pages.take(0, 2)
    time.sleep(0.6)
    with pytest.raises(OSError, match="gone" if is_afar else "descriptor"):
        pages.take(0, 3)


def test_a_rank_of_another_machine_that_is_lost_is_not_waited_for() -> None:
    lost = list[bool]()
    door = RemoteRankAccess("127.0.0.1", lambda: bool(lost))
    stores = [shared(layer(0, 2)), slowed(shared(layer(0, 2, first=2)), {2: 30.0})]
    publish_pages_remotely(stores[1], door.address)
    pages = RankPages(stores[0], [door], True, 60.0)
    threading.Timer(0.2, lost.append, (True,)).start()
    with pytest.raises(OSError, match="another rank of this server has gone"):
        pages.take(0, 2)


def test_who_lacks_the_key_is_refused() -> None:
    door = RemoteRankAccess("127.0.0.1", lambda: False)
    assert door.address.key not in repr(door.address)
    other = zmq.curve_keypair()[0].decode()
    publish_pages_remotely(shared(layer(0, 2)), RankAddress(door.address.address, other))
    with pytest.raises(DeviceError, match="did not publish its pages from another machine"):
        RankPages(shared(layer(0, 2)), [door], True, 0.5)


def test_other_tensors_are_another_layout() -> None:
    mine = layout_facts(page_layouts_of(KVStore(GROUPS, [layer(0, HEADS)], CPU)), GROUPS)
    latent = KVStore(GROUPS, [layer(0, 0, latent=True)], CPU)
    assert layout_facts(page_layouts_of(latent), GROUPS) != mine


def test_ranks_whose_heads_are_no_whole_are_refused(tmp_path: Path) -> None:
    stores = [shared(layer(0, 1)), shared(layer(0, 1))]
    with pytest.raises(ConfigError, match="2 ranks have 1 of 4 heads"):
        opened(tmp_path, stores, is_by_head=True)


def test_a_rank_is_waited_for_and_not_for_ever(tmp_path: Path) -> None:
    link = str(tmp_path / "late")
    other = shared(layer(0, 2, first=2))
    thread = threading.Thread(target=publish_pages, args=(other, link))
    thread.start()
    assert RankPages(shared(layer(0, 2)), [LocalRankAccess(link)], True, 5.0).page_bytes(0)
    thread.join()
    with pytest.raises(DeviceError, match="did not publish its pages"):
        RankPages(shared(layer(0, 2)), [LocalRankAccess(str(tmp_path / "never"))], True, 0.01)


def test_shared_pages_are_given_back_and_are_zero() -> None:
    store = shared(layer(0, HEADS))
    store.tensors(0)["k"][3] = 7.0
    store.release()
    assert not store.tensors(0)["k"].any()


def test_a_rank_that_cannot_move_a_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [of_a_device(layer(0, 2, first=first)) for first in (0, 2)]
    pages = opened(tmp_path, stores, is_by_head=False)
    right = pages.take(0, PageId(1))

    def fail(group: int, page: PageId) -> np.ndarray:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(stores[1], "take", fail)
    with pytest.raises(OSError, match="another rank of this server cannot move a page"):
        pages.take(0, PageId(1))
    monkeypatch.undo()
    assert (pages.take(0, PageId(1)) == right).all(), "it is asked again"


class Met(Group):
    """Of several ranks that have come, each to the same place."""

    def __init__(self, store: KVStore) -> None:
        super().__init__()
        self.store, self.found = store, list[float]()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.found.append(float(self.store.tensors(0)["turned"][2].sum()))
        return x


def test_ranks_wait_for_the_states_that_each_other_has_kept() -> None:
    """Else rank 0 would give away what another rank has not copied yet."""
    moved = PageCopy(1, 0, device_page(PageId(1)), device_page(PageId(2)), "after")
    before = PageCopy(2, 0, device_page(PageId(1)), device_page(PageId(2)), "before")
    store = KVStore(STATES, [kept(0, 1)], CPU, is_shared=True)
    store.tensors(0)["turned"][1] = 1.0
    ranks = Met(store)
    for copies in ([before], [moved, before]):
        store.copy(copies, "after")
        end_together(store, copies, ranks)
    assert ranks.found == [float(NUMBERS * VALUES)]
    assert (store.tensors(0)["turned"][2] == 1.0).all()
