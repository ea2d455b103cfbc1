"""Decode steps of several ranks as graphs on devices of an emulated NPU: which ones run, what comes
to the host, and that the answers are those of steps that are launched anew.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from banyan.ascend.platform import NpuPlatform
from banyan.layers.build import Build
from banyan.layers.cache_spec import group_caches
from banyan.messages.plan import (
    Join,
    NewContent,
    PageGrant,
    Piece,
    PlacedSpan,
    StepLoad,
    StepPlan,
    encode_spans,
)
from banyan.messages.spans import ContentKind
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model
from banyan.ops.bind import bind, open_toolkit
from banyan.parallel.groups import Group, GroupsConfig, open_groups
from banyan.pipeline.runner_stage import PipelineStage
from banyan.runner.batch import Batch
from banyan.runner.captured_forward import CapturedForward
from banyan.runner.control_ops import ControlOpExecutor
from banyan.runner.kvstore import GroupLayout
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig
from banyan.scheduler.step_plan_builder import StepPlanBuilder
from tests.ascend.emulation.device import EmulatedNpu, install
from tests.models.families import tiny
from tests.parallel.ranks import meet, together
from tests.support.runner_driver import Driver, Request, greedy

VOCAB, PAGE, TOKENS = 97, 128, 9
SHAPES = (1, 2, 4)
IN_TEST = ("dp, rows at once",)
IN_ALL = pytest.mark.skipif(os.environ.get("NPU_CASES") != "all", reason="NPU_CASES is not all")


@dataclass(frozen=True)
class Layout:
    """Of two ranks; `groups` as for `GroupsConfig`.

    Attributes:
        asked: lengths of each replica's prompts; its rows in a decode step are as many.
        exchanged: tokens of a rank that go to the ranks of their experts at once.
    """

    variant: str
    asked: tuple[tuple[int, ...], ...]
    groups: dict[str, object] = field(default_factory=dict)
    sizes: dict[str, object] = field(default_factory=dict)
    exchanged: int = 0

    @property
    def shares(self) -> int:
        """That a step is divided into."""
        return int(self.groups.get("shares", 1))  # type: ignore[call-overload]


SPARSE = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "index_head_dim": 128}
LAYOUTS = {
    "dp": Layout(
        *("qwen3 moe", ((5, 30, 12), (7,))),
        {"replicas": 2, "are_experts_apart": True},
        {"head_dim": 16, "num_experts": 8},
    ),
    "dp, heads apart": Layout(
        *("qwen3", ((5,), (7, 9, 40))),
        {"replicas": 2, "replicates_lm_head": True},
        {"head_dim": 128},
    ),
    "cp": Layout(*("qwen3", ((5, 30, 12),)), {"shares": 2, "split": "zigzag"}, {"head_dim": 128}),
    "cp of an indexer": Layout(
        "deepseek v3.2", ((5, 30, 12),), {"shares": 2, "split": "zigzag"}, SPARSE
    ),
    "dp, rows at once": Layout(
        *("qwen3 moe", ((5, 30, 12), (7,))),
        {"replicas": 2, "are_experts_apart": True, "has_exchange": True},
        {"head_dim": 16, "num_experts": 8, "hidden_size": 1024, "weights": 0.05},
        exchanged=16,
    ),
    "ep, rows at once": Layout(
        *("qwen3 moe", ((5, 30, 12),)),
        {"are_experts_apart": True, "has_exchange": True},
        {"head_dim": 16, "num_experts": 8, "hidden_size": 1024, "weights": 0.05},
        exchanged=2,
    ),
    "dp of an indexer": Layout(
        *("deepseek v3.2", ((5, 30, 12), (7,))),
        {"replicas": 2, "are_experts_apart": True},
        SPARSE,
    ),
    "pp": Layout(*("qwen3", ((5, 30, 12),)), {"stages": 2}, {"head_dim": 128}),
    "tp": Layout(*("qwen3", ((5, 30, 12),)), {}, {"head_dim": 128}),
}


class Ranks(Driver):
    """Drives one rank; replicas agree on each step by `talk`."""

    def __init__(self, runner: ModelRunner, talk: Group | None, width: int) -> None:
        super().__init__(runner)
        self.talk = talk
        self.width = width
        self.embeds = b""
        """In place of the tokens of the prompts that come."""

    def plan(self, **parts: object) -> StepPlan:
        plan = super().plan(**parts)
        if self.talk is None:
            return plan
        if self.embeds:
            given = NewContent(1, b"", ContentKind.FEATURES, (1, 1, 1), 1, self.embeds)
            plan = msgspec.structs.replace(plan, contents=[given], pieces=[Piece(1, 0, 1)])
        builder = StepPlanBuilder(plan.step, [], 0)
        builder.rows = plan.rows
        reported = torch.tensor([msgspec.structs.astuple(builder.load)], dtype=torch.float32)
        heard = self.talk.all_gather(reported, 6).view(2, 3).int().tolist()
        peers = [StepLoad(*one) for one in heard] if any(one[0] for one in heard) else []
        return msgspec.structs.replace(plan, replica_loads=peers)

    def enter(self, *given: object, **named: object) -> tuple[Join, PageGrant]:
        join, grant = super().enter(*given, **named)
        spans = [PlacedSpan(0, 1, 1, 0, (1, 1, 0))] if self.embeds else []
        return msgspec.structs.replace(join, spans=encode_spans(spans)), grant

    def go_on(self, requests: list[Request]) -> None:
        """To the end of requests that run."""
        while running := [request for request in requests if not request.is_over]:
            rows = [self.row(request) for request in running]
            self.accept(running, rows, self.runner.launch(self.plan(rows=rows)).result())

    def rest(self) -> None:
        """Go along with the other replica until it has no work."""
        while self.talk is not None and (plan := self.plan()).replica_loads:
            result = self.runner.launch(plan).result()
            assert not result.error, result.error


class Staged:
    """A plan goes through all stages before the next one comes."""

    def __init__(self, runner: ModelRunner, line: PipelineStage) -> None:
        self.store = runner.store
        self._line = line

    def launch(self, plan: StepPlan) -> object:
        pending = self._line.turn(plan)
        while pending is None:
            pending = self._line.turn(None)
        return pending


def open_rank(layout: Layout, folder: Path, rank: int, address: str, shapes: tuple[int, ...]):
    """A runner on the device of a rank, and what drives it."""
    model_config, platform = read_model_config(str(folder)), NpuPlatform()
    device = platform.open(rank, 1)
    toolkit = open_toolkit("npu", 1, {})
    kinds = (platform.traits.features, model_config.head_dim)
    ops = bind("npu", device, torch.float16, *kinds, toolkit=toolkit, page_size=PAGE)
    given, place, size = dict(layout.groups), rank, 2
    if "replicas" in given:
        given, place, size = given | {"replica": rank}, 0, 1
    if "stages" in given or "shares" in given:
        size = 1
    groups = open_groups(GroupsConfig(place, size, address, ("hccl",), 60, **given))
    sent = {"sends_rows": bool(layout.exchanged), "exchanged": layout.exchanged}
    build = Build(ops, groups, torch.float16, device, **sent)
    model = load_model(model_config, build)
    caches = group_caches(model.caches)
    pages = tuple(GroupLayout(each.kind, each.window, PAGE, 64) for each in caches)
    sizes = RunnerConfig(8, 8 * PAGE, pages, max_tokens=128, shapes=shapes)
    runner, talk = ModelRunner(model, build, sizes, platform), None
    if groups.dp_batch is not None:
        talk = meet("gloo", rank, 2, f"{address}-talk")
    driver = Ranks(runner, talk, model_config.hidden_size)
    if groups.stages.size > 1:
        like = torch.empty(0, dtype=torch.float16, device=device)
        executor = ControlOpExecutor(runner, {})
        line = PipelineStage(
            runner, executor, groups.stages, groups.world, like, model_config.hidden_size
        )
        driver.runner = Staged(runner, line)
    return runner, driver


def answer(rank: int, size: int, address: str, folder: Path, name: str) -> list[dict]:
    """What a rank finds, captured and then eager."""
    os.environ |= {"BANYAN_NPU": "tests.ascend.emulation", "BANYAN_NPU_CHECKS": "1"}
    npu, layout = install(os.environ.get("BANYAN_NPU_SOC", "A3")), LAYOUTS[name]
    replayed, bring = list[int](), CapturedForward._copy_inputs

    def counted(forward: CapturedForward, batch: Batch, shape: int, count: int) -> None:
        replayed.append(shape)
        bring(forward, batch, shape, count)

    CapturedForward._copy_inputs = counted
    found = list[dict]()
    for at, shapes in enumerate((SHAPES, ())):
        runner, driver = open_rank(layout, folder, rank, f"{address}-{at}", shapes)
        draw = np.random.default_rng(4)
        prompts = [[draw.integers(3, VOCAB, n).tolist() for n in each] for each in layout.asked]
        asked = [Request(ids, greedy(TOKENS)) for ids in prompts[rank % len(prompts)]]
        driver.run(asked, limit=1)
        replayed.clear()
        before = npu.counters()
        driver.go_on(asked)
        after = npu.counters()
        reported = {
            "how": runner.forward.how,
            "replayed": replayed.copy(),
            "counted": {key: (after[key] - before[key]) / (TOKENS - 1) for key in before},
            "output": [request.output for request in asked],
            "odd": [] if driver.talk is None else odd(driver, rank),
        }
        found.append(reported)
    return found


def odd(driver: Ranks, rank: int) -> list[tuple]:
    """What the second replica alone is asked: two prompts of a token, of which one fails, and one
    that comes as numbers."""
    if rank == 0:
        driver.rest()
        return []
    first = [Request([VOCAB], greedy(3)), Request([5], greedy(5))]
    driver.run(first)
    driver.embeds = np.linspace(-1, 1, driver.width, dtype=np.float32).tobytes()
    second = [Request([6], greedy(5))]
    driver.run(second)
    driver.rest()
    return [(request.output, request.failure) for request in (*first, *second)]


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in IN_TEST else IN_ALL) for n in LAYOUTS]
)
def test_steps_of_several_ranks_are_graphs_and_nothing_waits(npu: EmulatedNpu, tmp_path, name):
    layout = LAYOUTS[name]
    tiny(layout.variant, tmp_path, num_hidden_layers=2, **layout.sizes)
    answers = together(2, tmp_path, answer, tmp_path, name)
    rows = max(map(len, layout.asked))
    wanted = next(shape for shape in SHAPES if shape >= -(-rows // layout.shares))
    for rank, found in enumerate(answers):
        assert isinstance(found, list), found
        captured, eager = found
        assert (captured["how"], eager["how"]) == ("captured", "eager")
        assert captured["replayed"] == [wanted] * (TOKENS - 1) and not eager["replayed"]
        assert captured["output"] == eager["output"]
        assert captured["odd"] == eager["odd"]
        counts = captured["counted"]
        assert counts["waits"] == 1, counts
        late = 2 if rank == 0 or name != "pp" else 1  # the first rank alone has logits there
        assert counts["to_host"] == counts["to_host_late"] == late
    if "replicas" in layout.groups:
        failed, one, numbers = answers[1][0]["odd"]
        assert failed[1] and len(one[0]) == len(numbers[0]) == 5
