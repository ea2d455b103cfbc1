"""Steps of several ranks, recorded over shared memory, called over gloo or captured as on GPUs: the
answers are those of one rank, and a request's own bits do not depend on its company.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from banyan.layers.build import Build
from banyan.layers.cache_spec import group_caches
from banyan.messages.plan import POOL, Row, StepPlan
from banyan.messages.sampling_params import SamplingParams
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.model_config import ModelConfig, Pooling
from banyan.models.weights.loader import load_model
from banyan.ops.bind import NO_TOOLKIT, bind, open_toolkit
from banyan.parallel.groups import ALONE, GroupsConfig, open_groups
from banyan.runner.kvstore import GroupLayout
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig
from tests.models.families import tiny
from tests.parallel.ranks import needs_compiler, together
from tests.support.captured import Elsewhere, SampledInTensors
from tests.support.runner_driver import PAGE, Driver, Request, greedy

SIZES = {
    "head_dim": 8,
    "num_key_value_heads": 6,
    "intermediate_size": 96,
    "tie_word_embeddings": True,
}
"""That two and three ranks can share, with compiled kernels."""
MODELS = {"mistral": "text", "gemma3": "text", "qwen3": "vectors"}
"""Variant -> what it is served for; gemma3 has layers with windows and some without."""
VOCAB, LENGTHS = 97, (1, 5, 17, 30, 44, 71)


@dataclass
class Answers:
    """What one rank found, request by request."""

    how: str
    alone: list[tuple]
    together: list[tuple]


class Grouped(Driver):
    """Gives the same pages in every cache group."""

    def __init__(self, runner: ModelRunner, num_groups: int) -> None:
        super().__init__(runner)
        self.num_groups = num_groups

    def plan(self, **parts) -> StepPlan:
        grants = parts.pop("grants", [])
        mine = [
            type(g)(g.slot, group, g.first, g.pages)
            for g in grants
            for group in range(self.num_groups)
        ]
        return super().plan(grants=mine, **parts)


def requests() -> list[Request]:
    kinds = (
        greedy(8),
        SamplingParams(max_new_tokens=8, temperature=0.8, top_p=0.9, seed=4),
        SamplingParams(max_new_tokens=8, temperature=0.0, frequency_penalty=0.7),
    )
    draw = np.random.default_rng(2)
    return [
        Request(draw.integers(3, VOCAB, n).tolist(), kinds[i % 3], score_from=0)
        for i, n in enumerate(LENGTHS)
    ]


def write_text(driver: Driver, asked: list[Request]) -> list[tuple]:
    driver.run(asked, chunk=24)
    assert not any(request.failure for request in asked)
    return [(r.output, [r.scores[p] for p in sorted(r.scores)]) for r in asked]


def make_vectors(driver: Driver, asked: list[Request]) -> list[tuple]:
    entered = [driver.enter(request) for request in asked]
    rows = [Row(r.slot, 0, len(r.prompt), want=POOL) for r in asked]
    joins, grants = [e[0] for e in entered], [e[1] for e in entered]
    result = driver.runner.launch(driver.plan(joins=joins, grants=grants, rows=rows)).result()
    assert not result.error and not result.failed
    return [([], np.frombuffer(v, np.float32).tolist()) for v in result.vectors]


def answer(
    model_config: ModelConfig, rank: int = 0, size: int = 1, address: str = "", by: str = "shared"
):
    """Run the requests one by one, then all together."""
    is_gpu = by == "nccl"
    ops = bind(
        *("cpu", torch.device("cpu"), torch.float32, frozenset(), model_config.head_dim),
        toolkit=NO_TOOLKIT if is_gpu else open_toolkit("cpu", 1, {}),
        page_size=PAGE,
        exact=is_gpu,
    )
    groups = ALONE
    if size > 1:
        groups = open_groups(
            GroupsConfig(rank, size, address, (by,), timeout_s=60, recorder=ops.recorder)
        )
    build = Build(SampledInTensors(ops) if is_gpu else ops, groups)
    model = load_model(model_config, build)
    kinds = group_caches(model.caches)
    layouts = tuple(GroupLayout(kind.kind, kind.window, PAGE, 128) for kind in kinds)
    config = RunnerConfig(16, 120, layouts, max_tokens=300, shapes=(1, 2, 4, 8) * is_gpu)
    runner = ModelRunner(model, build, config, Elsewhere() if is_gpu else None)
    driver = Grouped(runner, len(kinds))
    ask = write_text if model_config.pooling is None else make_vectors
    alone = [ask(driver, [request])[0] for request in requests()]
    return Answers(runner.forward.how, alone, ask(driver, requests()))


def answer_all(
    rank: int, size: int, address: str, model_configs: list[ModelConfig]
) -> list[Answers]:
    """Over shared memory for every model, over gloo, then as GPUs work."""
    return [
        answer(model_config, rank, size, f"{address}-{by}-{i}", by)
        for by in ("shared", "gloo", "nccl")
        for i, model_config in enumerate(model_configs[:1] if by == "gloo" else model_configs)
    ]


@pytest.fixture(scope="module")
def model_configs(tmp_path_factory: pytest.TempPathFactory) -> list[ModelConfig]:
    found = []
    for variant, purpose in MODELS.items():
        folder = tmp_path_factory.mktemp(variant)
        tiny(variant, folder, **SIZES)
        model_config = read_model_config(str(folder))
        if purpose == "vectors":
            model_config = replace(model_config, pooling=Pooling(), tie_embeddings=False)
        found.append(model_config)
    return found


@pytest.fixture(scope="module")
def expected(model_configs: list[ModelConfig]) -> list[Answers]:
    """Of one rank, recorded and captured."""
    return [answer(each, by=by) for by in ("shared", "nccl") for each in model_configs]


@needs_compiler
@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_answer_as_one_does_and_company_changes_no_bit(
    size: int, model_configs: list[ModelConfig], expected: list[Answers], tmp_path: Path
):
    hows = ["recorded"] * 3 + ["captured", "captured", "eager"]
    assert [one.how for one in expected] == hows
    for rank, answers in enumerate(together(size, tmp_path, answer_all, model_configs)):
        assert isinstance(answers, list), answers
        called = answers.pop(3)
        assert called.how == "eager", "gloo's work cannot be recorded"
        assert [mine.how for mine in answers] == hows
        for mine, one in zip((*answers, called), (*expected, expected[0]), strict=True):
            if mine.how == "recorded":  # torch's products depend on the number of rows
                assert mine.alone == mine.together
            for (tokens, numbers), (same, close) in zip(mine.alone, one.alone, strict=True):
                assert tokens == same and len(numbers) == len(close) > 0
                if rank == 0:  # it samples, so it alone knows which edits a token was drawn after
                    assert np.allclose(numbers, close, rtol=0, atol=2e-4)
        # All libraries add in the same order: recorded or not, the bits are the same.
        assert answers[0].alone == called.alone
