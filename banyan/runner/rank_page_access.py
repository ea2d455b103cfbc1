"""RankAccess: how rank 0 reads and writes the KV pages of the other ranks of its replica.
PageLayout: where the pages of one rank lie, tensor by tensor, and which share each holds.

A rank on the same machine publishes its pages in a file (`LocalRankAccess`). Rank 0 maps them;
pages on a device are reached through a window, one page of host memory. A rank on another machine
is reached over an encrypted connection (`RemoteRankAccess`), one page at a time. Only ranks that
were sent the connection's key can connect.
"""

import math
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
import numpy as np
import torch
import zmq

from banyan.base.errors import DeviceError
from banyan.base.ids import PageId
from banyan.base.log import logger
from banyan.base.os import anonymous_memory
from banyan.disaggregation.page_cutting import Block, PageForm
from banyan.layers.cache_spec import LayerCache, ShardedAxis
from banyan.model_config.model_config import STATE
from banyan.runner.kvstore import GroupLayout, KVStore

log = logger(__name__)

_BRING, _PUT = 1, 2
_REQUEST = struct.Struct("<BIQ")
"""A request: operation, group, page."""
_DONE, _FAILED = b"\0", b"\1"
_CHECK_MS = 100
"""How often a wait for another machine checks whether that machine is lost."""


class PageLayout(msgspec.Struct, frozen=True):
    """The pages of one tensor of one layer on one rank.

    Attributes:
        at: first byte in the rank's memory.
        page_bytes: size of one page.
        dtype, shape: of one token's entry, or of one state.
        shared: which parts of it ranks share; () = each rank has it whole. With parts, shape[axis]
            counts the parts of all ranks together.
        is_state: one entry per page, not per token.
        is_spread: one entry per page, spread over the page's tokens.
    """

    group: int
    layer: int
    name: str
    at: int
    page_bytes: int
    dtype: str
    shape: tuple[int, ...]
    shared: tuple[ShardedAxis, ...]
    axis: int
    is_state: bool
    is_spread: bool = False

    @property
    def fact(self) -> tuple[object, ...]:
        """The properties that do not depend on the number of ranks or the page size."""
        sizes = tuple(part.size for part in self.shared)
        shape = () if self.is_spread else self.shape
        return self.group, self.layer, self.name, self.dtype, shape, sizes, self.axis


def page_layouts_of(store: KVStore) -> list[PageLayout]:
    """The layouts of one rank, by layer."""
    return [
        _page_layout(store.groups, store.group_of(cache.layer), cache, name, store.places)
        for cache in store.caches
        for name in cache.tensors
    ]


def window_layouts(page_layouts: Sequence[PageLayout]) -> list[PageLayout]:
    """The same tensors in a window, which holds one page."""
    ends: dict[int, int] = {}
    moved: list[PageLayout] = []
    for page_layout in page_layouts:
        at = ends.get(page_layout.group, 0)
        moved.append(msgspec.structs.replace(page_layout, at=at))
        ends[page_layout.group] = at + page_layout.page_bytes
    return moved


def _page_layout(
    groups: Sequence[GroupLayout],
    group: int,
    cache: LayerCache,
    name: str,
    places: dict[int, dict[str, int]],
) -> PageLayout:
    tensor, is_state = cache.tensors[name], groups[group].kind == STATE
    shape = list(tensor.shape)
    if tensor.shared:
        shape[tensor.axis] = sum(part.size for part in tensor.shared)
    return PageLayout(
        group=group,
        layer=cache.layer,
        name=name,
        at=places[cache.layer].get(name, 0),
        page_bytes=tensor.size_bytes * (1 if is_state else groups[group].page_size),
        dtype=str(tensor.dtype),
        shape=tuple(shape),
        shared=tensor.shared,
        axis=tensor.axis,
        is_state=is_state,
        is_spread=tensor.is_spread,
    )


def layout_facts(
    page_layouts: Sequence[PageLayout], groups: Sequence[GroupLayout]
) -> tuple[object, ...]:
    """Facts that must be equal on two servers whose pages may be cut for different numbers of
    ranks and tokens."""
    kinds = [(group.kind, group.window) for group in groups]
    return (kinds, sorted(dict.fromkeys(page_layout.fact for page_layout in page_layouts)))


PartsOfHead = Callable[[str, int, torch.dtype], tuple[tuple[int, int], ...]]
"""(name, width, dtype) of a tensor with consecutive heads -> `Block.parts` of one head."""


