"""The template worker process: compiles one chat template and renders tasks.

The kernel bounds its memory and the CPU time of each task, even inside one operation of the
template. So a template cannot slow or break the server. A task over its time ends the process.
processes.py describes the frames.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import BinaryIO

import jinja2
from jinja2 import meta
from jinja2.exceptions import SecurityError

from banyan.base.child_process import LENGTH
from banyan.base.memory import give_back, let_go
from banyan.chat_template.processes import DONE, FAILED, REFUSED, STOPPED, TASK
from banyan.chat_template.sandbox import TemplateEnvironment, constants

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
    with open("/proc/self/statm", encoding="ascii") as file:
        base_bytes = int(file.read().split()[0]) * resource.getpagesize()
    renderer, is_new = Renderer(), True
    while len(head := tasks.read(TASK.size)) == TASK.size:
        length, time_s = TASK.unpack(head)
        limit = base_bytes + ROOM_BYTES + FRAME_FACTOR * length
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
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
