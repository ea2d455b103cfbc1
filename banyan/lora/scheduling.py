"""LoRA scheduling: known adapters, the loaded ones with their numbers, and which one is evicted.

Holds names and numbers only; the runner holds the weights. `LoRANamespaces` gives each version of
an adapter a cache namespace of its own. The functions at the end connect this to `EngineCore`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

import msgspec

from banyan.base.errors import RequestError
from banyan.messages.control_ops import ControlOp, ControlOpReply, DropAdapter, TakeAdapter
from banyan.messages.events import Reply
from banyan.messages.requests import NO_CALL, Generate, LoadAdapter, RunControlOps, UnloadAdapter
from banyan.scheduler.request import WAITING, Request
from banyan.scheduler.request_table import RequestTable

LRU, FIFO = "lru", "fifo"
_LOOKS = 256
"""Waiting requests whose adapters are loaded ahead of their turn."""
_PATIENCE_S = 1.0
"""A request that has waited so long for a place among the adapters gets the next one."""
_SHOWN = 20
_MIB = 1 << 20


_DIGEST_BYTES, _MARK_BYTES = 16, 8


class LoRANamespaces:
    """Of the adapters that requests have named so far."""

    def __init__(self) -> None:
        self._by_mark: dict[bytes, str] = {}

    def narrowed(self, namespace: bytes, name: str, digest: str) -> bytes:
        """A namespace of an adapter's own, and of one version of it, within another: a digest of
        all three, followed by the adapter's mark."""
        parts = "\0".join((namespace.hex(), name, digest))
        mark = _mark(name)
        self._by_mark[mark] = name
        return blake2b(parts.encode(), digest_size=_DIGEST_BYTES).digest() + mark

    def adapter_of(self, namespace: bytes) -> str:
        """The adapter that a namespace belongs to; "" for none."""
        if len(namespace) != _DIGEST_BYTES + _MARK_BYTES:
            return ""
        return self._by_mark.get(namespace[_DIGEST_BYTES:], "")


def id_of(name: str) -> int:
    """A number that stands for an adapter's name wherever it is served: 1 … 2³¹ − 1."""
    return 1 + int.from_bytes(_mark(name), "big") % (2**31 - 1)


def _mark(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=_MARK_BYTES).digest()


class FirstAdapter(msgspec.Struct, frozen=True):
    """An adapter that is loaded from the start."""

    name: str
    path: str
    digest: str
    is_pinned: bool = False
    size_bytes: int = 0