def forms_of(
    page_layouts: Sequence[PageLayout], groups: Sequence[GroupLayout], by_head: PartsOfHead | None
) -> tuple[PageForm, ...]:
    """Layout of tokens in transferred pages of each group: layers in order, tensors as declared,
    all heads.

    Args:
        page_layouts: of all ranks.
        by_head: None = the heads of one token are stored together.
    """
    found = {(page_layout.layer, page_layout.name): page_layout for page_layout in page_layouts}
    names = list(dict.fromkeys(page_layout.name for page_layout in page_layouts))
    blocks: list[list[Block]] = [[] for _ in groups]
    for layer, name in sorted(found, key=lambda key: (key[0], names.index(key[1]))):
        page_layout = found[layer, name]
        if not page_layout.is_state:
            dtype: torch.dtype = getattr(torch, page_layout.dtype.removeprefix("torch."))
            if by_head is not None and page_layout.shared:
                heads, width = page_layout.shape
                blocks[page_layout.group].append(Block(heads, by_head(name, width, dtype)))
            else:
                parts = ((1, math.prod(page_layout.shape) * dtype.itemsize),)
                blocks[page_layout.group].append(Block(1, parts))
    fixed = {page_layout.group for page_layout in page_layouts if page_layout.is_spread}
    return tuple(
        PageForm(0)
        if group.kind == STATE
        else PageForm(group.page_size, None if at in fixed else tuple(mine))
        for at, (group, mine) in enumerate(zip(groups, blocks, strict=True))
    )


class PageWindow:
    """Host memory for one page of this rank, which rank 0 maps.

    Rank 0 asks over a socket to copy a page into the window, or out of it. A thread of the rank
    does that in the order of its steps' stream, whatever the thread that takes plans is doing.
    Between machines both ends have such memory, and its bytes travel with the request or the reply.

    Attributes:
        file: descriptor of the memory.
        memory: the same, uint8.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        size = max(store.page_bytes(group) for group in range(len(store.groups)))
        self.file = anonymous_memory("banyan-window", max(size, 1))
        self.memory = np.frombuffer(mmap.mmap(self.file, max(size, 1)), np.uint8)

    def ask(self, is_put: bool, group: int, page: PageId) -> None:
        """Copy a page into the window, or (is_put) from the window to its place."""
        if is_put:
            size = self._store.page_bytes(group)
            self._store.put(group, page, self.memory[:size])
            return
        with self._store.stream():
            payload = self._store.take(group, page)
        self.memory[: len(payload)] = payload

    def wait(self) -> None:
        """`ask` has already done it."""

    def serve(self, address: str) -> None:
        """Serve rank 0's requests at this socket path in a thread, until it disconnects."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(address)
        listener.listen(1)
        threading.Thread(target=self._serve, args=(listener,), name="window", daemon=True).start()

    def _serve(self, listener: socket.socket) -> None:
        with listener:
            rank_0, _ = listener.accept()
        with rank_0, suppress(ConnectionError):  # rank 0 has given up and reports why
            while request := rank_0.recv(_REQUEST.size):
                rank_0.send(self._answer(*_REQUEST.unpack(request)))

    def serve_remote(self, rank_0: "zmq.Socket[bytes]") -> None:
        """Serve requests of rank 0 on another machine, as long as this process lives."""
        while True:
            request, *parts = rank_0.recv_multipart()
            what, group, page = _REQUEST.unpack(request)
            if what == _PUT:
                self.memory[: len(parts[0])] = np.frombuffer(parts[0], np.uint8)
            answer = self._answer(what, group, page)
            size = self._store.page_bytes(group) if what == _BRING and answer == _DONE else 0
            rank_0.send_multipart([answer, self.memory[:size].tobytes()])

    def _answer(self, what: int, group: int, page: int) -> bytes:
        try:
            self.ask(what == _PUT, group, PageId(page))
        except Exception:
            log.exception("page %d of group %d cannot be moved", page, group)
            return _FAILED
        return _DONE


class WindowClient(Protocol):
    """A rank's window, as rank 0 uses it."""

    def ask(self, is_put: bool, group: int, page: PageId) -> None: ...
    def wait(self) -> None: ...


