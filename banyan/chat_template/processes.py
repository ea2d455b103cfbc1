"""TemplateProcesses: renders a chat template in processes of its own, under limits of time and
memory (template_worker). Knows no messages.

A task goes out as uint64 length, float64 seconds and a body in JSON: first the template's source,
then variables. An answer comes in as uint64 length, one byte that says what became of it, and a
text in UTF-8. All little-endian.
"""

import json
import signal
import struct
from collections.abc import Mapping
from queue import LifoQueue

from banyan.base.worker_process import Child

TASK = struct.Struct("<Qd")
DONE, STOPPED, REFUSED, FAILED = b"dsrf"
"""A text; beyond a bound; refused in the template's own words; an error."""

TIME_S = 10.0
"""Processor time of one rendering."""

LANES = 2
"""Renderings at a time: a long one does not hold up the next."""

_MODULE = "banyan.chat_template.worker"
_MAX_ANSWER_BYTES = 160 << 20
"""More than the longest output takes in UTF-8."""


class TemplateStopped(Exception):
    """The template went beyond a bound."""


class TemplateRefused(Exception):
    """The template raised an error of its own; the text is its own too."""


class TemplateFailed(Exception):
    """The template ran into an error."""


class TemplateProcesses:
    """One template. May be used from several threads; a process starts when it is needed first,
    and again after it was stopped.

    Args:
        source: jinja2 text.
        time_s: processor time in which it must compile.

    Raises:
        TemplateStopped, TemplateRefused, TemplateFailed: the template does not compile.
    """

    def __init__(self, source: str, time_s: float = TIME_S) -> None:
        self._idle: LifoQueue[_Lane] = LifoQueue()
        for _ in range(LANES):
            self._idle.put(_Lane(source))
        self.written, self.sought, variables = json.loads(self._on_a_lane(None, time_s))
        """What the template writes, and looks for in its inputs, each joined with NULs."""
        self.variables = frozenset[str](variables)
        """Names that the template reads from outside."""

    def render(self, variables: Mapping[str, object], time_s: float = TIME_S) -> str:
        """The output. Raises as above, and TemplateFailed for variables that JSON cannot hold."""
        try:
            task = json.dumps(variables).encode("ascii")
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateFailed(str(error)) from None
        return self._on_a_lane(task, time_s)

    def _on_a_lane(self, task: bytes | None, time_s: float) -> str:
        lane = self._idle.get()
        try:
            return lane.do(task, time_s)
        finally:
            self._idle.put(lane)


class _Lane:
    """The place of one process."""

    def __init__(self, source: str) -> None:
        self._source = json.dumps(source).encode("ascii")
        self._child: Child | None = None

    def do(self, task: bytes | None, time_s: float) -> str:
        """The output of a task; None asks for the facts of the template."""
        facts = ""
        if self._child is None:
            self._child = Child(_MODULE, most_bytes=_MAX_ANSWER_BYTES)
            facts = self._ask(self._child, self._source, time_s)
        return facts if task is None else self._ask(self._child, task, time_s)

    def _ask(self, child: Child, task: bytes, time_s: float) -> str:
        try:
            answer = _answer(child, TASK.pack(len(task), time_s) + task, time_s)
        except TemplateStopped:
            self._stop(child)
            raise
        verdict, text = answer[0], answer[1:].decode("utf-8", "surrogatepass")
        if verdict == DONE:
            return text
        if verdict == STOPPED or task is self._source:
            self._stop(child)  # it holds what it built, or no template
        errors = {STOPPED: TemplateStopped, REFUSED: TemplateRefused, FAILED: TemplateFailed}
        raise errors[verdict](text)

    def _stop(self, child: Child) -> None:
        child.end()
        self._child = None


def _answer(child: Child, task: bytes, time_s: float) -> bytes:
    try:
        return child.ask(task)
    except ValueError as error:
        raise TemplateStopped(str(error)) from None
    except EOFError:
        if child.exit_code() == -signal.SIGPROF:
            raise TemplateStopped(f"it takes longer than {time_s:g} s") from None
        raise TemplateStopped("it takes too much memory, or breaks its process") from None