class AdapterRules(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        max_running: adapters that running requests have between them.
        max_loaded: adapters that are loaded at once.
        max_bytes: of memory that they take on each rank; 0 = nobody counts.
        first: adapters of the start, loaded as 1, 2 …
    """

    max_running: int
    max_loaded: int
    eviction: str = LRU
    max_bytes: int = 0
    first: tuple[FirstAdapter, ...] = ()


@dataclass
class Adapter:
    """
    Attributes:
        number: what joins call it; 0 while it is not loaded.
        digest: of its files.
        size_bytes: that it takes where it takes most; 0 until somebody has tried.
        last_use: when it was last used, or loaded; grows.
        makes_room: it takes no more requests, and goes when the last has ended.
        leave_call: who asked to forget it; NO_CALL while nobody has.
    """

    name: str
    path: str
    is_pinned: bool = False
    number: int = 0
    digest: str = ""
    size_bytes: int = 0
    last_use: int = 0
    makes_room: bool = False
    leave_call: int = NO_CALL


@dataclass
class _Load:
    """A wish to load an adapter that is new, or that has made room for another."""

    adapter: Adapter
    call: int = NO_CALL


class LoadEnd(NamedTuple):
    """How an adapter that was wanted did not come.

    Attributes:
        name: of the adapter whose requests have waited in vain; "" for none.
        text: why, where that is known here.
    """

    name: str = ""
    text: str = ""


@dataclass
class Adapters:
    """The adapters of one replica."""

    rules: AdapterRules
    known: dict[str, Adapter] = field(default_factory=dict[str, Adapter])
    names: LoRANamespaces = field(default_factory=LoRANamespaces)
    _new: list[_Load] = field(default_factory=list[_Load])
    """Asked for by operators, in order; not known to requests yet."""
    _free: list[int] = field(default_factory=list[int])
    _under_way: _Load | None = None
    _uses: int = 0
    _held: Request | None = None
    """The first request that found all places taken, since `_held_s`."""
    _held_s: float = 0.0

    def __post_init__(self) -> None:
        self._free = list(range(self.rules.max_loaded, 0, -1))
        for first in self.rules.first:
            adapter = Adapter(first.name, first.path, first.is_pinned)
            adapter.digest, adapter.size_bytes = first.digest, first.size_bytes
            self._has_come(adapter, self._free.pop())
            self.known[first.name] = adapter

    # -- requests -----------------------------------------------------------------------------

    def received(self, generate: Generate) -> Generate:
        """The request with a cache namespace of its adapter's own.

        Raises:
            RequestError: no such adapter, or one that is leaving.
        """
        if not generate.adapter:
            return generate
        adapter = self.known.get(generate.adapter)
        if adapter is None or adapter.leave_call != NO_CALL:
            there = [other.name for other in self.known.values() if other.leave_call == NO_CALL]
            raise unknown_adapter(generate.adapter, there)
        namespace = self.names.narrowed(generate.namespace, adapter.name, adapter.digest)
        return msgspec.structs.replace(generate, namespace=namespace)

    def may_enter(self, request: Request, running: Sequence[Request], now: float) -> bool:
        """Whether the request's adapter is loaded and has a place among those that run."""
        name = request.generate.adapter
        if not name:
            return True
        adapter = self.known[name]
        if not adapter.number or adapter.makes_room:
            return False
        if self._held is not None and self._held.state != WAITING:
            self._held = None
        others = {r.generate.adapter for r in running} - {"", name}
        if len(others) >= self.rules.max_running:
            if self._held is None:
                self._held, self._held_s = request, now
            return False
        held = self._held
        is_waiting = held is not None and held.generate.adapter != name
        return not is_waiting or now - self._held_s < _PATIENCE_S

    def enter(self, request: Request) -> int:
        """The number that the request's join carries; it is being used."""
        name = request.generate.adapter
        if not name:
            return 0
        adapter = self.known[name]
        if self.rules.eviction == LRU:
            adapter.last_use = self._next_use()
        return adapter.number

    # -- operators ----------------------------------------------------------------------------

    def load(self, name: str, path: str, is_pinned: bool, call: int) -> str:
        """Ask for a new adapter; "" or why there cannot be one. `call` is answered later."""
        most = self.rules.max_loaded
        names = {*self.known, *(load.adapter.name for load in self._new)}
        if name in names:
            return f"There is an adapter {name!r} already; unload it first."
        pinned = sum(a.is_pinned for a in self.known.values())
        pinned += sum(load.adapter.is_pinned for load in self._new)
        if pinned + is_pinned >= most and len(names) + 1 > most:
            return (
                f"{pinned} of {most} adapters in memory are pinned: nothing can make room. "
                "Unload one, or start with a higher --max-loaded-loras."
            )
        self._new.append(_Load(Adapter(name, path, is_pinned), call))
        return ""

    def unload(self, name: str, call: int) -> str:
        """Ask to forget an adapter once its requests have ended; "" or why not. `call` is answered
        then."""
        adapter = self.known.get(name)
        if adapter is None:
            return f"There is no adapter {name!r}. {listed([*self.known])}"
        if adapter.leave_call != NO_CALL:
            return f"The adapter {name!r} is leaving already."
        adapter.leave_call = call
        return ""

    # -- what is to be done -------------------------------------------------------------------

    def wanted(
        self, waiting: Sequence[Request], running: Sequence[Request]
    ) -> RunControlOps | None:
        """What every rank should do next, if anything; `done` or `failed` must follow."""
        if self._under_way is not None:
            return None
        busy = {request.generate.adapter for request in running}
        for adapter in self.known.values():
            if adapter.leave_call != NO_CALL and adapter.name not in busy:
                if any(request.generate.adapter == adapter.name for request in waiting):
                    continue
                orders: list[ControlOp] = [DropAdapter(adapter.number)] if adapter.number else []
                return RunControlOps(adapter.leave_call, orders)
        load, kept = self._next_load(waiting)
        if load is None:
            return None
        going = self._making_room(load.adapter, kept, busy)
        if going is None:
            return None
        if late := [adapter for adapter in going if adapter.name in busy]:
            for adapter in late:
                adapter.makes_room = True
            return None
        return self._orders_of(load, going)

    def done(self, order: ControlOp, reply: ControlOpReply) -> None:
        """Every rank has carried it out."""
        if isinstance(order, DropAdapter):
            adapter = next(a for a in self.known.values() if a.number == order.number)
            adapter.number, adapter.makes_room = 0, False
            self._free.append(order.number)
        if isinstance(order, TakeAdapter) and self._under_way is not None:
            adapter, self._under_way = self._under_way.adapter, None
            adapter.digest, adapter.size_bytes = reply.body.decode(), reply.size_bytes
            self._free.remove(order.number)
            self._has_come(adapter, order.number)
            self.known[adapter.name] = adapter
            self._new = [load for load in self._new if load.adapter is not adapter]
            for other in self.known.values():
                other.makes_room = False  # the next waiting request chooses anew

    def failed(self, size_bytes: int = 0) -> LoadEnd | None:
        """The orders given last could not be carried out; None where they will be once there is
        more room.

        Args:
            size_bytes: that the adapter needs, where that was too much; else 0.
        """
        load, self._under_way = self._under_way, None
        if load is None:
            return LoadEnd()
        text = ""
        if size_bytes:
            most, load.adapter.size_bytes = self._reach(load.adapter), size_bytes
            if size_bytes <= most:
                return None
            text = no_room(size_bytes, most, self.rules.max_bytes)
        self._new = [other for other in self._new if other is not load]
        for other in self.known.values():
            other.makes_room = False
        return LoadEnd(load.adapter.name if load.call == NO_CALL else "", text)

    def has_left(self, call: int) -> None:
        """Forget the adapter that `call` asked to unload, now that it is nowhere any more."""
        gone = [a.name for a in self.known.values() if a.leave_call == call != NO_CALL]
        for name in gone:
            if not self.known[name].number:
                del self.known[name]

    def check(self) -> None:
        """Raise AssertionError when a number is counted wrongly."""
        loaded = [a.number for a in self.known.values() if a.number]
        assert sorted([*loaded, *self._free]) == list(range(1, self.rules.max_loaded + 1))
        assert self.used_bytes <= self.rules.max_bytes or not self.rules.max_bytes

    @property
    def num_loaded(self) -> int:
        return self.rules.max_loaded - len(self._free)

    @property
    def used_bytes(self) -> int:
        return sum(a.size_bytes for a in self.known.values() if a.number)

    def _next_load(self, waiting: Sequence[Request]) -> tuple[_Load | None, set[str]]:
        """What to load next, and the adapters of requests that go before the request that needs
        it."""
        if self._new:
            return self._new[0], set()
        before: set[str] = set()
        for request in islice(waiting, _LOOKS):
            name = request.generate.adapter
            if name and not self.known[name].number:
                return _Load(self.known[name]), before
            before.add(name)
        return None, before

    def _making_room(
        self, adapter: Adapter, kept: set[str], busy: set[str]
    ) -> list[Adapter] | None:
        """Who leaves for an adapter to come; None while too few can."""
        able = [
            a
            for a in self.known.values()
            if a.number and not a.is_pinned and a.name not in kept and a.leave_call == NO_CALL
        ]
        able.sort(key=lambda a: (not a.makes_room, a.name in busy, a.last_use))
        going: list[Adapter] = []
        needed = self.used_bytes + adapter.size_bytes
        for other in [*able, None]:
            is_enough = needed <= self.rules.max_bytes or not self.rules.max_bytes
            if is_enough and (self._free or going):
                return going
            if other is not None:
                going.append(other)
                needed -= other.size_bytes
        return None

    def _reach(self, adapter: Adapter) -> int:
        """Bytes that can be made free for an adapter. One that is pinned leaves as many as the
        largest of the others needs."""
        others = [a for a in self.known.values() if a is not adapter]
        pinned = sum(a.size_bytes for a in others if a.is_pinned)
        rest = [a.size_bytes for a in others if not a.is_pinned and adapter.is_pinned]
        return self.rules.max_bytes - pinned - max(rest, default=0)

    def _orders_of(self, load: _Load, going: Sequence[Adapter]) -> RunControlOps:
        self._under_way = load
        free = self.rules.max_bytes - self.used_bytes + sum(a.size_bytes for a in going)
        room = min(free, self._reach(load.adapter)) if self.rules.max_bytes else -1
        number = going[-1].number if going else self._free[-1]
        take = TakeAdapter(number, load.adapter.path, load.adapter.digest, max(room, -1))
        return RunControlOps(load.call, [*(DropAdapter(a.number) for a in going), take])

    def _has_come(self, adapter: Adapter, number: int) -> None:
        adapter.number, adapter.last_use = number, self._next_use()

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses


def listed(names: Sequence[str]) -> str:
    """The adapters that there are, for people."""
    if not names:
        return "No adapter is loaded."
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"There are: {', '.join(sorted(names)[:_SHOWN])}{more}."


def no_room(size_bytes: int, most_bytes: int, max_bytes: int) -> str:
    """Why an adapter of so many bytes cannot come, for people."""
    size, most, whole = (
        f"{count / _MIB:,.1f} MiB" for count in (size_bytes, most_bytes, max_bytes)
    )
    return (
        f"it takes {size} of memory, and at most {most} of the {whole} for adapters can be made "
        "free for it. Raise --lora-memory-gib, or unload an adapter that is pinned."
    )


def unknown_adapter(name: str, names: Sequence[str]) -> RequestError:
    shown = name if len(name) <= 80 else name[:80] + "…"
    return RequestError(
        f"The adapter {shown!r} is not loaded. {listed(names)}",
        param="lora_path",
        status=404,
        code="model_not_found",
    )


def change_adapters(
    adapters: Adapters | None, request_table: RequestTable, message: LoadAdapter | UnloadAdapter
) -> None:
    """Take an operator's wish. The reply follows when it is done, or at once if it cannot be."""
    call = message.call
    if adapters is None:
        text = "Adapters were not asked for: start with --enable-lora."
    elif isinstance(message, LoadAdapter):
        text = adapters.load(message.name, message.path, message.is_pinned, call)
    else:
        text = adapters.unload(message.name, call)
    if text:
        request_table.events.append(Reply(call, False, text))


def wanted_adapters(adapters: Adapters, request_table: RequestTable) -> RunControlOps | None:
    """The control ops that load and unload adapters, if any are due."""
    wanted = adapters.wanted(request_table.waiting, request_table.running)
    if wanted is None or wanted.ops:
        return wanted
    adapters.has_left(wanted.call)
    request_table.events.append(Reply(wanted.call, True, "The adapter has been unloaded."))
    return None


def end_adapters(
    adapters: Adapters | None,
    request_table: RequestTable,
    given: RunControlOps,
    ok: bool,
    replies: Sequence[ControlOpReply],
    text: str,
) -> str | None:
    """Control ops have ended: fail the requests whose adapter did not load.

    Args:
        replies: the ranks' replies to the applied ops, or to the one that failed.

    Returns:
        Error text for the caller; None if the ops will be issued again.
    """
    if adapters is None:
        return text
    if ok:
        adapters.has_left(given.call)
        return text
    end = adapters.failed(max((reply.size_bytes for reply in replies), default=0))
    if end is None:
        return None
    text = end.text or text
    if end.name:
        for request in [r for r in request_table.waiting if r.generate.adapter == end.name]:
            request_table.fail(request, 400, f"The adapter {end.name!r} cannot be loaded: {text}")
    return text