class LocalWindowClient:
    """The window of a rank on this machine. OSError if the rank has gone, or cannot copy the page.

    After a timeout the connection is closed: a late answer would be taken for the next page's.

    Args:
        address: socket path of the window.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self._rank = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._rank.settimeout(timeout_s)
        self._rank.connect(address)

    def ask(self, is_put: bool, group: int, page: PageId) -> None:
        self._rank.send(_REQUEST.pack(_PUT if is_put else _BRING, group, page))

    def wait(self) -> None:
        try:
            answer = self._rank.recv(1)
        except TimeoutError:
            self._rank.close()
            raise
        if answer != _DONE:
            what = "cannot move a page of its device" if answer else "has gone"
            raise OSError(f"another rank of this server {what}")


class RemoteWindowClient:
    """The window of a rank on another machine. OSError if the rank has gone or cannot copy.

    Args:
        is_lost: whether other machines are known to be lost; checked while waiting, because the
            connection itself does not report it.
    """

    def __init__(
        self, rank: "zmq.Socket[bytes]", timeout_s: float, is_lost: Callable[[], bool]
    ) -> None:
        self._rank, self._timeout_s, self._is_lost = rank, timeout_s, is_lost
        self._sizes: Mapping[int, int] = {}
        self._expected = 0
        """Bytes that the answer must have."""
        self.memory = np.empty(0, np.uint8)

    def hold(self, sizes: Mapping[int, int]) -> None:
        """Allocate memory for one page of any group. sizes: group -> bytes."""
        self._sizes = sizes
        self.memory = np.zeros(max(sizes.values(), default=0), np.uint8)

    def ask(self, is_put: bool, group: int, page: PageId) -> None:
        size = self._sizes.get(group, 0)
        request = _REQUEST.pack(_PUT if is_put else _BRING, group, page)
        payload = [self.memory[:size].tobytes()] if is_put else []
        self._expected = 0 if is_put else size
        try:
            self._rank.send_multipart([request, *payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # not connected, or closed after a timeout
            raise OSError(f"another rank of this server has gone: {error}") from None

    def wait(self) -> None:
        answer, payload = self._receive()
        if answer != _DONE:
            raise OSError("another rank of this server cannot move a page of its device")
        if len(payload) != self._expected:
            raise OSError(
                f"another rank of this server sent {len(payload):,} bytes, not {self._expected:,}"
            )
        self.memory[: len(payload)] = np.frombuffer(payload, np.uint8)

    def receive(self) -> bytes:
        """The rank's first message."""
        (message,) = self._receive()
        return message

    def _receive(self) -> list[bytes]:
        until = time.monotonic() + self._timeout_s
        while not self._rank.poll(_CHECK_MS):
            is_lost = self._is_lost()
            if is_lost or time.monotonic() >= until:
                self._rank.close()  # a late answer would be taken for the next page's
                if is_lost:
                    raise OSError("another rank of this server has gone")
                raise TimeoutError(f"another rank of this server is silent for {self._timeout_s} s")
        return self._rank.recv_multipart()


_POLL_S = 0.005
_MAX_MESSAGE_BYTES = 1 << 30
"""Largest message of a rank on another machine: a page."""


class PagesAnnouncement(msgspec.Struct, frozen=True):
    """Where another rank's pages are, as it publishes it for rank 0.

    Attributes:
        pid, file: process and descriptor of the memory.
        window: socket path of the window; "" = all pages are in the memory.
    """

    pid: int
    file: int
    page_layouts: list[PageLayout] = msgspec.field(name="shelves")
    window: str = msgspec.field(name="door", default="")


@dataclass(frozen=True)
class RankMemory:
    """One rank's pages, as rank 0 sees them.

    Attributes:
        memory: uint8, where the pages or one window lie.
        window: copies a page there; None = all pages are in the memory.
    """

    page_layouts: list[PageLayout]
    memory: np.ndarray
    window: WindowClient | None = None


class RankAccess(Protocol):
    """Opens another rank's pages."""

    def open(self, timeout_s: float) -> RankMemory:
        """Wait until the rank has published them; DeviceError after the timeout."""
        ...


def own_rank_pages(store: KVStore) -> RankMemory:
    """The pages of rank 0 itself."""
    page_layouts = page_layouts_of(store)
    if store.is_host:
        return RankMemory(page_layouts, _mapped(os.getpid(), store.file, page_layouts))
    window = PageWindow(store)
    return RankMemory(window_layouts(page_layouts), window.memory, window)


