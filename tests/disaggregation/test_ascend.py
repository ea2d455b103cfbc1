"""MemFabric as a carrier: its store, what its engine is asked, and what it refuses. The engine is
emulated; the store is the package's where that is installed (`make test-transfer`)."""

import inspect
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest

from banyan.ascend import kv_transfer as ascend
from banyan.ascend.kv_transfer import AREA_BYTES, Ascend
from banyan.base.errors import ConfigError
from banyan.disaggregation.transfer import TransferOptions
from banyan.disaggregation.transfer_engine import Fabric, HostMemory, Landing
from tests.ascend.emulation import fabric
from tests.support.page_transfer import free_port

HERE = "127.0.0.1"
PACKAGE = "memfabric_hybrid"
needs_package = pytest.mark.skipif(
    find_spec(PACKAGE) is None, reason="memfabric-hybrid is not installed; make test-transfer"
)


def opened(
    url: str, is_prefill: bool, patience_s: float = 0.3, protocol: str = "sdma", **changed: object
) -> Ascend:
    found = Fabric(fabric, 0, protocol, url, HostMemory)
    given = {"facts": {}, "vocab_size": 9, "lease_s": 1.0, "secret": "", "port": 1}
    given |= {"fabric": lambda: found, "patience_s": patience_s, **changed}
    return Ascend(HERE, TransferOptions(is_prefill, HERE, **given))


@pytest.fixture
def url() -> Iterator[str]:
    """Of a store that another server has made."""
    with socket.create_server((HERE, 0)) as store:
        yield f"tcp://{HERE}:{store.getsockname()[1]}"


def bytes_of(size: int) -> np.ndarray:
    return (np.arange(size) * 31 % 251).astype(np.uint8)


def test_pages_larger_than_what_they_are_sent_from_come_whole(url: str) -> None:
    giver, taker = opened(url, is_prefill=True), opened(url, is_prefill=False)
    page = bytes_of(AREA_BYTES + 7)
    address, memory = taker.land(2 * len(page) + 9)
    landing = Landing(address, memory.address, memory.size_bytes)
    giver.write(landing, [(9, page), (9 + len(page), page)])
    assert (memory.read(9, len(page)) == page).all()
    assert (memory.read(9 + len(page), len(page)) == page).all()
    assert not memory.read(0, 9).any()
    assert giver._areas.qsize() == ascend.AREAS


def test_nothing_is_written_where_nobody_may(url: str) -> None:
    """A taker that asks for pages elsewhere gets none, and the giver goes on."""
    giver, taker = opened(url, is_prefill=True), opened(url, is_prefill=False)
    address, memory = taker.land(100)
    secret = HostMemory(100)
    elsewhere = Landing(address, secret.address, secret.size_bytes)
    for _ in range(2 * ascend.AREAS):
        with pytest.raises(OSError, match=r"cannot write to 127.0.0.1:\d+ \(status -1\)"):
            giver.write(elsewhere, [(0, bytes_of(10))])
    with pytest.raises(OSError, match="status -1"):
        giver.write(Landing(address, memory.address, 100), [(95, bytes_of(10))])
    assert not secret.read(0, 100).any() and not memory.read(0, 100).any()
    giver.write(Landing(address, memory.address, 100), [(0, bytes_of(10))])
    assert (memory.read(0, 10) == bytes_of(10)).all()


def test_a_peer_that_is_gone_is_reported(url: str) -> None:
    giver = opened(url, is_prefill=True)
    gone = Landing(f"{HERE}:{free_port()}".encode(), 1 << 21, 1 << 21)
    with pytest.raises(OSError, match="status -1"):
        giver.write(gone, [(0, bytes_of(10))])


def test_memory_is_registered_in_one_piece(url: str) -> None:
    taker = opened(url, is_prefill=False)
    _, memory = taker.land(100)
    near = memory.address + 100
    assert taker._engine.batch_register_memory([near], [1]) == -1, "it shares a block"


def test_a_device_that_memfabric_does_not_copy_from_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"backend ascend: .* this device is none"):
        opened(url, is_prefill=True, fabric=lambda: None)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "ASCEND_MF_STORE_URL= is not tcp://HOST:PORT"),
        ("127.0.0.1:6670", "is not tcp://HOST:PORT"),
        ("udp://127.0.0.1:6670", "is not tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "is not tcp://HOST:PORT"),
        ("tcp://127.0.0.1:0", "is not tcp://HOST:PORT"),
        ("tcp://127.0.0.1:65536", "is not tcp://HOST:PORT"),
        ("tcp://127.0.0.1:6670/x", "is not tcp://HOST:PORT"),
        ("tcp://no.such.invalid:6670", "nothing has that name"),
    ],
)
@pytest.mark.parametrize("is_prefill", [True, False])
def test_a_store_that_is_no_address_is_refused(url: str, why: str, is_prefill: bool) -> None:
    with pytest.raises(ConfigError, match=why):
        opened(url, is_prefill)


