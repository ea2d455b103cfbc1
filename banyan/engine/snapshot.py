"""Snapshots of an EngineCore: all that its next decisions depend on, as bytes, and back.

What scheduler and memory hold is walked as a graph, so a new field of theirs is in the next
snapshot without a line here. Only values and classes of the modules named below are taken, and
nothing is called to bring them back: a fresh core of the same spec is filled in place, and what it
has of functions, it keeps. What is not plain (a constraint's state) is made anew from what is.
"""

import gc
from array import array
from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain, repeat
from types import ModuleType
from typing import Any, cast

import msgspec

from banyan.base.errors import ModelError, RequestError
from banyan.disaggregation import peer_pages
from banyan.disaggregation import scheduling as disaggregation
from banyan.engine import core as core_module
from banyan.engine.core import EngineCore
from banyan.grammar.base import Grammar, GrammarFactory
from banyan.kv_cache import (
    cache,
    cache_events,
    groups,
    hierarchical_cache,
    lease,
    loads,
    page_pool,
    partial_blocks,
    pins,
    radix_tree,
    state_checkpoints,
)
from banyan.kv_cache.cache import TOKEN_BYTES
from banyan.lora import scheduling as adapters
from banyan.messages import control_ops, events, plan, requests, sampling_params
from banyan.messages import disaggregation as transfers
from banyan.pipeline import micro_batches
from banyan.scheduler import (
    admission,
    budget,
    hicache_fetch,
    output_processor,
    request_table,
    row_planner,
    schedule_policy,
    scheduler,
    speculation,
    step_plan_builder,
)
from banyan.scheduler import request as one_request
from banyan.scheduler.request import Request

_MODULES: tuple[ModuleType, ...] = (
    core_module,
    cache,
    cache_events,
    groups,
    hierarchical_cache,
    lease,
    loads,
    page_pool,
    partial_blocks,
    peer_pages,
    pins,
    radix_tree,
    state_checkpoints,
    control_ops,
    events,
    plan,
    requests,
    sampling_params,
    transfers,
    adapters,
    admission,
    budget,
    disaggregation,
    hicache_fetch,
    micro_batches,
    one_request,
    output_processor,
    request_table,
    row_planner,
    schedule_policy,
    scheduler,
    speculation,
    step_plan_builder,
)
_KEPT = ("recorder", "_step_agreement", "_grammars", "misses")
"""Attributes that are none of the state: a fresh core has its own."""
_GROWN = "grammar"
"""Attribute that is made anew."""
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_LISTS: dict[type, str] = {list: "l", deque: "q", tuple: "t"}
_KEEP: list[int] = []
"""In the place of what a fresh core has anyway. A list with one number is a reference; no plain
value is a list."""

_OF_NODE = (
    *("key", "promised", "writer", "born", "last_used", "hits", "priority"),
    *("is_stored", "is_tail", "key_hash", "end", "history"),
)
"""Attributes of a node that are plain."""

_Name = tuple[str, tuple[str, ...]]


def _classes() -> dict[str, type]:
    return {
        f"{module.__name__}:{name}": found
        for module in _MODULES
        for name, found in vars(module).items()
        if isinstance(found, type) and found.__module__ == module.__name__
    }


class _Graph(msgspec.Struct, frozen=True, array_like=True):
    shapes: list[_Name]
    """Class, and the attributes that its objects have."""
    entries: list[tuple[str, int, Any]]
    """(kind, shape or length, content); the first one is the core."""


def take(core: EngineCore) -> bytes:
    """All that the core's decisions depend on besides its spec. Takes some microseconds for each
    node of the cache's tree.

    Raises:
        TypeError: the core holds something that has no place in a snapshot.
    """
    collects = gc.isenabled()
    gc.disable()  # much is made, nothing of it is garbage, and looking for some takes as long
    try:
        return msgspec.msgpack.encode(_Taker().graph(core))
    finally:
        if collects:
            gc.enable()


