"""Steps captured by shape: which are, what is padded, and that nothing of an older step remains."""

import numpy as np
import pytest
import torch

from banyan.messages.sampling_params import SamplingParams
from banyan.runner.captured_forward import CapturedForward
from tests.runner.conftest import SHAPES, Elsewhere, build_runner
from tests.support.runner_driver import Driver, Request, greedy


def requests(count: int, length: int = 6) -> list[Request]:
    draw = np.random.default_rng(count)
    return [Request(draw.integers(0, 131, 5 + i).tolist(), greedy(length)) for i in range(count)]


def outputs(model_config, count: int, platform: Elsewhere | None) -> list[list[int]]:
    mine = requests(count)
    Driver(build_runner(model_config, platform=platform)).run(mine)
    return [request.output for request in mine]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 17, 33])
def test_any_number_of_rows_gives_the_tokens_of_steps_that_are_not_captured(model_config, count):
    platform = Elsewhere()
    captured = outputs(model_config, count, platform)
    assert platform.replays == 5  # every step but the prompts'
    assert captured == outputs(model_config, count, None)


def test_a_step_takes_the_smallest_shape_that_holds_it_and_the_rest_is_slot_0(model_config):
    runner = build_runner(model_config, platform=Elsewhere())
    forward = runner.forward
    assert isinstance(forward, CapturedForward) and runner.forward.how == "captured"
    seen = []
    for (rows, _), graph in forward._graphs.items():
        work = graph.replay

        def replay(rows=rows, work=work):
            seen.append((rows, forward._step.slots[:rows].tolist()))
            work()

        forward._graphs[rows, 1] = type("Watched", (), {"replay": staticmethod(replay)})()
    mine = requests(5)
    Driver(runner).run(mine)
    assert {rows for rows, _ in seen} == {8}
    assert all(slots == [1, 2, 3, 4, 5, 0, 0, 0] for _, slots in seen)


def test_padding_never_moves_and_a_slot_taken_again_starts_where_its_new_row_says(model_config):
    runner = build_runner(model_config, platform=Elsewhere())
    driver, first = Driver(runner), requests(3, length=9)
    driver.run(first)
    lengths = runner._table.lengths
    assert int(lengths[0]) == 0
    assert lengths[1:4].tolist() == [len(r.prompt) + 8 for r in first]
    again = requests(1)[0]
    join, grant = driver.enter(again, slot=2)
    rows = [driver.row(again)]
    plan = driver.plan(leaves=[2], joins=[join], grants=[grant], rows=rows)
    driver.accept([again], rows, runner.launch(plan).result())
    while not again.is_over:
        rows = [driver.row(again)]
        driver.accept([again], rows, runner.launch(driver.plan(rows=rows)).result())
    alone = requests(1)[0]
    Driver(build_runner(model_config)).run([alone])
    assert again.output == alone.output


def test_rows_that_draw_or_are_penalised_are_sampled_behind_the_graph(model_config):
    def run(platform: Elsewhere | None) -> list[list[int]]:
        kinds = (
            SamplingParams(max_new_tokens=8, temperature=0.9, top_p=0.9, top_k=40, seed=3),
            SamplingParams(max_new_tokens=8, temperature=0.0, repetition_penalty=1.4),
            greedy(8),
        )
        mine = [Request([7, 8, 9], kind) for kind in kinds]
        Driver(build_runner(model_config, platform=platform)).run(mine)
        return [request.output for request in mine]

    assert run(Elsewhere()) == run(None)


def test_results_of_a_step_stay_when_the_next_one_has_run(model_config):
    runner = build_runner(model_config, platform=Elsewhere())
    driver, mine = Driver(runner), requests(2)
    driver.run(mine, limit=2)
    plans = []
    for ahead in range(2):
        rows = [
            type(row)(row.slot, row.start + ahead, 1, want=row.want)
            for row in (driver.row(r, chunk=1) for r in mine)
        ]
        plans.append(runner.launch(driver.plan(rows=rows)))
    early = [np.frombuffer(t, np.int32).item() for t in plans[0].result().tokens]
    late = [np.frombuffer(t, np.int32).item() for t in plans[1].result().tokens]
    whole = requests(2)
    Driver(build_runner(model_config)).run(whole)
    assert [[*r.output, a, b] for r, a, b in zip(mine, early, late, strict=True)] == [
        r.output[:4] for r in whole
    ]


def test_a_step_of_more_rows_than_any_shape_is_not_captured(model_config):
    assert torch.tensor(SHAPES).max() == 40
    platform = Elsewhere()
    runner = build_runner(model_config, platform=platform)
    runner.forward._shapes = (1, 2)
    mine = requests(3)
    Driver(runner).run(mine)
    assert platform.replays == 0 and all(len(r.output) == 6 for r in mine)
