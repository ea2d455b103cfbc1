"""TemplateProcesses: renders a chat template in worker processes (worker.py) with time and memory
limits.

A task goes out as uint64 length, float64 seconds and a body in JSON: first the template's source,
then variables. An answer is a uint64 length, one byte for the outcome, and a text in UTF-8. All
little-endian.
"""

import json
import signal
import struct
from collections.abc import Mapping
from queue import LifoQueue

from banyan.base.child_process import WorkerProcess

TASK = struct.Struct("<Qd")
DONE, STOPPED, REFUSED, FAILED = b"dsrf"
"""Outcomes: rendered; over a limit; raised by the template itself; an error."""

TIME_S = 10.0
"""CPU seconds for one rendering."""

MAX_PROCESSES = 2
"""Concurrent renderings: a long one does not delay the next."""

_MODULE = "banyan.chat_template.worker"
_MAX_ANSWER_BYTES = 160 << 20
"""More than the longest output takes in UTF-8."""


class TemplateStopped(Exception):
    """The template exceeded a limit."""


class TemplateRefused(Exception):
    """The template called raise_exception; the text is the template's."""


class TemplateFailed(Exception):
    """The template ran into an error."""


class TemplateProcesses:
    """One template. Thread-safe. A process starts on first use, and again after it was stopped.

    Args:
        source: jinja2 text.
        time_s: CPU seconds to compile it.

    Raises:
        TemplateStopped, TemplateRefused, TemplateFailed: the template does not compile.
    """

    def __init__(self, source: str, time_s: float = TIME_S) -> None:
        self._idle: LifoQueue[_TemplateProcess] = LifoQueue()
        for _ in range(MAX_PROCESSES):
            self._idle.put(_TemplateProcess(source))
        self.written, self.sought, variables = json.loads(self._on_a_process(None, time_s))
        """Texts that the template writes, and texts that it searches for; each joined with NULs."""
        self.variables = frozenset[str](variables)
        """Names of the variables that the template reads."""

    def render(self, variables: Mapping[str, object], time_s: float = TIME_S) -> str:
        """The output. Raises as above, and TemplateFailed for variables that JSON cannot hold."""
        try:
            task = json.dumps(variables).encode("ascii")
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateFailed(str(error)) from None
        return self._on_a_process(task, time_s)

    def _on_a_process(self, task: bytes | None, time_s: float) -> str:
        process = self._idle.get()
        try:
            return process.do(task, time_s)
        finally:
            self._idle.put(process)


class _TemplateProcess:
    """One worker process and its lock."""

    def __init__(self, source: str) -> None:
        self._source = json.dumps(source).encode("ascii")
        self._child: WorkerProcess | None = None

    def do(self, task: bytes | None, time_s: float) -> str:
        """Run a task and return its output; None returns the template's texts and variables."""
        facts = ""
        if self._child is None:
            self._child = WorkerProcess(_MODULE, max_answer_bytes=_MAX_ANSWER_BYTES)
            facts = self._ask(self._child, self._source, time_s)
        return facts if task is None else self._ask(self._child, task, time_s)

    def _ask(self, child: WorkerProcess, task: bytes, time_s: float) -> str:
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

    def _stop(self, child: WorkerProcess) -> None:
        child.close()
        self._child = None


def _answer(child: WorkerProcess, task: bytes, time_s: float) -> bytes:
    try:
        return child.run(task)
    except ValueError as error:
        raise TemplateStopped(str(error)) from None
    except EOFError:
        if child.exit_code() == -signal.SIGPROF:
            raise TemplateStopped(f"it takes longer than {time_s:g} s") from None
        raise TemplateStopped("it takes too much memory, or breaks its process") from None
