"""A model that drafts blocks: step by step what a plain loop drafts, verifies and accepts by
DFlash's published rule."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from banyan.base.errors import ModelError
from banyan.config.schema import LoadConfig
from banyan.layers.build import Build
from banyan.messages.plan import SAMPLE, Row
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.draft_model import dflash_model_config
from banyan.model_config.model_config import FULL, ModelConfig
from banyan.models.weights.draft_models import load_dflash
from banyan.models.weights.loader import load_model
from banyan.ops.bind import NO_TOOLKIT, bind, open_toolkit
from banyan.runner.kvstore import GroupLayout
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig
from banyan.runner.speculative.dflash import BlockDrafter
from banyan.runner.speculative.draft_runner import DraftModel
from tests.models.drafting import PlainBlocks, tiny_blocks
from tests.runner.speculative.test_eagle import CPU, MAX_LENGTH, NUM_PAGES, plain_loop, prompt_of
from tests.runner.speculative.test_standalone import drafted_loop
from tests.support.runner_driver import PAGE, Driver, Request, greedy, ids

BLOCKS, NEW = "blocks", 24


def runner_of(folder: Path, is_recorded: bool, slots: int = 4) -> ModelRunner:
    model_config = read_model_config(str(folder))
    toolkit = open_toolkit("cpu", 1, {}) if is_recorded else NO_TOOLKIT

    def build_of(model_config: ModelConfig) -> Build:
        return Build(
            bind(
                *("cpu", CPU, torch.float32, frozenset(), model_config.head_dim),
                exact=True,
                cache_dtype=torch.float32,
                toolkit=toolkit,
                page_size=PAGE,
            )
        )

    sizes = RunnerConfig(
        *(slots, MAX_LENGTH, (GroupLayout(FULL, 0, PAGE, NUM_PAGES),)),
        max_tokens=12 * slots if is_recorded else 0,
        draft_room=8 * slots,
        verified=8,
    )
    build, source = build_of(model_config), str(folder / BLOCKS)
    model = load_model(model_config, build)
    draft = dflash_model_config(LoadConfig(source, path=source), model_config)
    mine = build_of(draft)
    blocks = load_dflash(draft, model, mine)
    runner = ModelRunner(
        *(model, build, sizes),
        open_drafter=lambda open_draft_runner: BlockDrafter(open_draft_runner()),
        draft=DraftModel(blocks, mine, blocks=blocks),
    )
    assert runner.forward.is_recorded == is_recorded
    for layer in range(runner.store.num_layers):  # what nobody has written is no number
        for pages in runner.store.tensors(layer).values():
            pages.fill_(float("nan"))
    return runner


@pytest.fixture(scope="module", params=["qwen3", "qwen3 moe"])
def pair(request, tmp_path_factory) -> tuple[PlainBlocks, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("blocks")
    return tiny_blocks(request.param, folder, folder / BLOCKS, head_dim=16), folder


@pytest.mark.parametrize(("is_recorded", "drafts"), [(False, 5), (True, 1), (True, 5)])
def test_each_step_accepts_what_a_plain_loop_accepts(pair, is_recorded: bool, drafts: int):
    plain, folder = pair
    runner, accepted, refused = runner_of(folder, is_recorded), 0, 0
    for seed, (length, chunk) in enumerate([(1, 1000), (2, 1000), (30, 7), (40, 16)]):
        prompt = prompt_of(length, seed)
        right, steps = plain_loop(plain, prompt, drafts, NEW)
        assert drafted_loop(runner, prompt, drafts, NEW, chunk) == (right, steps)
        accepted += sum(steps) - len(steps)
        refused += sum(count <= drafts for count in steps)
    assert accepted > 20 and refused > 0


def test_requests_next_to_each_other_are_drafted_for_as_alone(pair):
    plain, folder = pair
    runner, drafts = runner_of(folder, True), 5
    driver = Driver(runner)
    requests = [Request(prompt_of(8 + 13 * i, 20 + i), greedy(20)) for i in range(3)]
    entered = [driver.enter(request) for request in requests]
    parts = {"joins": [join for join, _ in entered], "grants": [grant for _, grant in entered]}
    for turn in range(4):
        asked = [drafts - (turn + at) % 3 for at in range(3)]
        rows = [
            Row(each.slot, each.done, each.known - each.done, want=SAMPLE, propose=many)
            for each, many in zip(requests, asked, strict=True)
        ]
        result = runner.launch(driver.plan(rows=rows, **parts)).result()
        parts = {}
        reported = zip(requests, asked, result.tokens, result.drafts, strict=True)
        for each, many, tokens, guessed in reported:
            each.output += np.frombuffer(tokens, np.int32).tolist()
            each.done = each.known - 1
            assert guessed == ids(plain.drafts([*each.prompt, *each.output], many))


def test_a_prompt_whose_pages_were_read_before_is_drafted_for_as_well(pair):
    plain, folder = pair
    runner, prompt = runner_of(folder, True), prompt_of(50, 9)
    driver, first = Driver(runner), Request(prompt, greedy(1))
    driver.run([first], chunk=20)
    driver.plan(leaves=[first.slot])
    again = Request(prompt, greedy(9))
    join, grant = driver.enter(again, shared=first.pages[:3])
    row = Row(again.slot, again.done, again.known - again.done, want=SAMPLE, propose=5)
    result = runner.launch(driver.plan(rows=[row], joins=[join], grants=[grant])).result()
    answer = np.frombuffer(result.tokens[0], np.int32).tolist()
    assert result.drafts[0] == ids(plain.drafts([*prompt, *answer], 5))


def test_what_was_not_read_for_a_while_is_read_when_drafts_are_asked_for(pair):
    plain, folder = pair
    runner, prompt, new = runner_of(folder, True), prompt_of(15, 3), 60
    driver, request = Driver(runner), Request(prompt, greedy(new + 7))
    join, grant = driver.enter(request)
    parts = {"joins": [join], "grants": [grant]}
    while len(request.output) < new:
        asks = len(request.output) in (11, 13, 55)  # the last one after more than is ever held
        start, count = request.done, request.known - request.done
        row = Row(request.slot, start, count, want=SAMPLE, propose=5 if asks else 0)
        result = runner.launch(driver.plan(rows=[row], **parts)).result()
        request.output += np.frombuffer(result.tokens[0], np.int32).tolist()
        request.done, parts = request.known - 1, {}
        if asks:
            assert result.drafts[0] == ids(plain.drafts([*prompt, *request.output], 5))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda weights: weights.pop("fc.weight"), "lacks 1 weights.*join"),
        (lambda weights: weights.update(gate=weights["fc.weight"][:1].clone()), "have no place"),
    ],
)
def test_a_model_that_is_not_whole_is_refused(tmp_path, change, text: str):
    tiny_blocks("qwen3", tmp_path, tmp_path / BLOCKS, head_dim=16)
    weights = load_file(tmp_path / BLOCKS / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / BLOCKS / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"none of DFlash's: .*{text}"):
        runner_of(tmp_path, False)
