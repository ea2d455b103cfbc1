"""OpTimer: times the ops of a step, on a runner that serves nothing else.

Steps are synthetic: rows over pages with arbitrary numbers, so any batch at any context length can
be timed.
"""

from array import array
from collections.abc import Callable

from banyan.base.errors import ConfigError
from banyan.base.ids import PageId, SlotId, StepId
from banyan.messages.plan import SAMPLE, Join, PageGrant, Row, StepPlan
from banyan.messages.sampling_params import SamplingParams
from banyan.ops.api import OpTime, Peaks
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig

_RUNS = 9


class OpTimer:
    """
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
        runner.store.scribble()

    @property
    def is_recorded(self) -> bool:
        """Whether the ops of this model's steps can be timed."""
        return self._runner.is_recorded

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
        runs = [self._runner.op_times() for _ in range(_RUNS)]
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
