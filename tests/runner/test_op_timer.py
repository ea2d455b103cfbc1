"""The time of an op is the median of several runs, over pages that lie in memory."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import torch

from banyan.layers.cache_spec import CacheTensor, LayerCache
from banyan.messages.plan import StepPlan
from banyan.model_config.model_config import FULL
from banyan.ops.api import OpTime
from banyan.runner.kvstore import GroupLayout, KVStore
from banyan.runner.profiler import OpTimer
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig

KEPT = LayerCache(
    0, {"k": CacheTensor((2, 8), torch.float16), "v": CacheTensor((2, 8), torch.int8)}
)
SIZES = RunnerConfig(4, 64, (GroupLayout(FULL, 0, 16, 32),), 64)


@dataclass
class Scattered:
    """A runner whose steps take now longer, now shorter."""

    took_s: list[float] = field(
        default_factory=lambda: [5.0, 1.0, 9.0, 3.0, 7.0, 2.0, 8.0, 4.0, 6.0]
    )
    store: KVStore = field(
        default_factory=lambda: KVStore(SIZES.groups, (KEPT,), torch.device("cpu"))
    )

    def launch(self, plan: StepPlan) -> SimpleNamespace:
        return SimpleNamespace(result=lambda: SimpleNamespace(error="", failed=[]))

    @property
    def forward(self) -> "Scattered":
        return self

    def op_times(self) -> list[OpTime]:
        return [OpTime("linear", self.took_s.pop(), 1.0, 1.0)]


def test_the_middle_one_of_several_runs_counts() -> None:
    runner = Scattered()
    meter = OpTimer(cast(ModelRunner, runner), SIZES, 1, lambda: (1.0, 1.0, 1.0))
    (stage,) = meter.measure(rows=2, start=4, count=1)
    assert stage.seconds == 5.0 and not runner.took_s


def test_every_page_has_been_written_before_any_is_read() -> None:
    runner = Scattered()
    OpTimer(cast(ModelRunner, runner), SIZES, 1, lambda: (1.0, 1.0, 1.0))
    for pages in runner.store.tensors(0).values():
        assert torch.isfinite(pages.float()).all() and (pages != 0).all()
