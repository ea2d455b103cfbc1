"""The sandbox that chat templates run in.

A template comes with a model, from a stranger. It gets jinja2's immutable sandbox, and on top of
that bounds on steps, time and the size of what it builds. Knows no messages and no tokens.
"""

import json
import re
import time
import types
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

MAX_SOURCE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 32 << 20
MAX_VALUE_CHARS = 64 << 20
"""Characters of one value; an item of a list or dict counts as ITEM_CHARS more."""

MAX_BUILT_CHARS = 1 << 30
"""Characters of all values that one rendering builds."""

MAX_STEPS = 500_000
"""Loop turns, calls and outputs of one rendering."""

MAX_SECONDS = 10.0
MAX_PADDING = 1_000
"""Widths, indents and exponents."""

ITEM_CHARS = 64

_BUDGET = "%budget"
"""Key of the budget in the context: no template can spell it."""

_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float"),
    *("forceescape", "groupby", "int", "items", "last", "length", "list", "lower", "map", "max"),
    *("min", "random", "reject", "rejectattr", "reverse", "round", "safe", "select"),
    *("selectattr", "sort", "striptags", "title", "trim", "unique", "upper", "wordcount"),
)
_GLOBALS = ("range", "cycler", "joiner")
_REFUSED = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block)
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\*|\d{4})")
_WIDE_FIELD = re.compile(r"\{[^{}]*(\{|\d{4})")
_PADDING_METHODS = ("center", "ljust", "rjust", "zfill", "expandtabs")


class Budget:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._built = 0
        self._deadline_s = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS:,} steps")
        if self._steps % 256 == 0 and time.monotonic() > self._deadline_s:
            raise SecurityError(f"it takes longer than {MAX_SECONDS:g} s")

    def build(self, size: int) -> None:
        """Account for a value of `size` characters, before it is made."""
        self._built += size
        if size > MAX_VALUE_CHARS or self._built > MAX_BUILT_CHARS:
            raise SecurityError(
                f"it builds a value of {size:,} characters (limit {MAX_VALUE_CHARS:,}), "
                f"{self._built:,} in all (limit {MAX_BUILT_CHARS:,})"
            )

    def text(self, value: object) -> str:
        """`value` as a string, accounted for before it is made."""
        self.build(weigh(value))
        return value if isinstance(value, str) else str(value)


def weigh(value: object) -> int:
    """About as many characters as `value` has when written out; stops counting beyond the limit."""
    if isinstance(value, str):
        return len(value)
    total, waiting = 0, [value]
    while waiting and total <= MAX_VALUE_CHARS:
        item = waiting.pop()
        total += len(item) if isinstance(item, str) else ITEM_CHARS
        if isinstance(item, dict):
            waiting += (*item.keys(), *item.values())
        elif isinstance(item, (list, tuple)):
            waiting += item
    return total


