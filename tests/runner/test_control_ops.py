"""Control ops run on every rank or on none, in order; two ranks give the tokens of one."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from banyan.base.errors import ConfigError, DeviceError
from banyan.messages.control_ops import (
    ControlOp,
    ControlOpReply,
    ReleaseMemory,
    StopProfile,
    TakeWeights,
)
from banyan.messages.plan import StepPlan, StepResult
from banyan.messages.sampling_params import SamplingParams
from banyan.parallel.groups import Group, GroupsConfig, open_groups
from banyan.runner.control_ops import Alike, ControlOpExecutor, RankReply, serve_rank
from tests.parallel.ranks import LIBRARIES, meet, rank_processes, together
from tests.runner.conftest import VOCAB, build_runner
from tests.support.runner_driver import Driver, Request, greedy

TAKE, RELEASE = TakeWeights("new", "1"), ReleaseMemory(["weights"])


@dataclass
class Inner:
    """A runner that runs nothing, and what its carriers have done."""

    done: list[str] = field(default_factory=list)
    refuses: str = ""
    body: bytes = b""

    def launch(self, plan, mask_of=None):
        self.done.append(f"step {plan.step}")
        return self

    def result(self):
        return StepResult(step=1)

    def copies(self):
        return None

    def prepare(self, order: ControlOp):
        self.done.append(f"ready for {type(order).__name__}")
        if self.refuses == type(order).__name__:
            raise ConfigError("no such file", hint="look again")

        def finish() -> RankReply:
            self.done.append(type(order).__name__)
            return RankReply(f"did {type(order).__name__}", self.body)

        return finish

    def taker(
        self, ranks: Group | None = None, kinds=(TakeWeights, ReleaseMemory)
    ) -> ControlOpExecutor:
        return ControlOpExecutor(self, dict.fromkeys(kinds, self.prepare), ranks)


def test_orders_come_one_after_another_before_the_rows() -> None:
    inner = Inner()
    result = inner.taker().launch(StepPlan(step=1, control_ops=[TAKE, RELEASE])).result()
    assert [reply.text for reply in result.replies] == ["did TakeWeights", "did ReleaseMemory"]
    assert inner.done == [
        *("ready for TakeWeights", "TakeWeights"),
        *("ready for ReleaseMemory", "ReleaseMemory", "step 1"),
    ]


def test_what_orders_make_may_be_written_to_by_other_threads() -> None:
    made: list[torch.Tensor] = []

    def prepare(order: ControlOp):
        return lambda: made.append(torch.zeros(1)) or RankReply("made")

    taker = ControlOpExecutor(Inner(), {TakeWeights: prepare})
    with torch.inference_mode():  # as the thread that launches works in
        taker.launch(StepPlan(step=1, control_ops=[TAKE]))
    made[0] += 1
    assert made[0].item() == 1


def test_what_cannot_be_done_is_reported_and_what_follows_is_left_out() -> None:
    inner = Inner(refuses="TakeWeights")
    result = inner.taker().launch(StepPlan(step=1, control_ops=[TAKE, RELEASE])).result()
    assert result.replies == [ControlOpReply(False, "no such file. Look again")]
    assert inner.done == ["ready for TakeWeights", "step 1"] and not result.error


def test_an_order_that_nothing_carries_out_is_refused_by_name() -> None:
    result = Inner().taker().launch(StepPlan(step=1, control_ops=[StopProfile()])).result()
    assert not result.replies[0].ok and "StopProfile" in result.replies[0].text


def obey_alike(rank: int, size: int, address: str, library: str, mark: bytes) -> tuple[object, ...]:
    inner = Inner(body=b"body")

    def prepare(order: ControlOp) -> Alike:
        return Alike(inner.prepare(order), "the file", b"mark 1" if rank else mark)

    taker = ControlOpExecutor(inner, {TakeWeights: prepare}, meet(library, rank, size, address))
    result = taker.launch(StepPlan(step=1, control_ops=[TAKE])).result()
    return [(r.ok, r.text, r.body) for r in result.replies], inner.done


def obey(rank: int, size: int, address: str, library: str, refusing: int) -> tuple[object, ...]:
    inner = Inner(body=b"%d" % rank * 3000)
    inner.refuses = "TakeWeights" if rank == refusing else ""
    taker = inner.taker(meet(library, rank, size, address))
    result = taker.launch(StepPlan(step=1, control_ops=[TAKE, RELEASE])).result()
    return [(r.ok, r.text, r.body) for r in result.replies], inner.done


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_needs_all_ranks_alike_is_done_by_none_where_one_is_not(
    tmp_path, library: str
) -> None:
    for replies, done in together(2, tmp_path, obey_alike, library, b"mark 0"):
        assert replies == [(False, "the file of rank 1 differs from rank 0", b"")]
        assert done == ["ready for TakeWeights", "step 1"]
    (tmp_path / "alike").mkdir()
    for replies, _ in together(2, tmp_path / "alike", obey_alike, library, b"mark 1"):
        assert replies == [(True, "did TakeWeights", b"body")]


@pytest.mark.parametrize("library", LIBRARIES)
def test_all_ranks_do_it_and_the_first_speaks_for_them(tmp_path, library: str) -> None:
    found = together(2, tmp_path, obey, library, -1)
    for replies, done in found:
        assert replies == [
            (True, "did TakeWeights", b"0" * 3000),
            (True, "did ReleaseMemory", b"0" * 3000),
        ]
        assert done[-1] == "step 1" and "ReleaseMemory" in done


@pytest.mark.parametrize("library", LIBRARIES)
def test_when_one_rank_cannot_none_does_and_it_is_named(tmp_path, library: str) -> None:
    for replies, done in together(2, tmp_path, obey, library, 1):
        assert replies == [(False, "rank 1: no such file. Look again", b"")]
        assert done == ["ready for TakeWeights", "step 1"]


def requests() -> list[Request]:
    draw = np.random.default_rng(2)
    kinds = (
        greedy(10),
        SamplingParams(max_new_tokens=10, temperature=0.8, top_p=0.9, seed=4),
        SamplingParams(max_new_tokens=10, temperature=0.0, frequency_penalty=0.7),
    )
    return [
        Request(draw.integers(0, VOCAB, 20 + 9 * i).tolist(), kinds[i % 3], score_from=0)
        for i in range(6)
    ]


class Relay:
    """A runner that passes each plan on to another rank before running it."""

    def __init__(self, runner, plans) -> None:
        self._runner = runner
        self._plans = plans
        self.store = runner.store

    def launch(self, plan, mask_of=None):
        self._plans.put(plan)
        return self._runner.launch(plan, mask_of)


def serve(model_config, address, plans) -> None:
    torch.set_num_threads(1)
    runner = build_runner(model_config, open_groups(GroupsConfig(1, 2, address, timeout_s=60)))
    serve_rank(runner, plans.get)


def test_two_ranks_give_the_tokens_of_one(model_config, tmp_path):
    context = rank_processes()
    plans = context.Queue()
    address = f"file://{tmp_path}/meet"
    other = context.Process(target=serve, args=(model_config, address, plans))
    other.start()
    relay = Relay(
        build_runner(model_config, open_groups(GroupsConfig(0, 2, address, timeout_s=60))), plans
    )
    together = requests()
    driver = Driver(relay)
    assert relay.launch(StepPlan(step=0)).result().error == ""
    driver.run(together, chunk=24)
    plans.put(None)
    other.join(60)
    assert other.exitcode == 0

    alone = requests()
    Driver(build_runner(model_config)).run(alone, chunk=24)
    for got, want in zip(together, alone, strict=True):
        assert got.output == want.output and len(got.output) == 10
        for position, value in want.scores.items():
            assert got.scores[position] == pytest.approx(value, abs=1e-5)


def test_a_rank_whose_step_fails_ends(model_config):
    def break_forward(model):
        def forward(step):
            raise RuntimeError("lost")

        model.forward = forward
        return model

    driver = Driver(build_runner(model_config, wrap=break_forward))
    request = requests()[0]
    join, grant = driver.enter(request)
    plans = iter([driver.plan(joins=[join], grants=[grant], rows=[driver.row(request)])])
    with pytest.raises(DeviceError, match="step 1 failed on this rank: RuntimeError: lost"):
        serve_rank(driver.runner, lambda: next(plans))
