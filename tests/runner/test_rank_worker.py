"""Two ranks in two processes give the tokens of one."""

import numpy as np
import pytest
import torch

from banyan.base.errors import DeviceError
from banyan.messages.plan import StepPlan
from banyan.messages.sampling_params import SamplingParams
from banyan.parallel.groups import open_groups
from banyan.runner.control_ops import serve_rank
from tests.parallel.ranks import rank_processes
from tests.runner.conftest import VOCAB, build_runner
from tests.runner.driver import Driver, Request, greedy


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
    runner = build_runner(model_config, open_groups(1, 2, address, timeout_s=60))
    serve_rank(runner, plans.get)


def test_two_ranks_give_the_tokens_of_one(model_config, tmp_path):
    context = rank_processes()
    plans = context.Queue()
    address = f"file://{tmp_path}/meet"
    other = context.Process(target=serve, args=(model_config, address, plans))
    other.start()
    relay = Relay(build_runner(model_config, open_groups(0, 2, address, timeout_s=60)), plans)
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