class _Taker:
    """One walk. Every object is written once, however many others hold it."""

    def __init__(self) -> None:
        self._names = {found: name for name, found in _classes().items()}
        self._shapes: dict[_Name, int] = {}
        self._seen: dict[int, int] = {}
        self._found: list[object] = []

    def graph(self, core: EngineCore) -> _Graph:
        self._seen[id(core)] = 0
        self._found.append(core)
        # The list grows while it is walked.
        entries = [self._entry(value) for value in self._found]
        return _Graph(list(self._shapes), entries)

    def _reference(self, value: object) -> object:
        if type(value) in _PLAIN:
            return value
        number = self._seen.get(id(value))
        if number is None:
            if callable(value):
                return _KEEP
            number = self._seen[id(value)] = len(self._found)
            self._found.append(value)
        return [number]

    def _entry(self, value: object) -> tuple[str, int, Any]:
        kind = type(value)
        if kind is radix_tree.Node:
            return "n", 0, self._node(cast("radix_tree.Node", value))
        if (sign := _LISTS.get(kind)) is not None:
            parts = list(cast("list[object]", value))
            most = cast("deque[object]", value).maxlen if kind is deque else None
            if not set(map(type, parts)) <= _PLAIN:
                parts = [self._reference(part) for part in parts]
                sign = sign.upper()
            return sign, -1 if most is None else most, parts
        if kind is dict or kind is Counter:
            pairs = cast("dict[object, object]", value).items()
            flat = [self._reference(part) for pair in pairs for part in pair]
            return "d" if kind is dict else "c", 0, flat
        if kind is bytearray:
            return "b", 0, bytes(cast("bytearray", value))
        if kind is array:
            numbers = cast("array[int]", value)
            if numbers.typecode != "i":
                raise TypeError(f"an array of {numbers.typecode} has no place in a snapshot")
            return "a", 0, numbers.tobytes()
        return self._object(kind, value)

    def _object(self, kind: type, value: object) -> tuple[str, int, Any]:
        name = self._names.get(kind)
        if name is None:
            raise TypeError(f"a {kind.__module__}.{kind.__qualname__} has no place in a snapshot")
        if isinstance(value, msgspec.Struct):
            return "s", self._shape(name, ()), msgspec.msgpack.encode(value)
        held = vars(value)
        fields = [self._field(at, part) for at, part in held.items()]
        return "o", self._shape(name, tuple(held)), fields

    def _node(self, node: radix_tree.Node) -> list[object]:
        """In one piece, because there are many: its lists are nobody else's."""
        reference = self._reference
        return [
            reference(node.parent),
            [reference(child) for child in node.children.values()],
            [reference(epoch) for epoch in node.epochs],
            *(node.pages, node.locks, *(getattr(node, name) for name in _OF_NODE)),
        ]

    def _field(self, name: str, value: object) -> object:
        if name in _KEPT:
            return _KEEP
        return None if name == _GROWN else self._reference(value)

    def _shape(self, name: str, fields: tuple[str, ...]) -> int:
        return self._shapes.setdefault((name, fields), len(self._shapes))


def restore(core: EngineCore, body: bytes, grammars: GrammarFactory | None = None) -> None:
    """Make a fresh core of the same spec what the one was of which `body` was taken.

    Args:
        grammars: what compiled the constraints then; needed where constrained requests live.

    Raises:
        ModelError: no snapshot of this build, or a request whose constraint cannot be had.
    """
    try:
        graph = msgspec.msgpack.decode(body, type=_Graph)
        _Bringer(graph).fill(core)
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"the snapshot is damaged, or of another build: {error}") from None
    for request in core.scheduler.request_table.alive:
        request.grammar = _grown(request, grammars)


