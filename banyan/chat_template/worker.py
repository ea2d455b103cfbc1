"""The template worker process: compiles one chat template in a sandbox and renders tasks.

A template comes with a model and is untrusted. jinja2's immutable sandbox isolates it. The kernel
bounds its memory and the CPU time of each task, even inside one operation of the template. So a
template cannot slow or break the server. A task over its time ends the process. processes.py
describes the frames.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import BinaryIO

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from banyan.base.child_process import LENGTH
from banyan.base.memory import address_space_bytes, bound_address_space, give_back, let_go
from banyan.chat_template.processes import DONE, FAILED, REFUSED, STOPPED, TASK

MAX_SOURCE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 32 << 20

_FILTERS = (
    *("attr", "batch", "pprint", "slice", "sum", "truncate", "urlencode", "wordwrap"),
    *("abs", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape", "first"),
    *("float", "forceescape", "format", "groupby", "indent", "int", "items", "join", "last"),
    *("length", "list", "lower", "map", "max", "min", "random", "reject", "rejectattr", "replace"),
    *("reverse", "round", "safe", "select", "selectattr", "sort", "string", "striptags", "title"),
    *("trim", "unique", "upper", "wordcount"),
)
_GLOBALS = ("range", "cycler", "joiner")
_REFUSED = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block)


class _Generation(Extension):
    """Accepts the {% generation %} tag that marks answers."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateNamespace(Namespace):
    """`namespace()` without names that start with an underscore."""

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespace may not hold {name!r}")
        super().__setitem__(name, value)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """jinja2 as chat templates know it."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.filters = {name: self.filters[name] for name in _FILTERS} | {"tojson": _to_json}
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals.update(raise_exception=_raise, strftime_now=_strftime, dict=dict)
        self.globals.update(namespace=TemplateNamespace)

    def compile_template(self, source: str) -> tuple[jinja2.Template, nodes.Template]:
        """Compile a template after checking the names that it uses; return it with its tree.

        Raises:
            jinja2.TemplateError, and what else compiling a hostile text can raise.
        """
        if len(source) > MAX_SOURCE_CHARS:
            raise SecurityError(f"it has {len(source):,} characters, limit {MAX_SOURCE_CHARS:,}")
        tree = self.parse(source)
        _look(tree)
        return self.from_string(source), tree

    def render(self, template: jinja2.Template, variables: Mapping[str, object]) -> str:
        """The whole output; SecurityError when it is too long, and whatever the template raises."""
        parts: list[str] = []
        size = 0
        for part in template.generate(variables):
            size += len(part)
            if size > MAX_OUTPUT_CHARS:
                raise SecurityError(f"its output has more than {MAX_OUTPUT_CHARS:,} characters")
            parts.append(part)
        return "".join(parts)


def constants(tree: nodes.Template) -> tuple[str, str]:
    """Texts that the template writes, and texts that it searches for; each joined with NULs."""
    written = [node.data for node in tree.find_all(nodes.TemplateData)]
    written += [n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)]
    sought: list[str] = []
    for node in tree.find_all((nodes.Compare, nodes.Call)):
        # Operands of a comparison and arguments of a method; not what is joined inside of them.
        operands = (
            [node.expr, *(operand.expr for operand in node.ops)]
            if isinstance(node, nodes.Compare)
            else node.args
            if isinstance(node.node, nodes.Getattr)
            else []
        )
        values = [operand.value for operand in operands if isinstance(operand, nodes.Const)]
        sought += [value for value in values if isinstance(value, str)]
    return "\0".join(written), "\0".join(sought)


def _look(tree: nodes.Template) -> None:
    """Refuse other files and Python internals, which no chat template needs."""
    for node in tree.find_all(_REFUSED):
        raise SecurityError(f"line {node.lineno}: {type(node).__name__.lower()} is not available")
    for node in tree.find_all((nodes.Getattr, nodes.Getitem)):
        if isinstance(node, nodes.Getattr):
            name = node.attr
        else:
            name = node.arg.value if isinstance(node.arg, nodes.Const) else ""
        if isinstance(name, str) and name.startswith("__"):
            raise SecurityError(f"line {node.lineno}: {name} is not available")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: no HTML escapes, keys in their order."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime(form: str) -> str:
    return datetime.now().strftime(form)


ROOM_BYTES = 512 << 20
"""Memory for a task in addition to the libraries and FRAME_FACTOR times its own size."""
FRAME_FACTOR = 24

LARGE_BYTES = 1 << 20
"""Larger tasks leave many times their size in the allocator."""

MAX_REASON_CHARS = 2_000


def attempt(act: Callable[[], str]) -> bytes:
    """Run a task; return its outcome and the text or the reason."""
    try:
        return bytes([DONE]) + act().encode("utf-8", "surrogatepass")
    except MemoryError:
        return _reason(STOPPED, "it takes too much memory")
    except (SecurityError, OverflowError, RecursionError) as error:
        return _reason(STOPPED, str(error))
    except jinja2.TemplateError as error:
        return _reason(REFUSED, str(error))
    except Exception as error:  # any error of the template is its answer
        return _reason(FAILED, str(error) or type(error).__name__)


def _reason(verdict: int, text: str) -> bytes:
    return bytes([verdict]) + text[:MAX_REASON_CHARS].encode("utf-8", "surrogatepass")


class Renderer:
    """One template."""

    def __init__(self) -> None:
        self._environment = TemplateEnvironment()
        self._template: jinja2.Template | None = None

    def compile(self, source: str) -> str:
        """JSON of the texts that the template writes and searches for, and its variables."""
        self._template, tree = self._environment.compile_template(source)
        written, sought = constants(tree)
        return json.dumps([written, sought, sorted(meta.find_undeclared_variables(tree))])

    def run(self, body: bytes) -> str:
        task = json.loads(body)
        if self._template is None:
            return self.compile(task)
        return self._environment.render(self._template, task)


def main() -> None:
    """Serve tasks from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    base_bytes = address_space_bytes()
    renderer, is_new = Renderer(), True
    while len(head := tasks.read(TASK.size)) == TASK.size:
        length, time_s = TASK.unpack(head)
        bound_address_space(base_bytes + ROOM_BYTES + FRAME_FACTOR * length)
        _serve(renderer, tasks.read(length), time_s, answers)
        if length > LARGE_BYTES:
            give_back()
        if is_new:
            let_go()
            is_new = False


def _serve(renderer: Renderer, body: bytes, time_s: float, answers: BinaryIO) -> None:
    """Run one task and write the answer."""
    signal.setitimer(signal.ITIMER_PROF, time_s)  # its signal ends the process
    answer = attempt(partial(renderer.run, body))
    signal.setitimer(signal.ITIMER_PROF, 0)
    answers.write(LENGTH.pack(len(answer)))
    answers.write(answer)
    answers.flush()


if __name__ == "__main__":
    main()
