"""Rooms whose pages an engine carries: what lands, what does not, and who is notified."""

import ctypes
import logging
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from banyan.ascend.kv_transfer import Ascend
from banyan.base.errors import BanyanError, ConfigError
from banyan.disaggregation import decode_side as taking
from banyan.disaggregation import rules, wire
from banyan.disaggregation.backends import Mooncake, Nixl
from banyan.disaggregation.decode_side import DecodeSide
from banyan.disaggregation.prefill_side import PrefillSide
from banyan.disaggregation.transfer import TransferOptions
from banyan.disaggregation.transfer_engine import BATCH, Fabric, HostMemory, Landing, code_of
from banyan.llm import Engine
from banyan.messages.disaggregation import (
    PrefillResult,
    ReceiveTransfer,
    TransferFailed,
    TransferFound,
)
from banyan.messages.plan import CopyResult, PageCopy, device_page, peer_page
from tests.ascend.emulation import fabric
from tests.support.configs import MODEL_CONFIG, NOTHING
from tests.support.flags import config_of
from tests.support.page_transfer import ROOM, SIZE, SMALL, Pages, Side, free_port, give, seek, take
from tests.system.checkpoint import write_tiny_model


class EngineInMemory:
    """An engine whose two ends are one process.

    Attributes:
        fails: what a write raises.
        spoil: called with what was written where, behind the back of both servers.
    """

    name = "memory"

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.spoil: Callable[[int], None] = lambda target: None
        self.batches: list[int] = []

    def land(self, size_bytes: int) -> tuple[bytes, HostMemory]:
        return b"here", HostMemory(size_bytes)

    def write(self, landing: Landing, pages: Sequence[tuple[int, np.ndarray]]) -> None:
        assert landing.address == b"here"
        if self.fails is not None:
            raise self.fails
        self.batches.append(len(pages))
        for offset, page in pages:
            assert 0 <= offset <= landing.size_bytes - page.nbytes
            ctypes.memmove(landing.base + offset, page.ctypes.data, page.nbytes)
            self.spoil(landing.base + offset)


class MemFabric(Ascend):
    """The engine of `ascend` over the emulated engine and host memory; as EngineInMemory."""

    fails: Exception | None = None

    def __init__(self, host: str, options: TransferOptions) -> None:
        super().__init__(host, options)
        self.batches: list[int] = []

    def write(self, landing: Landing, pages: Sequence[tuple[int, np.ndarray]]) -> None:
        if self.fails is not None:
            raise self.fails
        self.batches.append(len(pages))
        super().write(landing, pages)


def in_memory(port: int) -> tuple[Side, Side, EngineInMemory]:
    engine = EngineInMemory()
    giver = Side(lambda *given: PrefillSide(*given, engine), port, is_prefill=True)
    taker = Side(lambda *given: DecodeSide(*given, engine), port, is_prefill=False)
    return giver, taker, engine


def by_memfabric(port: int) -> tuple[Side, Side, MemFabric]:
    made: list[MemFabric] = []

    def open_(kind: type) -> Callable[..., object]:
        def open_one(pages: object, options: TransferOptions, wake: object) -> object:
            made.append(MemFabric("127.0.0.1", options))
            return kind(pages, options, wake, made[-1])

        return open_one

    with socket.create_server(("127.0.0.1", 0)) as store:  # another prefill server has made it
        url = f"tcp://127.0.0.1:{store.getsockname()[1]}"
        found = Fabric(fabric, 0, "sdma", url, HostMemory)
        given = {"fabric": lambda: found}
        giver = Side(open_(PrefillSide), port, is_prefill=True, **given)
        taker = Side(open_(DecodeSide), port, is_prefill=False, **given)
    made[1]._engine.landed = lambda at: made[0].spoil(at)
    made[0].spoil = lambda at: None
    return giver, taker, made[0]


@pytest.fixture(params=[in_memory, by_memfabric])
def sides(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[Side, Side, EngineInMemory | MemFabric]]:
    port = free_port()
    giver, taker, engine = request.param(port)
    taker.peer = f"127.0.0.1:{port}"
    yield giver, taker, engine
    giver.mover.close()
    taker.mover.close()


def bring(taker: Side, units: int) -> None:
    """All of a room: unit n into page n + 1, by copy n + 1."""
    seek(taker, units)
    taker.hear(TransferFound)
    take(taker, list(range(units)))


