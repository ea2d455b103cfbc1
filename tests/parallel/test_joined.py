"""Joined replicas: each attends by itself, and all share the feed-forward blocks and the logits.

The answers are those of one rank, and a request's own bits depend neither on the requests of other
replicas nor on whether these have any.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from banyan.base.clock import WallClock
from banyan.dp_attention.rules import of_replica
from banyan.engine.model_loader import Phases, open_model
from banyan.layers.build import Build
from banyan.layers.cache_spec import group_caches
from banyan.messages.plan import StepLoad, StepPlan
from banyan.messages.sampling_params import SamplingParams
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.model_config import ModelConfig
from banyan.models.weights.loader import load_model
from banyan.moe.balancer import balance_between_steps
from banyan.moe.eplb import trivial
from banyan.moe.expert_location import ExpertMap
from banyan.moe.expert_watch import ExpertWatch
from banyan.ops.api import Recorder
from banyan.ops.bind import NO_TOOLKIT, bind, open_toolkit
from banyan.parallel.groups import ALONE, Groups, GroupsConfig, open_groups
from banyan.runner.kvstore import GroupLayout
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig
from banyan.scheduler.step_plan_builder import StepPlanBuilder
from tests.models.families import tiny
from tests.parallel.ranks import meet, needs_compiler, together
from tests.parallel.test_steps import SIZES, Grouped
from tests.support.captured import Elsewhere, SampledInTensors
from tests.support.configs import MODEL_CONFIG
from tests.support.flags import config_of
from tests.support.runner_driver import PAGE, Request, greedy

VOCAB = 97
CAPTURED = (1, 2, 4, 8)
IS_ALL = os.environ.get("PARALLEL") == "all"


@dataclass(frozen=True)
class Layout:
    """How a model is shared, and which one. The rest as for `GroupsConfig`."""

    variant: str
    replicas: int = 2
    ranks: int = 1
    library: str = "shared"
    are_experts_apart: bool = False
    replicates_lm_head: bool = False
    is_dense_whole: bool = False
    sends_rows: bool = False
    copies: str = ""
    """By which rule tokens choose among copies of experts; "" = there are none."""
    balances: bool = False
    """Experts move every third step."""
    is_eager: bool = False
    """Of the first replica only: one that calls the model works with one that replays it."""
    is_captured: bool = False
    """Decode steps are graphs of a device, with the collectives inside."""


TWO = (
    Layout("mistral"),
    Layout("mistral", is_eager=True),
    Layout("mistral", library="nccl", is_captured=True),
    Layout("gemma2", replicates_lm_head=True),
    Layout("qwen3 moe, six of 21", are_experts_apart=True),
    Layout("deepseek v3", is_dense_whole=True),
)
FOUR = (
    Layout("gemma2", ranks=2),
    Layout("mistral", ranks=2, replicates_lm_head=True),
    Layout("deepseek v3", ranks=2, are_experts_apart=True),
)


SENT = Layout("qwen3 moe, six of 21", are_experts_apart=True, sends_rows=True)
ON_GPUS = tuple(
    tuple(replace(x, library="nccl", is_captured=True) for x in layouts)
    for layouts in (TWO[3:5], (*TWO[5:], SENT), FOUR)
)
"""Every layout as GPUs run it."""

Outcome = tuple[list[int], str, list[float], list[float]]
"""Of a request: tokens, failure, log-probabilities of the prompt and of the output. Output tokens
are scored by the rank that samples them, the first one of a replica; others hold zeros."""


class Joined(Grouped):
    """Agrees with the other replicas before each step, as a step clock would."""

    def __init__(self, runner: ModelRunner, num_groups: int, agree) -> None:
        super().__init__(runner, num_groups)
        self.agree = agree
        self.empty_steps = 0

    def plan(self, **parts) -> StepPlan:
        plan = super().plan(**parts)
        builder = StepPlanBuilder(plan.step, [], 0)
        builder.rows = plan.rows
        return msgspec.structs.replace(plan, replica_loads=self.agree(builder.load))

    def rest(self) -> None:
        """Go along with the others until none has work."""
        while (plan := self.plan()).replica_loads:
            self.empty_steps += 1
            result = self.runner.launch(plan).result()
            assert not result.error, result.error


def requests(replica: int) -> list[Request]:
    """Those of a replica; the second one has a request that fails, too."""
    kinds = (
        greedy(8),
        SamplingParams(max_new_tokens=9, temperature=0.8, top_p=0.9, seed=4),
        SamplingParams(max_new_tokens=5, temperature=0.0, frequency_penalty=0.7),
    )
    draw = np.random.default_rng(2 + replica)
    found = [
        Request(draw.integers(3, VOCAB, n).tolist(), kinds[i % 3], score_from=(0, -1)[i % 2])
        for i, n in enumerate((1, 17, 44, 30 + replica))
    ]
    return [*found, Request([5, VOCAB, 7], greedy(4))] if replica == 1 else found


def outcome(asked: list[Request]) -> list[Outcome]:
    found = []
    for request in asked:
        scores = sorted(request.scores.items())
        of_prompt = [score for position, score in scores if position < len(request.prompt)]
        of_output = [score for position, score in scores if position >= len(request.prompt)]
        found.append((request.output, request.failure, of_prompt, of_output))
    return found


def open_runner(
    model_config: ModelConfig,
    groups_of,
    max_tokens: int,
    beside=lambda groups, recorder: {},
    is_captured: bool = False,
) -> tuple[ModelRunner, int]:
    """beside: what else the build has."""
    ops = bind(
        *("cpu", torch.device("cpu"), torch.float32, frozenset(), model_config.head_dim),
        toolkit=NO_TOOLKIT if is_captured else open_toolkit("cpu", 1, {}),
        page_size=PAGE,
        exact=True,
    )
    groups = groups_of(ops.recorder)
    build = Build(
        SampledInTensors(ops) if is_captured else ops, groups, **beside(groups, ops.recorder)
    )
    model = load_model(model_config, build)
    kinds = group_caches(model.caches)
    layouts = tuple(GroupLayout(kind.kind, kind.window, PAGE, 128) for kind in kinds)
    config = RunnerConfig(16, 120, layouts, max_tokens=max_tokens, shapes=CAPTURED * is_captured)
    dp = groups.dp_batch
    counts = () if dp is None else (dp.tokens, dp.outputs)
    runner = ModelRunner(model, build, config, Elsewhere(counts) if is_captured else None)
    return runner, len(kinds)


def beside(
    layout: Layout, model_config: ModelConfig, groups: Groups, recorder: Recorder | None
) -> dict:
    """What the build of a layout has, as `Build` names it."""
    found: dict = {"sends_rows": layout.sends_rows}
    if layout.copies and model_config.experts:
        count, ranks = model_config.experts.count, groups.experts.size
        lies = trivial(model_config.num_layers, count, count + 2 * ranks)[:, ::-1]
        found["places"] = ExpertMap(lies, count, groups.experts.rank, ranks, layout.copies)
    if layout.balances and groups.dp_batch is not None:
        found["watch"] = ExpertWatch(recorder, groups.dp_batch.tokens)
    return found


def answer(layout: Layout, folder: Path, rank: int, address: str) -> dict:
    """Each replica alone, one request after another; then all requests of all together."""
    replica, place = divmod(rank, layout.ranks)
    size = layout.replicas * layout.ranks
    talk = meet("gloo", rank, size, f"{address}-talk")

    def agree(load: StepLoad) -> list[StepLoad]:
        reported = torch.tensor([msgspec.structs.astuple(load)], dtype=torch.float32)
        heard = talk.all_gather(reported, 3 * size).view(size, 3)[:: layout.ranks].int().tolist()
        return [StepLoad(*one) for one in heard] if any(one[0] for one in heard) else []

    model_config = read_model_config(str(folder))
    runner, num_groups = open_runner(
        model_config,
        lambda recorder: open_groups(
            GroupsConfig(
                place,
                layout.ranks,
                address,
                (layout.library,),
                60,
                recorder=recorder,
                replica=replica,
                replicas=layout.replicas,
                are_experts_apart=layout.are_experts_apart,
                replicates_lm_head=layout.replicates_lm_head,
                is_dense_whole=layout.is_dense_whole,
            )
        ),
        0 if layout.is_eager and replica == 0 else 300,
        lambda groups, recorder: beside(layout, model_config, groups, recorder),
        layout.is_captured,
    )
    driver = Joined(runner, num_groups, agree)
    lay = let_experts_move(layout, model_config, runner)
    alone = []
    for turn in range(layout.replicas):
        if turn == replica:
            for request in requests(replica):
                driver.run([request], chunk=24)
                alone.append(request)
        driver.rest()
    crowd = requests(replica)
    driver.run(crowd, chunk=24)
    driver.rest()
    return {
        "how": runner.forward.how,
        "alone": outcome(alone),
        "together": outcome(crowd),
        "empty steps": driver.empty_steps,
        "moves": lay(),
    }


def let_experts_move(
    layout: Layout, model_config: ModelConfig, runner: ModelRunner
) -> Callable[[], int]:
    """What then says how many places hold another expert than at the start."""
    build = runner._build
    if not layout.balances or build.places is None:
        return lambda: 0
    config = config_of(
        *("--tp", "4", "--dp", "2", "--enable-dp-attention", "--enable-eplb"),
        *("--eplb-rebalance-num-iterations", "3", "--eplb-rebalance-layers-per-chunk", "1"),
    )
    before, places = build.places.logical.copy(), build.places
    balance_between_steps(config, model_config, build, lambda: runner.model)
    return lambda: int((places.logical != before).sum())


def answer_all(rank: int, size: int, address: str, asked: list) -> list[dict]:
    return [
        answer(layout, folder, rank, f"{address}-{at}") for at, (layout, folder) in enumerate(asked)
    ]


def of_one_rank(folder: Path, replica: int) -> list[tuple]:
    """What one rank that holds all answers to the requests of a replica."""
    runner, num_groups = open_runner(read_model_config(str(folder)), lambda recorder: ALONE, 300)
    asked = requests(replica)
    Grouped(runner, num_groups).run(asked, chunk=24)
    return outcome(asked)


def how(layout: Layout, replica: int) -> str:
    if layout.is_captured:
        return "eager" if layout.sends_rows else "captured"
    is_eager = layout.library != "shared" or (layout.is_eager and replica == 0)
    return "eager" if is_eager else "recorded"


def are_close(found: list[Outcome], expected: list[Outcome], samples: bool) -> bool:
    """The same tokens and failures, log-probabilities but for rounding.

    Args:
        samples: the rank that found them samples, so it has scores of the output too.
    """
    near = partial(np.allclose, rtol=0, atol=1e-5)
    return all(
        a[:2] == b[:2] and near(a[2], b[2]) and (near(a[3], b[3]) if samples else True)
        for a, b in zip(found, expected, strict=True)
    )


@needs_compiler
@pytest.mark.parametrize("layouts", [TWO, FOUR, *ON_GPUS] if IS_ALL else [TWO])
def test_joined_replicas_answer_as_one_rank_does_and_company_changes_no_bit(layouts, tmp_path):
    asked = []
    for at, layout in enumerate(layouts):
        folder = tmp_path / str(at)
        tiny(layout.variant, folder, **(SIZES if "moe" not in layout.variant else {}))
        asked.append((layout, folder))
    size = layouts[0].replicas * layouts[0].ranks
    answers = together(size, tmp_path, answer_all, asked)
    for at, (layout, folder) in enumerate(asked):
        expected = [of_one_rank(folder, replica) for replica in range(layout.replicas)]
        for rank, found in enumerate(answers):
            assert isinstance(found, list), found
            mine, replica = found[at], rank // layout.ranks
            alone = expected[replica]
            assert mine["how"] == how(layout, replica)
            assert mine["empty steps"] > 20
            samples = rank % layout.ranks == 0
            for what in ("alone", "together"):
                assert are_close(mine[what], alone, samples), (layout, rank, what)
            if not layout.is_captured:  # torch's products depend on the number of rows
                assert mine["alone"] == mine["together"], layout
        assert sum(bool(failure) for _, failure, _, _ in expected[1]) == 1


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), (4, 0, 1, False, False)),
        (("--enable-dp-attention",), (2, 1, 2, False, False)),
        (("--enable-dp-attention", "--enable-dp-lm-head"), (2, 1, 2, True, False)),
        (("--moe-dense-tp-size", "1"), (4, 0, 1, False, True)),
    ],
)
def test_the_flags_decide_who_shares_what(flags, expected, monkeypatch):
    """The groups are opened as the flags say; meeting is all that is left to do."""

    def report(config):
        names = ("replica", "replicas", "replicates_lm_head", "is_dense_whole")
        raise TimeoutError((config.size, *(getattr(config, name) for name in names)))

    monkeypatch.setattr("banyan.engine.model_loader.open_groups", report)
    config = of_replica(config_of("--tp", "4", "--dp", "2", *flags), 1, "/meeting")
    with pytest.raises(TimeoutError) as found:
        open_model(config, MODEL_CONFIG, 0, "", Phases(WallClock()))
    assert found.value.args[0] == expected
