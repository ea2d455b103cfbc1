"""Profiler: records a trace of one rank's steps, between a start and a stop control op.

The trace is kept in memory and written to one file at the end.
"""

import os
import re
import tempfile
from collections.abc import Sequence

from banyan.base.errors import RequestError
from banyan.base.log import logger
from banyan.base.trace import Marks, Trace
from banyan.messages.control_ops import ControlOp, StartProfile
from banyan.runner.control_ops import Finish, RankReply

log = logger(__name__)

_PREFIX = re.compile(r"[A-Za-z0-9_.-]{0,64}")


class Profiler:
    """
    Args:
        marks: profiler spans of the recorded threads.
        folder: default folder of the files; "" = the folder of temporary files.
        name: of this rank, for file names.
    """

    def __init__(self, marks: Sequence[Marks], folder: str = "", name: str = "engine") -> None:
        self._marks = marks
        self._folder = folder or tempfile.gettempdir()
        self._name = name
        self._trace: Trace | None = None
        self._path = ""
        self._steps = 0
        self._most_steps = 0
        """Steps after which the recording ends by itself; 0 = never."""
        self._summary = ""
        """Result of the last recording, until a stop reports it."""

    def stepped(self) -> None:
        """A step with rows has run."""
        if self._trace is None:
            return
        self._steps += 1
        if self._steps == self._most_steps:
            self._end()

    def prepare_start(self, op: ControlOp) -> Finish:
        """Check that a recording can start.

        Raises:
            RequestError: it cannot.
        """
        assert isinstance(op, StartProfile)
        folder = op.folder or self._folder
        if self._trace is not None:
            raise RequestError("A profile is being recorded already.")
        if not _PREFIX.fullmatch(op.prefix):
            raise RequestError(
                "profile_prefix must be at most 64 letters, digits, '.', '_' or '-'."
            )
        if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
            raise RequestError(f"output_dir {folder[:200]!r} is not a folder that can be written.")
        name = f"{op.prefix}banyan-{self._name}-{op.time_us}.trace.json"

        def start() -> RankReply:
            self._path = os.path.join(folder, name)
            self._steps, self._most_steps = 0, op.steps
            self._summary = ""
            self._trace = Trace()
            for marks in self._marks:
                marks.trace = self._trace
            return RankReply("Start profiling.")

        return start

    def prepare_stop(self, op: ControlOp) -> Finish:
        """
        Raises:
            RequestError: nothing has been recorded since the last stop.
        """
        if self._trace is None and not self._summary:
            raise RequestError("No profile is being recorded.")

        def stop() -> RankReply:
            if self._trace is not None:
                self._end()
            summary, self._summary = self._summary, ""
            return RankReply(summary)

        return stop

    def _end(self) -> None:
        assert self._trace is not None
        trace, self._trace = self._trace, None
        for marks in self._marks:
            marks.trace = None
        try:
            spans = trace.write(self._path)
        except OSError as error:
            self._summary = f"The profile could not be written: {error}"
        else:
            more = f", {trace.dropped} more were dropped" if trace.dropped else ""
            self._summary = f"Profile of {self._steps} steps: {self._path} ({spans} spans{more})"
        log.info("%s", self._summary)
