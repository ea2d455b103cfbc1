"""Ranks that divide the tokens of prompts: each computes a share of every step, reads the keys of
all of it, and keeps a whole cache.

The answers are those of one rank, and a request's own bits depend neither on its company nor on who
computes which token.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from banyan.base.clock import WallClock
from banyan.base.errors import ConfigError
from banyan.engine.model_loader import Phases, open_model
from banyan.messages.plan import HIDDEN, SAMPLE, Row
from banyan.messages.sampling_params import SamplingParams
from banyan.model_config.checkpoint import read_model_config
from banyan.parallel.groups import ALONE, GroupsConfig, open_groups
from banyan.runner.runner import ModelRunner
from tests.models.families import tiny
from tests.parallel.ranks import needs_compiler, together
from tests.parallel.test_joined import VOCAB, Outcome, are_close, open_runner, outcome
from tests.parallel.test_steps import SIZES, Grouped
from tests.support.configs import MODEL_CONFIG
from tests.support.flags import config_of
from tests.support.runner_driver import PAGE, Request, greedy

IS_ALL = os.environ.get("PARALLEL") == "all"
LENGTHS = (1, 2, 3, 17, 44, 71)
CHUNK = 23


@dataclass(frozen=True)
class Layout:
    """Which model, and how its steps are divided. The rest as for `GroupsConfig`."""

    variant: str
    split: str = "zigzag"
    shares: int = 2
    library: str = "shared"
    are_experts_apart: bool = False
    is_dense_whole: bool = False
    is_eager: bool = False
    sends_rows: bool = False


TWO = (
    Layout("mistral"),
    Layout("mistral", is_eager=True),
    Layout("mistral", "interleave", library="gloo"),
    Layout("qwen3", "interleave"),
    Layout("gemma3"),
    Layout("deepseek v2", "interleave"),
)
MORE = (
    Layout("gemma3", "interleave"),
    Layout("qwen3"),
    Layout("deepseek v2", is_dense_whole=True),
    Layout("deepseek v3.2"),
    Layout("deepseek v3.2", "interleave", are_experts_apart=True),
    Layout("gpt-oss"),
    Layout("qwen3 moe, six of 21", are_experts_apart=True),
    Layout("qwen3 moe, six of 21", are_experts_apart=True, sends_rows=True),
    Layout("mistral", library="nccl"),
    Layout("deepseek v2", "interleave", library="nccl"),
)
FOUR = (
    Layout("mistral"),
    Layout("qwen3", "interleave"),
    Layout("gemma3"),
    Layout("gemma3", "interleave"),
    Layout("deepseek v2"),
    Layout("deepseek v2", "interleave", library="gloo"),
    Layout("mistral", shares=4),
    Layout("mistral", "interleave", shares=4),
)
CALLED = ("gloo", "nccl")
"""Their work cannot be recorded."""
WORLDS = {2: TWO} if not IS_ALL else {2: TWO + MORE, 3: (Layout("mistral", shares=3),), 4: FOUR}


def requests() -> list[Request]:
    kinds = (
        greedy(8),
        SamplingParams(max_new_tokens=8, temperature=0.8, top_p=0.9, seed=4),
        SamplingParams(max_new_tokens=5, temperature=0.0, frequency_penalty=0.7),
    )
    draw = np.random.default_rng(3)
    found = [
        Request(draw.integers(3, VOCAB, n).tolist(), kinds[i % 3], score_from=(0, 0, -1)[i % 3])
        for i, n in enumerate(LENGTHS)
    ]
    return [*found, Request([5, VOCAB, 7], greedy(4))]


def behind_a_prefix(driver: Grouped) -> list[Outcome]:
    """A prompt whose beginning is in the cache of every rank, and a request that goes on after its
    pages were taken."""
    draw = np.random.default_rng(5)
    first = Request(draw.integers(3, VOCAB, 3 * PAGE + 5).tolist(), greedy(6))
    driver.run([first], CHUNK)
    prompt = first.prompt[: 2 * PAGE]
    second = Request([*prompt, *draw.integers(3, VOCAB, 19).tolist()], greedy(6), score_from=34)
    driver.run([second], 7, shared=first.pages[:2])
    driver.run([second], limit=3)
    third = Request(first.prompt, greedy(6))
    driver.run([third], CHUNK, limit=2)
    driver.run([third], CHUNK)  # with pages anew
    return outcome([first, second, third])


def hidden_of(driver: Grouped) -> list[float]:
    """Hidden states of all positions of a prompt that runs beside another one."""
    asked = [Request(list(range(5, 5 + n)), greedy(1)) for n in (21, 6)]
    entered = [driver.enter(request) for request in asked]
    rows = [Row(r.slot, 0, len(r.prompt), want=SAMPLE | HIDDEN) for r in asked]
    joins, grants = [e[0] for e in entered], [e[1] for e in entered]
    result = driver.runner.launch(driver.plan(joins=joins, grants=grants, rows=rows)).result()
    assert not result.error and not result.failed
    return [float(x) for states in result.hidden for x in np.frombuffer(states, np.float32)]


def work(runner: ModelRunner, num_groups: int) -> dict:
    """Each request alone, then all of them; behind a prefix; what hidden states come out."""
    driver = Grouped(runner, num_groups)
    alone = requests()
    for request in alone:
        driver.run([request], CHUNK)
    crowd = requests()
    driver.run(crowd, CHUNK)
    return {
        "how": runner.forward.how,
        "alone": outcome(alone),
        "together": outcome(crowd),
        "prefix": behind_a_prefix(Grouped(runner, num_groups)),
        "hidden": hidden_of(Grouped(runner, num_groups)),
    }


def answer(layout: Layout, folder: Path, rank: int, size: int, address: str) -> dict:
    return work(
        *open_runner(
            read_model_config(str(folder)),
            lambda recorder: open_groups(
                GroupsConfig(
                    rank,
                    size // layout.shares,
                    address,
                    (layout.library,),
                    60,
                    recorder=recorder,
                    are_experts_apart=layout.are_experts_apart,
                    is_dense_whole=layout.is_dense_whole,
                    shares=layout.shares,
                    split=layout.split,
                )
            ),
            0 if layout.is_eager else 300,
            lambda groups, recorder: {"sends_rows": layout.sends_rows},
        )
    )


def answer_all(rank: int, size: int, address: str, asked: list) -> list[dict]:
    return [
        answer(layout, folder, rank, size, f"{address}-{at}")
        for at, (layout, folder) in enumerate(asked)
    ]


def of_one_rank(folder: Path) -> dict:
    return work(*open_runner(read_model_config(str(folder)), lambda recorder: ALONE, 300))


@needs_compiler
@pytest.mark.parametrize("size", WORLDS)
def test_ranks_that_divide_steps_answer_as_one_does_and_company_changes_no_bit(size, tmp_path):
    folders: dict[str, Path] = {}
    for layout in WORLDS[size]:
        if layout.variant not in folders:
            folders[layout.variant] = tmp_path / str(len(folders))
            sizes = SIZES if "moe" not in layout.variant else {}
            tiny(layout.variant, folders[layout.variant], **sizes)
    asked = [(layout, folders[layout.variant]) for layout in WORLDS[size]]
    answers = together(size, tmp_path, answer_all, asked)
    expected = {variant: of_one_rank(folder) for variant, folder in folders.items()}
    for at, (layout, _) in enumerate(asked):
        one = expected[layout.variant]
        for rank, found in enumerate(answers):
            assert isinstance(found, list), found
            mine = found[at]
            is_eager = layout.is_eager or layout.library in CALLED
            assert mine["how"] == ("eager" if is_eager else "recorded")
            for what in ("alone", "together", "prefix"):
                assert are_close(mine[what], one[what], rank == 0), (layout, rank, what)
            assert mine["alone"] == mine["together"], layout
            assert np.allclose(mine["hidden"], one["hidden"], rtol=0, atol=1e-4), layout
            assert len(mine["hidden"]) == len(one["hidden"]) > 0
        assert sum(bool(failure) for _, failure, _, _ in one["alone"]) == 1
    of_sums: dict[Layout, list] = {}
    for at, (layout, _) in enumerate(asked):
        sums = replace(layout, split="", library="", is_eager=False, sends_rows=False)
        for rank, found in enumerate(answers):
            alone = found[at]["alone"]
            bits = of_sums.setdefault(sums, alone)  # first of rank 0, which has output scores
            reported = slice(None) if rank == 0 else slice(3)
            is_same = [one[reported] for one in bits] == [one[reported] for one in alone]
            assert is_same, "who computes a token changes none of its bits"
    assert len(of_sums) < len(asked) or size == 3


def test_devices_that_are_no_cpus_are_refused_by_name(monkeypatch):
    traits = SimpleNamespace(is_host=False, shares_steps=False, name="an accelerator")
    monkeypatch.setattr(
        "banyan.engine.model_loader.open_platform", lambda name: SimpleNamespace(traits=traits)
    )
    with pytest.raises(ConfigError, match="--attn-cp-size 2: .* only, this is an accelerator"):
        config = config_of("--tp", "4", "--attn-cp-size", "2")
        open_model(config, MODEL_CONFIG, 0, "", Phases(WallClock()))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), (4, 1, "zigzag")),
        (("--attn-cp-size", "2"), (2, 2, "zigzag")),
        (("--attn-cp-size", "4", "--cp-strategy", "interleave"), (1, 4, "interleave")),
        (("--attn-cp-size", "2", "--nsa-prefill-cp-mode", "in-seq-split"), (2, 2, "zigzag")),
    ],
)
def test_the_flags_decide_who_computes_what(flags, expected, monkeypatch):
    """The groups are opened as the flags say; meeting is all that is left to do."""

    def report(config):
        raise TimeoutError((config.size, config.shares, config.split))

    monkeypatch.setattr("banyan.engine.model_loader.open_groups", report)
    with pytest.raises(TimeoutError) as found:
        open_model(config_of("--tp", "4", *flags), MODEL_CONFIG, 0, "", Phases(WallClock()))
    assert found.value.args[0] == expected