def test_pages_land_and_are_put_where_copies_say(sides) -> None:
    giver, taker, engine = sides
    giver.pages.bytes[4], giver.pages.bytes[5] = 44, 55
    give(giver, [4, 5])
    bring(taker, 2)
    assert taker.hear(CopyResult).ids == [1, 2]
    assert taker.hear(PrefillResult).transfer_id == ROOM
    assert (taker.pages.bytes[1] == 44).all() and (taker.pages.bytes[2] == 55).all()
    assert engine.batches == [2]


def test_many_pages_take_turns_in_the_slots(sides) -> None:
    giver, taker, engine = sides
    slots = taker.mover._slots
    slots.free = slots.free[-3:]
    for page in range(8):
        giver.pages.bytes[page] = page + 1
    give(giver, list(range(8)))
    bring(taker, 8)
    came = [at for _ in range(3) for at in taker.hear(CopyResult).ids]
    taker.hear(PrefillResult)
    assert came == [1, 2, 3, 4, 5, 6, 7, 8] and engine.batches == [3, 3, 2]
    assert (taker.pages.bytes[1:9] == np.arange(1, 9)[:, None]).all()
    assert len(slots.free) == 3


def test_an_engine_carries_pages_in_the_size_that_is_wanted() -> None:
    """And writes no more than that into the places that it is granted."""
    engine, port = EngineInMemory(), free_port()
    giver = Side(lambda *given: PrefillSide(*given, engine), port, is_prefill=True)
    (form,) = SMALL

    def open_taker(pages: Pages, *rest: object) -> DecodeSide:
        pages.page_bytes = lambda group: form.size_bytes
        pages.bytes = np.zeros((10, form.size_bytes), np.uint8)
        return DecodeSide(pages, *rest, engine)

    taker = Side(open_taker, port, is_prefill=False, forms=SMALL)
    taker.peer = f"127.0.0.1:{port}"
    try:
        giver.pages.bytes[4:6] = np.arange(2 * SIZE).reshape(2, SIZE)
        seek(taker, 2)
        give(giver, [4, 5])
        taker.hear(TransferFound)
        copies = [
            PageCopy(at + 1, 0, peer_page(ROOM, form.tokens * at), device_page(at), "before")
            for at in range(4)
        ]
        taker.mover.execute([ReceiveTransfer(ROOM, len(copies))])
        taker.mover.start(copies)
        assert taker.hear(CopyResult).ids == [1, 2, 3, 4] and engine.batches == [4]
        taker.hear(PrefillResult)
        assert (taker.pages.bytes.ravel()[: 2 * SIZE] == np.arange(2 * SIZE)).all()
        landed = taker.mover._slots.memory.read(0, taker.mover._slots.memory.size_bytes)
        assert np.count_nonzero(landed) == 2 * SIZE - 1, "nothing else was written"
    finally:
        for side in (giver, taker):
            side.mover.close()


def test_a_page_that_others_write_to_while_it_lands_is_noticed(
    sides, caplog: pytest.LogCaptureFixture
) -> None:
    giver, taker, engine = sides
    engine.spoil = lambda target: ctypes.memset(target + 7, 9, 1) and None
    give(giver, [4])
    bring(taker, 1)
    assert taker.hear(CopyResult).failed == [1]
    assert taker.hear(PrefillResult).transfer_id == ROOM, (
        "its tokens are computed, and the request goes on"
    )
    assert not taker.pages.bytes.any()
    assert f"was changed on its way ({engine.name})" in caplog.text


def test_an_engine_that_cannot_carry_is_reported_once_and_requests_go_on(
    sides, caplog: pytest.LogCaptureFixture
) -> None:
    giver, taker, engine = sides
    engine.fails = OSError("the engine is dead")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            give(giver, [4, 5])
            bring(taker, 2)
            assert taker.hear(CopyResult).failed == [1, 2]
            taker.hear(PrefillResult)
    assert caplog.text.count("the engine is dead") == 1
    engine.fails = None
    give(giver, [4])
    bring(taker, 1)
    assert taker.hear(CopyResult).ids == [1], "it is tried again"