class _Bounds(Extension):
    """Counts steps, bounds `~`, and accepts the {% generation %} tag that marks answers."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)

    def bound(self, tree: nodes.Template) -> None:
        """Count every loop turn and macro call of `tree`, and check every `~`."""
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            literal = sum(len(piece.data) for piece in node.find_all(nodes.TemplateData))
            args = [nodes.ContextReference(), nodes.Const(literal)]
            tick = self.call_method("tick", args, lineno=node.lineno)
            node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        for node in list(tree.find_all(nodes.Concat)):
            pieces = nodes.List(list(node.nodes), lineno=node.lineno)
            args = [nodes.ContextReference(), pieces]
            node.nodes = [self.call_method("concat", args, lineno=node.lineno)]

    def tick(self, context: Context, literal: int) -> None:
        budget = budget_of(context)
        budget.step()
        if literal:
            budget.build(literal)

    def concat(self, context: Context, values: list[object]) -> str:
        return "".join(map(budget_of(context).text, values))


class TemplateNamespace(Namespace):
    """`namespace()` without names that start with an underscore."""

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespace may not hold {name!r}")
        super().__setitem__(name, value)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """jinja2 as chat templates know it, bounded."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Bounds, loopcontrols],
            finalize=_finalize,
        )
        kept = {name: self.filters[name] for name in _FILTERS}
        kept.update(tojson=_to_json, join=_join, replace=_replace, format=_format, string=_string)
        for name in ("indent", "center"):
            kept[name] = _padded(self.filters[name])
        self.filters = kept
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals.update(raise_exception=_raise, strftime_now=_strftime, dict=_dict)
        self.globals.update(namespace=TemplateNamespace)

    def compile_template(self, source: str) -> jinja2.Template:
        """A template with bounds, after a look at what it names.

        Raises:
            jinja2.TemplateError, and what else compiling a hostile text can raise.
        """
        if len(source) > MAX_SOURCE_CHARS:
            raise SecurityError(f"it has {len(source):,} characters, limit {MAX_SOURCE_CHARS:,}")
        tree = self.parse(source)
        _look(tree)
        bounds = next(e for e in self.extensions.values() if isinstance(e, _Bounds))
        bounds.bound(tree)
        return self.from_string(tree)

    def render(self, template: jinja2.Template, variables: Mapping[str, object]) -> str:
        """The whole output; SecurityError beyond a bound, and whatever the template raises."""
        budget = Budget()
        parts: list[str] = []
        size = 0
        for part in template.generate({**variables, _BUDGET: budget}):
            budget.step()
            size += len(part)
            if size > MAX_OUTPUT_CHARS:
                raise SecurityError(f"its output has more than {MAX_OUTPUT_CHARS:,} characters")
            parts.append(part)
        return "".join(parts)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        budget = budget_of(context)
        if operator == "+":
            if isinstance(left, str):
                budget.build(len(left) + weigh(right))
            elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
                budget.build(ITEM_CHARS * (len(left) + len(right)))
        elif operator == "*":
            budget.build(_product(left, right))
        elif operator == "**":
            _check_padding(right)
            budget.build(ITEM_CHARS * _bits(left) * _bits(right))
        elif operator == "%" and isinstance(left, str):
            _check_widths(left)
            budget.build(len(left) + weigh(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: object, *args: object, **kwargs: object) -> object:
        budget = budget_of(context)
        budget.step()
        if isinstance(obj, types.BuiltinMethodType) and isinstance(obj.__self__, str):
            text, name = obj.__self__, obj.__name__
            if name == "join" and args:
                return _join(context, args[0], text)
            if name == "replace":
                _check_replace(budget, text, *args[:2])
            elif name in _PADDING_METHODS:
                _check_padding(*args, *kwargs.values())
            elif name in ("translate", "encode"):
                raise SecurityError(f"str.{name} is not available")
            budget.build(len(text))
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        if inner is None or not isinstance(value, types.BuiltinMethodType):
            return inner
        form = str(value.__self__)

        @pass_context
        def bounded(context: Context, *args: object, **kwargs: object) -> str:
            _check_widths(form)
            size = sum(map(weigh, (*args, *kwargs.values())))
            budget_of(context).build(len(form) + size * form.count("{"))
            return inner(*args, **kwargs)

        return bounded


def budget_of(context: Context) -> Budget:
    budget = context[_BUDGET]
    assert isinstance(budget, Budget)
    return budget


def _look(tree: nodes.Template) -> None:
    """Refuse what no chat template needs: other files, and the insides of Python objects."""
    for node in tree.find_all(_REFUSED):
        raise SecurityError(f"line {node.lineno}: {type(node).__name__.lower()} is not available")
    for node in tree.find_all((nodes.Getattr, nodes.Getitem)):
        if isinstance(node, nodes.Getattr):
            name = node.attr
        else:
            name = node.arg.value if isinstance(node.arg, nodes.Const) else ""
        if isinstance(name, str) and name.startswith("__"):
            raise SecurityError(f"line {node.lineno}: {name} is not available")


def _product(left: object, right: object) -> int:
    """Characters of left * right."""
    for many, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(many, (str, list, tuple)):
            item = 1 if isinstance(many, str) else ITEM_CHARS
            return len(many) * item * max(times, 0)
    return _bits(left) + _bits(right)


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else ITEM_CHARS


def _check_replace(budget: Budget, text: str, *pair: object) -> None:
    old, new = map(budget.text, pair)
    budget.build(len(text) + text.count(old) * len(new))


def _check_padding(*widths: object) -> None:
    for width in widths:
        size = len(width) if isinstance(width, str) else width
        if isinstance(size, int) and size > MAX_PADDING:
            raise SecurityError(f"it pads or raises by {size:,}, limit {MAX_PADDING:,}")


def _check_widths(form: str) -> None:
    """Refuse a format string whose widths could be large, or come from its arguments."""
    if _WIDE_PERCENT.search(form) or _WIDE_FIELD.search(form.replace("{{", "").replace("}}", "")):
        raise SecurityError("a format string has a width of four digits or from an argument")


def _padded(inner: Callable[..., str]) -> Callable[..., str]:
    """A filter that pads each line, bounded."""

    @pass_context
    def bounded(context: Context, text: str, *args: object, **kwargs: object) -> str:
        _check_padding(*args, *kwargs.values())
        text = budget_of(context).text(text)
        widths = [_text_width(w) for w in (*args, *kwargs.values())]
        budget_of(context).build(len(text) + (text.count("\n") + 1) * max([80, *widths]))
        return inner(text, *args, **kwargs)

    return bounded


def _text_width(width: object) -> int:
    return len(width) if isinstance(width, str) else width if isinstance(width, int) else 0


@pass_context
def _finalize(context: Context, value: object) -> object:
    return budget_of(context).text(value)


@pass_context
def _string(context: Context, value: object) -> str:
    return budget_of(context).text(value)


@pass_context
def _to_json(
    context: Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: no HTML escapes, keys in their order."""
    _check_padding(indent)
    budget_of(context).build(weigh(value) * (1 if indent is None else 2))
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@pass_context
def _join(context: Context, values: object, d: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        values = (context.environment.getitem(value, attribute) for value in _items(values))
    budget = budget_of(context)
    parts = [budget.text(value) for value in _items(values)]
    budget.build(sum(map(len, parts)) + len(str(d)) * len(parts))
    return str(d).join(parts)


def _items(values: object) -> Iterable[object]:
    return values if isinstance(values, Iterable) else ()


@pass_context
def _replace(context: Context, text: object, old: object, new: object, count: int = -1) -> str:
    text = budget_of(context).text(text)
    _check_replace(budget_of(context), text, old, new)
    return text.replace(str(old), str(new), -1 if count is None else count)


@pass_context
def _format(context: Context, form: object, *args: object, **kwargs: object) -> str:
    form = budget_of(context).text(form)
    _check_widths(form)
    budget_of(context).build(len(form) + weigh([*args, *kwargs.values()]))
    return form % (kwargs or args)


def _raise(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime(form: str) -> str:
    _check_widths(form)
    return datetime.now().strftime(form)


def _dict(*args: object, **kwargs: object) -> dict[object, object]:
    return dict(*args, **kwargs)
