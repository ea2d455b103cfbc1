"""Profiler: records a trace of one rank's steps, between a start and a stop control op. OpTimer:
times the ops of a step, on a runner that serves nothing else.

The trace is kept in memory and written to one file at the end.
"""

import os
import re
import tempfile
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from banyan.base.errors import ConfigError, RequestError
from banyan.base.ids import PageId, SlotId, StepId
from banyan.base.log import logger
from banyan.base.trace import Marks, Trace
from banyan.messages.control_ops import ControlOp, StartProfile
from banyan.messages.plan import SAMPLE, Join, PageGrant, Row, StepPlan
from banyan.messages.sampling_params import SamplingParams
from banyan.ops.api import OpTime, Peaks
from banyan.runner.control_ops import Finish, RankReply
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig

log = logger(__name__)

_PREFIX = re.compile(r"[A-Za-z0-9_.-]{0,64}")


class Profiler:
    """
    Args:
        runner: of this rank.
        marks: profiler spans of other threads, recorded with the runner's.
        folder: default folder of the files; "" = the folder of temporary files.
        name: of this rank, for file names.
    """

    def __init__(
        self, runner: ModelRunner, marks: Sequence[Marks], folder: str = "", name: str = "engine"
    ) -> None:
        self._runner = runner
        self._marks = [*marks, runner.marks]
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
        with suppress(OSError, ValueError):
            os.makedirs(folder, exist_ok=True)
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
            self._runner.on_ran = self.stepped
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
        self._runner.on_ran = None
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


_RUNS = 9


class OpTimer:
    """Steps are synthetic: rows over pages with arbitrary numbers, so any batch at any context
    length can be timed.

    Args:
        threads: threads that compute an op together.
        probe: measures `peaks`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sizes: RunnerConfig,
        threads: int,
        probe: Callable[[], Peaks],
    ) -> None:
        self.threads = threads
        self._runner = runner
        self._sizes = sizes
        self._probe = probe
        self._step = 0
        # Unwritten host memory is one shared page of zeros, which stays in the nearest CPU cache.
        for cache in runner.store.caches:
            for pages in runner.store.tensors(cache.layer).values():
                pages.view(torch.uint8).fill_(0x3C)

    @property
    def is_recorded(self) -> bool:
        """Whether the ops of this model's steps can be timed."""
        return self._runner.forward.is_recorded

    def peaks(self) -> Peaks:
        """Peak performance of the kernels on this machine, measured now."""
        return self._probe()

    def measure(self, rows: int, start: int, count: int) -> list[OpTime]:
        """Op times of a step in which each of `rows` rows runs positions start … start+count−1.

        The median of several runs, as for the steps that they are compared with: with minima, part
        of every step's time would belong to no op.

        Raises:
            ConfigError: the batch does not fit, or the steps of this model are not recorded.
        """
        plan = self._plan(rows, start, count)
        failed = self._runner.launch(plan).result()
        if failed.error or failed.failed:
            raise ConfigError(f"the step cannot be run: {failed.error or failed.failed[0].text}")
        runs = [self._runner.forward.op_times() for _ in range(_RUNS)]
        self._run(leaves=[SlotId(i + 1) for i in range(rows)])
        return sorted(runs, key=lambda stages: sum(stage.seconds for stage in stages))[_RUNS // 2]

    def _plan(self, rows: int, start: int, count: int) -> StepPlan:
        if rows * count > self._sizes.max_tokens:
            raise ConfigError(
                f"{rows} rows of {count} tokens are more than the {self._sizes.max_tokens} of the "
                "largest step that is recorded",
                hint="raise --chunked-prefill-size",
            )
        if rows > self._sizes.max_slots or start + count > self._sizes.max_length:
            raise ConfigError(
                f"{rows} rows of {start + count} tokens; the engine takes {self._sizes.max_slots} "
                f"rows of {self._sizes.max_length}",
                hint="raise --max-running-requests, --context-length or --max-total-tokens",
            )
        slots = [SlotId(i + 1) for i in range(rows)]
        tokens = array("i", [1]) * (start + count)
        grants = []
        for group, layout in enumerate(self._sizes.groups):
            need = layout.columns(start + count)
            if rows * need >= layout.num_pages:
                raise ConfigError(
                    f"{rows} rows need {rows * need} pages, the cache has {layout.num_pages - 1}",
                    hint="raise --max-total-tokens",
                )
            for i, slot in enumerate(slots):
                pages = [PageId(1 + i * need + k) for k in range(need)]
                grants.append(PageGrant(slot, group, 0, pages))
        joins = [
            Join(
                slot=slot,
                tokens=tokens.tobytes(),
                prompt_len=len(tokens),
                sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
            )
            for slot in slots
        ]
        self._step += 1
        return StepPlan(
            step=StepId(self._step),
            joins=joins,
            grants=grants,
            rows=[Row(slot, start, count, want=SAMPLE) for slot in slots],
        )

    def _run(self, leaves: list[SlotId]) -> None:
        self._step += 1
        self._runner.launch(StepPlan(step=StepId(self._step), leaves=leaves)).result()