def test_a_store_that_nobody_makes_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric, "create_config_store", lambda store_url: -1)
    url = f"tcp://{HERE}:{free_port()}"
    with pytest.raises(ConfigError, match=r"was not there within 0\.3 s"):
        opened(url, is_prefill=False)
    with pytest.raises(ConfigError, match="cannot be created"):
        opened(url, is_prefill=True)
    with pytest.raises(ConfigError, match="was not there"):
        opened(url, is_prefill=True, replica=1, replicas=2)
    monkeypatch.setattr(ascend, "_is_here", lambda host: False)
    with pytest.raises(ConfigError, match="was not there"):
        opened(url, is_prefill=True)


def test_an_engine_that_does_not_start_ends_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match=r"does not start at 127.0.0.1 by host_rdma \(status -1"):
        opened(url, is_prefill=True, protocol="host_rdma")


def test_the_store_has_an_address_where_a_name_was_given(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package takes no names."""
    asked: list[str] = []
    begin = fabric.TransferEngine.initialize

    def initialize(engine: fabric.TransferEngine, store_url: str, **given: object) -> int:
        asked.append(store_url)
        return begin(engine, store_url, **given)

    monkeypatch.setattr(fabric.TransferEngine, "initialize", initialize)
    opened(url.replace(HERE, "localhost"), is_prefill=True)
    assert asked == [url]


# -- the package -----------------------------------------------------------------------------


SERVE = """
import sys
import memfabric_hybrid
print(memfabric_hybrid.create_config_store(store_url=sys.argv[1]), flush=True)
sys.stdin.read()
"""


@needs_package
def test_the_first_prefill_server_makes_the_store_and_others_find_it() -> None:
    """The store is a process of its own here, as it is for the others."""
    url = f"tcp://{HERE}:{free_port()}"
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, url], stdin=-1, stdout=-1, text=True
    ) as first:
        try:
            assert any(line.strip() == "0" for line in first.stdout)
            for is_prefill in (True, False):
                opened(url, is_prefill)
            assert fabric.create_config_store(url) != 0, "two of them cannot be at one place"
        finally:
            first.stdin.close()
            first.kill()


@needs_package
def test_a_prefill_server_makes_the_store_of_the_package() -> None:
    url = f"tcp://{HERE}:{free_port()}"
    giver = opened(url, is_prefill=True)
    taker = opened(url, is_prefill=False)
    address, memory = taker.land(100)
    giver.write(Landing(address, memory.address, 100), [(0, bytes_of(100))])
    assert (memory.read(0, 100) == bytes_of(100)).all()


@needs_package
@pytest.mark.parametrize(
    "name", [name for name in vars(fabric.TransferEngine) if not name.startswith("_")]
)
def test_calls_are_those_of_the_package(name: str) -> None:
    import memfabric_hybrid

    mine = inspect.signature(getattr(fabric.TransferEngine, name))
    said = getattr(memfabric_hybrid.TransferEngine, name).__doc__.strip()
    inside = said[said.index("(") + 1 : said.rindex(") -> ")]
    theirs = re.findall(r"(?:^|, )(\w+): [^=,]*(?:\[[^\]]*\])*[^=,]*(= [^,]+)?", inside)
    assert [name for name, _ in theirs] == list(mine.parameters)
    optional = [at for at, (_, default) in enumerate(theirs) if default]
    given = list(mine.parameters.values())
    assert optional == [at for at, each in enumerate(given) if each.default is not each.empty]


@needs_package
def test_protocols_and_the_store_are_those_of_the_package() -> None:
    import memfabric_hybrid

    theirs = memfabric_hybrid.TransDataOpType.__members__
    assert {name: each.value for name, each in theirs.items()} == {
        each.name: each.value for each in fabric.TransDataOpType
    }
    assert memfabric_hybrid.create_config_store.__doc__.startswith(
        f"create_config_store{str(inspect.signature(fabric.create_config_store)).split(')')[0]}"
    )


@needs_package
def test_the_engine_of_the_package_takes_the_calls_and_finds_no_driver() -> None:
    """It refuses to start without a driver, with a status and no exception."""
    import memfabric_hybrid

    with socket.create_server((HERE, 0)) as store:
        url = f"tcp://{HERE}:{store.getsockname()[1]}"
        found = Fabric(memfabric_hybrid, 0, "sdma", url, HostMemory)
        with pytest.raises(ConfigError, match=r"does not start at 127.0.0.1 by sdma \(status -"):
            opened(url, is_prefill=True, fabric=lambda: found)