def test_codes_for_another_number_of_pages_end_the_room(
    sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile server that knows the secret."""
    giver, taker, _ = sides

    async def write_all(engine, channel, room, wants, heard) -> None:
        await giver.mover._next(channel, heard, wire.GRANT)
        await channel.send(wire.SENT, wire.pack(wire.SentCodes([bytes(16)] * 3)))

    monkeypatch.setattr(giver.mover, "_write_all", write_all)
    give(giver, [4])
    bring(taker, 1)
    lost = taker.hear(TransferFailed)
    assert lost.status == 503 and "3 codes for 1 pages" in lost.text
    assert taker.hear(CopyResult).failed == [1]
    assert not taker.pages.bytes.any()


def test_a_code_belongs_to_one_page_in_one_place_of_one_connection() -> None:
    page, other = np.zeros(32, np.uint8), np.ones(32, np.uint8)
    codes = [
        code_of(page, b"k", 0),
        code_of(page, b"k", 1),
        code_of(page, b"l", 0),
        code_of(other, b"k", 0),
    ]
    assert len(dict.fromkeys(codes)) == 4 and codes[0] == code_of(page.copy(), b"k", 0)
    assert BATCH >= taking._REPORTED_AT_ONCE


def named_devices(devices: str) -> TransferOptions:
    return TransferOptions(True, "127.0.0.1", 1, "", {}, 8, 1.0, 1.0, rdma_devices=devices)


@pytest.mark.parametrize(
    ("devices", "protocol"), [("", "tcp"), ("mlx5_0,mlx5_1", "rdma")], ids=["none", "two"]
)
def test_the_devices_that_are_named_reach_the_engines(
    devices: str, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against stand-ins of the packages, which note what they are given."""
    given = list[object]()

    class Engine:
        def initialize(self, *words: str) -> int:
            given.append(words)
            return 0

        def get_rpc_port(self) -> int:
            return 5

    def agent(name: str, backends: list[str]) -> object:
        assert not backends
        return SimpleNamespace(create_backend=lambda *words: given.append(words))

    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", SimpleNamespace(TransferEngine=Engine))
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    api = SimpleNamespace(nixl_agent=agent, nixl_agent_config=lambda backends: backends)
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    Mooncake("127.0.0.1", named_devices(devices))
    Nixl("127.0.0.1", named_devices(devices))
    named = {"device_list": devices} if devices else {}
    assert given == [("127.0.0.1", "P2PHANDSHAKE", protocol, devices), ("UCX", named)]


def test_devices_of_mooncake_reach_its_store_and_its_transfers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[tuple[object, ...]]()

    class Client:
        def setup(self, *words: object) -> int:
            given.append(words)
            return 1

    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(rules, "RDMA_FOLDER", str(tmp_path))
    monkeypatch.setattr(rules, "find_spec", lambda name: name)
    monkeypatch.setattr("banyan.kv_transfer.mooncake_store._client_kind", lambda: Client)
    monkeypatch.setattr("banyan.kv_transfer.mooncake_store._check_master", lambda address: None)
    words = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake")
    config = config_of(*words, "--mooncake-ib-device", "mlx5_0")
    assert (
        rules.check_disaggregation(config, MODEL_CONFIG, NOTHING).handoff.rdma_devices == "mlx5_0"
    )
    both = config_of(*words, "--mooncake-ib-device", "mlx5_0", "--disaggregation-ib-device", "a")
    with pytest.raises(ConfigError, match="--disaggregation-ib-device a: .*no RDMA device 'a'"):
        rules.check_disaggregation(both, MODEL_CONFIG, NOTHING)
    with pytest.raises(BanyanError, match="its client does not start"):
        Engine(
            str(write_tiny_model(tmp_path / "model")),
            engine_mode="inprocess",
            enable_hierarchical_cache=True,
            hicache_storage_backend="mooncake",
            hicache_storage_backend_extra_config={
                "master_server_address": "h:1",
                "global_segment_size": 0,
            },
            mooncake_ib_device="mlx5_0",
        )
    assert [words[4:6] for words in given] == [("rdma", "mlx5_0")]


def test_devices_that_are_not_there_end_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "RDMA_FOLDER", str(tmp_path))
    monkeypatch.setattr(rules, "find_spec", lambda name: name)
    (tmp_path / "mlx5_0").mkdir()

    def checked(devices: str, engine: str) -> None:
        words = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", engine)
        config = config_of(*words, "--disaggregation-ib-device", devices)
        rules.check_disaggregation(config, MODEL_CONFIG, NOTHING)

    checked("mlx5_0:1", "nixl")
    checked("mlx5_0", "mooncake")
    with pytest.raises(ConfigError, match="has no RDMA device 'mlx5_1'"):
        checked("mlx5_0,mlx5_1", "mooncake")
    with pytest.raises(ConfigError, match="tcp takes no devices by name"):
        checked("mlx5_0", "tcp")