class LocalRankAccess:
    """A rank on this machine, which publishes its pages in the file `path`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def open(self, timeout_s: float) -> RankMemory:
        found = self._read(timeout_s)
        memory = _mapped(found.pid, found.file, found.page_layouts)
        return RankMemory(
            found.page_layouts,
            memory,
            LocalWindowClient(found.window, timeout_s) if found.window else None,
        )

    def _read(self, timeout_s: float) -> PagesAnnouncement:
        until = time.monotonic() + timeout_s
        while True:
            try:
                with open(self._path, "rb") as file:
                    return msgspec.json.decode(file.read(), type=PagesAnnouncement)
            except FileNotFoundError:
                if time.monotonic() >= until:
                    raise _silent(f"at {self._path}", timeout_s) from None
            time.sleep(_POLL_S)


@dataclass(frozen=True)
class RankAddress:
    """Where rank 0 waits for a rank on another machine. Only a rank with the key can connect.

    Attributes:
        address: ZeroMQ address.
        key: public key of rank 0, Z85.
    """

    address: str
    key: str = field(repr=False)


class RemoteRankAccess:
    """A rank on another machine, which connects to a port of its own here.

    Args:
        host: address of this machine, as the others use it.
        is_lost: whether other machines are known to be lost; checked while waiting.
    """

    def __init__(self, host: str, is_lost: Callable[[], bool]) -> None:
        self._is_lost = is_lost
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        public, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_publickey, self._socket.curve_server = public, True
        address = socket.gethostbyname(host)
        port = self._socket.bind_to_random_port(f"tcp://{address}")
        self.address = RankAddress(f"tcp://{address}:{port}", public.decode())

    def open(self, timeout_s: float) -> RankMemory:
        window = RemoteWindowClient(self._socket, timeout_s, self._is_lost)
        try:
            page_layouts = msgspec.json.decode(window.receive(), type=list[PageLayout])
        except TimeoutError:
            raise _silent("from another machine", timeout_s) from None
        except OSError as error:
            raise DeviceError(str(error)) from None
        sizes: dict[int, int] = {}
        for page_layout in page_layouts:
            sizes[page_layout.group] = sizes.get(page_layout.group, 0) + page_layout.page_bytes
        window.hold(sizes)
        return RankMemory(page_layouts, window.memory, window)


def publish_pages(store: KVStore, path: str) -> None:
    """On another rank of this machine: publish its pages in the file `path`."""
    own = PagesAnnouncement(os.getpid(), store.file, page_layouts_of(store))
    if not store.is_host:
        window, address = PageWindow(store), f"{path}.door"
        window.serve(address)
        layouts = window_layouts(own.page_layouts)
        own = PagesAnnouncement(os.getpid(), window.file, layouts, address)
    draft = f"{path}.new"
    with open(draft, "wb") as out:
        out.write(msgspec.json.encode(own))
    os.rename(draft, path)  # so that rank 0 never reads a half-written file


def publish_pages_remotely(store: KVStore, rank_0_at: RankAddress) -> None:
    """On a rank of another machine: send its page layouts to rank 0, then serve its requests."""
    window = PageWindow(store)
    rank_0 = zmq.Context.instance().socket(zmq.DEALER)
    rank_0.setsockopt(zmq.LINGER, 0)
    rank_0.curve_publickey, rank_0.curve_secretkey = zmq.curve_keypair()
    rank_0.curve_serverkey = rank_0_at.key.encode()
    rank_0.connect(rank_0_at.address)
    rank_0.send(msgspec.json.encode(window_layouts(page_layouts_of(store))))
    threading.Thread(
        target=window.serve_remote, args=(rank_0,), name="distant window", daemon=True
    ).start()


def pages_file_of(address: str) -> str:
    """The file in which a rank of this machine publishes its pages.

    Args:
        address: where it gets its plans, ipc://…
    """
    return f"{urlsplit(address).path}.pages"


def rank_addresses_of(rank_access: Sequence[RankAccess]) -> dict[int, RankAddress]:
    """Addresses for the ranks on other machines, by rank."""
    return {
        rank: access.address
        for rank, access in enumerate(rank_access, 1)
        if isinstance(access, RemoteRankAccess)
    }


def _mapped(pid: int, descriptor: int, page_layouts: Sequence[PageLayout]) -> np.ndarray:
    if not page_layouts:
        return np.empty(0, np.uint8)
    try:
        file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise DeviceError(f"the pages of another rank cannot be mapped: {error}") from None
    with os.fdopen(file, "r+b"):
        return np.frombuffer(mmap.mmap(file, 0), np.uint8)


def _silent(where: str, timeout_s: float) -> DeviceError:
    return DeviceError(f"a rank did not publish its pages {where} within {timeout_s:g} s")
