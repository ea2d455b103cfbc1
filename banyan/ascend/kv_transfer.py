"""The mover of --disaggregation-transfer-backend ascend: pages are written by MemFabric's transfer
engine from memory of one NPU to the memory of another.

Engines meet at the store that ASCEND_MF_STORE_URL names, which a prefill server of that machine
creates. What an engine reads and writes is registered once, in one piece: places where pages land,
and areas that pages are sent from. Neither is the cache: who reaches an engine reaches no more.
"""

import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import numpy as np

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.disaggregation.backends import open_with_engine
from banyan.disaggregation.transfer import TransferOptions
from banyan.disaggregation.transfer_engine import Fabric, Landing, TransferMemory
from banyan.kv_transfer.page_mover import PageMover, Pages

log = logger(__name__)

AREA_BYTES, AREAS = 16 << 20, 4
"""Memory that pages are sent from, and how many threads send at once."""
_FLAG = "--disaggregation-transfer-backend ascend"
_STORE = "ASCEND_MF_STORE_URL"
_URL = re.compile(r"tcp://(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+)):(\d{1,5})")
_CONNECT_S, _LOOK_S = 2.0, 0.2


class Ascend:
    """Satisfies TransferEngine. A page may be larger than an area: it is sent in pieces.

    Raises:
        ConfigError: the device is none that MemFabric copies from, the store cannot be reached or
            created, or the engine does not start.
    """

    name = "ascend"

    def __init__(self, host: str, options: TransferOptions) -> None:
        fabric = options.fabric()
        if fabric is None:
            raise ConfigError(
                f"{_FLAG}: MemFabric copies between Ascend NPUs, and this device is none",
                hint="use tcp, mooncake or nixl, or --device npu",
            )
        self._fabric = fabric
        store = _open_store(fabric, options)
        engine = self._engine = fabric.library.TransferEngine()
        status = engine.initialize(
            store_url=store,
            session_id=f"{host}:{engine.get_rpc_port()}",
            role="Prefill" if options.is_prefill else "Decode",
            device_id=fabric.device,
            data_op_type=getattr(fabric.library.TransDataOpType, fabric.protocol.upper()),
        )
        if status:
            raise ConfigError(
                f"{_FLAG}: its engine does not start at {host} by {fabric.protocol} (status "
                f"{status})",
                hint="look at what MemFabric has written above: the driver, the store at "
                f"{store}, and ASCEND_MF_TRANSFER_PROTOCOL",
            )
        self._address = f"{host}:{engine.get_rpc_port()}".encode()  # known only now
        self._areas: SimpleQueue[int] = SimpleQueue()
        if options.is_prefill:
            self._source = self._register(AREAS * AREA_BYTES)
            for area in range(AREAS):
                self._areas.put(area * AREA_BYTES)

    def land(self, size_bytes: int) -> tuple[bytes, TransferMemory]:
        return self._address, self._register(size_bytes)

    def write(self, landing: Landing, pages: Sequence[tuple[int, np.ndarray]]) -> None:
        area = self._areas.get()
        try:
            for parcel in _parcels(pages):
                self._send(landing, parcel, area)
        finally:
            self._areas.put(area)

    def _send(self, landing: Landing, parcel: list[tuple[int, np.ndarray]], area: int) -> None:
        sizes = [len(piece) for _, piece in parcel]
        places = np.cumsum([area, *sizes[:-1]]).tolist()
        for (_, piece), place in zip(parcel, places, strict=True):
            self._source.write(place, piece)
        peer = landing.address.decode()
        status = self._engine.batch_transfer_sync_write(
            dest_session=peer,
            buffers=[self._source.address + place for place in places],
            peer_buffers=[landing.base + offset for offset, _ in parcel],
            lengths=sizes,
        )
        if status:
            raise OSError(f"MemFabric cannot write to {peer} (status {status})")

    def _register(self, size_bytes: int) -> TransferMemory:
        """All that this engine reads or writes, at once: MemFabric takes whole pieces of 2 MiB, and
        two registrations must not have one in common."""
        memory = self._fabric.allocate(size_bytes)
        status = self._engine.batch_register_memory(
            buffer_addrs=[memory.address], capacities=[memory.size_bytes]
        )
        if status:
            raise ConfigError(
                f"{_FLAG}: MemFabric does not take {memory.size_bytes:,} bytes of the device "
                f"(status {status})",
                hint="look at what it has written above",
            )
        return memory


def _parcels(pages: Sequence[tuple[int, np.ndarray]]) -> Iterator[list[tuple[int, np.ndarray]]]:
    """Pages, in pieces that fit into an area together."""
    parcel, room = list[tuple[int, np.ndarray]](), AREA_BYTES
    for offset, page in pages:
        at = 0
        while at < len(page):
            piece = page[at : at + room]
            parcel.append((offset + at, piece))
            at, room = at + len(piece), room - len(piece)
            if not room:
                yield parcel
                parcel, room = [], AREA_BYTES
    if parcel:
        yield parcel


def _open_store(fabric: Fabric, options: TransferOptions) -> str:
    """The store's URL with an address instead of a name, which MemFabric does not take; where a
    prefill server is at that address and the store is not there yet, it is from now on."""
    found = _URL.fullmatch(fabric.store)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        raise ConfigError(
            f"{_FLAG}: {_STORE}={fabric.store} is not tcp://HOST:PORT",
            hint="set it to an address of the first prefill server's machine, alike on all servers",
        )
    try:
        (*_, place), *_ = socket.getaddrinfo(found[1] or found[2], int(found[3]), proto=6)
    except OSError as error:
        raise ConfigError(
            f"{_FLAG}: {_STORE}={fabric.store}: nothing has that name: {error.strerror}",
            hint="name an address",
        ) from None
    host, port = str(place[0]), int(place[1])
    url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    may_create = options.is_prefill and not options.replica and _is_here(host)
    until = time.monotonic() + options.patience_s
    if not _is_there(host, port) and may_create:
        if not fabric.library.create_config_store(store_url=url):
            log.info("the store of MemFabric is at %s; it asks nobody for a secret", url)
            return url
        until = time.monotonic()  # unless another server has just created it, nobody will
    elif not _is_there(host, port):
        log.info("waiting for the store of MemFabric at %s", url)
    while not _is_there(host, port):
        if time.monotonic() >= until:
            what = "cannot be created" if may_create else "was not there"
            raise ConfigError(
                f"{_FLAG}: the store at {url} {what} within {options.patience_s:g} s",
                hint=f"{_STORE} names the machine of a prefill server, and a port that is free "
                "there and that others may reach",
            )
        time.sleep(_LOOK_S)
    return url


def _is_here(host: str) -> bool:
    """Whether it is an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        try:
            tried.bind((host, 0))
        except OSError:
            return False
    return True


def _is_there(host: str, port: int) -> bool:
    """Whether anybody listens there."""
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError:
        return False
    return True


def open_ascend(pages: Pages, options: TransferOptions, wake: Callable[[], None]) -> PageMover:
    return open_with_engine(Ascend, pages, options, wake)
