"""Snapshots of an EngineCore: `take` encodes its state as bytes, `restore` fills a fresh core.

`take` walks all objects that the core refers to, so new fields need no change here. Only plain
values and classes of the modules below are allowed. `restore` calls no constructor: it fills a
fresh core of the same spec in place and keeps the functions of that core. The state of a grammar is
computed again from the tokens of its request.

A snapshot names its classes and their attributes. `restore` refuses it if the names in this build
differ, because the core would be restored only in part.
"""

import dis
import gc
from array import array
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache as memoize
from itertools import chain, pairwise, repeat
from types import FunctionType, ModuleType
from typing import Any, cast

import msgspec

from banyan.base.errors import ModelError, RequestError
from banyan.base.log import printable
from banyan.disaggregation import peer_pages
from banyan.disaggregation import scheduling as pd_scheduling
from banyan.engine import core as core_module
from banyan.engine.core import EngineCore
from banyan.grammar.base import Grammar, GrammarFactory
from banyan.kv_cache import (
    cache,
    cache_events,
    hierarchical_cache,
    loads,
    page_pool,
    partial_blocks,
    pins,
    radix_tree,
    sizing,
    state_checkpoints,
)
from banyan.kv_cache.cache import TOKEN_BYTES
from banyan.lora import scheduling as lora_scheduling
from banyan.messages import (
    control_ops,
    disaggregation,
    events,
    plan,
    requests,
    sampling_params,
)
from banyan.messages import spans as span_messages
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
from banyan.scheduler import request as request_module
from banyan.scheduler import spans as span_contents
from banyan.scheduler.request import Request

_MODULES: tuple[ModuleType, ...] = (
    core_module,
    # kv_cache
    cache,
    cache_events,
    hierarchical_cache,
    loads,
    page_pool,
    partial_blocks,
    pins,
    radix_tree,
    sizing,
    state_checkpoints,
    # messages
    control_ops,
    disaggregation,
    events,
    plan,
    requests,
    sampling_params,
    span_messages,
    # scheduler and its parts in other packages
    admission,
    budget,
    hicache_fetch,
    lora_scheduling,
    micro_batches,
    output_processor,
    peer_pages,
    pd_scheduling,
    request_module,
    request_table,
    row_planner,
    schedule_policy,
    scheduler,
    span_contents,
    speculation,
    step_plan_builder,
)
_KEPT = ("recorder", "_step_agreement", "_grammars", "misses")
"""Attributes that are not state; the fresh core keeps its own."""
_RECOMPUTED = "grammar"
"""Attribute that is computed again."""
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_LISTS: dict[type, str] = {list: "l", deque: "q", tuple: "t"}
_SAME_BUILD = "replay it with the version that recorded it"
_KEEP: list[int] = []
"""Stands for a value that the fresh core keeps. A list with one number is a reference to an entry;
no plain value is a list."""

_NODE_VALUES = (
    "key",
    "promised",
    "writer",
    "born",
    "last_used",
    "hits",
    "priority",
    "is_stored",
    "is_tail",
    "key_hash",
    "end",
    "history",
)
"""Plain attributes of a node of the radix tree."""

_Name = tuple[str, tuple[str, ...]]
"""Class ("module:class") and attributes."""


@memoize
def _classes() -> dict[str, type]:
    """Classes that a snapshot may contain, by "module:class"."""
    return {
        f"{module.__name__}:{name}": found
        for module in _MODULES
        for name, found in vars(module).items()
        if isinstance(found, type) and found.__module__ == module.__name__
    }


def _attributes(kind: type[object]) -> frozenset[str]:
    """Names of the attributes that objects of a class have in this build."""
    if issubclass(kind, msgspec.Struct):
        return frozenset(kind.__struct_fields__)
    if kind is radix_tree.Node:
        return frozenset(_NODE_VALUES)
    if is_dataclass(kind):
        return frozenset(field.name for field in fields(kind))
    constructors = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
    return frozenset(chain.from_iterable(map(_assigned, constructors[:-1])))  # not of object


def _assigned(method: FunctionType) -> Iterator[str]:
    """Attributes of `self` that a method assigns."""
    for before, each in pairwise(dis.get_instructions(method)):
        # From Python 3.13 on one instruction may load several variables; the last one counts.
        argval = cast("object", before.argval)
        many = cast("tuple[object, ...]", argval) if isinstance(argval, tuple) else (argval,)
        if each.opname == "STORE_ATTR" and many[-1:] == ("self",):
            yield str(each.argval)


class _Graph(msgspec.Struct, frozen=True, array_like=True):
    shapes: list[_Name]
    entries: list[tuple[str, int, Any]]
    """(kind, index of the shape or length, content); the first entry is the core."""


def take(core: EngineCore) -> bytes:
    """Encode the state of the core. Takes some microseconds for each node of the radix tree.

    Raises:
        TypeError: the core refers to an object of a class that is not allowed.
    """
    collects = gc.isenabled()
    gc.disable()  # many objects and no garbage: collections would double the time
    try:
        return msgspec.msgpack.encode(_Encoder().graph(core))
    finally:
        if collects:
            gc.enable()


