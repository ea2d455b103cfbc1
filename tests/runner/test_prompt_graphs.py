"""Steps with prompts as graphs: they give the tokens of other steps, and the host launches less."""

from dataclasses import dataclass

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runner.conftest import build_runner
from tests.support.captured import Elsewhere
from tests.support.runner_driver import Driver, Request, greedy

SIZES = (16, 48, 64)


class Counting(TorchDispatchMode):
    """Ops that are launched outside of graphs."""

    def __init__(self, platform: "Watched") -> None:
        super().__init__()
        self.platform, self.ops = platform, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += not self.platform.is_inside
        return func(*args, **(kwargs or {}))


class Watched(Elsewhere):
    """Knows whether a graph runs, and the tokens of those that ran."""

    is_inside = False

    def capture(self, work):
        work()
        return Watched.Replay(self, work)

    @dataclass(frozen=True)
    class Replay(Elsewhere.Replay):
        def replay(self) -> None:
            self.platform.is_inside = True
            super().replay()
            self.platform.is_inside = False


def requests(*lengths: int, **more) -> list[Request]:
    draw = np.random.default_rng(len(lengths))
    return [Request(draw.integers(0, 131, n).tolist(), greedy(4), **more) for n in lengths]


def outputs(model_config, lengths, platform, chunk=1 << 30, sizes=SIZES, **more):
    runner = build_runner(model_config, platform=platform, prompt_shapes=sizes, max_tokens=80)
    mine = requests(*lengths, **more)
    Driver(runner).run(mine, chunk=chunk)
    return [(request.output, request.scores) for request in mine]


@pytest.mark.parametrize(
    ("lengths", "prompt_steps"),
    [((16,), 1), ((5,), 1), ((17, 30), 1), ((9, 9, 9), 1), ((70,), 0), ((1, 1, 1, 1), 1)],
)
def test_prompts_in_graphs_give_the_tokens_of_others(model_config, lengths, prompt_steps):
    """Sizes that fit exactly, with padding, of one row and of several, and too large ones."""
    platform = Elsewhere()
    captured = outputs(model_config, lengths, platform)
    assert platform.replays == 3 + prompt_steps
    assert captured == outputs(model_config, lengths, None)


def test_prompts_in_pieces_run_with_rows_that_decode(model_config):
    platform = Elsewhere()
    lengths = (3, 45, 20)
    captured = outputs(model_config, lengths, platform, chunk=16)
    assert platform.replays == 6
    assert captured == outputs(model_config, lengths, None, chunk=16)


def test_steps_that_score_prompts_are_launched_op_by_op(model_config):
    platform = Elsewhere()
    captured = outputs(model_config, (20, 12), platform, score_from=0)
    assert platform.replays == 3
    assert captured == outputs(model_config, (20, 12), None, score_from=0)


def test_the_host_launches_a_graph_in_place_of_every_op_of_every_layer(model_config):
    found = {}
    for sizes in ((), SIZES):
        platform = Watched()
        runner = build_runner(model_config, platform=platform, prompt_shapes=sizes, max_tokens=80)
        driver, mine = Driver(runner), requests(20, 17)
        with Counting(platform) as counting:
            driver.run(mine, limit=1)
        found[bool(sizes)] = counting.ops
    assert found[True] < found[False] / 2
