"""A draft model beside the runner: step by step what a plain loop over two models drafts, verifies
and accepts by the published greedy rule."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from banyan.layers.build import Build
from banyan.messages.plan import SAMPLE, Row
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.model_config import FULL
from banyan.models.weights.loader import load_model
from banyan.ops.bind import NO_TOOLKIT, bind, open_toolkit
from banyan.runner.kvstore import GroupLayout
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig
from banyan.runner.speculative.draft_runner import DraftModel
from banyan.runner.speculative.standalone import ModelDrafter
from banyan.runner.speculative.tree_growth import Grower
from tests.support.runner_driver import PAGE, Driver, Request, greedy, ids

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
NUM_PAGES, MAX_LENGTH = 64, 192


@pytest.fixture(scope="module")
def similar(llama: nn.Module, tmp_path_factory) -> nn.Module:
    """A draft model of other widths that agrees with the target now and then."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**llama.config.to_dict() | {"num_hidden_layers": 1})
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(llama.state_dict(), strict=False)
    return model


@pytest.fixture(scope="module")
def runners(model_config, similar, tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    similar.save_pretrained(folder)
    draft_model_config = read_model_config(str(folder))

    def make(is_recorded: bool, tree: tuple[int, ...] = ()) -> ModelRunner:
        toolkit = open_toolkit("cpu", 1, {}) if is_recorded else NO_TOOLKIT
        ops = bind(
            *("cpu", CPU, torch.float32, frozenset(), model_config.head_dim),
            exact=True,
            cache_dtype=torch.float32,
            toolkit=toolkit,
            page_size=PAGE,
        )
        build = Build(ops)
        sizes = RunnerConfig(
            *(4, MAX_LENGTH, (GroupLayout(FULL, 0, PAGE, NUM_PAGES),)),
            max_tokens=48 if is_recorded else 0,
            draft_room=16,
            branching=tree[1] + 1 if tree else 0,
        )

        def open_drafter(open_draft_runner) -> ModelDrafter:
            draft_runner = open_draft_runner()
            return ModelDrafter(draft_runner, Grower(draft_runner, *tree) if tree else None)

        runner = ModelRunner(
            load_model(model_config, build),
            build,
            sizes,
            open_drafter=open_drafter,
            draft=DraftModel(load_model(draft_model_config, build), build),
        )
        assert runner.forward.is_recorded == is_recorded
        for layer in range(runner.store.num_layers):  # what nobody has written is no number
            for pages in runner.store.tensors(layer).values():
                pages.fill_(float("nan"))
        return runner

    return make


@torch.no_grad()
def next_of(model: nn.Module, tokens: Sequence[int]) -> int:
    return int(model(torch.tensor([list(tokens)])).logits[0, -1].argmax())


def plain_loop(target: nn.Module, draft: nn.Module, prompt: list[int], drafts: int, new: int):
    """The answer, and how many tokens each verification gave."""
    tokens, given = [*prompt, next_of(target, prompt)], []
    while len(tokens) < len(prompt) + new:
        chain = list(tokens)
        for _ in range(drafts):
            chain.append(next_of(draft, chain))
        count = 0
        while True:
            token = next_of(target, tokens)
            is_right = count < drafts and chain[len(tokens)] == token
            tokens.append(token)
            count += 1
            if not is_right:
                break
        given.append(count)
    return tokens[len(prompt) :], given


def drafted_loop(runner: ModelRunner, prompt: list[int], drafts: int, new: int, chunk: int = 1000):
    """The same by plans: the prompt in pieces, then rows of `drafts` drafts."""
    driver, request = Driver(runner), Request(prompt, greedy(new + drafts + 1))
    join, grant = driver.enter(request)
    parts = {"joins": [join], "grants": driver.of_every_group(grant)}
    given: list[int] = []
    while len(request.output) < new:
        start, known = request.done, request.known
        count = min(chunk, known - start)
        is_last = start + count == known
        many = drafts if request.output else 0
        row = Row(
            *(request.slot, start, count + many, many),
            want=SAMPLE if is_last else 0,
            propose=drafts if is_last else 0,
        )
        result = runner.launch(driver.plan(rows=[row], **parts)).result()
        assert not result.error and not result.failed, result
        found = np.frombuffer(result.tokens[0], np.int32).tolist()
        if many:
            given.append(len(found))
        request.output += found
        request.done = request.known - 1 if is_last else start + count
        parts = {}
    runner.launch(driver.plan(leaves=[request.slot])).result()
    return request.output, given


@pytest.mark.parametrize(("is_recorded", "drafts"), [(False, 3), (True, 1), (True, 6)])
def test_each_step_accepts_what_a_plain_loop_accepts(llama, similar, runners, is_recorded, drafts):
    runner = runners(is_recorded)
    accepted, new = 0, 24
    for seed in range(3):
        prompt = torch.randint(131, (21 + 9 * seed,), generator=torch.Generator().manual_seed(seed))
        right, steps = plain_loop(llama, similar, prompt.tolist(), drafts, new)
        chunk = (1000, 7, 16)[seed]
        assert drafted_loop(runner, prompt.tolist(), drafts, new, chunk) == (right, steps)
        accepted += sum(steps) - len(steps)
    assert accepted > 5


def test_a_prompt_whose_pages_were_read_before_is_drafted_for_as_well(llama, similar, runners):
    """The pages hold both models' keys and values; nothing else remembers the prompt."""
    runner, drafts = runners(True), 3
    prompt = torch.randint(131, (50,), generator=torch.Generator().manual_seed(9)).tolist()
    right = plain_loop(llama, similar, prompt, drafts, 20)
    driver, first = Driver(runner), Request(prompt, greedy(1))
    driver.run([first])
    driver.plan(leaves=[first.slot])
    again = Request(prompt, greedy(30))
    join, grant = driver.enter(again, shared=first.pages[:3])
    parts, given = {"joins": [join], "grants": [grant]}, []
    while len(again.output) < 20:
        many = drafts if again.output else 0
        count = again.known - again.done
        row = Row(again.slot, again.done, count + many, many, want=SAMPLE, propose=drafts)
        result = runner.launch(driver.plan(rows=[row], **parts)).result()
        found = np.frombuffer(result.tokens[0], np.int32).tolist()
        given += [len(found)] if many else []
        again.output += found
        again.done, parts = again.known - 1, {}
    assert (again.output, given) == right


def test_what_was_not_read_for_a_while_is_read_when_a_draft_is_asked_for(llama, similar, runners):
    runner, new = runners(True), 24
    prompt = list(range(5, 20))
    right, _ = plain_loop(llama, similar, prompt, 1, new)
    driver, request = Driver(runner), Request(prompt, greedy(new + 2))
    join, grant = driver.enter(request)
    parts = {"joins": [join], "grants": [grant]}
    while len(request.output) < new:
        asks = len(request.output) in (11, 20)
        row = Row(
            *(request.slot, request.done, request.known - request.done),
            want=SAMPLE,
            propose=3 if asks else 0,
        )
        result = runner.launch(driver.plan(rows=[row], **parts)).result()
        request.output += np.frombuffer(result.tokens[0], np.int32).tolist()
        request.done, parts = request.known - 1, {}
        chain = [*prompt, *request.output]
        for _ in range(3 * asks):
            chain.append(next_of(similar, chain))
        assert result.drafts[0] == ids(chain[request.known :])
    assert request.output[:new] == right[:new]


@torch.no_grad()
def plain_tree(model: nn.Module, tokens: Sequence[int], count: int, steps: int, ways: int):
    """By the published rule: tokens, and which of them each follows."""
    front: list[tuple[float, int, list[int]]] = [(0.0, -1, [])]
    seen: list[tuple[float, int, int]] = []
    for _ in range(steps):
        level: list[tuple[float, int, list[int]]] = []
        for score, at, path in front:
            logits = model(torch.tensor([[*tokens, *path]])).logits[0, -1]
            for gain, token in zip(*map(list, logits.log_softmax(-1).topk(ways)), strict=True):
                seen.append((score + float(gain), int(token), at))
                level.append((seen[-1][0], len(seen) - 1, [*path, int(token)]))
        front = sorted(level, key=lambda node: -node[0])[:ways]
    best = sorted(range(len(seen)), key=lambda at: -seen[at][0])[:count]
    places = {at: place for place, at in enumerate(best)} | {-1: -1}
    return [seen[at][1] for at in best], [places[seen[at][2]] for at in best]


def test_trees_are_those_of_the_published_rule_and_what_stands_is_read_again(
    llama, similar, runners
):
    runner, count, prompt = runners(True, (3, 4)), 6, list(range(5, 20))
    right, _ = plain_loop(llama, similar, prompt, 1, 24)
    driver, request = Driver(runner), Request(prompt, greedy(24 + count))
    join, grant = driver.enter(request)
    parts, most = {"joins": [join], "grants": [grant]}, 0
    while len(request.output) < 16:
        many = count if request.output else 0
        start = request.known - 1 if many else 0
        row = Row(
            *(request.slot, start, request.known + many - start, many), want=SAMPLE, propose=count
        )
        result = runner.launch(driver.plan(rows=[row], **parts)).result()
        parts, found = {}, np.frombuffer(result.tokens[0], np.int32).tolist()
        request.output += found
        most = max(most, len(found))
        tokens, parents = plain_tree(similar, [*prompt, *request.output], count, 4, 3)
        assert result.drafts[0] == ids(tokens) and result.parents[0] == ids(parents)
    assert most > 1 and request.output[:16] == right[:16]