class _Encoder:
    """Encodes one core. An object is written once, even if several others refer to it."""

    def __init__(self) -> None:
        self._names = {found: name for name, found in _classes().items()}
        self._shapes: dict[_Name, int] = {}
        self._seen: dict[int, int] = {}
        self._found: list[object] = []
        self._node_shape = -1

    def graph(self, core: EngineCore) -> _Graph:
        self._seen[id(core)] = 0
        self._found.append(core)
        # Encoding an entry appends the objects that it refers to.
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
            if self._node_shape < 0:
                self._node_shape = self._shape(self._names[kind], _NODE_VALUES)
            return "n", self._node_shape, self._node(cast("radix_tree.Node", value))
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
            return "s", self._shape(name, value.__struct_fields__), msgspec.msgpack.encode(value)
        held = vars(value)
        fields = [self._field(at, part) for at, part in held.items()]
        return "o", self._shape(name, tuple(held)), fields

    def _node(self, node: radix_tree.Node) -> list[object]:
        """Encodes a node with its lists in one entry: there are many nodes, and the lists are not
        shared."""
        reference = self._reference
        return [
            reference(node.parent),
            [reference(child) for child in node.children.values()],
            [reference(epoch) for epoch in node.epochs],
            node.pages,
            node.locks,
            *(getattr(node, name) for name in _NODE_VALUES),
        ]

    def _field(self, name: str, value: object) -> object:
        if name in _KEPT:
            return _KEEP
        return None if name == _RECOMPUTED else self._reference(value)

    def _shape(self, name: str, fields: tuple[str, ...]) -> int:
        return self._shapes.setdefault((name, fields), len(self._shapes))


def restore(core: EngineCore, body: bytes, grammars: GrammarFactory | None = None) -> None:
    """Fill a fresh core with the state of a snapshot.

    Args:
        core: built from the same spec as the encoded core.
        grammars: compiles grammars; needed if requests have one.

    Raises:
        ModelError: the snapshot is damaged or of another build, or a grammar does not compile.
    """
    try:
        graph = msgspec.msgpack.decode(body, type=_Graph)
        _Decoder(graph).fill(core)
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"the snapshot is damaged, or of another build: {error}") from None
    for request in core.scheduler.request_table.alive:
        request.grammar = _grammar_of(request, grammars)


class _Decoder:
    """Fills one core from one snapshot."""

    def __init__(self, graph: _Graph) -> None:
        self._graph = graph
        self._shapes = [_known_shape(name, names) for name, names in graph.shapes]
        self._made: dict[int, object] = {}
        self._used: set[int] = set()
        """Addresses of objects of the fresh core that are assigned to an entry."""

    def fill(self, core: EngineCore) -> None:
        self._make(core)
        for number, (kind, shape, content) in enumerate(self._graph.entries):
            self._fill(self._made[number], kind, shape, content)

    def _make(self, core: EngineCore) -> None:
        """Create every mutable object, still empty.

        An object of the fresh core in the same place is used again, because functions of the core
        refer to it.
        """
        todo: deque[tuple[int, object]] = deque([(0, core)])
        while todo:
            number, own = todo.popleft()
            if number in self._made:
                continue
            kind, shape, content = self._graph.entries[number]
            made = self._new(kind, shape, content, own)
            if made is None:  # a tuple: created later, from its parts
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
        """Each entry that this one refers to, with the fresh core's object in its place."""
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
                raise ValueError("an entry that nothing refers to")
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
                table[self._value(key)] = self._value(value)  # Counter.update would add
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
        for name, value in zip(_NODE_VALUES, plain, strict=True):
            setattr(node, name, value)

    def _key_of(self, child: list[int]) -> bytes:
        return self._graph.entries[child[0]][2][5]


def _known_shape(name: str, names: tuple[str, ...]) -> tuple[type[object], tuple[str, ...]]:
    """The class and attributes of a shape.

    Raises:
        ModelError: this build has no such class, or it has other attributes.
    """
    kind = _classes().get(name)
    if kind is None:
        raise ModelError(
            f"the snapshot is of another build: this one has no class {printable(name)}",
            hint=_SAME_BUILD,
        )
    expected, found = _attributes(kind), frozenset(names)
    if expected != found:
        parts = [
            f"{where}: {', '.join(map(printable, sorted(some)))}"
            for where, some in (("only there", found - expected), ("only here", expected - found))
            if some
        ]
        raise ModelError(
            f"the snapshot is of another build: {name} has other attributes ({'; '.join(parts)})",
            hint=_SAME_BUILD,
        )
    return kind, names


def _wanted(kind: str) -> type[object] | None:
    found = {"l": list, "q": deque, "d": dict, "c": Counter, "b": bytearray}
    return cast("dict[str, type[object]]", found).get(kind.lower())


def _refers(part: object) -> bool:
    return isinstance(part, list) and part != _KEEP


def _grammar_of(request: Request, grammars: GrammarFactory | None) -> Grammar | None:
    """The grammar of a request, advanced by the tokens of its output."""
    text = request.generate.grammar
    if not text:
        return None
    if grammars is None:
        raise ModelError(
            f"request {request.id} has a grammar, which cannot be compiled without a tokenizer",
            hint="name the model",
        )
    try:
        grammar = grammars(text)
    except RequestError as error:
        raise ModelError(f"request {request.id}: {error}") from None
    for token in array("i", request.tokens[request.prompt_len * TOKEN_BYTES :]):
        grammar.accept(token)
    return grammar
