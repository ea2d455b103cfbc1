"""Profiler: records what the engine and its runner do, from one control message to another.

What is recorded lies in memory until it ends; then it is one file.
"""

import os
import re
import tempfile
import time
from collections.abc import Sequence

from banyan.base.log import logger
from banyan.base.trace import Marks, Trace
from banyan.messages.events import Reply
from banyan.messages.requests import Control

log = logger(__name__)

START, STOP = "start_profile", "stop_profile"

_PREFIX = re.compile(r"[A-Za-z0-9_.-]{0,64}")


class Profiler:
    """
    Args:
        marks: of the threads that are recorded.
        folder: where files go unless a message names another; "" = that of temporary files.
        name: of this engine, for the name of the file.
    """

    def __init__(self, marks: Sequence[Marks], folder: str = "", name: str = "engine") -> None:
        self._marks = marks
        self._folder = folder or tempfile.gettempdir()
        self._name = name
        self._trace: Trace | None = None
        self._path = ""
        self._steps = 0
        self._most_steps = 0
        """Steps after which the recording ends by itself; 0 = it does not."""
        self._told = ""
        """What became of the last recording."""

    def answer(self, control: Control) -> Reply:
        """Carry out START or STOP."""
        is_start = control.verb == START
        ok, text = self._start(control) if is_start else self._stop()
        return Reply(control.call, ok, text)

    def stepped(self) -> None:
        """A step is complete."""
        if self._trace is None:
            return
        self._steps += 1
        if self._steps == self._most_steps:
            self._end()

    def _start(self, control: Control) -> tuple[bool, str]:
        folder = str(control.args.get("output_dir") or self._folder)
        prefix = str(control.args.get("profile_prefix") or "")
        if self._trace is not None:
            return False, "A profile is being recorded already."
        if not _PREFIX.fullmatch(prefix):
            return False, "profile_prefix must be at most 64 letters, digits, '.', '_' or '-'."
        if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
            return False, f"output_dir {folder[:200]!r} is not a folder that can be written."
        name = f"{prefix}banyan-{self._name}-{time.time_ns() // 1000}.trace.json"
        self._path = os.path.join(folder, name)
        self._steps, self._most_steps = 0, int(control.args.get("num_steps") or 0)
        self._told = ""
        self._trace = Trace()
        for marks in self._marks:
            marks.trace = self._trace
        return True, "Start profiling."

    def _stop(self) -> tuple[bool, str]:
        if self._trace is not None:
            self._end()
        told, self._told = self._told, ""
        return (True, told) if told else (False, "No profile is being recorded.")

    def _end(self) -> None:
        assert self._trace is not None
        trace, self._trace = self._trace, None
        for marks in self._marks:
            marks.trace = None
        try:
            spans = trace.write(self._path)
        except OSError as error:
            self._told = f"The profile could not be written: {error}"
        else:
            more = f", {trace.dropped} more were dropped" if trace.dropped else ""
            self._told = f"Profile of {self._steps} steps: {self._path} ({spans} spans{more})"
        log.info("%s", self._told)