class _Bringer:
    """One snapshot on its way into a core."""

    def __init__(self, graph: _Graph) -> None:
        self._graph = graph
        classes = _classes()
        self._shapes: list[tuple[type[object], tuple[str, ...]]] = [
            (classes[name], fields) for name, fields in graph.shapes
        ]
        self._made: dict[int, object] = {}
        self._used: set[int] = set()
        """Addresses of objects of the fresh core that have their content already."""

    def fill(self, core: EngineCore) -> None:
        self._make(core)
        for number, (kind, shape, content) in enumerate(self._graph.entries):
            self._fill(self._made[number], kind, shape, content)

    def _make(self, core: EngineCore) -> None:
        """Everything that can change, empty still. What the core has in the same place is taken
        for it, because its functions hold that."""
        todo: deque[tuple[int, object]] = deque([(0, core)])
        while todo:
            number, own = todo.popleft()
            if number in self._made:
                continue
            kind, shape, content = self._graph.entries[number]
            made = self._new(kind, shape, content, own)
            if made is None:  # a tuple: it is made of its parts, once they are there
                todo += [(part[0], None) for part in content if _refers(part)]
                continue
            self._made[number] = made
            todo += self._parts(kind, shape, content, own if made is own else None)
        for number in range(len(self._graph.entries)):
            self._value([number])

    def _new(self, kind: str, shape: int, content: Any, own: object) -> object:
        if kind == "s":
            return msgspec.msgpack.decode(content, type=self._shapes[shape][0])
        if kind == "a":
            numbers = array("i")
            numbers.frombytes(content)
            return numbers
        if kind == "n":
            fits = type(own) is radix_tree.Node and id(own) not in self._used
            self._used.add(id(own))
            return own if fits else radix_tree.Node(b"", None, len(content[3]))
        wanted = _wanted(kind) or self._shapes[shape][0] if kind not in "tT" else None
        if wanted is None:
            return None
        is_value = wanted.__eq__ is not object.__eq__ and wanted.__hash__ is not None
        fits = type(own) is wanted and not is_value and id(own) not in self._used
        if fits and kind in "qQ":
            fits = (cast("deque[object]", own).maxlen or -1) == shape
        if fits:
            self._used.add(id(own))
            return own
        if kind in "qQ":
            return deque[object](maxlen=None if shape < 0 else shape)
        return object.__new__(wanted) if kind == "o" else wanted()

    def _parts(
        self, kind: str, shape: int, content: Any, own: object
    ) -> Iterator[tuple[int, object]]:
        """What an entry refers to, beside what the fresh core has in its place."""
        if kind == "n":
            pairs = ((part, None) for part in (content[0], *content[1], *content[2]))
        elif kind == "o":
            fields = self._shapes[shape][1]
            held = {} if own is None else vars(own)
            pairs = zip(content, (held.get(field) for field in fields), strict=True)
        elif kind in "LQ":
            mine = [] if own is None else list(cast("list[object]", own))
            pairs = zip(content, chain(mine, repeat(None)), strict=False)
        elif kind in "dc":
            mine = {} if own is None else cast("dict[object, object]", own)
            keys, values = content[::2], content[1::2]
            yield from ((key[0], None) for key in keys if _refers(key))
            pairs = (
                (value, None if _refers(key) else mine.get(key))
                for key, value in zip(keys, values, strict=True)
            )
        else:
            return
        yield from ((part[0], other) for part, other in pairs if _refers(part))

    def _value(self, part: object) -> object:
        if not _refers(part):
            return part
        number = cast("list[int]", part)[0]
        if number not in self._made:
            kind, _, content = self._graph.entries[number]
            if kind not in "tT":
                raise ValueError("something that nothing refers to")
            self._made[number] = tuple(self._value(inner) for inner in content)
        return self._made[number]

    def _fill(self, made: object, kind: str, shape: int, content: Any) -> None:
        if kind in "lLqQ":
            some = cast("list[object]", made)
            some.clear()
            some.extend(content if kind in "lq" else map(self._value, content))
        elif kind in "dc":
            table = cast("dict[object, object]", made)
            table.clear()
            for key, value in zip(content[::2], content[1::2], strict=True):
                table[self._value(key)] = self._value(value)  # `update` of a Counter would count
        elif kind == "b":
            cast("bytearray", made)[:] = content
        elif kind == "n":
            self._fill_node(cast("radix_tree.Node", made), content)
        elif kind == "o":
            for field, part in zip(self._shapes[shape][1], content, strict=True):
                if part != _KEEP:
                    object.__setattr__(made, field, self._value(part))

    def _fill_node(self, node: radix_tree.Node, content: Any) -> None:
        parent, children, released, node.pages, node.locks, *plain = content
        node.parent = cast("radix_tree.Node | None", self._value(parent))
        node.children = {
            self._key_of(child): cast("radix_tree.Node", self._value(child)) for child in children
        }
        node.epochs = [cast("page_pool.Epoch", self._value(epoch)) for epoch in released]
        for name, value in zip(_OF_NODE, plain, strict=True):
            setattr(node, name, value)

    def _key_of(self, child: list[int]) -> bytes:
        return self._graph.entries[child[0]][2][5]


def _wanted(kind: str) -> type[object] | None:
    found = {"l": list, "q": deque, "d": dict, "c": Counter, "b": bytearray}
    return cast("dict[str, type[object]]", found).get(kind.lower())


def _refers(part: object) -> bool:
    return isinstance(part, list) and part != _KEEP


def _grown(request: Request, grammars: GrammarFactory | None) -> Grammar | None:
    """The constraint of a request where its output has got to."""
    text = request.generate.grammar
    if not text:
        return None
    if grammars is None:
        raise ModelError(
            f"request {request.id} is constrained, and there is no vocabulary here to go by",
            hint="name the model",
        )
    try:
        grammar = grammars(text)
    except RequestError as error:
        raise ModelError(f"request {request.id}: {error}") from None
    for token in array("i", request.tokens[request.prompt_len * TOKEN_BYTES :]):
        grammar.accept(token)
    return grammar
